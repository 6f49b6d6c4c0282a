"""Which calls become records, and under which names."""

from __future__ import annotations

import contextlib

import pytest
import torch
from capturing import capture, entries, stat
from torch import matmul as matmul_taken_early
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (lambda x: x * x, "Tensor.__mul__"),
        (lambda x: x.mul(x), "Tensor.mul"),
        (lambda x: x @ x, "Tensor.__matmul__"),
        (lambda x: torch.mul(x, x), "Torch.mul"),
        (lambda x: 2 - x, "Tensor.__rsub__"),
        (lambda x: x / 2, "Tensor.__truediv__"),
        (lambda x: x > 0, "Tensor.__gt__"),
        (lambda x: F.gelu(x), "Functional.gelu"),
        (lambda x: F.linear(x, x), "Functional.linear"),
        (lambda x: torch.linalg.norm(x), "Torch.norm"),
        (lambda x: x[0], "Tensor.__getitem__"),
        (lambda x: torch.ops.aten.sin(x), "Aten.sin"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "Functional.scaled_dot_product_attention"),
        (lambda x: torch.softmax(x, -1), "Torch.softmax"),
    ],
)
def test_names(work, name):
    """Record names are those of the existing format: namespace prefix, last segment, operators as dunder methods."""
    assert names_of(lambda: work(torch.ones(2, 2)))[-1] == f"{name}.0.forward"


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


def test_stack_starts_at_the_users_line():
    """The first line of a record's call stack is the user's own source line."""
    frame = capture(None, lambda: torch.ones(2).exp(), "L1")[0]
    stack = frame.stacks[entries(frame)["Tensor.exp.0.forward"].stack]
    assert __file__ in stack[0]
    assert "torch.ones(2).exp()" in stack[0]


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


def test_layer_norm_arguments_are_where_the_user_put_them():
    """Weight and bias given by position are positional in the record."""
    weight, bias = torch.ones(4), torch.zeros(4)
    frame = capture(None, lambda: F.layer_norm(torch.ones(2, 4), (4,), weight, bias), "L1")[0]
    record = entries(frame)["Functional.layer_norm.0.forward"]
    assert [type(a).__name__ for a in record.sections["input_args"]] == ["TensorRef", "list", "TensorRef", "TensorRef"]
