"""``msprobe run_overflow_check``: every API of an overflow dump once more, to tell a normal overflow from an abnormal one.

On a machine with an accelerator a call runs on it and on the CPU, in the recorded types: if both overflow, or none does, the overflow
is a normal one, the result of the calculation; if only one does, it is abnormal. Without an accelerator it runs on the CPU, in the
recorded types and in float64: an overflow is normal if the float64 result does not fit the recorded type either, and abnormal if it
does, so that only on the way there a number became too large.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.diagnose.overflow_table import ABNORMAL, NORMAL, NOT_RUN, Row
from msprobe_engine.dump import layout
from msprobe_engine.dump.reader import parse_json, read_bytes
from msprobe_engine.dump.tensor_reader import TensorFiles
from msprobe_engine.errors import DumpFormatError, UsageError
from msprobe_engine.progress import progress
from msprobe_integrations.torch.accuracy.arguments import Arguments
from msprobe_integrations.torch.accuracy.resolve import CannotRun, find, is_api

_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64, torch.complex64: torch.complex128}


def rerun(file: Path, device_id: int = 0, jit_compile: bool = False) -> list[Row]:
    """Run every forward API of a dump.json again, and its backward where gradients can be had.

    Args:
        file: dump.json of one rank.
        device_id: which accelerator.
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
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if found is None:
        return None
    if not 0 <= number < torch.accelerator.device_count():
        raise UsageError(f"-d {number}: there are {torch.accelerator.device_count()} devices of type {found.type}, from 0")
    if found.type == "npu":
        torch.npu.set_compile_mode(jit_compile=jit_compile)  # type: ignore[attr-defined]
    return torch.device(found.type, number)


def _one(name: str, record: Mapping[str, Any], data: Mapping[str, Any], arguments: Arguments, device: torch.device | None) -> Row:
    row = Row(name)
    function = find(name)
    if function is None:
        row.verdict, row.note = NOT_RUN, "unknown API"
        return row
    try:
        args, kwargs = arguments.of(name, record)
        row.inputs = (
            "drawn from statistics" if arguments.drawn else "saved" if any(map(torch.is_tensor, _leaves([args, kwargs]))) else "none"
        )
        if name.split(".")[1] in ("__getitem__", "__setitem__") and len(args) > 1 and isinstance(args[1], list):
            args[1] = tuple(args[1])
        gradient = _gradient(name, data, arguments)
    except CannotRun as error:
        row.verdict, row.note = NOT_RUN, str(error)
        return row
    row.bad_inputs = any(_overflows(x) for x in _leaves([args, kwargs]))
    seed = zlib.crc32(name.encode())
    tested = _attempt(function, args, kwargs, gradient, device or torch.device("cpu"), None, seed)
    if isinstance(tested, Exception):
        row.verdict, row.note = NOT_RUN, _short(tested)
        return row
    reference = tested if device is None else _attempt(function, args, kwargs, gradient, torch.device("cpu"), None, seed)
    row.reference = "cpu"
    if device is None or isinstance(reference, Exception):  # the CPU has no kernel of this type
        reference = _attempt(function, args, kwargs, gradient, torch.device("cpu"), _WIDER, seed)
        row.reference = "cpu, float64"
    if isinstance(reference, Exception):
        row.verdict, row.note = NOT_RUN, f"reference: {_short(reference)}"
        return row
    row.device = str(device or "cpu")
    row.verdict, row.overflow, row.reference_overflow = _verdict(tested[0], reference[0])
    if tested[1] is not None and reference[1] is not None:
        row.backward, row.backward_overflow, row.backward_reference_overflow = _verdict(tested[1], reference[1])
        row.gradient = "saved or drawn" if gradient else "ones"
    return row


def _attempt(
    function: Callable[..., Any],
    args: list[Any],
    kwargs: Mapping[str, Any],
    gradient: list[torch.Tensor],
    device: torch.device,
    wider: Mapping[torch.dtype, torch.dtype] | None,
    seed: int,
) -> tuple[list[Any], list[Any] | None] | Exception:
    """Outputs, and gradients of the inputs (None: there are none); an exception when the call does not work."""
    leaves: list[torch.Tensor] = []

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = value.to(device, wider.get(value.dtype, value.dtype) if wider else value.dtype, copy=True)
            if tensor.dtype.is_floating_point and function is not None and not _writes(function):
                leaves.append(tensor.requires_grad_())
            return tensor
        if isinstance(value, torch.device):
            return device
        if isinstance(value, torch.dtype) and wider:
            return wider.get(value, value)
        if isinstance(value, dict):
            return {key: moved(child) for key, child in value.items()}
        return type(value)(map(moved, value)) if type(value) in (list, tuple) else value

    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            out = function(*moved(list(args)), **moved(dict(kwargs)))
            outs = list(_leaves(out))
            return outs, _backward(outs, leaves, gradient)
    except Exception as error:  # whatever an operation says of arguments it does not take
        return error


def _writes(function: Callable[..., Any]) -> bool:
    """In-place operations do not take leaves that need gradients."""
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _backward(outs: list[Any], leaves: list[torch.Tensor], gradient: list[torch.Tensor]) -> list[Any] | None:
    roots = [out for out in outs if isinstance(out, torch.Tensor) and out.requires_grad and not out.is_leaf]
    if not roots or not leaves:
        return None
    fits = len(gradient) == len(roots) and all(g.shape == root.shape for g, root in zip(gradient, roots))
    with_what = [g.to(root.device, root.dtype) for g, root in zip(gradient, roots)] if fits else [torch.ones_like(root) for root in roots]
    try:
        found = torch.autograd.grad(roots, leaves, with_what, allow_unused=True)
    except RuntimeError:
        return None  # the forward result stands; this function has no derivative here
    return [g for g in found if g is not None]


def _gradient(name: str, data: Mapping[str, Any], arguments: Arguments) -> list[torch.Tensor]:
    """What came into the backward call of this record, when the dump has it."""
    record = data.get(name.removesuffix("forward") + "backward")
    if not isinstance(record, dict):
        return []
    drawn = arguments.drawn
    try:
        return [g for g in arguments.gradients(name, record) if g is not None]
    except CannotRun:
        return []
    finally:
        arguments.drawn = drawn


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for child in value:
            yield from _leaves(child)
    else:
        yield value


def _overflows(value: Any) -> bool:
    """NaN or Inf in it?"""
    if isinstance(value, torch.Tensor):
        return value.dtype != torch.bool and value.numel() > 0 and not bool(torch.isfinite(value.detach()).all())
    return isinstance(value, float) and value - value != 0


def _verdict(tested: list[Any], reference: list[Any]) -> tuple[str, bool, bool]:
    """(verdict, overflow of the tested side, overflow of the reference in the types of the tested side)."""
    ours = any(map(_overflows, tested))
    fitted = (
        r.to(t.dtype) if isinstance(t, torch.Tensor) and isinstance(r, torch.Tensor) and t.dtype.is_floating_point else r
        for t, r in zip(tested, reference)
    )
    theirs = any(map(_overflows, fitted))
    return (NORMAL if ours == theirs else ABNORMAL), ours, theirs


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
