"""Records of operators in a capture: functions, methods, primitives, compiled functions."""

from __future__ import annotations

import pickle
import sys
import threading
import types
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.ops import softmax as early_softmax
from ms_capturing import LEVELS, Layers, capture, entries, gradients, same, stat, tensor

from msprobe_integrations.common.capture.filters import RecordFilter
from msprobe_integrations.mindspore.capture.api_names import apis


def forwards(model: Any, work: Any, level: str = "L1", **options: Any) -> list[str]:
    """Names of the forward records, in order, without the direction."""
    frames, _ = capture(model, work, level, **options)
    return [name.removesuffix(".forward") for name in entries(frames[0]) if name.endswith(".forward")]


def test_prefixes_and_numbers() -> None:
    """A call is named after the module it is in, or the class of tensors; numbers count per name."""
    x = tensor()

    def work() -> None:
        ops.softmax(x)
        mint.matmul(x, x)
        mint.nn.functional.relu(x)
        x.sum()
        _ = x + x
        _ = 1 + x
        _ = x @ x
        _ = x[0]
        _ = 2.0 / x
        ops.softmax(x)

    assert forwards(None, work) == [
        "Functional.softmax.0",
        "Mint.matmul.0",
        "MintFunctional.relu.0",
        "Tensor.sum.0",
        "Tensor.__add__.0",
        "Tensor.__radd__.0",
        "Tensor.__matmul__.0",
        "Tensor.__getitem__.0",
        "Tensor.__rtruediv__.0",
        "Functional.softmax.1",
    ]


def test_only_the_outermost_call_is_a_record() -> None:
    """What a function calls inside is its own business; its gradients are those of its arguments."""
    x, labels = tensor(), ms.Tensor([0, 1, 2, 3], ms.int32)
    run = ms.grad(lambda x: ops.cross_entropy(x, labels))
    frames, _ = capture(None, lambda: run(x), "L1")
    found = entries(frames[0])
    assert list(found) == ["Functional.cross_entropy.0.forward", "Functional.cross_entropy.0.backward"]
    gradient = found["Functional.cross_entropy.0.backward"].sections["output"][0]
    softmax = np.exp(x.asnumpy()) / np.exp(x.asnumpy()).sum(1, keepdims=True)
    assert stat(frames[0], gradient).norm == pytest.approx(float(np.linalg.norm(softmax - np.eye(4)) / 4), rel=1e-5)


def test_contributions_of_one_call() -> None:
    """A gradient is the contribution of this call, also where the tensor is used elsewhere or stands at two places."""
    x = tensor()
    run = ms.grad(lambda x: mint.matmul(x, x).sum() + (x * 100).sum())
    frames, _ = capture(None, lambda: run(x), "L1")
    first, second = entries(frames[0])["Mint.matmul.0.backward"].sections["output"]
    ones = np.ones((4, 4))
    assert stat(frames[0], first).norm == pytest.approx(float(np.linalg.norm(ones @ x.asnumpy().T)), rel=1e-6)
    assert stat(frames[0], second).norm == pytest.approx(float(np.linalg.norm(x.asnumpy().T @ ones)), rel=1e-6)


def test_early_imports_and_members_are_seen() -> None:
    """A function taken by name before, or kept as a member of a Cell, is seen; afterwards it is what it was."""

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.act = ops.gelu

        def construct(self, x):  # type: ignore[no-untyped-def]
            return early_softmax(self.act(x))

    model, x = Model(), tensor()
    before = model.act
    assert forwards(model, lambda: model(x)) == ["Functional.gelu.0", "Functional.softmax.0"]
    assert model.act is before
    assert early_softmax is ops.softmax


def test_imports_in_a_window_keep_no_wrapper() -> None:
    """A module that takes a function by name while a capture is open has MindSpore's own one afterwards."""
    late = types.ModuleType("late_module")
    sys.modules["late_module"] = late
    x = tensor()

    def work() -> None:
        exec("from mindspore.ops import tanh", vars(late))
        late.tanh(x)

    try:
        assert forwards(None, work) == ["Functional.tanh.0"]
        assert late.tanh is ops.tanh
        assert not hasattr(late.tanh, "__wrapped__")
    finally:
        del sys.modules["late_module"]


def test_nothing_is_left_on() -> None:
    """After the capture every function, method, primitive and Cell is called as before."""

    def owners() -> list[Any]:
        classes = (nn.Cell, ops.Primitive, ops.MatMul, ms.Tensor)
        return [vars(api.owner).get(api.name) for api in known] + [vars(c).get("__call__") for c in classes]

    known = list(apis())
    before = owners()
    model, x = Layers(), tensor()
    run = gradients(model)
    for level in LEVELS:
        capture(model, lambda: run(x), level)
    assert all(a is b for a, b in zip(before, owners()))
    assert not hasattr(nn.Cell.__call__, "__wrapped__")


def test_primitives_of_cells() -> None:
    """A primitive that is a member of a Cell is recorded under its attribute; any other is not."""

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mul = ops.Mul()
            self.shapes = ops.Shape()

        def construct(self, x):  # type: ignore[no-untyped-def]
            self.shapes(x)
            return self.mul(x, ops.Sub()(x, x))

    class Outer(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def construct(self, x):  # type: ignore[no-untyped-def]
            return self.inner(x)

    model, x = Outer(), tensor()
    run = gradients(model)
    frames, _ = capture(model, lambda: run(x), "mix")
    found = entries(frames[0])
    assert found["Primitive.shapes.Shape.0.forward"].sections["output"][0].json == {"type": "int", "value": 4}
    assert found["Primitive.mul.Mul.0.forward"].parent == "Cell.inner.Model.forward.0"
    assert "Primitive.mul.Mul.0.backward" in found
    assert not any("Sub" in name for name in found)


@ms.jit
def compiled(a, b):  # type: ignore[no-untyped-def]
    """Many ways to call what is wrapped."""
    y = ops.softmax(a) + mint.add(a, b, alpha=2) - a.abs() + a.reshape(2, 8).reshape(4, 4) + ops.relu(a) * a.sum()
    y = y + mint.nn.functional.relu(a) + ops.gelu(a) + (a @ b) + 1 / (a * a + 1) + ops.where(a > b, a, b) + a[0]
    for _ in range(2):
        y = y + a.pow(2) + ops.exp(-b)
    return y


class CompiledCell(nn.Cell):  # type: ignore[misc]
    """A Cell with a compiled construct."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    @ms.jit
    def construct(self, x):  # type: ignore[no-untyped-def]
        return self.layers(x) * 2 + ops.relu(x)


@pytest.mark.fast_cells("L0")
@pytest.mark.parametrize("level", LEVELS)
def test_compiled_functions(level: str) -> None:
    """A compiled function is compiled while the capture looks, gives the same bits, and is one record with its gradients."""

    class Model(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.j, self.a = CompiledCell(), Layers()

        def construct(self, x):  # type: ignore[no-untyped-def]
            return compiled(self.j(self.a(x)), x)

    model, x = Model(), tensor()
    run = gradients(model)
    frames, results = capture(model, lambda: run(x), level)
    assert same(run(x), results[0])
    found = entries(frames[0])
    if level != "L0":
        assert found["Jit.compiled.0.forward"].parent is None
        assert len(found["Jit.compiled.0.backward"].sections["output"]) == 2
        assert "Jit.CompiledCell.0.forward" in found
        assert not any("gelu" in name for name in found)
    if level != "L1":
        assert "Cell.j.CompiledCell.backward.0" in found
        assert "Cell.j.layers.d.Dense.parameters_grad.0" in found
        assert not any("Cell.j.layers.d.Dense.forward" in name for name in found)
    if level == "mix":
        assert found["Jit.CompiledCell.0.forward"].parent == "Cell.j.CompiledCell.forward.0"


def test_compiled_by_bytecode() -> None:
    """The mode bytecode compiles what Python runs; a call is one record there too."""

    @ms.jit(capture_mode="bytecode")
    def function(a):  # type: ignore[no-untyped-def]
        return ops.softmax(a) @ a

    x = tensor()
    frames, results = capture(None, lambda: function(x), "L1")
    assert list(entries(frames[0])) == ["Jit.function.0.forward"]
    assert same(function(x), results[0])


def test_graph_mode_is_left_alone() -> None:
    """A program that switches to the static graph while a capture is open compiles and runs as ever."""
    model, x = Layers(), tensor()

    def work() -> Any:
        ms.set_context(mode=ms.GRAPH_MODE)
        try:
            return model(x)
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)

    assert capture(model, work, "mix")[1][0].shape == (4, 4)


def test_transforms_of_functions_are_no_records() -> None:
    """grad, vmap and their kin are no operations; what they run is seen."""
    x = tensor()
    names = forwards(None, lambda: ms.grad(lambda a: ops.sin(a).sum())(x))
    assert names == ["Functional.sin.0", "Tensor.sum.0"]
    known = {(api.prefix, api.name) for api in apis()}
    assert not known & {
        ("Functional", name) for name in ("grad", "value_and_grad", "vmap", "jvp", "vjp", "constexpr", "kernel", "all_reduce")
    }
    assert {("Functional", "stop_gradient"), ("Mint", "addmm"), ("MintDistributed", "all_reduce"), ("Distributed", "all_reduce")} <= known


def test_other_threads_are_not_seen() -> None:
    """A capture looks at the thread that opened it; calls of data loading threads are none of the step."""
    x = tensor()

    def work() -> None:
        thread = threading.Thread(target=lambda: ops.exp(x))
        thread.start()
        thread.join()
        ops.sin(x)

    assert forwards(None, work) == ["Functional.sin.0"]


def test_two_captures_at_once() -> None:
    """Captures may be open at the same time and close in any order; both see every call."""
    x = tensor()
    inner: list[str] = []

    def work() -> None:
        ops.sin(x)
        inner.extend(forwards(None, lambda: ops.exp(x)))
        ops.cos(x)

    assert forwards(None, work) == ["Functional.sin.0", "Functional.exp.0", "Functional.cos.0"]
    assert inner == ["Functional.exp.0"]


def test_lists_and_risk_levels_keep_records_and_numbers() -> None:
    """What the settings leave out is counted all the same, so numbers are those of a whole dump."""
    model, x = Layers(), tensor()

    def work() -> None:
        ops.exp(x)
        ops.sin(x)
        ops.exp(x)
        x.reshape(2, 8)

    assert forwards(None, work, kept=RecordFilter((), ("exp.1",), "L1")) == ["Functional.exp.1"]
    assert forwards(None, work, kept=RecordFilter((), (), "L1", "FOCUS")) == ["Functional.exp.0", "Functional.sin.0", "Functional.exp.1"]
    run = gradients(model)
    frames, _ = capture(model, lambda: run(x), "mix", kept=RecordFilter((), ("Cell.e",), "mix"))
    kept = [e.name for e in frames[0].entries if not e.tags.get("node_only")]
    assert "Primitive.matmul.MatMul.1.forward" in kept
    assert "Primitive.matmul.MatMul.1.backward" in kept
    assert not any("Cell.d" in name for name in kept)
    span = RecordFilter(("Functional.sin.0.forward", "Functional.exp.1.forward"), (), "L1")
    assert forwards(None, work, kept=span) == ["Functional.sin.0", "Functional.exp.1"]


def test_stacks_show_the_program() -> None:
    """The first line of a stack is whose call it is; neither MindSpore's way of a call nor the probe are in it."""
    model, x = Layers(), tensor()
    frames, _ = capture(model, lambda: model(x), "mix")
    found = entries(frames[0])
    lines = frames[0].stacks[found["Functional.relu.0.forward"].stack]
    assert "ms_capturing.py" in lines[0]
    assert "return self.e(ops.relu(self.d(x)))" in lines[0]
    assert not any("nn/cell.py" in line or "msprobe_integrations" in line for line in lines)


@ms.jit
def weighted(a, b, c, d):  # type: ignore[no-untyped-def]
    """Every input has a gradient of its own size."""
    return a.sum() + 2 * b.sum() + 3 * c.sum() + 4 * d.sum()


def test_gradients_of_compiled_functions_belong_to_their_inputs() -> None:
    """MindSpore gives a compiled function's node only the gradients that somebody wants: each is that of its input, the others are none,
    and the capture of gradients goes on."""
    x = tensor()
    run = ms.grad(lambda x: weighted(tensor(), x * 1, tensor(), x * 2) + ops.square(mint.sin(x)).sum())
    frames, _ = capture(None, lambda: run(x), "L1")
    found = entries(frames[0])
    a, b, c, d = found["Jit.weighted.0.backward"].sections["output"]
    assert (a, c) == (None, None)
    assert [stat(frames[0], ref).mean for ref in (b, d)] == pytest.approx([2, 4])
    assert {"Mint.sin.0.backward", "Functional.square.0.backward"} <= found.keys()


def test_a_parameter_that_is_not_differentiated() -> None:
    """A Parameter that nobody differentiates (the scale of a loss) takes a place among the inputs and has no gradient: no other one's is
    taken for it, and the capture of gradients goes on."""
    x, scale = tensor(), ms.Parameter(ms.Tensor(2.0, ms.float32), name="scale")
    run = ms.grad(lambda x: weighted(scale, x * 1, scale, x * 2) + ops.square(mint.sin(x)).sum())
    frames, _ = capture(None, lambda: run(x), "L1")
    found = entries(frames[0])
    assert not any(found["Jit.weighted.0.backward"].sections["output"])
    assert {"Mint.sin.0.backward", "Functional.square.0.backward"} <= found.keys()


def test_functions_are_pickled_in_a_window() -> None:
    """pickle takes functions and methods while a capture looks at them, and gives the functions themselves afterwards."""
    kept: list[bytes] = []
    own = (ops.relu, mint.matmul, Tensor.sum)

    def work() -> None:
        ops.relu(tensor())
        kept.extend(pickle.dumps(function) for function in (ops.relu, mint.matmul, Tensor.sum))

    capture(None, work, "L1")
    assert [pickle.loads(data) for data in kept] == list(own)
