"""Level L0 inside compiled graphs: the records of the dynamic graph, and the bits of the training."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import _c_expression, nn
from static_programs import IDS, MODES, Net, config, train

from msprobe.mindspore import PrecisionDebugger
from msprobe_integrations.mindspore.debugger import PrecisionDebugger as Debugger

GRAPHS = MODES[1:]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[bytes]]]:
    """Each mode with a dump of task tensor: directory and bits."""
    made = {}
    for mode in MODES:
        Debugger._instance = None
        path = tmp_path_factory.mktemp(mode)
        debugger: Any = PrecisionDebugger(config(path, task="tensor"))
        made[mode] = path, train(mode, debugger)
        debugger._run.at_exit()
    Debugger._instance = None
    return made


@cache
def plain(mode: str) -> list[bytes]:
    """The bits of two steps without a probe."""
    return train(mode)


def step_of(path: Path, name: str = "dump.json", step: int = 0) -> Any:
    """A file of a step."""
    if Debugger._instance is not None and Debugger._instance._run is not None:
        Debugger._instance._run.files.wait()
    return json.loads(next((path / "dump").glob(f"step{step}/*/{name}")).read_text())


@pytest.mark.usefixtures("own_debugger")
@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_forward_probes_keep_all_bits(tmp_path: Path, mode: str) -> None:
    """Without probes for gradients all losses and weights have the bits of the training without a probe."""
    assert train(mode, PrecisionDebugger(config(tmp_path, section={"data_mode": ["forward"]}))) == plain(mode)
    assert all(".backward." not in name for name in step_of(tmp_path)["data"])


@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_gradient_probes_differ_by_rounding_at_most(dumps: dict[str, tuple[Path, list[bytes]]], mode: str) -> None:
    """The forward pass has all its bits; weights may differ in the last ones, where gradients of several uses come together."""
    expected, probed = plain(mode), dumps[mode][1]
    assert probed[0] == expected[0]
    for one, other in zip(expected, probed, strict=True):
        np.testing.assert_allclose(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("mode", GRAPHS)
def test_records_are_those_of_the_dynamic_graph(dumps: dict[str, tuple[Path, list[bytes]]], mode: str) -> None:
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


@pytest.mark.usefixtures("own_debugger")
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


@pytest.mark.parametrize("mode", GRAPHS)
def test_saved_tensors_are_those_of_the_dynamic_graph(dumps: dict[str, tuple[Path, list[bytes]]], mode: str) -> None:
    """Every tensor has its file, and the values differ by rounding at most."""
    eager, graph = (next((dumps[m][0] / "dump").glob("step0/*/dump_tensor_data")) for m in ("pynative", mode))
    forward = sorted(p.name for p in eager.iterdir() if ".forward." in p.name)
    assert sorted(p.name for p in graph.iterdir() if ".forward." in p.name) == forward
    assert len(list(graph.iterdir())) == len(list(eager.iterdir()))
    for file in eager.iterdir():
        if file.name.startswith("Cell.twice.Twice.backward.0.output"):  # an integer tensor has a place in the one, none in the other
            continue
        np.testing.assert_allclose(np.load(graph / file.name), np.load(file), rtol=1e-3, atol=1e-4, err_msg=file.name)


@pytest.mark.usefixtures("own_debugger")
@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_graphs_that_were_compiled_before_are_compiled_again(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """start() after the first step is told, and the records are there all the same."""
    train(mode, PrecisionDebugger(config(tmp_path)), steps=2, started=1)
    assert any(".forward." in name for name in step_of(tmp_path, step=1)["data"])
    assert "compiled again" in capsys.readouterr().err


@pytest.mark.usefixtures("own_debugger")
@pytest.mark.parametrize("started", [0, 1])
def test_graphs_of_optimizers_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str], started: int) -> None:
    """An optimizer that is a graph of its own in PyNative mode has no probe in it: nothing is said of it, nothing is compiled again."""
    train("pynative", PrecisionDebugger(config(tmp_path, step=[1])), steps=3, started=started)
    assert any(".forward." in name for name in step_of(tmp_path, step=1)["data"])
    said = capsys.readouterr().err
    assert "compiled again" not in said
    assert "probes for gradients" not in said


@pytest.mark.usefixtures("own_debugger")
def test_a_program_that_cannot_be_compiled_with_probes_is_compiled_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler has against a probe costs the dump, not the training."""
    from msprobe_integrations.mindspore.graph import compiled

    def unreadable(original: Any, *_: Any, **__: Any) -> Any:
        def construct(_: Any, *args: Any) -> Any:
            with open("x") as stream:
                return original(*args, stream)

        return construct

    monkeypatch.setattr(compiled, "probed", unreadable)
    assert train("graph", PrecisionDebugger(config(tmp_path))) == plain("graph")


@pytest.mark.usefixtures("own_debugger")
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


@pytest.mark.usefixtures("own_debugger")
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
