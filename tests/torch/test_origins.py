"""Parents ``optimizer`` and ``clip_grad``: calls of an optimizer step and of gradient clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capturing import capture, entries
from torch import nn
from torch.nn.utils import clip_grad_norm_ as norm_taken_early
from torch.nn.utils import clip_grad_value_ as value_taken_early

from msprobe_engine.dump.template import LayoutCache, Options


def parents(work: Callable[[], Any], model: Any = None, level: str = "mix", **options: Any) -> dict[str, str | None]:
    return {e.name: e.parent for e in capture(model, work, level, **options)[0].entries}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.1),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        lambda p: torch.optim.Adam(p, 0.1, fused=True),
        lambda p: torch.optim.Adagrad(p, 0.1, differentiable=False),
    ],
)
def test_optimizer_step(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Torch calls inside `step()` have the parent ``optimizer``, with their inputs; calls before and after do not."""
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters())

    def work() -> None:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        torch.ones(2).exp()

    records = entries(capture(None, work, "mix")[0])
    inside = [record for record in records.values() if record.parent == "optimizer"]
    assert inside
    assert all(record.sections["input_args"] for record in inside)
    assert records["Tensor.exp.0.forward"].parent is None
    assert records["Functional.linear.0.forward"].parent is None


def test_gradient_clipping() -> None:
    """The parent is ``clip_grad``, also for functions that were imported before the probe existed."""
    model = nn.Linear(4, 2)

    def work() -> None:
        model(torch.ones(3, 4)).sum().backward()
        norm_taken_early(model.parameters(), 1.0)
        torch.ones(1).exp()
        value_taken_early(model.parameters(), 0.5)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)

    found = parents(work)
    clipped = {name for name, parent in found.items() if parent == "clip_grad"}
    assert {"Torch._foreach_norm.0.forward", "Torch._foreach_clamp_min_.0.forward", "Torch.vector_norm.0.forward"} <= clipped
    assert found["Tensor.exp.0.forward"] is None


def test_both_are_nodes_without_a_parent() -> None:
    """construct.json has the nodes ``clip_grad`` and ``optimizer``, both without a parent."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work() -> None:
        model(torch.ones(1, 2)).sum().backward()
        norm_taken_early(model.parameters(), 1.0)
        optimizer.step()

    frame = capture(None, work, "mix")[0]
    construct = LayoutCache(Options()).find(frame.entries, "mix")[0].construct
    assert ' "clip_grad": null' in construct
    assert ' "optimizer": null' in construct
    assert construct.index("clip_grad") < construct.index("optimizer")


def test_closures_and_exceptions() -> None:
    """A closure's modules keep their own tree; after a step that raised, calls are no calls of the optimizer."""
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    x = torch.ones(3, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    def fails() -> torch.Tensor:
        raise RuntimeError("no")

    def work() -> None:
        optimizer.step(closure)
        with contextlib.suppress(RuntimeError):
            optimizer.step(fails)
        with torch.no_grad():
            x.exp()

    found = parents(work, model)
    assert found["Module.0.Linear.forward.0"] is None
    assert found["Functional.linear.0.forward"] == "Module.0.Linear.forward.0"
    assert found["Tensor.sum.0.forward"] == "optimizer"
    assert found["Tensor.exp.0.forward"] is None


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_closure_is_seen_where_the_optimizer_is_not(level: str) -> None:
    """Without the calls of the optimizer (as the ring of incidents is): its own are not seen, those of its closure are, forward and
    backward (every training step of Lightning is in one)."""
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        return loss

    def work() -> None:
        loss = optimizer.step(closure=closure)
        assert loss.shape == ()

    found = set(parents(work, model, level, optimizer_calls=False))
    module = {"Module.0.Linear.forward.0", "Module.0.Linear.backward.0"}
    calls = {"Functional.linear.0.forward", "Functional.linear.0.backward", "Tensor.sum.0.forward", "Tensor.sum.0.backward"}
    assert found >= (module if level == "L0" else calls if level == "L1" else module | calls)
    assert not [name for name in found if "mul" in name or "add" in name]


def test_api_level_has_no_tree() -> None:
    """At L1 construct.json is empty: nobody looks for callers."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)

    def work() -> None:
        weight.sum().backward()
        optimizer.step()

    assert set(parents(work, level="L1").values()) == {None}
