"""Memory without values: what it holds by chance is no statistic and no reason for an alert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from capturing import capture, entries, stat

from msprobe_engine.records import Frame, TensorRef


def first(frame: Frame, name: str, section: str = "input_args") -> TensorRef:
    found: Any = entries(frame)[name].sections[section]
    ref = found[0] if isinstance(found, list) else found["out"]
    assert isinstance(ref, TensorRef)
    return ref


def test_empty_tensors_of_inference_mode_do_not_raise() -> None:
    """`torch.empty` under inference_mode, and of layouts without storage, runs as without the probe."""

    def work() -> None:
        with torch.inference_mode():
            torch.empty(3).fill_(1).exp()
        torch.empty(2, 2, layout=torch.sparse_coo)
        torch.empty(2, device="meta")
        torch.vmap(lambda x: torch.empty_like(x).fill_(0) + x)(torch.ones(2))

    assert "Tensor.exp.0.forward" in entries(capture(None, work, "L1")[0])


def test_writes_that_leave_the_version_end_rawness() -> None:
    """Memory filled through ``.data`` has values afterwards; before, it has none through the alias either."""

    def work() -> None:
        made = torch.empty(4)
        made.data.fill_(2.0)
        made.exp()

    frame = capture(None, work, "L1")[0]
    assert first(frame, "Tensor.fill_.0.forward").row == -1
    assert stat(frame, first(frame, "Tensor.exp.0.forward")).max == 2.0


def test_out_buffers_are_not_read_before_the_call() -> None:
    """What ``out=`` holds before the call is ignored; the result is recorded."""
    target = torch.full((3,), float("nan"))
    frame = capture(None, lambda: torch.add(torch.ones(3), 1, out=target), "L1")[0]
    assert first(frame, "Torch.add.0.forward", "input_kwargs").row == -1
    assert stat(frame, first(frame, "Torch.add.0.forward", "output")).max == 2.0


def test_memory_of_another_tensor_at_the_same_place_is_not_taken_for_raw() -> None:
    """A raw tensor that was given other memory says nothing about what comes to lie where it was."""

    def work() -> None:
        made = torch.empty(1000)
        made.data = torch.ones(1000)
        for _ in range(20):
            torch.ones(1000).exp()
        made.exp()

    frame = capture(None, work, "L1")[0]
    rows = [e.sections["input_args"][0].row for n, e in entries(frame).items() if n.startswith("Tensor.exp.")]
    assert len(rows) == 21
    assert min(rows) >= 0


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_collectives_fill_raw_memory() -> None:
    """A buffer that a collective is to fill has no values before, and has them afterwards."""

    def work() -> None:
        made = torch.empty(4)
        dist.broadcast(made, 0)
        made.exp()

    frame = capture(None, work, "L1")[0]
    assert first(frame, "Distributed.broadcast.0.forward").row == -1
    assert first(frame, "Distributed.broadcast.0.forward", "output").row >= 0
    assert first(frame, "Tensor.exp.0.forward").row >= 0
