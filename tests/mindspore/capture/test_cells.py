"""Capture in MindSpore's dynamic graph: Cells, parents, gradients, and that the training has the same bits."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, mint, nn, ops
from ms_capturing import LEVELS, Layers, capture, entries, gradients, same, stat, tensor

from msprobe_engine.core.records import TensorRef
from msprobe_integrations.mindspore.capture.recorder import Recorder
from msprobe_integrations.mindspore.hooks import autograd, identity_ops


class Residual(nn.Cell):  # type: ignore[misc]
    """One tensor used many times, shared weights, residual sums, products with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.CellList([Layers() for _ in range(3)])
        self.t = nn.Dense(4, 4)
        self.t.weight = self.l[0].d.weight
        self.ln = nn.LayerNorm((4,))

    def construct(self, x):  # type: ignore[no-untyped-def]
        h = self.ln(x)
        y = sum((layers(h) * 0.3333 for layers in self.l), h * 1.7)
        z = y + self.t(h) * y / 3.7 + mint.matmul(ops.softmax(h), y)
        for layers in self.l:
            z = z + layers(z) * h + z
        return mint.matmul(z, h) + z * z


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_fan_out_residuals_and_shared_weights_have_the_same_bits(level: str) -> None:
    """Loss and all gradients are the same bits with a capture as without, also where gradients of many consumers are added up."""
    model, x = Residual(), tensor()
    run = gradients(model)
    plain = run(x)
    frames, results = capture(model, lambda: run(x), level)
    assert same(plain, results[0])
    assert same(plain, run(x))
    assert not frames[0].lost
    names = entries(frames[0])
    if level != "L1":
        assert len([n for n in names if n.startswith("Cell.t.Dense.")]) == 3  # forward, backward, parameters_grad
        assert "Cell.l.0.Layers.backward.1" in names


def test_statistics_are_those_of_the_values() -> None:
    """Inputs, outputs, parameters and gradients of a Cell are those that numpy computes."""
    model, x = Layers(), tensor()
    run = gradients(model)
    frames, _ = capture(model, lambda: run(x), "L0")
    found = entries(frames[0])
    d, e = model.d, model.e
    w1, b1, w2 = d.weight.asnumpy(), d.bias.asnumpy(), e.weight.asnumpy()
    hidden = x.asnumpy() @ w1.T + b1
    forward = found["Cell.d.Dense.forward.0"]
    assert stat(frames[0], forward.sections["input_args"][0]).mean == pytest.approx(float(x.asnumpy().mean()))
    assert stat(frames[0], forward.sections["output"][0]).max == pytest.approx(float(hidden.max()), rel=1e-6)
    assert list(forward.sections["parameters"]) == ["weight", "bias"]
    into_d = (np.ones((4, 4)) @ w2) * (hidden > 0)
    backward = found["Cell.d.Dense.backward.0"]
    assert stat(frames[0], backward.sections["input"][0]).norm == pytest.approx(float(np.linalg.norm(into_d)), rel=1e-6)
    assert stat(frames[0], backward.sections["output"][0]).norm == pytest.approx(float(np.linalg.norm(into_d @ w1)), rel=1e-6)
    weights = found["Cell.d.Dense.parameters_grad.0"].sections
    assert stat(frames[0], weights["weight"][0]).norm == pytest.approx(float(np.linalg.norm(into_d.T @ x.asnumpy())), rel=1e-6)


def test_parents_and_order() -> None:
    """Children stand before their parents; a backward record belongs to that of the Cell around it."""

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.block = Layers()

        def construct(self, x):  # type: ignore[no-untyped-def]
            return self.block(x)

    model, x = Model(), tensor()
    run = gradients(model)
    found = entries(capture(model, lambda: run(x), "mix")[0][0])
    names = list(found)
    assert found["Cell.block.d.Dense.forward.0"].parent == "Cell.block.Layers.forward.0"
    assert found["Primitive.matmul.MatMul.0.forward"].parent == "Cell.block.d.Dense.forward.0"
    assert found["Functional.relu.0.forward"].parent == "Cell.block.Layers.forward.0"
    assert found["Cell.block.Layers.forward.0"].parent is None
    assert found["Primitive.matmul.MatMul.0.backward"].parent == "Cell.block.d.Dense.backward.0"
    assert found["Cell.block.d.Dense.backward.0"].parent == "Cell.block.Layers.backward.0"
    assert names.index("Cell.block.d.Dense.backward.0") < names.index("Cell.block.Layers.backward.0")
    assert names.index("Primitive.matmul.MatMul.0.forward") < names.index("Cell.block.d.Dense.forward.0")


class Containers(nn.Cell):  # type: ignore[misc]
    """Takes a keyword, gives a dict with a nested list."""

    def __init__(self) -> None:
        super().__init__()
        self.w = Parameter(tensor(3), name="w")

    def construct(self, x, *, extra=None):  # type: ignore[no-untyped-def]
        return {"a": x * self.w, "b": [x + 1, (extra * 2,)], "n": 3}


def test_gradients_of_nested_outputs_and_keywords() -> None:
    """Gradients of every tensor in a dict come, and those of keyword tensors; MindSpore's own hooks give wrong ones there."""

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.a, self.d = Containers(), nn.Dense(4, 4)

        def construct(self, x):  # type: ignore[no-untyped-def]
            out = self.a(x, extra=self.d(x))
            return (out["a"] * 3).sum() + out["b"][0].sum() + out["b"][1][0].sum()

    model, x = Model(), tensor()
    run = ms.value_and_grad(model, 0, model.trainable_params())
    plain = run(x)
    frames, results = capture(model, lambda: run(x), "L0")
    assert same(plain, results[0])
    sections = entries(frames[0])["Cell.a.Containers.backward.0"].sections
    assert [stat(frames[0], ref).max for ref in sections["input"]] == [3.0, 1.0, 1.0]
    into_x = 3 * model.a.w.asnumpy() + 1
    assert stat(frames[0], sections["output"][0]).norm == pytest.approx(float(np.linalg.norm(into_x)), rel=1e-6)
    assert stat(frames[0], sections["output"][1]).min == 2.0
    forward = entries(frames[0])["Cell.a.Containers.forward.0"].sections
    assert set(forward["input_kwargs"]) == {"extra"}
    assert set(forward["output"][0]) == {"a", "b", "n"}


def test_what_needs_no_gradient_is_null_and_holds_nothing_up() -> None:
    """A Cell whose input needs no gradient is reported in its backward pass, not at the end of the step."""

    class Scaled(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Dense(4, 4)

        def construct(self, x):  # type: ignore[no-untyped-def]
            return self.fc(x / 255.0)

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.emb = Scaled(), nn.Embedding(4, 4)

        def construct(self, x, ids):  # type: ignore[no-untyped-def]
            return self.first(x) + self.emb(ids)

    model, x, ids = Model(), tensor(), ms.Tensor([0, 1, 2, 3], ms.int32)
    run = ms.value_and_grad(lambda x, ids: model(x, ids).sum(), None, model.trainable_params())
    frames, _ = capture(model, lambda: (run(x, ids), run(x, ids)), "L0")
    found = entries(frames[0])
    names = list(found)
    assert found["Cell.first.Scaled.backward.0"].sections["output"] == [None]
    assert found["Cell.emb.Embedding.backward.0"].sections["output"] == []
    assert names.index("Cell.first.Scaled.backward.0") < names.index("Cell.first.fc.Dense.forward.1")
    assert names.index("Cell.first.fc.Dense.backward.0") < names.index("Cell.first.Scaled.backward.0")


def test_calls_and_passes_are_numbered() -> None:
    """A second call in a step is number 1, also in the gradients of parameters; the next step begins with 0."""
    model, x = Layers(), tensor()
    run = gradients(model)
    frames, _ = capture(model, lambda: (run(x), run(x)), "L0", steps=2)
    for frame in frames:
        names = [n for n in entries(frame) if n.startswith("Cell.d.")]
        assert sorted(names) == sorted(f"Cell.d.Dense.{kind}.{n}" for n in (0, 1) for kind in ("forward", "backward", "parameters_grad"))


@pytest.mark.parametrize("how", ["cell", "function"])
def test_recomputation(how: str) -> None:
    """What is computed again has records of its own, marked, under the backward record that made it; bits stay."""

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Layers(), Layers()
            if how == "cell":
                self.b.recompute()

        def construct(self, x):  # type: ignore[no-untyped-def]
            h = self.a(x)
            return self.b(h) if how == "cell" else ms.recompute(self.b, h)

    model, x = Model(), tensor()
    run = gradients(model)
    plain = run(x)
    frames, results = capture(model, lambda: run(x), "mix")
    assert same(plain, results[0])
    found = entries(frames[0])
    again = found["Cell.b.d.Dense.forward.1"]
    assert again.tags == {"is_recompute": True}
    assert again.parent == ("Cell.b.Layers.backward.0" if how == "cell" else "Cell.b.Layers.forward.1")
    assert found["Functional.relu.2.forward"].tags == {"is_recompute": True}
    assert "Cell.b.d.Dense.backward.1" in found
    assert ("Cell.b.Layers.backward.0" if how == "cell" else "Cell.b.Layers.backward.1") in found
    assert not any("_recompute_cell" in name or "stop_gradient" in name for name in found)


def test_custom_gradients() -> None:
    """Cells with their own bprop and custom autograd functions keep their gradients."""
    from mindspore.common._grad_function import _Function

    class Product(_Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            x, w = ctx.saved_tensors
            return g * w, g * x

    class Own(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.Dense(4, 4)

        def construct(self, x):  # type: ignore[no-untyped-def]
            return self.d(x)

        def bprop(self, x, out, dout):  # type: ignore[no-untyped-def]  # noqa: ARG002
            return (dout * 2,)

    class Mul(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = Parameter(tensor(5), name="w")

        def construct(self, x):  # type: ignore[no-untyped-def]
            return Product.apply(x, self.w)

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.own, self.mul = Own(), Mul()

        def construct(self, x):  # type: ignore[no-untyped-def]
            return self.mul(self.own(x))

    model, x = Model(), tensor()
    run = gradients(model)
    plain = run(x)
    frames, results = capture(model, lambda: run(x), "mix")
    assert same(plain, results[0])
    found = entries(frames[0])
    into = found["Cell.own.Own.backward.0"].sections
    assert stat(frames[0], into["output"][0]).norm == pytest.approx(2 * (stat(frames[0], into["input"][0]).norm or 0))
    assert stat(frames[0], found["Cell.mul.Mul.backward.0"].sections["output"][0]).norm == stat(frames[0], into["input"][0]).norm


def test_second_order_gradients_are_a_pass_of_their_own() -> None:
    """The gradient of a gradient goes through the forward calls once more: its records tell which pass they are."""
    x = tensor()
    double = ms.grad(ms.grad(lambda x: (mint.matmul(x, x) ** 3).sum()))
    plain = double(x)
    frames, results = capture(None, lambda: double(x), "L1")
    assert same(plain, results[0])
    found = entries(frames[0])
    assert found["Mint.matmul.1000000.backward"].tags["of"] == "Mint.matmul.0.backward"


def test_mixed_precision() -> None:
    """Under to_float a Cell shows what it got and gave: float32 in, float16 out, and the gradients the other way round."""

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.half, self.full = nn.Dense(4, 4).to_float(ms.float16), nn.Dense(4, 4)

        def construct(self, x):  # type: ignore[no-untyped-def]
            return self.full(self.half(x).astype(ms.float32))

    model, x = Model(), tensor()
    run = gradients(model)
    plain = run(x)
    frames, results = capture(model, lambda: run(x), "L0")
    assert same(plain, results[0])
    found = entries(frames[0])

    def types(refs: list[TensorRef]) -> list[str]:
        return [ref.description.dtype for ref in refs]

    forward, backward = found["Cell.half.Dense.forward.0"].sections, found["Cell.half.Dense.backward.0"].sections
    assert (types(forward["input_args"]), types(forward["output"])) == (["Float32"], ["Float16"])
    assert (types(backward["input"]), types(backward["output"])) == (["Float16"], ["Float32"])


def test_exceptions_that_the_program_catches() -> None:
    """A Cell that raises, and an operator that fails, have records that say so; what follows is numbered and named as ever."""

    class Bad(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.Dense(4, 4)

        def construct(self, x):  # type: ignore[no-untyped-def]
            self.d(x)
            raise ValueError("mine")

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.d = Bad(), nn.Dense(4, 4)

        def construct(self, x):  # type: ignore[no-untyped-def]
            with pytest.raises(ValueError, match="mine"):
                self.bad(x)
            with pytest.raises(RuntimeError, match="MatMul"):
                mint.matmul(x, ops.ones((3, 3))).asnumpy()
            return self.d(x)

    model, x = Model(), tensor()
    run = gradients(model)
    frames, _ = capture(model, lambda: run(x), "mix")
    found = entries(frames[0])
    assert found["Cell.bad.Bad.forward.0"].tags == {"raised": True}
    assert found["Mint.matmul.0.forward"].tags == {"raised": True}
    assert found["Mint.matmul.0.forward"].sections["output"] is None
    assert found["Cell.d.Dense.forward.0"].parent is None
    assert "Cell.d.Dense.backward.0" in found


@pytest.mark.parametrize("level", LEVELS)
def test_training_with_an_optimizer_has_the_same_bits(level: str) -> None:
    """Three steps of TrainOneStepCell with Adam: losses and weights are the same bits at every level."""

    def train(captured: bool) -> Any:
        ms.set_seed(3)
        model = Layers()
        step = nn.TrainOneStepCell(nn.WithLossCell(model, nn.MSELoss()), nn.Adam(model.trainable_params(), 1e-2))
        x = tensor()
        losses = capture(model, lambda: step(x, x), level, steps=3)[1] if captured else [step(x, x) for _ in range(3)]
        return [*losses, *model.get_parameters()]

    assert same(train(False), train(True))


def test_models_in_a_list_and_a_single_cell() -> None:
    """With several models the index comes first in the path; a frozen parameter has no gradient record."""
    first, second, x = Layers(), Layers(), tensor()
    second.d.weight.requires_grad = False
    run = ms.value_and_grad(lambda x: second(first(x)).sum(), None, [*first.trainable_params(), *second.trainable_params()])
    frames, _ = capture([first, second], lambda: run(x), "L0")
    found = entries(frames[0])
    assert {"Cell.0.d.Dense.forward.0", "Cell.1.d.Dense.backward.0"} <= set(found)
    assert set(found["Cell.1.d.Dense.parameters_grad.0"].sections) == {"bias"}


def test_data_mode_chooses_sections() -> None:
    """forward, backward, input and output choose as in the settings."""
    model, x = Layers(), tensor()
    run = gradients(model)
    only = entries(capture(model, lambda: run(x), "L0", data_mode=("backward", "input"))[0][0])
    assert {tuple(e.sections) for n, e in only.items() if ".backward." in n} == {("input",)}
    assert not any(".forward." in n for n in only)
    forward = entries(capture(model, lambda: run(x), "L0", data_mode=("forward",))[0][0])
    assert all(".forward." in n for n in forward)


@pytest.mark.fast_cells("mix")
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_operators_around_cells_where_the_graph_is_not_shown(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore before 2.10 does not show its backward graph: Cells have their gradients all the same, and the training its bits."""
    model, x = Residual(), tensor()
    run = gradients(model)
    plain = run(x)
    shown = entries(capture(model, lambda: run(x), "L0")[0][0])
    monkeypatch.setattr(autograd, "available", False)
    monkeypatch.setattr(Recorder, "watch", identity_ops.TapWatch)
    monkeypatch.setattr(Recorder, "graph_task", staticmethod(identity_ops.TapWatch.graph_task))
    frames, results = capture(model, lambda: run(x), level)
    assert same(plain, results[0])
    assert same(plain, run(x))
    found = {name: entry for name, entry in entries(frames[0]).items() if name.startswith("Cell.")}
    assert set(found) == set(shown)
    for name, entry in found.items():
        if ".backward." in name:
            assert entry.parent == shown[name].parent
            assert [len(section) for section in entry.sections.values()] == [1, 1]
    into = found["Cell.l.0.e.Dense.backward.0"].sections
    weight = model.l[0].e.weight.asnumpy()
    assert (stat(frames[0], into["output"][0]).norm or 0) <= (stat(frames[0], into["input"][0]).norm or 0) * float(
        np.linalg.norm(weight)
    ) * 1.001
