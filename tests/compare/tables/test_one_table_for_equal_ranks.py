"""Of many ranks those that hold the same have one table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver_dumps import dump, pair

from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.api import compare_dumps
from msprobe_engine.report.table.same_ranks import MANY

RANKS = MANY + 4
OPTIONS = CompareOptions(scheduler="serial")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """All ranks hold the same but rank 1 of the target; each names its own group."""
    root = tmp_path_factory.mktemp("many")
    sides = pair(root, RANKS, wrong=3)
    for side in sides:
        for rank in range(RANKS):
            file = side / "step0" / f"rank{rank}" / "dump.json"
            document = json.loads(file.read_text())
            group = {"type": "torch.ProcessGroup", "group_ranks": [rank, rank + RANKS]}
            document["data"]["Distributed.all_reduce.0.forward"] = {"input_args": [], "input_kwargs": {"group": group}, "output": []}
            file.write_text(json.dumps(document, indent=1))
    return sides


def totals(summary: Path) -> dict[str, Any]:
    document = json.loads(summary.read_text())
    return {name: document[name] for name in ("finding", "first_suspect", "exit_code", "verdicts", "rows", "only_target", "only_golden")}


def test_the_summary_says_the_same_with_fewer_tables(runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are different ones. The others name whose table is theirs; what is counted over all ranks stays."""
    few = compare_dumps(*runs, tmp_path / "few", OPTIONS)
    monkeypatch.setattr("msprobe_engine.report.table.same_ranks.MANY", RANKS)
    all_of_them = compare_dumps(*runs, tmp_path / "all", OPTIONS)
    assert (len(few.files), len(all_of_them.files)) == (2, RANKS)
    assert few.summary is not None
    assert all_of_them.summary is not None
    assert totals(few.summary) == totals(all_of_them.summary)
    assert [result.same_as for result in few.results] == ["", ""] + ["./compare_result_rank0"] * (RANKS - 2)
    assert any(note.startswith(f"{RANKS - 2} ranks have no table of their own") for note in few.notes)
    for one, other in zip(few.files, all_of_them.files):
        assert Path(one).read_bytes() == Path(other).read_bytes()


def test_the_tables_of_the_existing_tool_are_all_there(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert len(compare_dumps(*runs, tmp_path, replace(OPTIONS, compat=True)).files) == RANKS


def test_a_rank_that_cannot_be_read_has_its_own_answer(tmp_path: Path) -> None:
    """Damaged ranks follow nobody, and nobody follows them."""
    target, golden = pair(tmp_path, RANKS - 1)
    for side in (target, golden):
        dump(side / "step0" / f"rank{RANKS - 1}")
    for rank in (0, 5):
        file = target / "step0" / f"rank{rank}" / "dump.json"
        file.write_text(file.read_text()[:-40])
    found = compare_dumps(target, golden, tmp_path / "out", OPTIONS)
    assert found.exit_code == 3
    assert len([problem for problem in found.all_problems if "cut off" in problem or "damaged" in problem]) >= 2
    assert not found.results[0].same_as
    assert not found.results[5].same_as
    assert {result.same_as for result in found.results[2:5]} == {"./compare_result_rank1"}


def test_an_earlier_try_whose_table_is_gone(tmp_path: Path) -> None:
    """The table that others follow is made again, and they do not count as done without it."""
    target, golden = pair(tmp_path, RANKS, wrong=3)
    file = target / "step0/rank5/dump.json"
    file.write_text(file.read_text()[:-40])
    first = compare_dumps(target, golden, tmp_path / "out", OPTIONS)
    (table,) = (file for file in first.files if "rank0_" in file)
    Path(table).unlink()
    again = compare_dumps(target, golden, tmp_path / "out", OPTIONS)
    assert any("of an earlier try" in note for note in again.notes)
    assert sorted(again.files) == sorted(first.files)
    assert all(Path(file).is_file() for file in again.files)
    assert [result.same_as for result in again.results] == [result.same_as for result in first.results]
