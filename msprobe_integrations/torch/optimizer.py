"""Parameter-side monitor of a plain PyTorch loop: gradients just before the optimizer step, parameters and moments around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from msprobe_integrations.torch.watch import matches

if TYPE_CHECKING:
    from msprobe_integrations.torch.probe import TorchProbe


class OptimizerWatch:
    """Hooks on one optimizer object (not on its class), and on the parameters for gradients before reduction.

    Args:
        probe: owner; its monitor settings say what is watched.
        models: model chunks; names come from their `named_parameters`.
        optimizer: a `torch.optim.Optimizer` (or a wrapper with the same hooks).
    """

    def __init__(self, probe: TorchProbe, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._probe = probe
        self._optimizer = optimizer
        monitor = probe.monitor
        assert monitor is not None
        self._parameters = [
            (chunk, name.removeprefix("module."), p)
            for chunk, model in enumerate(models)
            for name, p in model.named_parameters()
            if p.requires_grad and matches(name.removeprefix("module."), monitor.targets)
        ]
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        if monitor.unreduced_gradients or monitor.micro_batch_gradients:
            for chunk, name, parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._accumulated(chunk, name))

    def _accumulated(self, chunk: int, name: str) -> Any:
        probe = self._probe

        def hook(parameter: torch.Tensor) -> None:
            every = probe.wanted("monitor.micro_batch_gradients")
            if (every or probe.wanted("monitor.unreduced_gradients")) and parameter.grad is not None:
                with probe.guard("monitor.unreduced_gradients"):
                    micro = probe.micro_step if every else -1
                    probe.sample("grad_unreduced", name, parameter.grad, phase="accumulated", micro_step=micro, vpp_stage=chunk)

        return hook

    def _before(self, *_: Any) -> None:
        probe = self._probe
        if probe.wanted("monitor.gradients"):
            with probe.guard("monitor.gradients"):
                for chunk, name, parameter in self._parameters:
                    if parameter.grad is not None:  # a parameter without a gradient has no row
                        probe.sample("grad_reduced", name, parameter.grad, phase="reduced", vpp_stage=chunk)
        if probe.wanted("monitor.parameters"):
            self._sample_parameters("param_origin")

    def _after(self, *_: Any) -> None:
        probe = self._probe
        probe.backend.forget()  # fused updates leave version counters as they are
        if probe.wanted("monitor.parameters"):
            self._sample_parameters("param_updated")
        if probe.wanted("monitor.optimizer_states"):
            with probe.guard("monitor.optimizer_states"):
                for chunk, name, parameter in self._parameters:
                    state = self._optimizer.state.get(parameter, {})
                    for moment in ("exp_avg", "exp_avg_sq"):
                        if isinstance(state.get(moment), torch.Tensor):
                            probe.sample(moment, name, state[moment], vpp_stage=chunk)

    def _sample_parameters(self, family: str) -> None:
        with self._probe.guard("monitor.parameters"):
            for chunk, name, parameter in self._parameters:
                self._probe.sample(family, name, parameter, vpp_stage=chunk)
