"""`TrainerMon` of PyTorch: the monitor under the name, arguments and configuration file of the existing tool.

monitor = TrainerMon("monitor_config.json")
monitor.set_monitor(model, optimizer, grad_acc_steps=4)
for batch in data:          # nothing else: a step ends when the optimizer has updated the parameters
    train(batch)
monitor.stop()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msprobe_integrations.common.compat.trainer_mon import TrainerMonitor
from msprobe_integrations.common.compat.trainer_mon_values import Shown
from msprobe_integrations.torch.hooks.modules import OwnHook
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.monitor.replicated_gradients import ReplicatedGradients
from msprobe_integrations.torch.training import owner

AGREEMENT = "mg_direction"
"""Tag of the share of elements whose gradient has the sign of the first moment."""


def _dtype(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."), name)


class TrainerMon(TrainerMonitor):
    """Watches a training through its optimizer (of torch, Accelerate, DeepSpeed or Megatron): a step begins where the last one ended and
    ends with the optimizer's update, also with one that a loss scaler skips. Other optimizers, of the same class or not, end no step.

    Args:
        config_file_path: ``monitor_config.json`` or ``probe.yaml``; the directory is that of ``MONITOR_OUTPUT_DIR``, else
            ``./monitor_output``. With ``DYNAMIC_MONITOR=True`` nothing is attached until the file says ``dynamic_on: true``.
        process_group: pipeline group of this rank; only for the places in ``anomaly.json``.
        params_have_main_grad: not needed any more: gradients are looked for where the objects given to `set_monitor` have them.
        opt_ty: has no effect, as in the existing tool.

    Raises:
        SettingsError: the file cannot be read or is wrong; all mistakes, one line each.
    """

    probe_type = TorchProbe
    _shown = Shown(lambda value: torch.tensor(value, dtype=torch.float64), torch.Size, _dtype)

    def _of_user(self) -> None:
        owner.of_user()

    def _is_model(self, model: Any) -> bool:
        return isinstance(model, nn.Module)

    def _make_duplicates(self, tp_group: Any, dp_group: Any) -> ReplicatedGradients:
        assert isinstance(self._probe, TorchProbe)
        return ReplicatedGradients(self._probe, tp_group, dp_group)

    def _before_forward(self, model: Any, call: Callable[[], None]) -> Any:
        return model.register_forward_pre_hook(OwnHook(lambda *_: call()))

    def _note_first_agreement(self) -> None:
        probe = self._probe
        if not probe.wanted("monitor.momentum_agreement"):
            return
        seen = {(s.vpp_stage, s.name) for s in probe.pipeline.samples if s.extra.get("tag") == AGREEMENT}
        one = torch.ones(())
        for watch in probe.parameters.watches:
            for piece in watch.source.pieces:
                if (piece.vpp_stage, piece.name) not in seen and watch.source.gradient(piece) is not None:
                    probe.sample("other", piece.name, one, vpp_stage=piece.vpp_stage, extra={"tag": AGREEMENT})

    def _group_of(self, group: Any) -> tuple[int, list[int]]:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 0, [self._rank]
        stage = torch.distributed.get_group_rank(group, torch.distributed.get_rank())
        return stage, list(torch.distributed.get_process_group_ranks(group))
