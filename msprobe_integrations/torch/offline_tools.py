"""What commands of the engine ask of torch. Each is imported when it is asked for: a training that is watched needs none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class OfflineTools:
    """The part of `TorchBackend` behind ``run_overflow_check``, ``op_generate`` and ``acc_check``."""

    def rerun_overflow(self, file: Path, device_id: int, jit_compile: bool) -> Any:
        """What ``msprobe run_overflow_check`` does."""
        from msprobe_integrations.torch.op_tools.overflow_rerun import rerun

        return rerun(file, device_id, jit_compile)

    def script_dialect(self) -> Any:
        """How ``msprobe op_generate`` writes scripts for torch."""
        from msprobe_integrations.torch.op_tools.accuracy.scripts.dialect import TorchDialect

        return TorchDialect()

    def precheck(self, work: Any) -> Any:
        """What a process of ``msprobe acc_check`` checks calls with; `work` is a `msprobe_engine.accuracy.precheck.options.Work`."""
        if work.received:
            from msprobe_integrations.torch.op_tools.online.received import make_check as make_check_of_received

            return make_check_of_received(work)
        from msprobe_integrations.torch.op_tools.accuracy.precheck import make_check

        return make_check(work)
