"""What programs do to a monitor: short floats, scalars, shared Cells, several optimizers, compiled parts, recomputation, exceptions. The
training goes on with the same bits, and what cannot be seen is not made up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import monitor_programs as programs
import numpy as np
import pytest
from mindspore import nn, ops

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import Frame
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe
from msprobe_integrations.mindspore.monitor.tensors import CellWatch

EVERYTHING: dict[str, Any] = {
    "activations": True,
    "activation_gradients": True,
    "gradients": True,
    "unreduced_gradients": True,
    "parameters": True,
    "optimizer_states": True,
    "updates": True,
}


class Odd(nn.Cell):  # type: ignore[misc]
    """A Cell that is used twice, an input of integers, a scalar parameter, an output that is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.shared = nn.Dense(4, 4)
        self.scale = ms.Parameter(ms.Tensor(2.0, ms.float32), name="scale")
        self.half = nn.Dense(4, 4).to_float(ms.float16)

    def construct(self, ids: Any, mask: Any = None) -> Any:
        x = self.shared(self.shared(self.table(ids)))
        x = self.half(x).astype(ms.float32) * self.scale
        return {"x": x, "none": None, "masked": x if mask is None else x * mask}


class Recomputed(nn.Cell):  # type: ignore[misc]
    """The first layer runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.SequentialCell(nn.Dense(6, 8), nn.Tanh())
        self.first.recompute()
        self.second = nn.Dense(8, 3)

    def construct(self, x: Any) -> Any:
        return self.second(self.first(x))


class Own(nn.Cell):  # type: ignore[misc]
    """An optimizer of one's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple(parameters)

    def construct(self, gradients: Any) -> Any:
        for parameter, gradient in zip(self.parameters, gradients):
            ops.assign(parameter, parameter - 0.01 * gradient)
        return True


@pytest.fixture
def probes() -> Iterator[list[MindSporeProbe]]:
    """All probes of a test are closed."""
    made: list[MindSporeProbe] = []
    yield made
    for probe in made:
        probe.close()


def steps(net: Any, optimizer: Any, loss: Any, probe: MindSporeProbe | None, count: int = 2) -> list[bytes]:
    """Train; losses and weights."""
    gradient = ms.value_and_grad(loss, None, tuple(optimizer.parameters))
    if probe is not None:
        probe.attach(net, optimizer)
    out = []
    for step in range(count):
        if probe is not None:
            probe.begin_step(step)
        value, gradients = gradient()
        optimizer(gradients)
        if probe is not None:
            probe.end_step({"loss": value})
        out.append(value.asnumpy().tobytes())
    return out + [p.asnumpy().tobytes() for p in optimizer.parameters]


def names(frame: Frame, family: str) -> list[str]:
    """Names of a family."""
    return [sample.name for sample in frame.samples if sample.family == family]


def test_odd_network(probes: list[MindSporeProbe]) -> None:
    """Shared Cells count twice, members of containers have their key, what has no gradient has no row."""
    probe = MindSporeProbe(programs.settings(**EVERYTHING))
    probes.append(probe)

    def run(watched: MindSporeProbe | None) -> list[bytes]:
        ms.set_seed(3)
        net = Odd()
        ids, mask = ms.Tensor(np.array([[1, 2], [3, 6]], np.int32)), ms.Tensor(np.ones((2, 2, 4), np.float32))
        optimizer = nn.Adam(net.trainable_params(), 1e-2)
        return steps(net, optimizer, lambda: net(ids, mask=mask)["masked"].sum(), watched)

    assert run(probe) == run(None)
    probe.close()
    frame = probe.frames[0]
    forward = names(frame, "actv")
    assert forward.count("shared.input") == 2
    assert [name for name in forward if name.startswith(".")] == [".input_0", ".input_1", ".output_x", ".output_masked"]
    assert "table.input" in forward
    gradients = names(frame, "actv_grad")
    assert "table.input" not in gradients
    assert "table.output" in gradients
    assert {s.ref.description.dtype for s in frame.samples if s.name == "half.output"} == {"Float16"}
    assert set(names(frame, "grad_reduced")) == {
        "table.embedding_table", "shared.weight", "shared.bias", "scale", "half.weight", "half.bias"
    }  # fmt: skip


def test_recomputation_is_not_counted(probes: list[MindSporeProbe]) -> None:
    """A layer that runs a second time in the backward pass has one row."""
    probe = MindSporeProbe(programs.settings(**EVERYTHING))
    probes.append(probe)
    batch = programs.data(1)[0]

    def run(watched: MindSporeProbe | None) -> list[bytes]:
        ms.set_seed(3)
        net = Recomputed()
        net.set_train()
        optimizer = nn.SGD(net.trainable_params(), 1e-2)
        return steps(net, optimizer, lambda: (net(batch) ** 2).mean(), watched)

    assert run(probe) == run(None)
    probe.close()
    assert names(probe.frames[0], "actv").count("first.0.output") == 1
    assert names(probe.frames[0], "actv").count("second.output") == 1


@pytest.mark.slow
def test_compiled_part(probes: list[MindSporeProbe]) -> None:
    """What is inside of a compiled function is not seen; gradients, parameters and states are."""
    probe = MindSporeProbe(programs.settings(**EVERYTHING))
    probes.append(probe)
    batch = programs.data(1)[0]

    def run(watched: MindSporeProbe | None) -> list[bytes]:
        net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))

        @ms.jit  # type: ignore[untyped-decorator]
        def forward(x: Any) -> Any:
            return (net(x) ** 2).mean()

        return steps(net, optimizer, lambda: forward(batch), watched)

    assert run(probe) == run(None)
    probe.close()
    frame = probe.frames[1]
    assert names(frame, "actv") == []
    assert len(names(frame, "grad_unreduced")) == len(names(frame, "grad_reduced")) == 6
    assert names(frame, "exp_avg")


def test_two_optimizers(probes: list[MindSporeProbe]) -> None:
    """Each has its own parameters; nothing is there twice."""
    probe = MindSporeProbe(programs.settings(gradients=True, parameters=True))
    probes.append(probe)
    net, _ = programs.build(lambda p: nn.SGD(p))
    first, second = nn.Adam(net.first.trainable_params(), 1e-2), Own(net.second.trainable_params())
    probe.attach(net, [first, second])
    gradient = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, (*first.parameters, *second.parameters))
    for step, x in enumerate(programs.data(2)):
        probe.begin_step(step)
        _, gradients = gradient(x)
        first(gradients[:2])
        second(gradients[2:])
        probe.end_step()
    probe.close()
    for family in ("grad_reduced", "param_updated"):
        assert names(probe.frames[1], family) == ["first.weight", "first.bias", "second.weight", "second.bias"]


@pytest.mark.parametrize("kind", ["number", "schedule", "groups", "list", "experimental groups"])
@pytest.mark.fast_cells("groups", "list", "number", "schedule")
def test_learning_rate(kind: str, probes: list[MindSporeProbe]) -> None:
    """The learning rate of a step is that of the first group, also where a schedule makes it; the training has the same bits."""
    decay = nn.ExponentialDecayLR(0.5, 0.5, 1)

    def groups(p: Any) -> list[dict[str, Any]]:
        return [{"params": list(p[:2]), "lr": 0.25}, {"params": list(p[2:]), "lr": 0.125}]

    make: dict[str, Any] = {
        "number": lambda p: nn.SGD(p, 0.25),
        "schedule": lambda p: nn.SGD(p, decay),
        "groups": lambda p: nn.SGD(groups(p), 0.5),
        "list": lambda p: nn.SGD(p, [0.5, 0.25, 0.125]),
        "experimental groups": lambda p: ms.experimental.optim.SGD(groups(p), 0.5),
    }
    probe = MindSporeProbe(programs.settings(gradients=True, updates=True))
    probes.append(probe)
    net, optimizer = programs.build(make[kind])
    probe.attach(net, optimizer)
    result = programs.train(net, optimizer, probe, 3)
    probe.close()
    assert result == programs.train(*programs.build(make[kind]), None)
    expected = [0.5, 0.25, 0.125] if kind in ("schedule", "list") else [0.25] * 3
    assert [frame.scalars["learning_rate"] for frame in probe.frames] == pytest.approx(expected)
    assert len(names(probe.frames[1], "update")) == 6


def test_evaluation_and_exceptions(probes: list[MindSporeProbe]) -> None:
    """A pause is not seen; a forward pass that raises leaves nothing behind, and its error is the user's."""
    probe = MindSporeProbe(programs.settings(activations=True, activation_gradients=True, gradients=True))
    probes.append(probe)
    net, optimizer = programs.build(lambda p: nn.SGD(p, 1e-2))
    probe.attach(net, optimizer)
    batch = programs.data(1)[0]
    gradient = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
    probe.begin_step(0)
    with pytest.raises(ValueError, match="dimension"):
        net(ms.Tensor(np.ones((2, 5), np.float32))).asnumpy()
    probe.pause()
    net(batch)
    probe.resume()
    _, gradients = gradient(batch)
    optimizer(gradients)
    probe.end_step()
    probe.close()
    assert names(probe.frames[0], "actv").count("second.output") == 1
    assert names(probe.frames[0], "actv_grad").count("second.output") == 1


def test_a_fault_of_the_probe(probes: list[MindSporeProbe], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Costs the part it is in, is said once, and the training goes on with the same bits."""
    settings = programs.settings(**EVERYTHING)
    probe = MindSporeProbe(type(settings)(**{**vars(settings), "strict": False}))
    probes.append(probe)
    monkeypatch.setattr(CellWatch, "_add_samples", lambda *_: 1 / 0)
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    probe.attach(net, optimizer)
    result = programs.train(net, optimizer, probe)
    probe.close()
    assert result == programs.train(*programs.build(lambda p: nn.Adam(p, 1e-2)), None)
    assert len([r for r in caplog.records if "activation monitor is switched off" in r.getMessage()]) == 1
    assert len(names(probe.frames[2], "grad_reduced")) == 6


def test_wrong_arguments(probes: list[MindSporeProbe]) -> None:
    """A network that is none, an optimizer that is none: said, with what is allowed."""
    probe = MindSporeProbe(programs.settings())
    probes.append(probe)
    net, optimizer = programs.build(lambda p: nn.SGD(p))
    with pytest.raises(UsageError, match="network is of type int"):
        probe.attach(3, optimizer)
    with pytest.raises(UsageError, match="optimizer is of type Net"):
        probe.attach(net, net)


def test_gradients_that_are_no_numbers(probes: list[MindSporeProbe]) -> None:
    """NaN and Inf in float16 and bfloat16 gradients are counted; the update of such a step is the program's business."""
    probe = MindSporeProbe(programs.settings(gradients=True))
    probes.append(probe)
    weights = [ms.Parameter(ms.Tensor(np.ones(4, np.float32)).astype(kind), name=str(kind).lower()) for kind in (ms.float16, ms.bfloat16)]

    class Holder(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = weights

        def construct(self) -> Any:
            return self.a

    class Nothing(Own):
        def construct(self, gradients: Any) -> Any:
            return gradients[0]

    optimizer = Nothing(weights)
    monkey = [ms.Tensor(np.array([1, np.nan, np.inf, -2], np.float32)).astype(p.dtype) for p in weights]
    probe.attach(Holder(), optimizer)
    probe.begin_step(0)
    optimizer(tuple(monkey))
    probe.end_step()
    probe.close()
    found = {record.name: record.statistics for record in probe.frames[0].records()}
    assert {name: (s.nans, s.infs) for name, s in found.items()} == {"a": (1, 1), "b": (1, 1)}
