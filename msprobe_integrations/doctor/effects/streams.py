"""B3: a row is of the values that a tensor had when it was seen, on slow streams, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.captured import capture, first_tensor, statistics_of
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.torch.backend import TorchBackend

_STREAMS, _EACH = 4, 400
"""Together more rows than one piece of the memory of rows has."""
_SLEEP = 100_000_000
"""Cycles: some 50 ms."""


def run(device: Device) -> Iterator[Line]:
    """A line per way in which a value can be gone before it is read. On the CPU there are no streams: what is overwritten, freed and made
    anew is checked all the same."""
    for name, lifetime in (("overwritten", "overwrite"), ("freed and made anew", "free")):
        yield _line(f"rows of {_STREAMS} streams, {name} behind the call", _rows_of_streams(device, lifetime))
    yield _line("rows in batches", _batches(device))
    if device.full:
        yield _host_copy(device)
    else:
        yield Line("copies to the host that are not waited for", "skipped", why="needs a GPU or NPU")


def _line(name: str, found: tuple[int, list[str]]) -> Line:
    count, wrong = found
    why = "; ".join(wrong[:3]) + (f"; {len(wrong) - 3} more" if len(wrong) > 3 else "")
    return Line(name, "WRONG" if wrong else "ok", f"{count} rows", "the value at the call", why)


def _streams(device: Device) -> list[Any]:
    """Streams, the current one among them."""
    if not device.full:
        return [None] * _STREAMS
    return [device.module.current_stream(), *(device.module.Stream() for _ in range(_STREAMS - 1))]


def _on(device: Device, stream: Any) -> AbstractContextManager[Any]:
    return device.module.stream(stream) if device.full else nullcontext()


def slow_down(device: Device) -> None:
    """The current stream is busy for some 50 ms."""
    if hasattr(device.module, "_sleep"):
        device.module._sleep(_SLEEP)
        return
    large = torch.ones(4096, 4096, device=device.device)
    for _ in range(50):
        large = large @ large * 1e-4


def _rows_of_streams(device: Device, lifetime: str) -> tuple[int, list[str]]:
    backend = TorchBackend(digest=True)
    backend.reduce(torch.zeros(8, device=device.device))  # compiles
    backend.finish_step().rows()
    streams = _streams(device)
    tensors = [torch.zeros(1000, device=device.device) for _ in streams]
    device.synchronize()
    refs: list[tuple[int, float]] = []
    for number, stream in enumerate(streams):
        with _on(device, stream):
            if device.full:
                slow_down(device)
            tensor = tensors[number]
            for index in range(_EACH):
                value = float(number * _EACH + index + 1)
                if lifetime == "overwrite":
                    tensor.fill_(value)
                    refs.append((backend.reduce(tensor).row, value))
                    tensor.fill_(-1.0)
                else:
                    made = torch.full((1000,), value, device=device.device)
                    refs.append((backend.reduce(made).row, value))
                    del made
                    torch.full((1000,), -1.0, device=device.device)
    return _judge(backend, refs)


def _batches(device: Device) -> tuple[int, list[str]]:
    """Tensors that are reduced together, written to as soon as the batch has ended."""
    backend, refs = TorchBackend(), []
    tensors = [torch.zeros(64 + number, device=device.device) for number in range(100)]
    for stream in _streams(device):
        with _on(device, stream):
            if device.full:
                for tensor in tensors:
                    tensor.record_stream(stream)
                stream.wait_stream(device.module.default_stream())
                slow_down(device)
            for number, tensor in enumerate(tensors):
                tensor.fill_(number + 1.0)
            with backend.batched():
                refs += [(backend.reduce(tensor).row, number + 1.0) for number, tensor in enumerate(tensors)]
            for tensor in tensors:
                tensor.fill_(-1.0)
        if device.full:
            device.module.default_stream().wait_stream(stream)
    return _judge(backend, refs)


def _judge(backend: TorchBackend, refs: list[tuple[int, float]]) -> tuple[int, list[str]]:
    rows = backend.finish_step().rows()
    wrong = [f"no numbers ({why})" for why in backend.unsupported]
    for row, value in refs:
        if row >= 0 and (rows[row, _rows.MIN] != value or rows[row, _rows.MAX] != value):
            wrong.append(f"{value:g} was seen as {rows[row, _rows.MIN]:g} to {rows[row, _rows.MAX]:g}")
    return len(refs), wrong


def _host_copy(device: Device) -> Line:
    """The result of a copy that is not waited for is not read before it is there."""
    name = "copies to the host that are not waited for"
    source = torch.full((1 << 20,), 3.0, device=device.device)

    def work() -> None:
        slow_down(device)
        copied = (source * 2.0).to("cpu", non_blocking=True)
        torch.relu(copied)

    frame = capture(work)
    device.synchronize()
    entry = next(entry for entry in frame.entries if ".to." in entry.name)
    seen = statistics_of(frame, first_tensor(entry.sections["output"]))
    value = None if seen is None else seen.max
    return Line(name, "ok" if value in (None, 6.0) else "WRONG", f"{value}", "6.0, or no number")
