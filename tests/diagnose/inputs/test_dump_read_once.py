"""A dump is read as often as needed: once, and again only where the first reading has shown something that nothing was held against."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find import findings, single_run
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump import stream
from msprobe_engine.formats.dump.replicas import template
from msprobe_engine.report.table.api import compare_dumps


def _tensor(value: float, shape: list[int]) -> dict[str, Any]:
    four = {"Max": value, "Min": -value, "Mean": value / 8, "Norm": 3 * value}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": shape, **four, "requires_grad": True}


def _run(root: Path, bad: float | None = None, ranks: int = 1) -> Path:
    """Three calls; with `bad`, a fourth one between them that gives out this number."""
    data = {
        "Functional.linear.0.forward": {"input_args": [_tensor(1.0, [4, 4])], "input_kwargs": {}, "output": [_tensor(3.0, [4, 4])]},
        "Torch.softmax.0.forward": {"input_args": [_tensor(3.0, [4, 4])], "input_kwargs": {}, "output": [_tensor(0.5, [4, 4])]},
    }
    if bad is not None:
        data["Torch.log.0.forward"] = {"input_args": [_tensor(0.25, [7])], "input_kwargs": {}, "output": [_tensor(bad, [7])]}
    data["Tensor.sum.0.forward"] = {"input_args": [_tensor(0.5, [4, 4])], "input_kwargs": {}, "output": [_tensor(0.75, [1])]}
    for rank in range(ranks):
        directory = root / "step0" / f"rank{rank}"
        directory.mkdir(parents=True)
        header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
        (directory / "dump.json").write_text(json.dumps(header | {"data": data}, indent=1))
        (directory / "construct.json").write_text(json.dumps(dict.fromkeys(data)))
        (directory / "stack.json").write_text("{}")
    return root


def test_nan_in_a_call_of_one_run(tmp_path: Path) -> None:
    """It has no partner to differ from; diagnose and compare name it all the same, when the golden run has none."""
    target, golden = _run(tmp_path / "target", float("nan")), _run(tmp_path / "golden")
    found = diagnose(target, golden)
    compared = compare_dumps(target / "step0", golden / "step0", tmp_path / "out").diagnosis
    for one in (found, compared):
        assert one is not None
        assert one.finding == findings.NONFINITE
        assert one.suspects[0].record == "Torch.log.0.forward"
    assert diagnose(golden, target, exact=True).finding == findings.STRUCTURE


@pytest.mark.parametrize("more", [None, 2.0])
def test_runs_without_nan_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: float | None) -> None:
    """Equal runs, and a call more that is finite: nothing is left to look for in the run alone."""
    target, golden = _run(tmp_path / "target", more), _run(tmp_path / "golden")
    monkeypatch.setattr(single_run, "diagnose_alone", lambda _: pytest.fail("read again"))
    assert diagnose(target, golden).finding == findings.NONE
    assert diagnose(target, golden, exact=True).finding == (findings.NONE if more is None else findings.STRUCTURE)


@pytest.mark.parametrize("command", ["diagnose", "compare"])
def test_each_directory_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Whoever needs to know what a dump holds gets it from the one who has looked."""
    target, golden = _run(tmp_path / "target", float("nan"), ranks=2), _run(tmp_path / "golden", ranks=2)
    listed: Counter[str] = Counter()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def lists(path: Any = ".") -> Any:
            listed[str(path)] += 1
            return real(path)

        return lists

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    found = diagnose(target, golden) if command == "diagnose" else compare_dumps(target, golden, tmp_path / "out").diagnosis
    assert found is not None
    assert found.finding == findings.NONFINITE
    assert {place: listed[str(place)] for root in (target, golden) for place in (root, root / "step0")} == dict.fromkeys(
        (target, target / "step0", golden, golden / "step0"), 1
    )


def test_a_run_alone_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for NaN and the checks across ranks share one reading of each dump.json."""
    target = _run(tmp_path / "target", ranks=2)
    read: list[str] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def reads(path: Path, *args: Any) -> Any:
            read.extend([f"{path.parent.name}/{path.name}"] if path.name == "dump.json" else [])
            return real(path, *args)

        return reads

    monkeypatch.setattr("msprobe_engine.formats.dump.read_table.open_records", counted(stream.open_records))
    monkeypatch.setattr("msprobe_engine.formats.dump.replicas.template.read_step_file", counted(template.read_step_file))
    found = diagnose(target)
    assert found.finding == findings.NONE
    assert found.looked_at["collectives"] == 0
    assert sorted(read) == ["rank0/dump.json", "rank1/dump.json"]
