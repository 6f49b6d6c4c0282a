"""``msprobe trends`` of two runs: which rows are the same; and of a directory of several runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.sinks.csv import CsvSink
from msprobe_engine.testing import frame_of
from msprobe_engine.trends.collect import collect
from msprobe_engine.trends.page_data import manifest
from msprobe_engine.trends.pairing import renamed, wrapped
from msprobe_engine.trends.source import SCALARS, Target, open_source


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
    first, second = (dict(run["problems"]) for run in manifest(trends)["runs"])
    assert first["rows only in ddp"] == 1
    assert second == {"rows only in bare": 2}
    assert main(["trends", str(ddp), str(bare)]) == 0
    out = capsys.readouterr().out
    assert "note: 'module.' taken off the front of all names of ddp" in out
    assert "note: rows only in bare (2)" in out


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
    assert wrapped(*sides) == depths


def test_names_without_their_wrappers() -> None:
    """Dumps keep the kind in front; what has no wrapper stays."""
    shown = [renamed(Target(n), 1).name for n in ("module.a.w", "Module.module.a.Linear.output.0", "Cell.module.a", "Functional.y.0")]
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
