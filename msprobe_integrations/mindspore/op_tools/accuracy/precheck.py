"""What a process of the pre-check does with MindSpore: the device, the checker of a dump, and the files of calls that do not pass."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore
import numpy as np

from msprobe_engine.accuracy.precheck.options import About, Check, Work
from msprobe_engine.accuracy.results import CallResult
from msprobe_engine.core import names
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_integrations.mindspore.op_tools.accuracy.checker import Checker

_TARGETS = {"npu": "Ascend", "ascend": "Ascend", "gpu": "GPU", "cuda": "GPU", "cpu": "CPU"}
_LONGEST = 200


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
    keep = Path(work.error_data) if work.error_data else None

    def check(name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None) -> CallResult:
        checked = checker.check(name, record, backward)
        if keep is not None and not checked.result.passed:
            save(keep, name, checked.data)
        return checked.result

    target = str(mindspore.get_context("device_target"))
    device = f"recorded results (where none were saved: {target})" if recorded else target
    return Check(check, About(device=device, sides=work.sides(f"mindspore {mindspore.__version__}")))


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


def save(directory: Path, call: str, data: Mapping[str, Any]) -> None:
    """Write the tensors of one call as ``{call}.{part}.npy``; other values have a number among them and no file.

    Raises:
        SinkError: a file cannot be written.
    """
    if len(call) > _LONGEST:
        call = f"{call[:_LONGEST]}_{zlib.crc32(call.encode()):08x}"
    for part, value in data.items():
        if isinstance(value, np.ndarray):
            path = directory / names.check_file_name(f"{call}.{part}.npy", str(directory))
            buffer = io.BytesIO()
            np.save(buffer, value, allow_pickle=False)
            try:
                make_directories(str(directory))
                write_file(path, [buffer.getvalue()])
            except OSError as error:
                raise layout.DumpWriteError(error, os.fspath(path)) from error
