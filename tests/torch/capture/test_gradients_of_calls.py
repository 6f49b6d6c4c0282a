"""Gradients of calls: the same numbers as torch's full backward hooks, without changing the training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from capturing import capture, entries, stat
from torch import nn
from torch.nn import functional as F

from msprobe_engine.core.guard import of_training
from msprobe_engine.core.records import NODE_ONLY
from msprobe_integrations.torch.hooks.backward import GradientWatch


class Parallel(nn.Module):
    """Attention and MLP beside each other on one input: three and more contributions to one gradient."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.up, self.gate, self.down = nn.Linear(width, 40), nn.Linear(width, 40), nn.Linear(40, width)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        attention = torch.softmax(self.q(h) @ self.k(h).transpose(-1, -2), -1) @ self.v(h)
        return x + attention + self.down(self.act(self.gate(h)) * self.up(h)) + 0.5 * h


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(10, 24)
        self.blocks = nn.ModuleList([Parallel() for _ in range(3)])
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) + 0.1 * x
        return self.last(self.act(x * 1.0))


def reference(model: nn.Module, x: torch.Tensor) -> dict[str, tuple[Any, Any]]:
    """Gradients of every module by torch's own hooks, on a copy."""
    model = copy.deepcopy(model)
    for m in model.modules():
        if isinstance(m, nn.ReLU):
            m.inplace = False  # torch's hooks cannot be combined with in-place modules
    seen: dict[str, tuple[Any, Any]] = {}
    for name, module in model.named_modules():
        if name:
            module.register_full_backward_hook(lambda _, gi, go, name=name: seen.__setitem__(name, (gi, go)))
    F.cross_entropy(model(x), torch.arange(len(x)).clamp(max=4)[:, None].expand(-1, 5).float()).backward()
    return seen


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_module_gradients_equal_full_backward_hooks(level: str) -> None:
    """Norms of a module's gradients (outputs and inputs, several uses of one tensor included) are those of torch's own hooks."""
    model, x = Net(), torch.randn(6, 10, requires_grad=True)
    want = reference(model, x)
    frame = capture(
        model, lambda: F.cross_entropy(model(x), torch.arange(6).clamp(max=4)[:, None].expand(-1, 5).float()).backward(), level
    )[0]
    found = entries(frame)
    checked = 0
    for name, (grad_inputs, grad_outputs) in want.items():
        record = next(
            e for n, e in found.items() if n.startswith(f"Module.{name}.") and ".backward." in n and n.split(".")[-4] == name.split(".")[-1]
        )
        for refs, tensors in ((record.sections["output"], grad_inputs), (record.sections["input"], grad_outputs)):
            assert len(refs) == len(tensors)
            for ref, tensor in zip(refs, tensors):
                assert stat(frame, ref).norm == pytest.approx(float(tensor.double().norm()), rel=1e-5), (name, record)
                checked += 1
    assert checked == 2 * len(want)


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_training_is_bitwise_the_same(level: str) -> None:
    """Loss, gradients and random state after steps under a capture are bit for bit those without, also where gradients have many
    contributions (an identity node would change the order of additions)."""

    def train(probed: bool) -> list[torch.Tensor]:
        model = Net()
        drop = nn.Dropout(0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(11)
        losses = []

        def step() -> None:
            loss = model(drop(torch.randn(6, 10))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        if probed:
            capture(model, step, level, steps=5)
        else:
            for _ in range(5):
                step()
        return [*losses, *[p.detach() for p in model.parameters()], torch.get_rng_state()]

    for a, b in zip(train(False), train(True)):
        assert torch.equal(a, b)


def test_gradients_come_after_the_window_was_closed() -> None:
    """backward() after stop(): module gradients and parameter gradients of calls seen before are recorded until the step ends."""
    from msprobe_engine.core.guard import Faults
    from msprobe_engine.probe.pipeline import Pipeline
    from msprobe_engine.probe.writer import Writer
    from msprobe_integrations.torch.backend import TorchBackend
    from msprobe_integrations.torch.capture.level import Capture

    model = Net()
    faults = Faults(strict=True)
    pipeline = Pipeline(TorchBackend(), [], Writer([], faults), faults)
    session = Capture(pipeline, "mix")
    session.attach(model)
    session.open()
    loss = model(torch.randn(6, 10)).sum()
    session.pause()
    loss.backward()
    session.end_step()
    names = [e.name for e in pipeline.entries]
    session.close()
    assert "Module.last.Linear.backward.0" in names
    assert "Module.last.Linear.parameters_grad.0" in names
    assert "Functional.linear.0.backward" in names


def test_accumulated_parameter_gradients_are_numbered() -> None:
    """Two backward passes give parameters_grad.0 and .1, the second holding the accumulated gradient."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].bias.data.zero_()

    def work() -> None:
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()

    frame = capture(model, work, "L0")[0]
    found = entries(frame)
    first, second = (found[f"Module.1.Linear.parameters_grad.{k}"].sections["bias"][0] for k in (0, 1))
    assert (stat(frame, first).max, stat(frame, second).max) == (3.0, 6.0)


def test_further_passes_over_one_graph_are_records_of_their_own() -> None:
    """retain_graph: every pass has its records, a million on for each; calls that come later keep their numbers, names are unique, and
    records of a pass belong to the module's record of that pass."""
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)

    def work() -> None:
        y = model(x)
        for _ in range(3):
            y.sum().backward(retain_graph=True)
        model(x).sum().backward()

    found = entries(capture(model, work, "mix")[0])
    modules = [n for n in found if n.startswith("Module.0.Linear.backward.")]
    assert modules == [f"Module.0.Linear.backward.{n}" for n in (0, 1_000_000, 2_000_000, 1)]
    for number in (0, 1_000_000, 2_000_000, 1):
        assert found[f"Functional.linear.{number}.backward"].parent == f"Module.0.Linear.backward.{number}"
    assert found["Module.0.Linear.backward.2000000"].tags == {"pass": 3, "of": "Module.0.Linear.backward.0"}
    assert {n for n in found if n.endswith("forward") and "linear" in n} == {"Functional.linear.0.forward", "Functional.linear.1.forward"}


def test_the_gradient_of_a_gradient() -> None:
    """The second pass of create_graph comes through the weights and through no input of a module: the module is a node all the same."""
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)

    def work() -> None:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum().backward()

    found = entries(capture(model, work, "mix")[0])
    assert found["Functional.linear.1000000.backward"].parent == "Module.0.Linear.backward.1000000"
    assert found["Module.0.Linear.backward.1000000"].tags == NODE_ONLY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_that_autocast_keeps_are_shared_by_no_calls(dtype: torch.dtype) -> None:
    """Autocast casts a leaf once for all calls that take it in. Each call has its own part of the gradient, in the dtype of the leaf, as it
    has without that cache."""
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def train(cache: bool) -> dict[str, list[tuple[float, str]]]:
        def step() -> None:
            with torch.autocast("cpu", dtype, cache_enabled=cache):
                (2 * F.linear(x, weight) + 3 * F.linear(x, weight.abs()) * F.linear(x, weight)).sum().backward()

        frame = capture(None, step, "L1")[0]
        return {
            name: [(stat(frame, ref).norm, str(ref.description.dtype)) for ref in record.sections["output"] if ref is not None]
            for name, record in entries(frame).items()
            if name.startswith("Functional.linear") and name.endswith("backward")
        }

    kept, apart = train(True), train(False)
    assert kept.keys() == apart.keys()
    assert [len(refs) for refs in apart.values()] == [2, 2, 2]
    for name, refs in apart.items():
        assert [ref[1] for ref in kept[name]] == [ref[1] for ref in refs]
        assert [ref[0] for ref in kept[name]] == pytest.approx([ref[0] for ref in refs], rel=1e-6)


def test_linear_backward_names_input_weight_and_bias() -> None:
    """The backward record of F.linear with a 3-D input holds the gradients of input, weight and bias, in argument order."""
    weight, bias = torch.randn(8, 4, requires_grad=True), torch.zeros(8, requires_grad=True)
    x = torch.randn(2, 3, 4, requires_grad=True)
    frame = capture(None, lambda: F.linear(x, weight, bias).square().sum().backward(), "L1")[0]
    record = entries(frame)["Functional.linear.0.backward"]
    refs = record.sections["output"]
    assert [tuple(r.description.shape) for r in refs] == [(2, 3, 4), (8, 4), (8,)]
    for ref, tensor in zip(refs, (x, weight, bias)):
        assert stat(frame, ref).norm == pytest.approx(float(tensor.grad.double().norm()), rel=1e-5)


def test_keyword_and_inplace_modules_have_gradients() -> None:
    """A module called with keyword tensors, and an in-place activation, have backward records."""

    class Keyword(nn.Module):
        def forward(self, *, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * 2

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keyword = Keyword()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.keyword(hidden=x))

    model = Both()
    frame = capture(model, lambda: model(torch.ones(3, requires_grad=True)).sum().backward(), "L0")[0]
    found = entries(frame)
    assert stat(frame, found["Module.keyword.Keyword.backward.0"].sections["output"][0]).max == 2.0
    assert stat(frame, found["Module.act.ReLU.backward.0"].sections["output"][0]).max == 1.0


def test_hooks_of_the_user_beside_ours() -> None:
    """A hook that the user puts on a node before or after ours works, can be removed, and torch has its own registration back."""
    before = dict(vars(torch.autograd.Function))
    seen: list[str] = []

    def work() -> None:
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        first = y.grad_fn.register_hook(lambda *_: seen.append("first"))  # type: ignore[union-attr]
        gone = y.grad_fn.register_hook(lambda *_: seen.append("gone"))  # type: ignore[union-attr]
        z = y.exp()
        z.grad_fn.register_hook(lambda *_: seen.append("second"))  # type: ignore[union-attr]
        gone.remove()
        z.sum().backward()
        first.remove()

    frame = capture(None, work, "L1")[0]
    assert seen == ["second", "first"]
    assert "Tensor.exp.0.backward" in entries(frame)
    assert dict(vars(torch.autograd.Function)) == before


def test_one_tensor_at_several_places() -> None:
    """Where contributions of the places cannot be told apart the first has their sum and the record says which places; where one node
    made them all each place has its own."""
    x = torch.arange(3.0, requires_grad=True)

    class Add(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a * 2 + b * 3

    model = nn.Sequential(Add())
    frame = capture(model, lambda: torch.mul(model[0](x, x), 1).sum().backward(), "mix")[0]
    record = entries(frame)["Module.0.Add.backward.0"]
    first, second = record.sections["output"]
    assert (stat(frame, first).max, second) == (5.0, None)
    assert record.tags == {"one_tensor": [[0, 1]]}
    y = torch.arange(3.0, requires_grad=True)
    frame = capture(None, lambda: torch.mul(y, y).sum().backward(), "L1")[0]
    record = entries(frame)["Torch.mul.0.backward"]
    assert [stat(frame, ref).max for ref in record.sections["output"]] == [2.0, 2.0]
    assert not record.tags


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_one_node_of_several_outputs(level: str) -> None:
    """A call whose outputs come from one node gets its input gradient once: x -> a, b = x.chunk(2), loss 3a + b."""

    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.chunk(2)

    model, x = nn.Sequential(Halves()), torch.ones(4, 2, requires_grad=True)

    def work() -> None:
        a, b = model[0](x * 2)
        (a * 3 + b).sum().backward()

    frame = capture(model, work, level)[0]
    record = entries(frame)["Module.0.Halves.backward.0" if level == "L0" else "Tensor.chunk.0.backward"]
    (gradient,) = record.sections["output"]
    assert (stat(frame, gradient).max, stat(frame, gradient).min) == (3.0, 1.0)
    frame = capture(None, lambda: sum(row.sum() for row in (x * 2).unbind()).backward(), "L1")[0]  # type: ignore[union-attr]
    assert stat(frame, entries(frame)["Tensor.unbind.0.backward"].sections["output"][0]).max == 1.0


@pytest.mark.parametrize("write", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.Hardtanh(inplace=True)])
def test_a_write_into_a_view(write: nn.Module) -> None:
    """An activation in place behind a linear layer of a three-dimensional input, whose result is a view: gradients of both are those of
    the same model without writing in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), write, nn.Linear(4, 2))
    x = torch.randn(2, 3, 4, requires_grad=True)

    def work() -> None:
        torch.manual_seed(1)
        model(x).square().sum().backward()

    frame = capture(model, work)[0]
    other = copy.deepcopy(model)
    other[1].inplace = False
    torch.manual_seed(1)
    steps = [x.detach()]
    for layer in other:
        steps.append(layer(steps[-1]))
        if steps[-1].requires_grad:
            steps[-1].retain_grad()
    steps[-1].square().sum().backward()
    found = entries(frame)
    linear, written = found["Module.0.Linear.backward.0"], found[f"Module.1.{type(write).__name__}.backward.0"]
    for ref, tensor in (
        (linear.sections["input"][0], steps[1]),
        (written.sections["output"][0], steps[1]),
        (written.sections["input"][0], steps[2]),
    ):
        assert tensor.grad is not None
        assert tuple(ref.description.shape) == (2, 3, 4)
        assert stat(frame, ref).norm == pytest.approx(float(tensor.grad.double().norm()), rel=1e-6)
    assert linear.sections["output"][0] is not None


def test_gradients_that_come_in_part_stand_before_the_update() -> None:
    """What is written into a view has no gradient of its own: its record, and that of the module around it, end with the pass."""

    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = x.new_empty(2, 4)
            whole[:, :2] = x[:, :2]
            whole[:, 2:].copy_(x[:, 2:] * 2)
            return whole

    model = nn.Sequential(nn.Linear(4, 4), Parts(), nn.Linear(4, 2))

    def work() -> None:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                model[0].weight.mul_(0.5)

    names = list(entries(capture(model, work)[0]))
    passes = [at for at, name in enumerate(names) if name.endswith("backward") or ".backward." in name]
    updates = [at for at, name in enumerate(names) if name.startswith("Tensor.mul_.")]
    assert any("copy_" in names[at] for at in passes), names
    assert len(updates) == 2
    assert max(passes) < updates[1], names
    assert any(updates[0] < at for at in passes)


def test_a_row_that_is_written_to() -> None:
    """h[1].mul_(5): the gradient of the row before is five times that behind; what made h has its whole gradient."""

    def work() -> None:
        h = torch.ones(3, 4, requires_grad=True) * 1
        h[1].mul_(5)
        h.sum().backward()

    frame = capture(None, work, "L1")[0]
    found = entries(frame)
    (before,) = found["Tensor.mul_.0.backward"].sections["output"]
    assert (tuple(before.description.shape), stat(frame, before).min, stat(frame, before).max) == ((4,), 5.0, 5.0)
    (whole,) = found["Tensor.__mul__.0.backward"].sections["input"]
    assert (stat(frame, whole).min, stat(frame, whole).max) == (1.0, 5.0)


def test_passes_that_take_different_ways() -> None:
    """First through one output of a module, then through the other, then through both: records of a pass of the engine are below the
    module's record of that pass, whichever pass it is for them."""

    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = x.chunk(2)
            return a.sin(), b.cos()

    model, x = nn.Sequential(Halves()), torch.ones(4, requires_grad=True)

    def work() -> None:
        a, b = model[0](x)
        a.sum().backward(retain_graph=True)
        b.sum().backward(retain_graph=True)
        (a + b).sum().backward()

    found = entries(capture(model, work, "mix")[0])
    module = "Module.0.Halves.backward"
    assert [found[name].parent for name in ("Tensor.sin.0.backward", "Tensor.sin.1000000.backward")] == [f"{module}.0", f"{module}.2000000"]
    assert [found[name].parent for name in ("Tensor.cos.0.backward", "Tensor.cos.1000000.backward")] == [
        f"{module}.1000000",
        f"{module}.2000000",
    ]
    assert found["Tensor.cos.1000000.backward"].tags == {"pass": 2, "of": "Tensor.cos.0.backward"}


def test_a_pass_inside_a_pass() -> None:
    """A hook of the user that runs a backward pass over the same graph: every record has a name of its own, and the outer pass's record
    of the gradient that came first is the first one."""
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    model = nn.Sequential(layer)

    def work() -> None:
        h = model(x)
        done: list[int] = []

        def hook(_: torch.Tensor) -> None:
            if not done:
                done.append(1)
                with torch.enable_grad():
                    (h * 2).sum().backward(retain_graph=True)

        layer.bias.register_hook(hook)
        h.sum().backward(retain_graph=True)

    found = entries(capture(model, work, "mix")[0])
    names = [n for n in found if n.startswith("Functional.linear") and n.endswith("backward")]
    assert len(names) >= 2
    assert all(found[n].parent in found for n in names)


@pytest.mark.parametrize("training_s", [False, True])
def test_an_error_in_a_hook_is_told_once(training_s: bool) -> None:
    """A fault where gradients are reduced switches the watch off, is told once and does not reach the backward pass; an error of the
    training's does, and is told to nobody."""
    told: list[Exception] = []
    error = of_training(ValueError("planted")) if training_s else ValueError("planted")

    def reduce(_gradient: Any) -> Any:
        raise error

    x = torch.ones(2, requires_grad=True)
    y = x * 3
    watch = GradientWatch(None, 1, 1, reduce, lambda *_: None, told.append)
    assert watch.start([(x, -1)], [y], 0)
    if training_s:
        with pytest.raises(ValueError, match="planted"):
            y.sum().backward()
        assert told == []
    else:
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        assert told == [error]
        assert watch.active is False
