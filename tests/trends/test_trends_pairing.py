"""``msprobe trends`` of two runs: which rows are the same; and of a directory of several runs."""

# ruff: noqa: RUF001 - Chinese is meant
from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "frameworks"))

from forkpool import run_ranks
from frames_of_lists import frame_of

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.report.trends.collect import collect
from msprobe_engine.report.trends.page import manifest
from msprobe_engine.report.trends.pairing import count_extra_wrappers, outside, unwrap_target
from msprobe_engine.report.trends.sources.open_source import open_source
from msprobe_engine.report.trends.sources.order import Order
from msprobe_engine.report.trends.sources.source import SCALARS, Target


def _run(root: Path, names: tuple[str, ...]) -> Path:
    sink = CsvSink(CsvSettings(), MonitorSettings(ops=("norm",)), output_dir=root, rank=0)
    for step in range(3):
        sink.write(frame_of({name: [1.0] for name in names}, step=step, rank=0, scalars={"loss": 1.0}), [])
    sink.close()
    return root


def test_a_wrapped_run_beside_a_bare_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``module.`` that one run alone has on all its rows is taken off, and how many rows only one run has is said; page and console."""
    ddp = _run(tmp_path / "ddp", ("module.layers.0.w", "module.layers.1.w", "module.extra.w"))
    bare = _run(tmp_path / "bare", ("layers.0.w", "layers.1.w", "head.a", "head.b"))
    trends = collect([open_source(ddp), open_source(bare)])
    names = {t.name for t in trends.metrics["grad_reduced, reduced"].targets}
    assert names == {"layers.0.w", "layers.1.w", "extra.w", "head.a", "head.b"}
    assert not trends.runs[0].grids["grad_reduced, reduced", "norm"].cube.missing.all()
    first, second = ([said for said, _ in run["problems"]] for run in manifest(trends)["runs"])
    wrapper, only = first
    assert wrapper == [
        "'module.' taken off the front of the names of ddp, so that its rows are those of the other run",
        "已去掉 ddp 各名称开头的 module.，使其各行与另一次运行对应",
    ]
    assert only[0] == "rows only in ddp: 1, the first: extra.w (grad_reduced, reduced)"
    assert second == [
        ["rows only in bare: 2, the first: head.a (grad_reduced, reduced)", "仅 bare 有的行：2 行，首行为 head.a（grad_reduced, reduced）"]
    ]
    assert main(["trends", str(ddp), str(bare)]) == 3
    out = capsys.readouterr().out
    assert "note: 'module.' taken off the front of the names of ddp" in out
    assert "note: rows only in bare: 2, the first: head.a" in out
    assert "the runs agree: no relative difference above 1e-06 in 3 rows" in out


@pytest.mark.parametrize(
    ("one", "other", "depths"),
    [
        (["module.a", "module.b"], ["a"], (1, 0)),
        (["a"], ["module.module.a"], (0, 2)),
        (["module.a"], ["module.b"], (0, 0)),
        (["module.module.a"], ["module.a"], (1, 0)),
        (["module.a", "b"], ["a"], (0, 0)),
        (["module.a"], [], (0, 0)),
        (["Module.module.a.Linear.output.0", "module.a: Functional.x.0", "Functional.y.0"], ["Module.a.Linear.output.0"], (1, 0)),
    ],
)
def test_when_a_wrapper_is_taken_off(one: list[str], other: list[str], depths: tuple[int, int]) -> None:
    """As often as exactly one run has it on all rows of modules; numbers of the steps have no say."""
    sides = [{"m": [Target(name) for name in names], SCALARS: [Target("loss")]} for names in (one, other)]
    assert count_extra_wrappers(*sides) == depths


def test_names_without_their_wrappers() -> None:
    """Dumps keep the kind in front; what has no wrapper stays."""
    shown = [unwrap_target(Target(n), 1).name for n in ("module.a.w", "Module.module.a.Linear.output.0", "Cell.module.a", "Functional.y.0")]
    assert shown == ["a.w", "Module.a.Linear.output.0", "Cell.a", "Functional.y.0"]


@pytest.mark.parametrize("command", [("trends",), ("monitor", "report")])
def test_a_directory_of_runs_names_them(command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a directory holds several runs, the message says which paths to give."""
    for name in ("a", "b"):
        _run(tmp_path / "mon" / name, ("w",))
    assert main([*command, str(tmp_path / "mon")]) == 2
    said = capsys.readouterr().err
    places = [str(tmp_path / "mon" / name) for name in ("a", "b")]
    assert "give one of them: " + ", ".join(places) in said


def test_runs_with_nothing_in_common_do_not_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no step of one run is one of the other, nothing was compared, which is another thing than no difference."""
    for name in ("a", "b"):
        _run(tmp_path / name, ("w",))
    assert main(["trends", str(tmp_path / "a"), str(tmp_path / "b"), "--shift", "10", "-o", str(tmp_path / "ab.html")]) == 3
    out = capsys.readouterr().out
    assert "no numbers in common: nothing was compared" in out
    assert "agree" not in out
    assert "note: steps only in a: 3 of 3" in out


def test_an_order_that_several_lists_make() -> None:
    """What a later list alone has stands behind what it has before it there; at its beginning, before the next that is known."""
    order: Order[str] = Order()
    for items in ("abcd", "axbb", "ybd", "cde", "pq", ""):
        order.add(items)
    assert "".join(order) == "axybcdepq"
    assert len(order) == 9


def _train(root: Path, wrapped_by: str) -> None:
    """Two steps; monitor and dump."""
    import torch
    from torch import nn

    from msprobe.pytorch import TorchProbe

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return x + torch.relu(self.up(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x) + 1.0
            return x

    torch.manual_seed(0)
    model: nn.Module = Net()
    if wrapped_by == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if wrapped_by == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS[wrapped_by],))
        for layer in next(model.children()).children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"strict": True, "output_dir": str(root), "monitor": {"activations": True}, "sinks": {"csv": {"enabled": True}}}
    file = root.with_name(f"{root.name}-{os.getpid()}.json")  # of each rank: another one may read it while it is written
    file.write_text(json.dumps(settings | {"dump": {"task": "statistics", "level": "mix"}}))
    probe = TorchProbe.from_config(str(file))
    probe.attach(model, optimizer)
    x = torch.ones(4, 8)
    for step in range(2):
        probe.begin_step(step)
        loss = (model(x) + 1.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": loss})
    probe.close()


RANKS = {"bare": 1, "ddp": 1, "fsdp2": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bare``, ``ddp`` and ``fsdp2``: one model; all ranks have the same batch."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("trained")
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "msprobe.pytorch"):
        importlib.import_module(name)  # once, in the process that is forked
    for name, ranks in RANKS.items():
        run_ranks(ranks, _train, root / name, name)
    return root


def _is_piece(metric: str, target: Target) -> bool:
    """Rows of a dump that hold what is a rank's own with FSDP2: parameters, and the calls of the optimizer."""
    return metric == "parameters_grad" or ".parameters." in target.name or outside(target.name)


@pytest.mark.parametrize("pair", [("ddp", "bare"), ("fsdp2", "bare"), ("ddp", "fsdp2")])
@pytest.mark.fast_cells("pair1")
def test_a_trained_model_is_the_same_however_it_is_wrapped(pair: tuple[str, str], trained: Path) -> None:
    """Rows of monitor and dump stand beside those of the other run, also calls of the wrapped module itself, which a bare model does not
    tell from those of the loss. No number differs but those of pieces, and rows of one run alone are what a wrapper itself does."""
    trends = collect([open_source(trained / name) for name in pair])
    assert trends.compared > 150
    rows = {(name, i): target for name, metric in trends.metrics.items() for i, target in enumerate(metric.targets)}
    different = [(one.metric, rows[one.metric, one.target]) for one in trends.apart]
    assert bool(different) == ("fsdp2" in pair)
    assert not [row for row in different if not _is_piece(*row)]
    for run in trends.runs:
        missing = [
            target
            for (name, i), target in rows.items()
            if not any(of == name and not grid.cube.missing[i].all() for (of, _), grid in run.grids.items())
        ]
        assert not [target.name for target in missing if not outside(target.name) and not target.name.startswith("Module.Net.")]
        assert len(missing) < 60
    said = [str(what) for run in trends.runs for what in run.problems]
    assert any(what.startswith("'module.' taken off the front of the names of ddp") for what in said) == ("ddp" in pair)
    assert any(what.startswith("'FSDP' taken off the class names of fsdp2") for what in said) == ("fsdp2" in pair)
    assert any(what.startswith("ranks: ") for what in said) == ("fsdp2" in pair)
