"""Call stacks: the first line is whose call it is, without frames of the probe or of torch's way of calling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capturing import capture, entries
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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
