"""What a process of the pre-check does with MindSpore: the device, the checker of a dump, and the files of calls that do not pass."""

from __future__ import annotations

import io
from typing import Any

import mindspore
import numpy as np

from msprobe_engine.accuracy.precheck.options import About, Check, Work
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_integrations.common.op_tools.accuracy.checking import keep_failures
from msprobe_integrations.mindspore.op_tools.accuracy.checker import Checker

_TARGETS = {"npu": "Ascend", "ascend": "Ascend", "gpu": "GPU", "cuda": "GPU", "cpu": "CPU"}


def make_check(work: Work) -> Check:
    """See `msprobe_engine.accuracy.precheck.options.Check`. PyNative mode.

    With device ``auto`` the recorded results are judged where the dump has saved them; a device that is named runs every call.

    Raises:
        UsageError: there is no such device here, or something is asked for that only torch has.
    """
    if work.received or work.operators:
        what = "the online pre-check" if work.received else "--operators"
        raise UsageError(f"{what} is for torch; the dump is one of MindSpore")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    kind, _, number = work.device.partition(":")
    _use(kind, number)
    directory = work.rank_directory
    files = TensorFiles(directory) if (directory / layout.TENSORS).is_dir() else None
    recorded = kind == "auto" and work.dtype is None and not work.compiled
    checker = Checker(
        files,
        bench=work.bench_dtype,
        dtype=work.dtype,
        compiled=work.compiled,
        recorded=recorded,
        seed=work.seed,
        condition=work.condition,
        compat=bool(work.compat),
        quantized=work.quantized,
    )
    target = str(mindspore.get_context("device_target"))
    device = f"recorded results (where none were saved: {target})" if recorded else target
    return Check(keep_failures(checker.check, work, _file_of), About(device=device, sides=work.sides(f"mindspore {mindspore.__version__}")))


def _use(kind: str, number: str) -> None:
    target = mindspore.get_context("device_target") if kind == "auto" else _TARGETS.get(kind)
    if target is None:
        raise UsageError(f"device {kind}: allowed for MindSpore are cpu, npu and gpu, with a number where there are several (npu:1)")
    try:
        mindspore.set_context(device_target=target)
        if number and target != "CPU":
            mindspore.set_context(device_id=int(number))
    except (ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(f"device {kind}: MindSpore has none here ({reason[:200]}); name another one with -d") from None


def _file_of(value: Any) -> tuple[str, bytes] | None:
    if not isinstance(value, np.ndarray):
        return None
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=False)
    return ".npy", buffer.getvalue()
