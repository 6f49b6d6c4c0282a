"""Calls that a capture records: which are seen, what they are called, and their arguments as the caller wrote them."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capturing import capture, entries, stat
from torch import matmul as matmul_taken_early
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from msprobe_engine.core.records import Opaque, TensorRef

# Which calls become records, and under which names.


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


square_taken_early = Square.apply


def names_of(work, level="L1", model=None):
    return [e.name for e in capture(model, work, level)[0].entries]


def test_early_imports_do_not_escape():
    """Functions and custom autograd functions taken before the capture are seen, with their gradients."""
    x = torch.ones(2, 2, requires_grad=True)
    names = names_of(lambda: square_taken_early(matmul_taken_early(x, x)).sum().backward())
    assert "Torch.matmul.0.forward" in names
    assert "Autograd.Square.0.forward" in names
    assert "Autograd.Square.0.backward" in names


def test_marks_for_the_profiler_are_no_calls():
    """An optimizer marks its step for torch's profiler; that is no operation on data."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)

    def work():
        weight.sum().backward()
        optimizer.step()

    names = names_of(work)
    assert "Tensor.sum.0.forward" in names
    assert [name for name in names if name.startswith("profiler")] == []


def test_in_place_operator_name():
    """``x += y`` is Tensor.__iadd__, its input the value before."""
    x = torch.ones(3)

    def work():
        nonlocal x
        x += 1

    frame = capture(None, work, "L1")[0]
    record = entries(frame)["Tensor.__iadd__.0.forward"]
    assert (stat(frame, record.sections["input_args"][0]).max, stat(frame, record.sections["output"][0]).max) == (1.0, 2.0)


def test_metadata_is_no_record():
    """Shapes, sizes, flags and properties leave no record."""
    x = torch.ones(2, 3)

    def work():
        _ = (x.shape, x.size(), x.dim(), x.dtype, x.is_contiguous(), x.numel(), x.requires_grad, len(x), x.device)

    assert names_of(work) == []


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, mode):
        def run(h):
            return self.b(torch.relu(self.a(h)))

        h = checkpoint(run, x, use_reentrant=mode) if mode is not None else run(x)
        return self.head(torch.sigmoid(h))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_marked_and_loses_nothing(reentrant):
    """Activation checkpointing: recomputed calls are marked, and every record of the run without it is still there."""
    model = Layers()
    x = torch.ones(2, 4, requires_grad=True)
    plain = set(names_of(lambda: model(x, None).sum().backward(), "mix", model))
    frame = capture(model, lambda: model(x, reentrant).sum().backward(), "mix")[0]
    found = entries(frame)
    again = found["Module.a.Linear.forward.1"]
    assert again.tags.get("is_recompute") is True
    assert not found["Module.a.Linear.forward.0"].tags.get("is_recompute")
    kept = {n for n in plain if "forward" in n}
    assert kept <= set(found)
    assert any(n.startswith("Module.a.Linear.backward") for n in found)
    assert any(n.startswith("Module.head.Linear.parameters_grad") for n in found)
    assert "Torch.sigmoid.0.backward" in found


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.mul(x, 2)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.mul(gradient, torch.full_like(x, 2))


class _Doubles(nn.Module):
    def forward(self, x):
        return _Doubled.apply(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_function_of_autograds_own_does_is_marked_as_recomputed(reentrant):
    """Autograd records nothing inside of it, the first time and again; what its backward does is no recomputation."""
    model, x = _Doubles(), torch.ones(2, requires_grad=True)
    frame = capture(model, lambda: checkpoint(model, x, use_reentrant=reentrant).sum().backward(), "mix")[0]
    marked = [bool(entry.tags.get("is_recompute")) for name, entry in entries(frame).items() if name.startswith("Torch.mul.")]
    assert marked == [False, True, False]


def test_an_exception_in_user_code_does_not_hide_later_calls():
    """After a caught exception, inside a module or an API, names, parents and later records are right."""

    class Fails(nn.Module):
        def forward(self, x):
            return F.linear(x, torch.ones(7, 7))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails, self.fine = Fails(), nn.Linear(4, 4)

        def forward(self, x):
            with contextlib.suppress(RuntimeError):
                self.fails(x)
            return self.fine(x)

    model = nn.Sequential(Outer())
    found = entries(capture(model, lambda: model(torch.ones(2, 4)), "mix")[0])
    assert found["Module.0.fine.Linear.forward.0"].parent == "Module.0.Outer.forward.0"
    assert found["Functional.linear.0.forward"].tags.get("raised") is True
    assert found["Functional.linear.1.forward"].parent == "Module.0.fine.Linear.forward.0"


def test_calls_are_numbered_from_zero_in_every_step():
    """A module called twice has forward.0 and forward.1, in each step anew."""
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"shared": shared})
    for frame in capture(model, lambda: shared(shared(torch.ones(1, 4))), "L0", steps=2):
        assert [e.name for e in frame.entries] == ["Module.shared.Linear.forward.0", "Module.shared.Linear.forward.1"]


def test_without_gradients():
    """Calls under no_grad and in inference mode are recorded and have no backward record."""
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        assert "Module.0.Linear.forward.0" in names_of(lambda: model(torch.ones(1, 2)), "mix", model)
    with torch.inference_mode():
        assert "Module.0.Linear.forward.0" in names_of(lambda: model(torch.ones(1, 2)), "mix", model)


def test_nothing_is_left_behind():
    """After close there is no hook on any module or parameter, no mode, and Function.apply is torch's own."""
    model = Layers()
    capture(model, lambda: model(torch.ones(1, 4), None).sum().backward(), "mix")
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
    assert torch._C._len_torch_function_stack() == 0
    assert "apply" not in torch.autograd.function._SingleLevelFunction.__dict__


def test_another_mode_entered_meanwhile_survives():
    """A mode of the user that is entered inside the window is still there when the window closes first."""
    session_mode = torch.device("cpu")

    def work():
        session_mode.__enter__()
        torch.ones(2)

    names = names_of(work)
    session_mode.__exit__(None, None, None)
    assert "Torch.ones.0.forward" in names
    assert torch._C._len_torch_function_stack() == 0


def test_input_is_the_value_before_the_call():
    """A module that changes its input in place is recorded with the input as it was."""

    class AddTen(nn.Module):
        def forward(self, x):
            return x.add_(10)

    model = nn.Sequential(AddTen())
    frame = capture(model, lambda: model(torch.ones(3)), "L0")[0]
    record = entries(frame)["Module.0.AddTen.forward.0"]
    assert stat(frame, record.sections["input_args"][0]).max == 1.0
    assert stat(frame, record.sections["output"][0]).max == 11.0


def test_uninitialised_memory_has_no_statistics():
    """torch.empty, views of it and the ignored addend of baddbmm(beta=0) have no numbers; a write ends that."""

    def work():
        raw = torch.empty(2 * 3 * 3)
        view = raw[:18].view(2, 3, 3)
        torch.baddbmm(view, torch.ones(2, 3, 4), torch.ones(2, 4, 3), beta=0.0)
        raw.fill_(7.0)
        raw.exp()

    frame = capture(None, work, "L1")[0]
    found = entries(frame)
    assert found["Torch.empty.0.forward"].sections["output"][0].row == -1
    assert found["Tensor.view.0.forward"].sections["output"][0].row == -1
    record = found["Torch.baddbmm.0.forward"]
    assert record.sections["input_args"][0].row == -1
    assert stat(frame, record.sections["output"][0]).max == 4.0
    assert stat(frame, found["Tensor.exp.0.forward"].sections["input_args"][0]).max == 7.0


def test_an_ignored_addend_is_not_read():
    """The addend of addmm with beta=0 may hold NaN without a trace."""
    bad = torch.full((2, 2), float("nan"))
    frame = capture(None, lambda: torch.addmm(bad, torch.ones(2, 2), torch.ones(2, 2), beta=0), "L1")[0]
    assert entries(frame)["Torch.addmm.0.forward"].sections["input_args"][0].row == -1


@pytest.mark.parametrize("run", ["method", "function", "grad"])
def test_calls_inside_a_backward_pass_are_seen(run):
    """Recomputed API calls and custom backward code are records, however the backward pass is started."""
    model = Layers()
    x = torch.ones(2, 4, requires_grad=True)

    def work():
        loss = model(square_taken_early(x), True).sum()
        if run == "method":
            loss.backward()
        elif run == "function":
            torch.autograd.backward([loss])
        else:
            torch.autograd.grad(loss, [x])

    if run == "grad":  # torch refuses re-entrant checkpoints with autograd.grad
        names = names_of(lambda: torch.autograd.grad(square_taken_early(x).sum(), [x]), "mix", model)
        assert "Tensor.__mul__.1.forward" in names
        return
    names = names_of(work, "mix", model)
    assert "Torch.relu.1.forward" in names
    assert any(n.startswith("Torch.relu") and n.endswith("backward") for n in names)


# Names of API records are those of the existing tool (26.2.0) wherever the call is the same.


def bare_names_of(work: Callable[[], Any]) -> list[str]:
    found = [e.name for e in capture(None, work, "L1", stacks=False)[0].entries]
    return [name.removesuffix(".0.forward") for name in found if name.endswith(".0.forward")]


X, Y = torch.rand(3) + 1, torch.rand(3) + 1
WHOLE = torch.tensor([1, 2, 3])
SQUARE = torch.rand(3, 3)


def augmented(symbol: str, value: torch.Tensor = X) -> Callable[[], None]:
    return lambda: exec(f"z {symbol} 2", {"z": value.clone()})


CALLS: list[tuple[Callable[[], Any], list[str]]] = [
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
    (lambda: SQUARE @ SQUARE, ["Tensor.__matmul__"]),
    (lambda: X.mul(X), ["Tensor.mul"]),
    (lambda: F.gelu(X), ["Functional.gelu"]),
    (lambda: F.linear(SQUARE, SQUARE), ["Functional.linear"]),
    (lambda: torch.ops.aten.sin(X), ["Aten.sin"]),
    (lambda: F.scaled_dot_product_attention(SQUARE, SQUARE, SQUARE), ["Functional.scaled_dot_product_attention"]),
    (lambda: torch.softmax(X, -1), ["Torch.softmax"]),
]


def test_names() -> None:
    """Operators, their reflected and in-place forms, and functions that are one object under two names."""
    found = [([n for n in bare_names_of(work) if n != "Tensor.clone"], names) for work, names in CALLS]
    faults = [(got, names) for got, names in found if got != names]
    assert not faults, faults


def test_operators_by_other_ways() -> None:
    """Where the text of the caller does not say which it was, the method's name stands."""
    assert bare_names_of(lambda: operator.mul(X, Y)) == ["Tensor.mul"]
    assert bare_names_of(lambda: list(map(torch.Tensor.mul, [X], [Y]))) == ["Tensor.mul"]


def test_reflected_operators_of_other_threads_have_no_effect() -> None:
    """A thread without a capture neither gets a record nor changes a name."""

    def work() -> None:
        thread = threading.Thread(target=lambda: 2 * X)
        thread.start()
        thread.join()
        X.mul(Y)

    assert bare_names_of(work) == ["Tensor.mul"]


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
    assert "Tensor.__rdiv__" in bare_names_of(lambda: 1 / x)
    assert "__rdiv__" in handled


# Arguments stand in a record as the caller wrote them, though torch's Python functions hand them on with their defaults.

ROWS = torch.arange(16.0).reshape(2, 8)
T = "tensor"
OPTIONS = {"eps": 1e-4}
NORM = nn.LayerNorm(8)


def shown(value: Any) -> Any:
    """A structure with tensors as `T` and scalars bare."""
    if isinstance(value, TensorRef):
        return T
    if isinstance(value, Opaque):
        return value.json["value"] if isinstance(value.json, dict) else value.json
    if isinstance(value, dict):
        return {k: shown(v) for k, v in value.items()}
    return [shown(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("call", "args", "kwargs"),
    [
        (lambda: F.softmax(ROWS, -1), [T, -1], {}),
        (lambda: F.softmax(ROWS, dim=-1), [T], {"dim": -1}),
        (lambda: F.layer_norm(ROWS, (8,)), [T, [8]], {}),
        (lambda: F.layer_norm(ROWS, (8,), eps=1e-3), [T, [8]], {"eps": 1e-3}),
        (lambda: NORM(ROWS), [T, [8], T, T, 1e-5], {}),
        (lambda: F.cross_entropy(input=ROWS, target=torch.ones(2, dtype=torch.int64)), [], {"input": T, "target": T}),
        (lambda: F.max_pool2d(ROWS[None, None], 2, stride=1), [T, 2], {"stride": 1}),
        (lambda: ROWS.norm(), [T], {}),
        (lambda: ROWS.norm(2), [T, 2], {}),
        (lambda: ROWS.norm(dim=0), [T], {"dim": 0}),
        (lambda: torch.norm(ROWS, 2), [T, 2], {}),
        (lambda: torch.Tensor.norm(ROWS, 2), [T, 2], {}),
        (lambda: torch.Tensor.norm(ROWS, p=2), [T], {"p": 2}),
        (lambda: torch.Tensor.split(ROWS, split_size=2), [T], {"split_size": 2}),
        (lambda: torch.Tensor.norm(self=ROWS, p=2), [], {"self": T, "p": 2}),
        (lambda: torch.Tensor.norm(ROWS, 2, dim=0, keepdim=True), [T, 2], {"dim": 0, "keepdim": True}),
        # where the instruction does not tell, nothing that was given is lost
        (lambda: F.layer_norm(ROWS, (8,), **OPTIONS), [T, [8]], {"weight": None, "bias": None, "eps": 1e-4}),
        (lambda: functools.partial(F.softmax, dim=0)(ROWS), [T], {"dim": 0, "_stacklevel": 3, "dtype": None}),
        (lambda: list(map(F.softmax, [ROWS], [0])), [T], {"dim": 0, "_stacklevel": 3, "dtype": None}),
    ],
)
def test_arguments(call: Callable[[], Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    """The last record of the call has these arguments."""
    frame = capture(None, call, "L1")[0]
    entry = next(e for e in reversed(frame.entries) if e.name.endswith(".forward"))
    assert shown(entry.sections["input_args"]) == args
    assert shown(entry.sections["input_kwargs"]) == kwargs


def test_copies_whose_arguments_have_keywords() -> None:
    """They are looked at for copies to host memory, and are the program's calls as any other."""
    target, source = torch.zeros(2), torch.ones(2)

    def work() -> None:
        torch._foreach_copy_(self=[target], src=[source], non_blocking=True)
        target.copy_(other=source * 2, non_blocking=True)
        torch.relu(target)

    (frame,) = capture(None, work, "L1")
    assert stat(frame, entries(frame)["Torch.relu.0.forward"].sections["input_args"][0]).max == 2
