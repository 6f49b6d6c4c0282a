"""`TrainerMon` of MindSpore: the monitor under the name, arguments and configuration file of the existing tool.

monitor = TrainerMon("monitor_config.json")
monitor.set_monitor(net, optimizer)
for data, label in dataset:          # nothing else: a step ends when the optimizer has updated the parameters
    loss, gradients = forward_and_gradients(data, label)
    optimizer(gradients)
monitor.stop()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore

from msprobe_engine.core import log
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.common.compat.trainer_mon import TrainerMonitor
from msprobe_integrations.common.compat.trainer_mon_values import Shown
from msprobe_integrations.mindspore.hooks import eager as hooks
from msprobe_integrations.mindspore.models import is_model
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe


def _number(value: float) -> Any:
    return mindspore.Tensor(value, mindspore.float64)


def _dtype(name: str) -> Any:
    return getattr(mindspore, name.lower(), name)


class TrainerMon(TrainerMonitor):
    """Watches a training through its optimizer, of ``mindspore.nn``, ``mint.optim`` or ``experimental.optim``: a step begins where the last
    one ended and ends with the optimizer's update. Other optimizers, of the same class or not, end no step.

    Args:
        config_file_path: ``monitor_config.json`` or ``probe.yaml``; the directory is that of ``MONITOR_OUTPUT_DIR``, else
            ``./monitor_output``. With ``DYNAMIC_MONITOR=True`` nothing is attached until the file says ``dynamic_on: true``.
        process_group: name of the pipeline group of this rank; only for the places in ``anomaly.json``.
        params_have_main_grad: not needed any more: gradients are those that the optimizer is called with.
        opt_ty: has no effect, as in the existing tool.

    Raises:
        SettingsError: the file cannot be read or is wrong; all mistakes, one line each.
    """

    probe_type = MindSporeProbe
    _shown = Shown(_number, tuple, _dtype)

    def set_monitor(self, model: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        """See `TrainerMonitor.set_monitor`. A training step that is compiled as a whole has no updates that are seen, so no steps."""
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            log.warn_once(
                "TrainerMon graph",
                "TrainerMon: in GRAPH_MODE the optimizer is called inside of a compiled graph and no step is seen; use PYNATIVE_MODE, or "
                "MindSporeProbe, whose steps the loop tells",
            )
        super().set_monitor(model, optimizer, *arguments, **keywords)

    def _is_model(self, model: Any) -> bool:
        return is_model(model)

    def _make_duplicates(self, tp_group: Any, dp_group: Any) -> Any:
        raise UsageError(
            f"set_monitor: tp_group={tp_group!r}, dp_group={dp_group!r} are not supported with MindSpore; leave them out: every rank "
            "writes its own files, and the option 'module_ranks' of the file chooses the ranks that do"
        )

    def _before_forward(self, model: Any, call: Callable[[], None]) -> Any:
        return hooks.before_call(model, lambda *_: call())

    def _group_of(self, group: Any) -> tuple[int, list[int]]:
        ranks = self._probe.parameters.ranks
        if ranks.rank() is None:
            return 0, [self._rank]
        members = [int(rank) for rank in ranks.members(group)]
        return members.index(self._rank), members
