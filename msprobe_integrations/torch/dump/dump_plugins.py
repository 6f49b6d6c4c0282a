"""What a dump of torch has besides the records: replay of inputs, kernels of an NPU, the free benchmark, the online pre-check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.dump_rules import kernel_api
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.core.window import Window
from msprobe_integrations.common.dump.dump_plugins import DumpPlugin
from msprobe_integrations.torch.ascend.kernel_dump import KernelDump
from msprobe_integrations.torch.dump.replay import Replay


def parts_of(dump: DumpSettings, root: Path, faults: Faults) -> list[DumpPlugin]:
    """What the settings ask for.

    Raises:
        SettingsError: level L2 for something else than one API.
        UsageError: level L2 without an NPU.
    """
    parts: list[DumpPlugin] = [] if dump.load is None else [Replay(dump.load, faults)]
    if dump.task == "free_benchmark":
        from msprobe_integrations.torch.op_tools.free_benchmark.run import FreeBenchmark  # here: a plain dump does not pay for it

        parts.append(FreeBenchmark(dump, root, faults))
    if dump.online is not None:
        from msprobe_integrations.torch.op_tools.online.calls import OnlineCalls  # here: sockets and TLS

        parts.append(OnlineCalls(dump, faults))
    if dump.level == "L2":
        parts.append(_Kernels(KernelDump(kernel_api(dump), root, faults), Window(dump.rank, dump.step)))
    return parts


class _Kernels(DumpPlugin):
    """The kernel dump in the steps where it is wanted."""

    def __init__(self, kernels: KernelDump, window: Window) -> None:
        self._kernels = kernels
        self._window = window

    def begin(self, model: Any, step: int, rank: int | None) -> None:  # noqa: ARG002
        if self._window.wanted(step, rank):
            self._kernels.begin(step, rank)

    def pause(self) -> None:
        self._kernels.pause()

    def end_step(self, next_step: int) -> None:  # noqa: ARG002
        self._kernels.end_step()

    def close(self) -> None:
        self._kernels.close()
