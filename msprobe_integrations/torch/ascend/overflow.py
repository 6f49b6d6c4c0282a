"""The overflow flag of Ascend NPUs that saturate.

Older NPUs (before Ascend 910B) write the largest finite number where others write Inf, so no tensor shows an overflow. They keep a flag
instead: 1 from the first overflow on, until somebody clears it. Newer ones can be told to keep it too (FORCE_OVERFLOW_CHECK, from CANN
9.1.0 on; torch_npu looks up whether). `torch_npu.npu.utils.get_npu_overflow_flag` waits for it; here the operator below it is called, whose
result stays on the device and arrives with the numbers of the step. The flag is never cleared here: torch_npu's `GradScaler` decides by it
whether an update is skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

NAME = "npu_overflow"
_WORDS = 8
"""Elements of the status, float32; the first is the flag."""


class NpuOverflow:
    """Adds number `NAME` to those of a step, 0 or 1, where torch_npu is loaded (by somebody else) and its device saturates."""

    def __init__(self) -> None:
        self._saturates: bool | None = None

    def add(self, scalars: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """`scalars` with the flag as it is now, a tensor on the device. Does not wait."""
        torch_npu = sys.modules.get("torch_npu")
        if torch_npu is None or self._saturates is False:
            return scalars
        npu: Any = getattr(torch_npu, "npu", None)
        read = getattr(torch_npu, "npu_get_float_status", None)
        if npu is None or read is None or not npu.is_initialized():
            return scalars
        if self._saturates is None:
            self._saturates = not npu.utils.is_support_inf_nan() or getattr(npu.utils, "is_force_overflow_check", bool)()
            if not self._saturates:
                return scalars
        with torch.no_grad(), torch._C.DisableTorchFunction():
            status = read(torch.zeros(_WORDS, device="npu"))
        return {**(scalars or {}), NAME: status[0]}
