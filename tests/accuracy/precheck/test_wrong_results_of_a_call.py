"""What of one recorded call of torch is an error and what is round-off: wrong kernels, gradients and casts are found, right ones pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from call_records import Memory, check, normal, tensor

from msprobe_engine.accuracy.results import ERROR, NOT_RUN, PASS, SKIP, CallResult
from msprobe_engine.accuracy.verdict.standards import NEW, OLD
from msprobe_integrations.torch.op_tools.accuracy import as_existing
from msprobe_integrations.torch.op_tools.accuracy.as_existing import CheckerAsExisting
from msprobe_integrations.torch.op_tools.accuracy.checker import Checker
from msprobe_integrations.torch.op_tools.accuracy.operators.custom import forget_operator, register_operator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_cancel(dtype: torch.dtype) -> None:
    """Where terms of a gradient cancel it is zero for all inputs, and right kernels have the round-off of these terms there; a wrong
    result of the same size is none of that."""
    q, k, v, g = (normal(1, 2, 16, 8).to(dtype) for _ in range(4))
    attention = check("Functional.scaled_dot_product_attention.0", q.requires_grad_(), k.requires_grad_(), v, is_causal=True, grad=g)
    assert (attention.forward, attention.backward, attention.message) == (PASS, PASS, "")
    x = torch.linspace(-30, 30, 12).reshape(3, 4).to(dtype).requires_grad_()
    ones = check("Torch.softmax.0", x, 1, grad=torch.ones(3, 4, dtype=dtype))
    assert (ones.forward, ones.backward) == (PASS, PASS)
    column = normal(4, 1).to(dtype).requires_grad_()
    assert check("Functional.normalize.0", column, dim=1, grad=normal(4, 1).to(dtype)).backward == PASS


def test_gradients_of_certain_probabilities() -> None:
    """Where a softmax is 1, its gradient is the difference of two equal numbers: whoever computes it, all of it is round-off. One that
    is wrong by more is still found."""
    generator = torch.Generator().manual_seed(3)
    x = (10 * torch.randn(500, 50, generator=generator)).requires_grad_()
    gradient = torch.rand(500, 50, generator=generator) + 0.5

    def composite(x: torch.Tensor, dim: int) -> torch.Tensor:
        e = torch.exp(x - x.amax(dim, keepdim=True))
        return e / e.sum(dim, keepdim=True)

    def careless(x: torch.Tensor, dim: int) -> torch.Tensor:
        return composite(x, dim) + 2e-6 * (x - x.detach())

    found = {}
    for kernel in (None, composite, careless):
        if kernel is not None:
            register_operator("Torch.softmax", kernel, torch.softmax)
        try:
            found[kernel] = check("Torch.softmax.0", x, -1, grad=gradient)
        finally:
            if kernel is not None:
                forget_operator("Torch.softmax")
    assert [(r.forward, r.backward) for r in found.values()] == [(PASS, PASS), (PASS, PASS), (PASS, ERROR)]


WRONG = {
    "scaled": lambda x, dim: torch.softmax(x, dim) * 1.01,
    "swallows NaN": lambda x, dim: torch.softmax(x, dim).nan_to_num(0.5),
    "other axis": lambda x, dim: torch.softmax(x, 1 - dim),
    "drops a row": lambda x, dim: torch.cat([torch.softmax(x, dim)[:-1], torch.zeros(1, x.shape[1])]),
    "computes in bfloat16": lambda x, dim: torch.softmax(x.bfloat16(), dim).float(),
    "too few results": lambda *_: [],
    "other shape": lambda x, dim: torch.softmax(x, dim)[None],
}


@pytest.fixture
def softmax() -> Iterator[Any]:
    """Puts a kernel in the place of softmax; taken back at the end."""
    yield lambda kernel: register_operator("Torch.softmax", kernel, torch.softmax)
    forget_operator("Torch.softmax")


def test_wrong_kernels_are_errors(softmax: Any) -> None:
    """What is wrong with a kernel is seen, with saved inputs and with drawn ones."""
    for fault, kernel in WRONG.items():
        softmax(kernel)
        x = normal(16, 16)
        x[3, 4] = torch.nan if fault == "swallows NaN" else 0
        assert check("Torch.softmax.0", x, 1).forward == ERROR, fault
        if fault != "swallows NaN":
            assert check("Torch.softmax.0", x, 1, saved=False).forward == ERROR, fault


def test_wrong_gradients_are_errors(softmax: Any) -> None:
    """A right forward with a wrong backward is an error of the backward alone; one without a gradient too."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, 1)

        @staticmethod
        def backward(_: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 0.1

    softmax(lambda x, _: Wrong.apply(x))  # type: ignore[no-untyped-call]
    result = check("Torch.softmax.0", normal(8, 8, grad=True), 1, grad=normal(8, 8))
    assert (result.forward, result.backward) == (PASS, ERROR)
    softmax(lambda x, _: torch.softmax(x, 1).detach() + 0 * x.detach())
    result = check("Torch.softmax.0", normal(8, 8, grad=True), 1, grad=normal(8, 8))
    assert (result.forward, result.backward) == (PASS, SKIP)
    assert "no output depends on" in result.message


def test_a_gradient_that_a_kernel_has_lost() -> None:
    """An input that needed a gradient in the training and gets none from the kernel is an error; one that needed
    none may go without."""
    x, y, g = normal(8, 8, grad=True), normal(8, 8, grad=True), normal(8, 8)
    try:
        register_operator("Torch.mul", lambda x, y: torch.mul(x, y.detach()), torch.mul)
        result = check("Torch.mul.0", x, y, grad=g)
        assert (result.forward, result.backward) == (PASS, ERROR)
        assert result.message == "backward: only the bench has a gradient for input 1"
        assert check("Torch.mul.0", x, y.detach(), grad=g).backward == PASS
        for value, verdict in ((1.0, ERROR), (0.0, PASS)):  # a gradient of zeros is none
            assert check("Torch.mul.0", torch.ones_like(x, requires_grad=True), y, grad=torch.full_like(g, value)).backward == verdict
    finally:
        forget_operator("Torch.mul")


def test_equal_values_in_another_order() -> None:
    """Places of equal values are as good as others; places of other values are not, nor is one place twice."""
    x = torch.tensor([[3.0, 1.0, 3.0, 0.0]])
    try:
        for places, status in (([2, 0, 1], PASS), ([2, 2, 1], ERROR), ([2, 0, 3], ERROR)):
            index = torch.tensor([places])
            register_operator("Torch.topk", lambda x, k, index=index: (torch.topk(x, k)[0], index), torch.topk)
            assert check("Torch.topk.0", x, 3).forward == status
        register_operator("Torch.argsort", lambda *_, **__: torch.tensor([[3, 1, 2, 0]]), torch.argsort)
        assert check("Torch.argsort.0", x).forward == PASS
        assert check("Torch.argsort.0", x, stable=True).forward == ERROR  # equal values keep their order
    finally:
        forget_operator("Torch.topk")
        forget_operator("Torch.argsort")


def test_wrong_casts_are_errors() -> None:
    """A cast is one rounding to its type: cutting off the last bits, and a move that changes something, are errors."""
    x = normal(64)
    try:
        for to in (torch.bfloat16, "cuda:1"):
            cut = (x.view(torch.int32) & -(1 << 16)).view(torch.float32)
            wrong = cut.bfloat16() if isinstance(to, torch.dtype) else cut
            register_operator("Tensor.to", lambda *_, wrong=wrong: wrong, lambda x, _: x)
            assert check("Tensor.to.0", x, to).forward == ERROR
        wide = x.double() * math.pi
        register_operator("Tensor.float", lambda x: (x.view(torch.int64) & -(1 << 29)).view(torch.float64).float(), lambda x: x)
        assert check("Tensor.float.0", wide).forward == ERROR
        register_operator("Tensor.float", lambda x: x.float(), lambda x: x)
        assert check("Tensor.float.0", wide).forward == PASS
    finally:
        forget_operator("Tensor.to")
        forget_operator("Tensor.float")


def test_gradients_that_are_long_sums() -> None:
    """Gradients of parameters over many places may have the error of a float32 sum in order; one of 16 bits is found."""
    x, weight, bias, g = normal(16, 3, 64, 64, grad=True), normal(4, 3, 3, 3, grad=True), normal(4, grad=True), normal(16, 4, 64, 64)
    assert check("Functional.conv2d.0", x, weight, bias, 1, 1, grad=g).backward == PASS

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.bfloat16().float()

    conv2d = torch.nn.functional.conv2d
    try:
        register_operator("Functional.conv2d", lambda x, w, b, *more: conv2d(x, Rounded.apply(w), Rounded.apply(b), *more), conv2d)
        assert check("Functional.conv2d.0", x, weight, bias, 1, 1, grad=g).backward == ERROR
    finally:
        forget_operator("Functional.conv2d")


@pytest.mark.parametrize("api", ["dropout", "dropout2d"])
def test_dropout_is_checked_by_what_it_dropped(api: str) -> None:
    """What is left must be the scaled input, gradients follow, and the share of dropped values must be possible."""
    x, g = normal(30, 20, 4, 4, grad=True), normal(30, 20, 4, 4)
    right = check(f"Functional.{api}.0", x, 0.3, True, grad=g)
    assert (right.forward, right.backward, right.message) == (PASS, PASS, "")
    assert check(f"Functional.{api}.0", x, 0.3, False, grad=g).backward == PASS
    try:
        for kernel in (
            lambda x, p, t: getattr(torch.nn.functional, api)(x, p / 2, t) * (1 - p / 2) / (1 - p),  # too few
            lambda x, p, t: getattr(torch.nn.functional, api)(x, p, t) * (1 - p),  # not scaled
        ):
            register_operator(f"Functional.{api}", kernel, getattr(torch.nn.functional, api))
            assert check(f"Functional.{api}.0", x, 0.3, True).forward == ERROR
    finally:
        forget_operator(f"Functional.{api}")


def test_recorded_results_are_judged() -> None:
    """Results that a device had are judged as they are, without a run: from the dump, or given."""
    memory = Memory()
    x, w, g = normal(4, 8, grad=True), normal(3, 8, grad=True), normal(4, 3)
    y = torch.nn.functional.linear(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    record = memory.record((x, w), {}, y)
    checker = Checker(memory)
    for gradients, status in (((dx, dw), PASS), ((dx, dw * 1.01), ERROR)):
        backward = memory.backward(g, output=gradients)
        result = checker.check("Functional.linear.0", record, backward, recorded=True).result
        assert (result.forward, result.backward, len(result.tensors)) == (PASS, status, 3)
        given = checker.check("Functional.linear.0", record, backward, outputs=[y], gradients=list(gradients)).result
        assert (given.forward, given.backward) == (PASS, status)
    shifted = checker.check("Functional.linear.0", record, None, outputs=[y + 1]).result
    assert (shifted.forward, shifted.backward) == (ERROR, NOT_RUN)
    plain = {"input_args": [tensor(x), tensor(w)], "input_kwargs": {}, "output": [tensor(y)]}
    assert "was not saved" in Checker(None).check("Functional.linear.0", plain, None, recorded=True).result.message


@pytest.mark.parametrize("place", ["positional", "keyword"])
def test_attention_with_dropout_is_not_judged(place: str) -> None:
    """What drops inside draws other numbers on every device: it is skipped, and judged where nothing is dropped."""
    size, x = 8, normal(5, 2, 8, grad=True)
    weights = (normal(24, 8), normal(24), None, None, False)

    def call(p: float, training: bool) -> CallResult:
        rest = (normal(8, 8), normal(8))
        args, kwargs = (x, x, x, size, 2, *weights), {"training": training, "need_weights": False}
        if place == "positional":
            return check("Functional.multi_head_attention_forward.0", *args, p, *rest, **kwargs)
        kwargs |= {"dropout_p": p, "out_proj_weight": rest[0], "out_proj_bias": rest[1]}
        return check("Functional.multi_head_attention_forward.0", *args, **kwargs)

    skipped = call(0.1, True)
    assert (skipped.forward, "random" in skipped.message) == (SKIP, True)
    assert call(0.1, False).forward == call(0.0, True).forward == PASS


def test_operators_that_draw_inside_are_not_judged() -> None:
    """That an operator draws is told by its run, whatever its name."""
    register_operator("Mine.noisy", lambda x: x + torch.rand_like(x))
    try:
        result = check("Mine.noisy.0", normal(4))
    finally:
        forget_operator("Mine.noisy")
    assert (result.forward, result.message) == (SKIP, "draws random numbers: no two devices draw the same")


def test_norms_of_numbers_whose_squares_are_lost() -> None:
    """A kernel that squares 1e-26 in float32 has nothing left, everywhere; one that loses what it could keep is found."""
    small = torch.full((16,), 1e-26)
    assert check("Torch._foreach_norm.0", [small, torch.ones(16)], 2.0).forward == PASS
    register_operator("Torch._foreach_norm", lambda tensors, order: [t.norm(order) * (1 - 1e-3) for t in tensors], torch._foreach_norm)
    try:
        assert check("Torch._foreach_norm.0", [small, torch.full((16,), 1e-12)], 2.0).forward == ERROR
    finally:
        forget_operator("Torch._foreach_norm")


def test_recorded_results_of_an_autocast_region() -> None:
    """They are those of rounded inputs; what is wrong by more is found."""
    x, w = normal(6, 64), normal(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        right = torch.nn.functional.linear(x, w)
    for result, status in ((right, PASS), (right * 1.1, ERROR)):
        memory = Memory()
        record = memory.record((x, w), {}, result)
        assert Checker(memory).check("Functional.linear.0", record, None, recorded=True).result.forward == status


INTEGERS = {
    "type": "torch.Tensor",
    "dtype": "torch.int32",
    "shape": [2],
    "requires_grad": False,
    "Max": 3,
    "Min": 3,
    "Mean": 3,
    "Norm": 4.24,
}


def test_integers_of_quantizing_operators_may_differ_by_one() -> None:
    """An API of `quantization_api_list` may give the integer beside the right one, and no further one; other APIs may not."""
    record = {"input_args": [INTEGERS, INTEGERS], "input_kwargs": {}, "output": [INTEGERS]}

    def status(result: list[int], *names: str) -> str:
        outputs = [torch.tensor(result, dtype=torch.int32)]
        return Checker(None, quantized=names).check("Torch.mul.0", record, None, outputs).result.forward

    assert status([9, 9]) == "pass"
    assert status([10, 8], "mul") == "pass"
    assert status([11, 9], "mul") == status([10, 9], "add") == status([10, 9]) == "error"


@pytest.mark.parametrize(
    ("version", "names", "off", "status", "shown"),
    [
        (NEW, ("mul",), 0, "pass", {"max_abs": 0.0}),
        (NEW, ("mul",), 1, "pass", {"max_abs": 1.0}),
        (NEW, ("mul",), 2, "error", {"max_abs": 2.0}),
        (NEW, (), 1, "error", {"error_rate": 1.0}),
        (OLD, ("mul",), 1, "error", {"error_rate": 1.0}),
    ],
)
def test_integers_of_quantizing_operators_as_the_existing_tool(
    version: str, names: tuple[str, ...], off: int, status: str, shown: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """26.2.0 judges integers of the APIs in `quantization_api_list` by their largest error, which may be 1; 8.1.1 knows no such list."""
    calls = []

    def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * y + (off if len(calls) == 2 else 0)  # the first is the bench

    monkeypatch.setattr(as_existing, "find", lambda _: mul)
    record = {"input_args": [INTEGERS, INTEGERS], "input_kwargs": {}, "output": [INTEGERS]}
    result = CheckerAsExisting(None, version=version, quantized=names).check("Torch.mul.0", record, None).result
    assert result.forward == status
    assert result.tensors[0].metrics == shown
