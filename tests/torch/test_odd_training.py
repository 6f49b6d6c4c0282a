"""Trainings that do unusual things: what is recorded is still right, and nothing is switched off."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from capturing import capture, entries, stat
from torch import nn

from msprobe_engine.records import Opaque
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.structure import MAX_VALUES, convert


class TwoHeads(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        trunk = x * 2
        return trunk * 3, trunk * 5


def test_backward_passes_that_use_only_some_outputs_are_kept_apart() -> None:
    """Each of several passes through one graph is a record with its own numbers, also when it reaches only one of two outputs."""
    model, x = nn.Sequential(TwoHeads()), torch.ones(4, requires_grad=True)

    def work() -> None:
        a, b = model(x)
        a.sum().backward(retain_graph=True)
        a.sum().backward(retain_graph=True)
        (b.sum() * 10).backward()

    frame = capture(model, work, "L0")[0]
    seen = [
        [[None if ref is None else stat(frame, ref).max for ref in e.sections[key]] for key in ("input", "output")]
        for name, e in entries(frame).items()
        if ".backward." in name
    ]
    assert seen == [[[1.0, None], [6.0]], [[1.0, None], [6.0]], [[None, 10.0], [100.0]]]


def test_views_of_freed_memory_have_no_statistics() -> None:
    """A view whose storage was given back (sharded training) has an address and no memory: it is not read."""
    whole = torch.randn(1000)
    view = whole[500:900]
    backend = TorchBackend()
    assert backend.reduce(view.clone()).row >= 0  # this kind of tensor is known from now on
    whole.untyped_storage().resize_(0)
    ref = backend.reduce(view)
    assert ref.row == -1
    assert ("freed", True) in ref.description.extra
    backend.want_digest = True
    whole.untyped_storage().resize_(4000)
    part = whole[500:900]
    whole.untyped_storage().resize_(0)
    assert backend.reduce_part(part, 500).row == -1


def test_arguments_with_code_of_their_own_cost_nothing_but_their_value() -> None:
    """Arguments whose own code raises are recorded by type; objects that refer to each other, and long lists, end."""

    class Bad(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("no")

    class BadInt(int):
        def __str__(self) -> str:
            raise RuntimeError("no")

    @dataclasses.dataclass
    class Node:
        others: list[Any]

    def reduce(_: torch.Tensor) -> Any:
        raise AssertionError("no tensor here")

    for value in (Bad(a=1), BadInt(3), slice("a", "b")):
        assert isinstance(convert(value, reduce), Opaque)
    nodes = [Node([]) for _ in range(10)]
    for node in nodes:
        node.others.extend(nodes)

    def size(found: Any) -> int:
        children = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        return 1 + sum(size(child) for child in children)

    assert size(convert(nodes, reduce)) < 3 * MAX_VALUES
    assert size(convert(list(range(10**6)), reduce)) < 3 * MAX_VALUES
    assert convert(np.float32(2), reduce).json["value"] == 2.0


def test_all_tensors_of_a_long_list_are_recorded() -> None:
    """The limit on values does not count tensors: fused operations take thousands of them."""
    tensors = [torch.zeros(1)] * (2 * MAX_VALUES)
    backend = TorchBackend()
    assert len(convert(tensors, backend.reduce)) == len(tensors)


def test_very_deep_graphs_survive() -> None:
    """A chain of 60,000 operations is released without overflowing the stack; how many calls have no gradients is said."""
    x = torch.ones(1, requires_grad=True)

    def work() -> None:
        out = x
        for _ in range(60_000):
            out = out + 1
        out.sum().backward()

    (frame,) = capture(None, work, "L1", stacks=False)
    assert sum(frame.lost.values()) >= 30_000
    assert "Tensor.__add__.0.backward" in entries(frame)
