"""``msprobe run_overflow_check``: every API of an overflow dump once more, to tell a normal overflow from an abnormal one.

On a machine with an accelerator a call runs on it and on the CPU, in the recorded types: if both overflow, or none does, the overflow
is a normal one, the result of the calculation; if only one does, it is abnormal. Without an accelerator it runs on the CPU, in the
recorded types and in float64: an overflow is normal if the float64 result does not fit the recorded type either, and abnormal if it
does, so that only on the way there a number became too large.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.progress import progress
from msprobe_engine.find.nonfinite.overflow_table import ABNORMAL, NORMAL, NOT_RUN, Row
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.rank_files import parse_json, read_bytes
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun
from msprobe_integrations.torch.op_tools.accuracy.arguments import Arguments
from msprobe_integrations.torch.op_tools.accuracy.execute import ExecutionOptions, Outcome, leaves_of
from msprobe_integrations.torch.op_tools.accuracy.prepare import Prepared, prepare
from msprobe_integrations.torch.op_tools.accuracy.resolve import find, is_api
from msprobe_integrations.torch.op_tools.accuracy.sides import Ran, on_bench, on_target
from msprobe_integrations.torch.tensors.devices import accelerator


def rerun(file: Path, device_id: int = 0, jit_compile: bool = False) -> list[Row]:
    """Run every forward API of a dump.json again, and its backward where gradients can be had.

    Args:
        file: dump.json of one rank.
        jit_compile: compile mode of an NPU.

    Raises:
        DumpFormatError: the file is damaged or no dump.
        UsageError: there is no such device.
    """
    try:
        document = parse_json(read_bytes(file), file)
    except FileNotFoundError:
        raise DumpFormatError(f"{file}: is not there") from None
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, dict):
        raise DumpFormatError(f"{file}: no 'data' object; this is no dump file")
    device = _device(device_id, jit_compile)
    files = TensorFiles(file.parent) if (file.parent / layout.TENSORS).is_dir() else None
    arguments = Arguments(files)
    calls = [(name, record) for name, record in data.items() if is_api(name) and isinstance(record, dict)]
    return [_one(name, record, data, arguments, device) for name, record in progress(calls, "rerun")]


def _device(number: int, jit_compile: bool) -> torch.device | None:
    found = accelerator()
    if found is None:
        return None
    count = getattr(torch, found.type).device_count()
    if not 0 <= number < count:
        raise UsageError(f"-d {number}: there are {count} devices of type {found.type}, from 0")
    if found.type == "npu":
        torch.npu.set_compile_mode(jit_compile=jit_compile)  # type: ignore[attr-defined]
    return torch.device(found.type, number)


def _one(name: str, record: Mapping[str, Any], data: Mapping[str, Any], arguments: Arguments, device: torch.device | None) -> Row:
    row, call = Row(name), name.removesuffix(".forward")
    cpu = torch.device("cpu")
    backward = data.get(f"{call}.backward")
    try:
        # without a backward record gradients are asked for all the same: ones come in
        prepared = prepare(call, record, backward if isinstance(backward, dict) else {}, arguments, None, 0)
        inputs = list(leaves_of([list(prepared.call.args), dict(prepared.call.kwargs)]))
        row.inputs = "drawn from statistics" if arguments.drawn else "saved" if any(map(torch.is_tensor, inputs)) else "none"
        row.bad_inputs = any(map(_overflows, inputs))
        ran = on_target(prepared, ExecutionOptions(device or cpu), as_recorded=True)
        reference, row.reference = _reference(prepared, ran, device)
    except CannotRun as error:
        row.verdict, row.note = NOT_RUN, "unknown API" if find(name) is None else str(error)
        return row
    row.device = str(device or "cpu")
    tested = ran.outcome
    target, golden = [*tested.outputs, *tested.written.values()], [*reference.outputs, *reference.written.values()]
    row.verdict, row.overflow, row.reference_overflow = _verdict(target, golden)
    places = [place for place, gradient in tested.gradients.items() if gradient is not None and reference.gradients.get(place) is not None]
    if places:
        pairs = [tested.gradients[p] for p in places], [reference.gradients[p] for p in places]
        row.backward, row.backward_overflow, row.backward_reference_overflow = _verdict(*pairs)
        row.gradient = "saved or drawn" if prepared.call.gradients else "ones"
    return row


def _reference(prepared: Prepared, ran: Ran, device: torch.device | None) -> tuple[Outcome, str]:
    """The same call on the CPU: in the same types where another device is tested and the CPU has a kernel for them, else in float64.

    Raises:
        CannotRun: it does not run there.
    """
    cpu = torch.device("cpu")
    if device is not None:
        try:
            return on_target(prepared, ExecutionOptions(cpu), as_recorded=True).outcome, "cpu"
        except CannotRun:
            pass  # the CPU has no kernel of this type
    return on_bench(prepared, cpu, "float64", ran.side.autocast).outcome, "cpu, float64"


def _overflows(value: Any) -> bool:
    """NaN or Inf in it?"""
    if isinstance(value, torch.Tensor):
        return value.dtype != torch.bool and value.numel() > 0 and not bool(torch.isfinite(value.detach()).all())
    return isinstance(value, float) and value - value != 0


def _verdict(tested: list[Any], reference: list[Any]) -> tuple[str, bool, bool]:
    """(verdict, overflow of the tested side, overflow of the reference in the types of the tested side)."""
    target = any(map(_overflows, tested))
    fitted = (
        r.to(t.dtype) if isinstance(t, torch.Tensor) and isinstance(r, torch.Tensor) and t.dtype.is_floating_point else r
        for t, r in zip(tested, reference)
    )
    golden = any(map(_overflows, fitted))
    return (NORMAL if target == golden else ABNORMAL), target, golden
