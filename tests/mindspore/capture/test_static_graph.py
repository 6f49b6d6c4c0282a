"""Compiled graphs: level L0, `Model.train`, `ConfigChecker`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mindspore
import mindspore as ms
import numpy as np
import pytest
from mindspore import _c_expression, nn, ops
from small_residual import Net as Residual
from static_programs import IDS, MODES, Net, config, train

from msprobe.mindspore import MsprobeStep, PrecisionDebugger
from msprobe_engine.config.pack.reader import read_pack
from msprobe_integrations.mindspore.config.checker import MindSporeConfigChecker
from msprobe_integrations.mindspore.dump.debugger import PrecisionDebugger as Debugger

GRAPHS = [pytest.param(mode, marks=pytest.mark.slow) if mode == "one_step" else mode for mode in MODES[1:]]
"""`Model.train`, below, compiles what one_step does."""


class Dumps(dict[str, tuple[Path, list[bytes]]]):
    """Mode -> directory and bits of a training with a dump of task tensor, made when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, mode: str) -> tuple[Path, list[bytes]]:
        Debugger._instance = None
        path = self._factory.mktemp(mode)
        debugger: Any = PrecisionDebugger(config(path, task="tensor"))
        self[mode] = path, train(mode, debugger)
        debugger._run.at_exit()
        Debugger._instance = None
        return self[mode]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    """Of all modes."""
    return Dumps(tmp_path_factory)


@cache
def plain(mode: str) -> list[bytes]:
    """The bits of two steps without a probe."""
    return train(mode)


def step_of(path: Path, name: str = "dump.json", step: int = 0) -> Any:
    """A file of a step."""
    if Debugger._instance is not None and Debugger._instance._run is not None:
        Debugger._instance._run.files.wait()
    return json.loads(next((path / "dump").glob(f"step{step}/*/{name}")).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_forward_probes_keep_all_bits(tmp_path: Path, mode: str) -> None:
    """Without probes for gradients all losses and weights have the bits of the training without a probe."""
    assert train(mode, PrecisionDebugger(config(tmp_path, section={"data_mode": ["forward"]}))) == plain(mode)
    assert all(".backward." not in name for name in step_of(tmp_path)["data"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_gradient_probes_differ_by_rounding_at_most(dumps: Dumps, mode: str) -> None:
    """The forward pass has all its bits; weights may differ in the last ones, where gradients of several uses come together."""
    expected, probed = plain(mode), dumps[mode][1]
    assert probed[0] == expected[0]
    for one, other in zip(expected, probed, strict=True):
        np.testing.assert_allclose(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32), rtol=1e-2, atol=1e-3)


@pytest.mark.fast_cells("jit")
@pytest.mark.parametrize("mode", GRAPHS)
def test_records_are_those_of_the_dynamic_graph(dumps: Dumps, mode: str) -> None:
    """Names, their order, parents, places, types and shapes are the same in every mode."""
    eager, graph = step_of(dumps["pynative"][0])["data"], step_of(dumps[mode][0])["data"]
    assert list(graph) == list(eager)
    assert step_of(dumps[mode][0], "construct.json") == step_of(dumps["pynative"][0], "construct.json")
    for name in eager:
        assert shown(graph[name]) == shown(eager[name]), name


def shown(value: Any) -> Any:
    """A record without numbers of tensors, and without places where no gradient can come."""
    if isinstance(value, dict):
        return {k: shown(v) for k, v in value.items() if k not in ("Max", "Min", "Mean", "Norm", "data_name")}
    return [shown(v) for v in value if v is not None] if isinstance(value, list) else value


def test_a_call_is_seen_though_nobody_waits_for_its_result_and_averages_are_read_behind_it(tmp_path: Path) -> None:
    """A graph that stop() overtakes is waited for; averages that a call moves are in its record as the call leaves them, as in the dynamic
    graph."""
    net = nn.SequentialCell(nn.BatchNorm1d(4), nn.ReLU())
    net.set_train()
    debugger = PrecisionDebugger(config(tmp_path, step=[0]))
    ms.set_context(mode=ms.GRAPH_MODE)
    debugger.start(net)
    ms.value_and_grad(net, None, net.trainable_params())(ms.Tensor(np.arange(12, dtype=np.float32).reshape(3, 4)))
    debugger.stop()
    debugger.step()
    left = net[0].moving_mean.asnumpy().max()
    assert left > 0
    assert step_of(tmp_path)["data"]["Cell.0.BatchNorm1d.forward.0"]["parameters"]["moving_mean"]["Max"] == left


@pytest.mark.fast_cells("jit")
@pytest.mark.parametrize("mode", GRAPHS)
def test_saved_tensors_are_those_of_the_dynamic_graph(dumps: Dumps, mode: str) -> None:
    """Every tensor has its file, and the values differ by rounding at most."""
    eager, graph = (next((dumps[m][0] / "dump").glob("step0/*/dump_tensor_data")) for m in ("pynative", mode))
    forward = sorted(p.name for p in eager.iterdir() if ".forward." in p.name)
    assert sorted(p.name for p in graph.iterdir() if ".forward." in p.name) == forward
    assert len(list(graph.iterdir())) == len(list(eager.iterdir()))
    for file in eager.iterdir():
        if file.name.startswith("Cell.twice.Twice.backward.0.output"):  # an integer tensor has a place in the one, none in the other
            continue
        np.testing.assert_allclose(np.load(graph / file.name), np.load(file), rtol=1e-3, atol=1e-4, err_msg=file.name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_graphs_that_were_compiled_before_are_compiled_again(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """start() after the first step is told, and the records are there all the same."""
    train(mode, PrecisionDebugger(config(tmp_path)), steps=2, started=1)
    assert any(".forward." in name for name in step_of(tmp_path, step=1)["data"])
    assert "compiled again" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("started", [0, 1])
def test_graphs_of_optimizers_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str], started: int) -> None:
    """An optimizer that is a graph of its own in PyNative mode has no probe in it: nothing is said of it, nothing is compiled again."""
    train("pynative", PrecisionDebugger(config(tmp_path, step=[1])), steps=3, started=started)
    assert any(".forward." in name for name in step_of(tmp_path, step=1)["data"])
    said = capsys.readouterr().err
    assert "compiled again" not in said
    assert "probes for gradients" not in said


@pytest.mark.slow
def test_a_program_that_cannot_be_compiled_with_probes_is_compiled_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler has against a probe costs the dump, not the training."""
    from msprobe_integrations.mindspore.graph import compiled

    def unreadable(original: Any, *_: Any, **__: Any) -> Any:
        def construct(_: Any, *args: Any) -> Any:
            with open("x") as stream:
                return original(*args, stream)

        return construct

    monkeypatch.setattr(compiled, "add_probes", unreadable)
    assert train("graph", PrecisionDebugger(config(tmp_path))) == plain("graph")


@pytest.mark.slow
def test_selections_hold_inside_of_graphs(tmp_path: Path) -> None:
    """list, scope and step choose the same records as in the dynamic graph."""
    section = {"list": ["parts.1"], "data_mode": ["forward", "output"]}
    train("graph", PrecisionDebugger(config(tmp_path, step=[1], section=section)), steps=3)
    data = step_of(tmp_path, step=1)["data"]
    assert list(data) == [
        "Cell.parts.1.q.Dense.forward.0",
        "Cell.parts.1.k.Dense.forward.0",
        "Cell.parts.1.v.Dense.forward.0",
        "Cell.parts.1.Part.forward.0",
    ]
    assert all("input_args" not in record and record["output"] for record in data.values())
    assert not list((tmp_path / "dump").glob("step[02]"))


@pytest.mark.slow
def test_the_cells_are_as_they_were(tmp_path: Path) -> None:
    """Probes are on Cells only while a graph is compiled, and the compiler is let alone after the last step."""
    before = [vars(kind)["compile"] for kind in (_c_expression.GraphExecutor_, _c_expression.JitExecutor_)]
    ms.set_context(mode=ms.GRAPH_MODE)
    net = Net()
    debugger = PrecisionDebugger(config(tmp_path, step=[0]))
    debugger.start(net)
    net(IDS)
    assert all("construct" not in vars(cell) for _, cell in net.cells_and_names())
    debugger.stop()
    debugger.step()
    assert [vars(kind)["compile"] for kind in (_c_expression.GraphExecutor_, _c_expression.JitExecutor_)] == before


OUT, DOWN, UP = "Cell.out.Dense", "Cell.block.down.Dense", "Cell.block.up.Dense"


def train_model(settings: dict[str, Any] | None = None, *, recompute: bool = False) -> list[bytes]:
    """Three steps of a residual network; losses and weights."""
    ms.set_seed(1234)
    ms.set_context(mode=ms.GRAPH_MODE)
    net: Any = Residual()  # type: ignore[no-untyped-call]
    if recompute:
        net.block.recompute()
    random = np.random.RandomState(0)
    arrays = random.randn(6, 4).astype(np.float32), random.randn(6, 1).astype(np.float32)
    data = ms.dataset.NumpySlicesDataset(arrays, ["x", "y"], shuffle=False).batch(2)
    losses = _Losses()
    callbacks: list[Any] = [losses]
    if settings is not None:
        debugger: Any = PrecisionDebugger(settings)  # type: ignore[arg-type]
        debugger.start(net)
        callbacks.append(MsprobeStep(debugger))
    ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1)).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    if settings is not None:
        debugger._run.files.wait()
    return [*losses.seen, *(p.asnumpy().tobytes() for p in net.get_parameters())]


class _Losses(ms.train.Callback):  # type: ignore[misc]
    """Notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def on_train_step_end(self, run_context: Any) -> None:
        """The loss of a step."""
        self.seen.append(run_context.original_args().net_outputs.asnumpy().tobytes())


@pytest.fixture(scope="module")
def plain_model() -> list[bytes]:
    """Without a probe."""
    return train_model()


def settings_of(path: Path, **section: Any) -> dict[str, Any]:
    """Level L0 in the steps 1 and 2."""
    return {"task": "statistics", "level": "L0", "dump_path": str(path), "step": [1, 2], "statistics": section}


def names_of(path: Path, step: int) -> list[str]:
    """Records of a step."""
    return list(json.loads(next(path.glob(f"step{step}/*/dump.json")).read_text())["data"])


@pytest.mark.slow
def test_each_step_of_a_model(tmp_path: Path, plain_model: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    """The wanted steps have all records, forward and backward; the training has its bits here; that gradient probes may change last bits
    is said once."""
    assert train_model(settings_of(tmp_path)) == plain_model
    for step in (1, 2):
        names = names_of(tmp_path, step)
        assert names[:4] == [f"{UP}.forward.0", f"{DOWN}.forward.0", "Cell.block.Block.forward.0", f"{OUT}.forward.0"]
        assert {f"{cell}.{kind}.0" for cell in (OUT, DOWN, UP) for kind in ("backward", "parameters_grad")} < set(names)
    assert not (tmp_path / "step0").exists()
    assert capsys.readouterr().err.count("the last bits of the sum may differ") == 1


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ([f"{UP}.forward.0", f"{DOWN}.forward.0"], [f"{UP}.forward.0", f"{DOWN}.forward.0"]),
        (
            [f"{OUT}.backward.0", f"{DOWN}.backward.0"],
            [f"{OUT}.parameters_grad.0", f"{OUT}.backward.0", f"{DOWN}.parameters_grad.0", f"{DOWN}.backward.0"],
        ),
    ],
)
@pytest.mark.slow
def test_a_range(tmp_path: Path, scope: list[str], expected: list[str]) -> None:
    """With scope, records from the first to the last, and gradients of parameters between them only."""
    train_model(settings_of(tmp_path, scope=scope))
    assert names_of(tmp_path, 1) == expected


@pytest.mark.slow
def test_recompute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells that are recomputed have one forward record and gradients of parameters, others all; it is said; the bits stay."""
    assert train_model(settings_of(tmp_path), recompute=True) == train_model(recompute=True)
    names = names_of(tmp_path, 1)
    assert names[:4] == [f"{UP}.forward.0", f"{DOWN}.forward.0", "Cell.block.Block.forward.0", f"{OUT}.forward.0"]
    assert {name for name in names if ".backward." in name} == {f"{OUT}.backward.0"}
    assert {f"{cell}.parameters_grad.0" for cell in (OUT, DOWN, UP)} < set(names)
    assert "are recomputed in a compiled graph" in capsys.readouterr().err


def outputs(pack: Path | None) -> tuple[Any, list[Any]]:
    """The checker, made where `pack` is given, and the bits of the loss and the gradients of a compiled step."""
    mindspore.set_seed(7)
    net = nn.SequentialCell(nn.Dense(3, 4), nn.ReLU(), nn.Dense(4, 1))
    net.set_train()
    checker = MindSporeConfigChecker(net, {}, pack) if pack is not None else None
    x = mindspore.Tensor(np.linspace(-1, 1, 6).reshape(2, 3).astype(np.float32))

    def forward(given: Any) -> Any:
        return ops.square(net(given)).mean()

    gradient = mindspore.value_and_grad(forward, None, net.trainable_params())
    loss, grads = mindspore.jit(gradient)(x)
    return checker, [loss.asnumpy().tobytes(), *(g.asnumpy().tobytes() for g in grads)]


@pytest.mark.slow
def test_a_compiled_step_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model that only compiled code calls computes the same bits, and the end of the checker says why there is nothing of it."""
    _, plain = outputs(None)
    checker, checked = outputs(tmp_path / "pack.zip")
    assert checked == plain
    checker.close()
    said = capfd.readouterr()
    assert "no forward pass in training outside of compiled functions" in said.out + said.err
    assert not read_pack(tmp_path / "pack.zip").by_step("weights")
