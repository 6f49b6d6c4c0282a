"""Reduced gradients that several ranks hold alike are reported by one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from msprobe_integrations.torch.monitor.probe import TorchProbe


class ReplicatedGradients:
    """Leaves out what another rank reports. Which parameters are split is taken from Megatron's attribute ``tensor_model_parallel``.

    Args:
        probe: owner of the samples.
        tp_group: ranks among which parameters are split or equal; None: do not look.
        dp_group: ranks whose parameters are equal; None: do not look.
    """

    def __init__(self, probe: TorchProbe, tp_group: Any, dp_group: Any) -> None:
        self._probe = probe
        self._all = dp_group is not None and dist.get_rank(dp_group) != 0
        self._whole = tp_group is not None and dist.get_rank(tp_group) != 0
        self._names: frozenset[tuple[int, str]] | None = None

    def leave_out(self) -> None:
        """Take the duplicates out of this step's samples. Merges over ranks, in which this rank has its part, go on."""
        if not (self._all or self._whole):
            return
        samples = self._probe.pipeline.samples
        if self._all:
            samples[:] = [s for s in samples if s.family != "grad_reduced"]
            return
        if self._names is None:
            pieces = [piece for watch in self._probe.parameters.watches for piece in watch.source.pieces]
            self._names = frozenset((p.vpp_stage, p.name) for p in pieces if not getattr(p.parameter, "tensor_model_parallel", False))
        names = self._names
        samples[:] = [s for s in samples if s.family != "grad_reduced" or (s.vpp_stage, s.name) not in names]
