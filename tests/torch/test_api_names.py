"""Names of API records are those of the existing tool (26.2.0) wherever the call is the same."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capturing import capture
from torch.nn import functional as F


def names_of(work: Callable[[], Any]) -> list[str]:
    found = [e.name for e in capture(None, work, "L1", stacks=False)[0].entries]
    return [name.removesuffix(".0.forward") for name in found if name.endswith(".0.forward")]


X, Y = torch.rand(3) + 1, torch.rand(3) + 1
WHOLE = torch.tensor([1, 2, 3])
SQUARE = torch.rand(3, 3)


def augmented(symbol: str, value: torch.Tensor = X) -> Callable[[], None]:
    return lambda: exec(f"z {symbol} 2", {"z": value.clone()})


@pytest.mark.parametrize(
    ("work", "names"),
    [
        (lambda: X**2, ["Tensor.__pow__"]),
        (lambda: 2**X, ["Tensor.__rpow__"]),
        (lambda: 2 * X, ["Tensor.__rmul__"]),
        (lambda: 2 + X, ["Tensor.__radd__"]),
        (lambda: X * 2, ["Tensor.__mul__"]),
        (lambda: 2 - X, ["Tensor.__rsub__"]),
        (lambda: 1 / X, ["Tensor.reciprocal", "Tensor.__mul__"]),
        (lambda: 2 // X, ["Torch.floor_divide"]),
        (lambda: X // 2, ["Tensor.__floordiv__"]),
        (lambda: 3 % X, ["Tensor.__rmod__"]),
        (lambda: 1 | WHOLE, ["Tensor.__ror__"]),
        (lambda: 1 ^ WHOLE, ["Tensor.__rxor__"]),
        (lambda: WHOLE << 1, ["Tensor.__lshift__"]),
        (lambda: X > 2, ["Tensor.__gt__"]),
        (lambda: X != Y, ["Tensor.__ne__"]),
        (lambda: -X, ["Tensor.__neg__"]),
        (lambda: sum([X, Y]), ["Tensor.__radd__", "Tensor.__add__"]),
        (lambda: X.neg(), ["Tensor.neg"]),
        (lambda: X.pow(2), ["Tensor.pow"]),
        (lambda: torch.pow(X, 2), ["Torch.pow"]),
        (lambda: X.__rmul__(2), ["Tensor.__rmul__"]),
        (augmented("**="), ["Tensor.__ipow__"]),
        (augmented("*="), ["Tensor.__imul__"]),
        (augmented("<<=", WHOLE), ["Tensor.__ilshift__"]),
        (lambda: bool(X[0] > 0), ["Tensor.__getitem__", "Tensor.__gt__", "Tensor.__bool__"]),
        (lambda: X.numpy(), ["Tensor.numpy"]),
        (lambda: F.sigmoid(X), ["Functional.sigmoid"]),
        (lambda: F.tanh(X), ["Functional.tanh"]),
        (lambda: X.sigmoid(), ["Tensor.sigmoid"]),
        (lambda: F.logsigmoid(X), ["Functional.logsigmoid"]),
        (lambda: F.threshold(X, 1.0, 0.0), ["Functional.threshold"]),
        (lambda: torch.conv1d(SQUARE[None], SQUARE[None]), ["Tensor.__getitem__", "Torch.conv1d"]),
        (lambda: F.conv1d(SQUARE[None], SQUARE[None]), ["Tensor.__getitem__", "Functional.conv1d"]),
        (lambda: torch.hardshrink(X), ["Torch.hardshrink"]),
        (lambda: torch.linalg.vector_norm(X), ["Torch.vector_norm"]),
        (lambda: torch.linalg.multi_dot([SQUARE, SQUARE]), ["Torch.multi_dot"]),
    ],
)
def test_names(work: Callable[[], Any], names: list[str]) -> None:
    """Operators, their reflected and in-place forms, and functions that are one object under two names."""
    assert [n for n in names_of(work) if n != "Tensor.clone"] == names


def test_operators_by_other_ways() -> None:
    """Where the text of the caller does not say which it was, the method's name stands."""
    assert names_of(lambda: operator.mul(X, Y)) == ["Tensor.mul"]
    assert names_of(lambda: list(map(torch.Tensor.mul, [X], [Y]))) == ["Tensor.mul"]


def test_reflected_operators_of_other_threads_have_no_effect() -> None:
    """A thread without a capture neither gets a record nor changes a name."""

    def work() -> None:
        thread = threading.Thread(target=lambda: 2 * X)
        thread.start()
        thread.join()
        X.mul(Y)

    assert names_of(work) == ["Tensor.mul"]


def test_results_are_those_of_torch() -> None:
    """Operators that are seen by what they call give the same bits, and NotImplemented where torch does."""

    class Other:
        def __truediv__(self, _: Any) -> str:
            return "mine"

        def __add__(self, _: Any) -> str:
            return "mine"

    before = (1 / X, 2 * X, 2 // X, 1 - X)
    after: list[Any] = []
    capture(None, lambda: after.extend([1 / X, 2 * X, 2 // X, 1 - X, Other() / X, Other() + X]), "L1")
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    assert after[4:] == ["mine", "mine"]


def test_no_patched_name_stays() -> None:
    """After the window `torch.Tensor` has the operators it had before."""
    before = dict(vars(torch.Tensor))
    capture(None, lambda: 2 * X, "mix")
    assert dict(vars(torch.Tensor)) == before


def test_a_subclass_with_functions_of_its_own_is_asked() -> None:
    """An operator that a tensor subclass handles itself stays one call."""
    handled: list[str] = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            handled.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2).as_subclass(Mine)
    assert "Tensor.__rdiv__" in names_of(lambda: 1 / x)
    assert "__rdiv__" in handled
