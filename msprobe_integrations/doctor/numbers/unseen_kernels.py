"""A4: what kernels write through pointers, unseen by Python and torch, has numbers, and those of its present values."""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from msprobe_engine.core.records import Frame
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor import kernels
from msprobe_integrations.doctor.captured import capture, first_tensor, statistics_of, tensors_of
from msprobe_integrations.doctor.device import Device

_N = 1024
_SIX = 0x40C00000
"""Bits of 6.0 in float32."""
Write = Callable[[torch.Tensor], None]


def run(device: Device) -> Iterator[Line]:
    """A line per kind of kernel."""
    for name, make in (("a write through a pointer", _pointer), ("a Triton kernel", _triton)):
        write, why = make(device)
        if write is None:
            yield Line(name, "skipped", why=why)
            continue
        yield _check(name, device, write)
    yield _flash_attention(device)


def _pointer(device: Device) -> tuple[Write | None, str]:
    """Sets all elements to 6 by the library of the device, in the order of the stream."""
    if not device.full:

        def on_host(tensor: torch.Tensor) -> None:
            ctypes.memmove(tensor.data_ptr(), (ctypes.c_float * _N)(*[6.0] * _N), 4 * _N)

        return on_host, ""
    if device.type != "cuda" or torch.version.cuda is None:
        return None, f"no library is known that writes memory of {device.type}"
    try:
        fill: Any = ctypes.CDLL("libcuda.so.1").cuMemsetD32Async
    except (OSError, AttributeError) as error:
        return None, f"the driver's library cannot be used: {error}"
    fill.argtypes = (ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)

    def on_device(tensor: torch.Tensor) -> None:
        if fill(tensor.data_ptr(), _SIX, _N, torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("cuMemsetD32Async failed")

    return on_device, ""


def _triton(device: Device) -> tuple[Write | None, str]:
    """The same by a kernel that the user has."""
    if why := kernels.why_not(device, "kernels"):
        return None, why
    from msprobe_integrations.doctor.numbers import user_kernel

    def write(tensor: torch.Tensor) -> None:
        user_kernel.fill[(1,)](tensor, _N, N=_N)

    return write, ""


class _Filled(torch.autograd.Function):
    """A function whose result is filled by a kernel."""

    write: Write

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        _Filled.write(made)
        return made

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(grads[0])
        _Filled.write(made)
        return made


class _Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        _Filled.write(made)
        return made


def _check(name: str, device: Device, write: Write) -> Line:
    """Results of a function, of an `autograd.Function`, of a module, gradients, and a tensor that is changed in place."""
    _Filled.write = staticmethod(write)
    x = torch.ones(_N, device=device.device, requires_grad=True)

    def plain() -> None:
        made = torch.empty(_N, device=device.device)
        write(made)
        torch.exp(made)

    def in_place() -> None:
        made = torch.relu(x.detach())
        write(made)
        torch.neg(made)

    def function() -> None:
        filled: torch.Tensor = _Filled.apply(x)  # type: ignore[no-untyped-call]
        torch.exp(filled).sum().backward()

    expected = {
        "plain": (plain, {"Torch.exp.0.forward input_args": 6.0, "Torch.exp.0.forward output": math.exp(6.0)}),
        "in place": (in_place, {"Torch.relu.0.forward output": 1.0, "Torch.neg.0.forward input_args": 6.0}),
        "function": (function, {"Torch.exp.0.forward input_args": 6.0, "Autograd._Filled.0.backward output": 6.0}),
        "module": (lambda: torch.exp(_Module()(x)), {"Torch.exp.0.forward input_args": 6.0}),
    }
    wrong, count = [], 0
    for case, (work, values) in expected.items():
        frame = capture(work)
        for place, value in values.items():
            count += 1
            wrong += [f"{case}: {text}" for text in _problems(frame, place, value)]
    return Line(name, "WRONG" if wrong else "ok", f"{count} tensors", "numbers of the present values", "; ".join(wrong))


def _problems(frame: Frame, place: str, value: float) -> Iterator[str]:
    name, section = place.split()
    entry = next((entry for entry in frame.entries if entry.name == name), None)
    if entry is None:
        yield f"no record {name} among {', '.join(entry.name for entry in frame.entries)}"
        return
    seen = statistics_of(frame, first_tensor(entry.sections[section]))
    if seen is None:
        yield f"{place} has no numbers"
    elif seen.max is None or not math.isclose(seen.max, value, rel_tol=1e-5):
        yield f"{place} has the maximum {seen.max}, not {value}"


def _flash_attention(device: Device) -> Line:
    """The extension that many trainings use, where it is installed."""
    name = "flash-attn"
    if device.type != "cuda":
        return Line(name, "skipped", why="needs a GPU")
    try:
        attend: Any = importlib.import_module("flash_attn").flash_attn_func
    except Exception as error:
        return Line(name, "skipped", why=f"cannot be imported: {type(error).__name__}: {str(error)[:100]}")
    query = torch.randn(2, 64, 4, 64, device=device.device, dtype=torch.bfloat16, requires_grad=True)
    results: list[torch.Tensor] = []

    def work() -> None:
        results.append(attend(query, query, query, causal=True))
        torch.neg(results[0])

    frame = capture(work)
    wrong = list(_problems(frame, "Torch.neg.0.forward input_args", float(results[0].max())))
    blank = [entry.name for entry in frame.entries for ref in tensors_of(entry.sections.get("output")) if ref.row < 0]
    wrong += [f"outputs without numbers: {', '.join(blank)}"] if blank else []
    return Line(name, "WRONG" if wrong else "ok", f"{len(frame.entries)} records", why="; ".join(wrong))
