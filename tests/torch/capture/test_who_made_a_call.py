"""Who made a call: call stacks, and the steps of optimizers and of gradient clipping."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from capturing import capture, entries
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_ as norm_taken_early
from torch.nn.utils import clip_grad_value_ as value_taken_early
from torch.utils.checkpoint import checkpoint

from msprobe_engine.formats.dump.writing.template import LayoutCache, Options
from msprobe_integrations.common.capture.stacks import walk_python

# Call stacks: the first line is whose call it is, without frames of the probe or of torch's way of calling.


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x * 2  # in forward

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return g * 2  # in backward


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)  # layer


def stacks(model: Any, work: Callable[[], Any], level: str = "mix") -> dict[str, list[str]]:
    frame = capture(model, work, level)[0]
    return {name: frame.stacks[e.stack] for name, e in entries(frame).items() if e.stack >= 0}


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (lambda: X.exp(), "Tensor.exp"),
        (lambda: X**2, "Tensor.__pow__"),
        (lambda: 2 * X, "Tensor.__rmul__"),
        (lambda: 1 / X, "Tensor.reciprocal"),
        (lambda: X.norm(), "Tensor.norm"),
        (lambda: F.softmax(X, -1), "Functional.softmax"),
        (lambda: F.sigmoid(X), "Functional.sigmoid"),
        (lambda: torch.einsum("ij->j", X), "Torch.einsum"),
        (lambda: torch.ops.aten.sin(X), "Aten.sin"),
        (lambda: Twice.apply(X), "Autograd.Twice"),
        (lambda: torch.no_grad()(X.exp)(), "Tensor.exp"),
    ],
)
def test_the_first_line_of_a_call(work: Callable[[], Any], name: str) -> None:
    """The line of this file, for methods, operators, functions that hand on, custom operators and custom functions."""
    found = stacks(None, work, "L1")[f"{name}.0.forward"]
    assert __file__ in found[0]
    assert "lambda" in found[0]
    assert not [line for line in found if "msprobe_integrations" in line or "nn/modules/module.py" in line]


def test_modules() -> None:
    """A module's first line is the line that calls it, an API's the line inside the module; both go on outward to the test."""
    model = nn.Sequential(Layer())
    found = stacks(model, lambda: model(X))
    assert "return self.fc(x)  # layer" in found["Module.0.fc.Linear.forward.0"][0]
    assert "container.py" in found["Module.0.Layer.forward.0"][0]
    api = found["Functional.linear.0.forward"]
    assert ["linear.py" in api[0], "# layer" in api[1], "container.py" in api[2], "lambda: model(X)" in api[3]] == [True] * 4


def test_inside_a_custom_function() -> None:
    """Calls inside forward and backward of a custom function name its lines."""
    x = X.clone().requires_grad_()
    found = stacks(None, lambda: Twice.apply(x).sum().backward(), "L1")
    assert "# in forward" in found["Tensor.__mul__.0.forward"][0]
    assert "# in backward" in found["Tensor.__mul__.1.forward"][0]


def test_optimizer_and_hooks() -> None:
    """A call of an optimizer names the optimizer's line and, further out, the user's; a call in a hook names the hook's."""
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def hook(_m: Any, _a: Any, out: torch.Tensor) -> torch.Tensor:
        return out.tanh()  # hook

    handle = model[0].register_forward_hook(hook)

    def work() -> None:
        model(X).sum().backward()
        optimizer.step()  # step

    found = stacks(model, work)
    handle.remove()
    assert "# hook" in found["Tensor.tanh.0.forward"][0]
    update = found["Tensor.add_.0.forward"]
    assert "sgd.py" in update[0]
    assert any("# step" in line for line in update)


def test_recomputation() -> None:
    """A recomputed call names the same first line as the call it repeats."""
    model = nn.Sequential(Layer())
    x = X.clone().requires_grad_()
    found = stacks(model, lambda: checkpoint(model[0], x, use_reentrant=False).sum().backward())
    assert found["Module.0.fc.Linear.forward.1"][0] == found["Module.0.fc.Linear.forward.0"][0]
    assert found["Functional.linear.1.forward"][0] == found["Functional.linear.0.forward"][0]


# The walk over call frames in C and in Python.

compiled = pytest.importorskip("msprobe_integrations.common._stackwalk", reason="built without a C compiler")


def deep(n: int, then: Callable[[FrameType], Any]) -> Any:
    """Call `then` with a frame `n` calls further in."""
    return then(sys._getframe()) if n == 0 else deep(n - 1, then)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("hide", [(), ("deep",), ("<lambda>",)])
def test_both_walks_give_the_same_key(ends: bool, hide: tuple[str, ...]) -> None:
    """Same code objects and instructions, the same frames left out and judged once, the same end."""

    def both(frame: FrameType) -> list[Any]:
        outer: FrameType | None = frame
        for _ in range(3):
            assert outer is not None
            outer = outer.f_back
        results = []
        for walk in (walk_python, compiled.stack_key):
            hidden: dict[CodeType, bool] = {}
            judged: list[str] = []

            def judge(code: CodeType, judged: list[str] = judged) -> bool:
                judged.append(code.co_name)
                return code.co_name in hide

            key, known = walk(frame, outer if ends else None, hidden, judge, 7)
            results.append((key, known, hidden, judged))
        return results

    python, c = deep(6, both)
    assert python == c
    assert python[1] is ends
    assert (python[0][-1] == 7) is ends
    assert len(set(python[3])) == len(python[3]) or not ends


def test_no_frame_and_an_end_that_is_not_met() -> None:
    """Nothing to walk gives an empty key; a frame that is no caller of the first is never met."""
    assert compiled.stack_key(None, None, {}, bool, 1) == walk_python(None, None, {}, bool, 1) == ((), False)
    other = deep(3, lambda frame: frame)
    here = sys._getframe()
    assert compiled.stack_key(here, other, {}, lambda _: False, 1)[1] is False


def test_an_error_of_the_judge_comes_through_and_nothing_leaks() -> None:
    """The judge's exception is the caller's; references of frames, codes and keys are given back."""

    def fails(_: CodeType) -> bool:
        raise ValueError("no")

    here = sys._getframe()
    before = sys.getrefcount(here), sys.getrefcount(here.f_code)
    for _ in range(100):
        with pytest.raises(ValueError, match="no"):
            compiled.stack_key(here, None, {}, fails, 1)
        compiled.stack_key(here, None, {}, lambda _: False, 1)
        compiled.stack_key(here, here.f_back, {}, lambda _: False, 1)
    gc.collect()
    assert sys.getrefcount(here) <= before[0] + 1
    assert sys.getrefcount(here.f_code) <= before[1] + 1
    with pytest.raises(TypeError):
        compiled.stack_key(here)


# Parents ``optimizer`` and ``clip_grad``: calls of an optimizer step and of gradient clipping.


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
