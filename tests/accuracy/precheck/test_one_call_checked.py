"""One recorded call of torch, run on both sides: what runs, what is compared, and what is said of the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from call_records import Memory, check, names, tensor

from msprobe_engine.accuracy.results import ERROR, NOT_JUDGED, NOT_RUN, PASS, SKIP, CallResult
from msprobe_engine.accuracy.verdict.standards import NEW, OLD
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.torch.op_tools.accuracy import as_existing, comparison
from msprobe_integrations.torch.op_tools.accuracy.as_existing import CheckerAsExisting
from msprobe_integrations.torch.op_tools.accuracy.checker import Bench, Checker, Target
from msprobe_integrations.torch.op_tools.accuracy.operators.custom import forget_operator, load_operators, register_operator


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def types(result: CallResult) -> list[tuple[str, str]]:
    """Types of both sides of what was compared."""
    return [(t.bench_dtype.removeprefix("torch."), t.device_dtype.removeprefix("torch.")) for t in result.tensors]


COMPILE = torch.compile
C64, F8 = torch.complex64, torch.float8_e4m3fn
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], Any, list[str]]] = {
    "method": ("Tensor.matmul.0", (normal(3, 4, grad=True), normal(4, 5)), {}, normal(3, 5), ["forward.output.0", "backward.output.0"]),
    "gradients of keywords": (
        "Functional.linear.0", (normal(4, 8),), {"weight": normal(3, 8, grad=True), "bias": None}, normal(4, 3),
        ["forward.output.0", "backward.output.1"],
    ),
    "all keywords": (
        "Torch.add.0", (), {"input": normal(4, grad=True), "other": normal(4, grad=True), "alpha": 2}, normal(4),
        ["forward.output.0", "backward.output.0", "backward.output.1"],
    ),
    "several outputs": (
        "Torch.split.0", (normal(4, 8, grad=True), 4), {"dim": -1}, [normal(4, 4), None],
        ["forward.output.0", "forward.output.1", "backward.output.0"],
    ),
    "one of them an index": (
        "Torch.topk.0", (normal(6, 9, grad=True), 3), {}, normal(6, 3), ["forward.output.0", "forward.output.1", "backward.output.0"],
    ),
    "list of tensors": (
        "Torch.cat.0", ([normal(2, 2, grad=True), normal(2, 2, grad=True)],), {"dim": 0}, normal(4, 2),
        ["forward.output.0", "backward.output.0", "backward.output.1"],
    ),
    "in place": (
        "Tensor.add_.0", (normal(4, grad=True), normal(4, grad=True)), {}, normal(4),
        ["forward.output.0", "backward.output.0", "backward.output.1"],
    ),
    "written and not returned": (
        "Tensor.__setitem__.0", (normal(4, 4), (slice(None), 0), normal(4)), {"recorded_output": None}, None, ["forward.input.0.written"],
    ),
    "running statistics": (
        "Functional.batch_norm.0", (normal(8, 4), torch.zeros(4), torch.ones(4)), {"training": True}, None,
        ["forward.output.0", "forward.input.1.written", "forward.input.2.written"],
    ),
    "out": ("Torch.add.1", (normal(4), normal(4)), {"out": torch.zeros(4)}, None, ["forward.output.0"]),
    "integers": ("Tensor.__truediv__.0", (torch.arange(1, 5), 3), {}, None, ["forward.output.0"]),
    "no tensor at all": ("Torch.linspace.0", (0.0, 1.0, 7), {}, None, ["forward.output.0"]),
    "complex": (
        "Torch.mul.0", (normal(4, dtype=C64, grad=True), normal(4, dtype=C64)), {}, normal(4, dtype=C64),
        ["forward.output.0", "backward.output.0"],
    ),
    "operator of aten": ("Aten.silu.0", (normal(4, grad=True),), {}, normal(4), ["forward.output.0", "backward.output.0"]),
    "attention of aten": (
        "Aten._scaled_dot_product_flash_attention_for_cpu.0", (normal(1, 2, 8, 4), normal(1, 2, 8, 4), normal(1, 2, 8, 4)), {}, None,
        ["forward.output.0", "forward.output.1"],
    ),
    "product in 8 bits": (
        "Torch._scaled_mm.0", (normal(16, 32).to(F8), normal(16, 32).to(F8).t(), torch.ones(()), torch.ones(())),
        {"out_dtype": torch.bfloat16}, None, ["forward.output.0"],
    ),
    "lists that are written to": (
        "Torch._foreach_add_.0", ([normal(3), normal(4)], [normal(3), normal(4)]), {"alpha": -0.1}, None,
        ["forward.output.0", "forward.output.1"],
    ),
    "recurrent": (
        "VF.gru.0", (normal(2, 3, 4), normal(1, 3, 5), [normal(15, 4), normal(15, 5)], False, 1, 0.0, True, False, False), {}, None,
        ["forward.output.0", "forward.output.1"],
    ),
    "module of torch": ("Torch.fft.0", (normal(8),), {}, None, ["forward.output.0"]),
    "lists for tuples": (
        "Functional.conv2d.0", (normal(1, 3, 8, 8, grad=True), normal(4, 3, 3, 3), None, [1, 1], [1, 1]), {}, normal(1, 4, 8, 8),
        ["forward.output.0", "backward.output.0"],
    ),
    "nothing in it": ("Torch.matmul.1", (normal(0, 4), normal(4, 5)), {}, None, ["forward.output.0"]),
    "8 bits": ("Tensor.to.0", (normal(4).to(torch.float8_e4m3fn), torch.bfloat16), {}, None, ["forward.output.0"]),
    "cast": ("Tensor.to.1", (normal(4, grad=True), torch.bfloat16), {}, normal(4).bfloat16(), ["forward.output.0", "backward.output.0"]),
    "move": ("Tensor.to.2", (normal(4, grad=True), "npu:3"), {}, normal(4), ["forward.output.0", "backward.output.0"]),
    "move and cast": ("Tensor.to.3", (normal(4),), {"device": "cuda:0", "dtype": torch.int32}, None, ["forward.output.0"]),
    "cast by a name": ("Tensor.type.0", (normal(4), "torch.cuda.HalfTensor"), {}, None, ["forward.output.0"]),
    "move by a method": ("Tensor.npu.0", (normal(4, grad=True), 1), {}, normal(4), ["forward.output.0", "backward.output.0"]),
    "value of Python": ("Tensor.__bool__.0", (torch.tensor(3.0),), {}, None, ["forward.output.0"]),
    "flattened": ("Functional.flatten_dense_tensors.0", ([normal(2, 3), normal(4)],), {}, None, ["forward.output.0"]),
    "taken apart": (
        "Functional.unflatten_dense_tensors.0", (normal(5), [normal(3), normal(2)]), {}, None, ["forward.output.0", "forward.output.1"],
    ),
    "made for its type": ("Torch.nan_to_num.0", (torch.tensor([1.0, torch.inf]),), {}, None, ["forward.output.0"]),
    "bits as another type": ("Tensor.view.0", (normal(4), torch.int32), {}, None, ["forward.output.0"]),
}  # fmt: skip


def test_right_kernels_pass() -> None:
    """Every form of a call runs on both sides; outputs, written arguments and gradients are compared and pass."""
    for case, (name, args, kwargs, grad, compared) in CALLS.items():
        result = check(name, *args, grad=grad, **kwargs)
        assert (result.forward, result.backward, result.message) == (PASS, NOT_RUN if grad is None else PASS, ""), case
        assert names(result) == compared, case


def test_types_of_both_sides() -> None:
    """The bench has float64 whatever the recorded type is, or one step more; the device has the recorded type."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = check("Torch.mul.0", normal(4).to(dtype), normal(4).to(dtype))
        assert types(found) == [("float64", str(dtype).removeprefix("torch."))]
    raised = Checker(None, bench=Bench(dtype="raised"))
    assert types(check("Torch.exp.0", normal(4).bfloat16(), checker=raised)) == [("float32", "bfloat16")]
    same = Checker(None, bench=Bench(dtype="same"))
    assert types(check("Torch.exp.0", normal(4), checker=same)) == [("float32", "float32")]
    rounded = check("Torch.exp.0", normal(4, grad=True), grad=normal(4), checker=Checker(None, Target(dtype="bfloat16")))
    assert types(rounded) == [("float64", "bfloat16")] * 2
    assert (rounded.forward, rounded.backward) == (PASS, PASS)
    for wrong in ({"target": Target(dtype="int8")}, {"target": Target(dtype="load")}, {"bench": Bench(dtype="float8")}):
        with pytest.raises(UsageError):
            Checker(None, **wrong)


def test_autocast() -> None:
    """A call that was recorded with a result of another type than its inputs runs under autocast, and gradients that were computed in 16
    bits are judged as such."""
    x, w = normal(8, 16, grad=True), normal(4, 16, grad=True)
    result = check("Functional.linear.0", x, w, grad=normal(8, 4).bfloat16(), recorded_output=torch.zeros(8, 4, dtype=torch.bfloat16))
    assert (result.forward, result.backward, result.message) == (PASS, PASS, "")
    assert types(result) == [("float64", "bfloat16"), ("float64", "float32"), ("float64", "float32")]
    wide = check("Functional.softmax.0", normal(4, 8).bfloat16(), -1, recorded_output=torch.zeros(4, 8))
    assert (wide.forward, types(wide)) == (PASS, [("float64", "float32")])


def _lstm_by_hand(x: torch.Tensor, state: Any, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Both directions in bfloat16, each with its own casts, as oneDNN's LSTM under autocast (which not every processor can run)."""
    found = []
    for turned in (False, True):
        given = [t.bfloat16() for t in (x.flip(1) if turned else x, *(s[int(turned)][None] for s in state))]
        own = [w.bfloat16() for w in weights[4 * turned : 4 * turned + 4]]
        out, *ends = torch._VF.lstm(given[0], given[1:], own, True, 1, 0.0, True, False, True)
        found.append([out.flip(1) if turned else out, *ends])
    return [torch.cat(pair, -1 if n == 0 else 0) for n, pair in enumerate(zip(*found))]


@pytest.mark.parametrize("region", [False, True])
def test_autocast_sums(region: bool) -> None:
    """Under autocast a gradient that is the sum of several of 16 bits (of an LSTM's input, by its two directions) is judged as one of
    these; a wrong one is none."""
    if region and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no LSTM under autocast: torch stops at it")
    cell = torch.nn.LSTM(16, 16, bidirectional=True, batch_first=True)
    x, zero, weights = normal(2, 5, 16, grad=True), torch.zeros(2, 2, 16), [w.detach().requires_grad_() for w in cell._flat_weights]
    call = (x, (zero, zero), weights, True, 1, 0.0, True, True, True)
    if region:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = torch._VF.lstm(*call)
    else:
        outputs = _lstm_by_hand(x, (zero, zero), weights)
    g = normal(2, 5, 32).bfloat16()
    (gradient,) = torch.autograd.grad(outputs[0], [x], g)
    assert not torch.equal(gradient.bfloat16().float(), gradient), "more digits than 16 bits have"
    right = check("VF.lstm.0", *call, grad=[g, None, None], recorded_output=outputs)
    assert (right.forward, right.backward) == (PASS, PASS), right.message
    assert types(right)[0] == ("float64", "bfloat16"), "as it was recorded, on any processor"
    for factor, status in ((1.0, PASS), (1.05, ERROR)):
        memory = Memory()
        record, backward = memory.record(call, {}, outputs), memory.backward(g, None, None)
        given = Checker(memory).check("VF.lstm.0", record, backward, gradients=[factor * gradient])
        assert given.result.backward == status, given.result.message


def test_autocast_without_its_kernel() -> None:
    """Where the kernel that autocast picks cannot be run here, the inputs are cast by hand: the call is judged in the recorded types."""

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and x.dtype is torch.float32:
            raise RuntimeError("could not create a primitive descriptor")
        return torch.mm(x, y)

    x, y, g = normal(8, 16, grad=True), normal(16, 4, grad=True), normal(8, 4).bfloat16()
    try:
        register_operator("Torch.mm", product, torch.mm)
        result = check("Torch.mm.0", x, y, grad=g, recorded_output=torch.zeros(8, 4, dtype=torch.bfloat16))
        assert (result.forward, result.backward, result.message) == (PASS, PASS, "")
        assert types(result) == [("float64", "bfloat16")] * 3
        register_operator("Torch.mm", lambda x, y: 1.05 * product(x, y), torch.mm)
        assert check("Torch.mm.0", x, y, recorded_output=torch.zeros(8, 4, dtype=torch.bfloat16)).forward == ERROR
    finally:
        forget_operator("Torch.mm")


@pytest.mark.parametrize(
    ("given", "made", "status"), [("Partial", "Replicate", SKIP), ("Shard", "Replicate", SKIP), ("Shard", "Shard", PASS)]
)
def test_operators_that_communicate(given: str, made: str, status: str) -> None:
    """The recorded result of an operator on DTensors that asks other ranks is not held against the local tensors."""
    memory, x = Memory(), normal(8)
    local = torch.linalg.vector_norm(x)
    result = local if status == PASS else 2 * local
    record = memory.record((x, 2.0), {}, result)
    record["input_args"][0]["placements"], record["output"][0]["placements"] = [{given: {}}], [{made: {}}]
    found = Checker(memory).check("Torch.vector_norm.0", record, None, recorded=True).result
    assert found.forward == status
    assert Checker(memory).check("Torch.vector_norm.0", record, None).result.forward == PASS, "run here, it is the local operator"


def test_names_of_types() -> None:
    """What names a type is no number: the bench has another type because it is meant to."""
    named = check("Tensor.type.0", normal(4), recorded_output="torch.FloatTensor")
    assert (named.forward, named.message) == (SKIP, "there is nothing to compare: the call gives no values")
    cast = check("Tensor.type.1", normal(4), torch.bfloat16, recorded_output=torch.zeros(4, dtype=torch.bfloat16))
    assert (cast.forward, types(cast)) == (PASS, [("float64", "bfloat16")])


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


def test_what_an_index_was() -> None:
    """JSON has a list for a tuple: the recorded shape tells ``x[0, 1]`` from ``x[[0, 1]]``."""
    x = normal(4, 4)
    both = (
        check("Tensor.__getitem__.0", x, [0, 1], recorded_output=x[[0, 1]]),
        check("Tensor.__getitem__.0", x, [0, 1], recorded_output=x[0, 1]),
    )
    assert [result.tensors[0].shape for result in both] == [(2, 4), ()]
    assert check("Torch.norm.0", x, ord="nuc", recorded_output=torch.tensor(1.0)).forward == PASS  # only torch.linalg.norm has it


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("Torch.randn.0", (3,), "random"),
        ("Torch.bernoulli.0", (torch.rand(3),), "random"),
        ("Functional.scaled_dot_product_attention.0", (*(normal(1, 1, 4, 4) for _ in range(3)), None, 0.5), "random"),
        ("Torch.empty.0", (3,), "nobody has written"),
        ("Distributed.all_reduce.0", (normal(3),), "communication"),
        ("NPU.npu_nothing.0", (normal(3),), "torch_npu"),
        ("NPU.npu_swiglu.0", (normal(3, 4),), "cannot be run here"),
        ("my.kernel.0", (normal(3),), "register_operator"),
        ("Torch.load.0", ("x",), "computes nothing"),
        ("Aten.from_file.0", ("/etc/passwd",), "computes nothing"),
        ("Torch.matmul.0", (normal(2, 3), normal(2, 3)), "cannot be multiplied"),
        ("Torch.mul.0", ({"a"},), "argument of type set"),
        ("Torch.__import__.0", ("os",), "no operator"),
        ("Functional.os.0", (), "no operator"),
        ("", (), ""),
    ],
)
def test_what_is_skipped_says_why(name: str, args: tuple[Any, ...], reason: str) -> None:
    """Communication, random numbers, memory without values, unknown names, and whatever torch refuses: one row with the reason."""
    result = check(name, *args)
    assert (result.forward, result.backward, result.tensors) == (SKIP, NOT_RUN, ())
    assert reason in result.message


def test_damaged_records() -> None:
    """A damaged record is a row, no exception."""
    checker = Checker(None)
    bad: list[Any] = [{}, {"input_args": 3}, {"input_args": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1 << 40]}]}]
    bad += [{"input_args": [{"type": "torch.Tensor", "dtype": "torch.os", "shape": [2]}]}, {"input_args": [[[[]]]]}]
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for record in [*bad, {"input_args": deep}]:
        assert checker.check("Torch.mul.0", record, None).result.forward == SKIP
        assert checker.check("Torch.mul.0", record, {"input": "x"}).result.message


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


def test_custom_operators(tmp_path: Any) -> None:
    """A registered name runs by its function and is judged by its formula; drawn inputs go through its own maker; a file of
    registrations can be loaded."""
    seen = []

    def inputs(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        seen.append(len(args))
        return [args[0].abs() + 1], kwargs

    try:
        register_operator("my.kernels.log", torch.log, lambda x: torch.log(x), inputs)
        result = check("my.kernels.log.3", normal(4, grad=True), grad=normal(4), saved=False)
        assert (result.forward, result.backward, seen) == (PASS, PASS, [1])
        register_operator("my.kernels.log", lambda x: torch.log(x) + 0.1, torch.log)
        assert check("my.kernels.log.0", normal(4).abs() + 1).forward == ERROR
        for bad in (("nodots", torch.log), ("a.b", None), ("a.b", 3), ("a/b.c", torch.log)):
            with pytest.raises(UsageError):
                register_operator(*bad)
        file = tmp_path / "operators.py"
        file.write_text(
            "from msprobe.pytorch import register_operator\nregister_operator('my.kernels.twice', lambda x: x + x, lambda x: 2 * x)\n"
        )
        load_operators(str(file))
        assert check("my.kernels.twice.0", normal(3)).forward == PASS
        file.write_text("1 / 0\n")
        for source in (str(file), str(tmp_path / "none.py"), "no_such_module_here"):
            with pytest.raises(UsageError, match="operators"):
                load_operators(source)
    finally:
        forget_operator("my.kernels.log")
        forget_operator("my.kernels.twice")


def test_operators_of_libraries() -> None:
    """What a library has registered with torch is run when it is loaded; nothing that takes text, and so may open files."""

    @torch.library.custom_op("probed::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("probed::keep", mutates_args=())
    def keep(x: torch.Tensor, name: str) -> torch.Tensor:
        raise AssertionError(name, x)

    assert check("probed.twice.0", normal(3)).forward == PASS
    assert twice is not keep
    for name in ("probed.keep.0", "probed.none.0", "prim.device.0", "nothing.here.0"):
        assert "register_operator" in check(name, normal(3), "x").message


def test_operators_of_torch_with_text() -> None:
    """Words that say what is computed are taken; an operator whose text may be anything, as that of a library, is not."""
    assert check("Aten.div.Tensor_mode.0", normal(3), normal(3), rounding_mode="trunc").forward == PASS
    assert check("Aten.gelu.0", normal(3), approximate="tanh").forward == PASS
    for name in ("Aten.from_file.0", "Aten._assert_async.0", "Aten._test_string_default.0"):
        assert check(name, normal(3), "/etc/passwd").forward == SKIP


def test_the_same_inputs_in_any_order() -> None:
    """What is drawn for a call depends on its name and the seed, not on what was checked before; the name and the seed do change it."""
    memory = Memory()
    record = memory.record((normal(4, 4), normal(4, 4)), {})
    for item in record["input_args"]:
        del item["data_name"]

    def product(checker: Checker, name: str = "Torch.matmul.0") -> torch.Tensor:
        found = checker.check(name, record, None).data["forward.output.device.0"]
        assert isinstance(found, torch.Tensor)
        return found

    checker = Checker(None)
    first = product(checker)
    product(checker, "Torch.matmul.1")
    assert torch.equal(product(checker), first)
    assert torch.equal(product(Checker(None)), first)
    assert not torch.equal(product(Checker(None, seed=1)), first)
    assert not torch.equal(product(checker, "Torch.matmul.1"), first)


def test_the_process_is_left_as_it_was() -> None:
    """Random state, default type and the saved tensors are those of before, whatever a call writes to."""
    state, saved = torch.get_rng_state(), normal(4)
    before = saved.clone()
    memory = Memory()
    record = memory.record((saved, 1.0), {})
    memory.tensors["0.pt"] = saved
    Checker(memory).check("Tensor.add_.0", record, None)
    check("Functional.dropout.0", normal(50, 50), 0.5)
    torch.set_rng_state(state)
    check("Functional.dropout.0", saved, 0.5)
    assert torch.equal(saved, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32


def test_data_of_a_call() -> None:
    """Both sides, under the names that the files of error data have."""
    memory = Memory()
    x = normal(3, grad=True)
    data = Checker(memory).check("Torch.mul.0", memory.record((x, 2.0), {}), memory.backward(normal(3))).data
    assert set(data) == {
        *("forward.input.0", "forward.input.1", "forward.output.bench.0", "forward.output.device.0", "backward.input.0"),
        *("backward.output.bench.0", "backward.output.device.0"),
    }
    assert data["forward.input.1"] == 2.0
    assert data["forward.output.bench.0"].dtype is torch.float64


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target may be the compiled call; inductor, torch's own choice, takes a C++ compiler many seconds."""
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: compiled.append(call) or COMPILE(call, backend=backend, **options))
    result = check("Functional.gelu.0", normal(4, 8, grad=True), grad=normal(4, 8), checker=Checker(None, Target(compiled=True)))
    assert (result.forward, result.backward, len(compiled)) == (PASS, PASS, 1)


def test_a_fault_of_ours_is_no_refusal_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator says of its arguments is a reason to skip; what our verdict raises is told as such, with its place."""
    record = {"input_args": [tensor(torch.ones(2, 3)), tensor(torch.ones(2, 3))], "input_kwargs": {}, "output": []}
    refused = Checker(None).check("Torch.matmul.0", record, None).result
    assert refused.forward == SKIP
    assert not refused.message.startswith(NOT_JUDGED)
    monkeypatch.setattr(comparison, "judge", lambda *_, **__: {}["standard"])
    for check_call in (Checker(None), CheckerAsExisting(None)):
        assert check_call.check("Torch.matmul.0", record, None).result.message == refused.message
    record["input_args"][1] = tensor(torch.ones(3, 2))
    failed = Checker(None).check("Torch.matmul.0", record, None).result
    assert failed.forward == SKIP
    assert failed.message.startswith(f"{NOT_JUDGED}: KeyError: 'standard' (comparison.py:")


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
