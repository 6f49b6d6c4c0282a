"""Of many ranks those that hold the same have one graph; what is said and linked is that of all ranks."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from driver_dumps import pair, tensor

from msprobe_engine.report.graph import run as module
from msprobe_engine.report.graph.nodes.model import Comparison, Graph
from msprobe_engine.report.graph.options import DB, HTML, GraphOptions
from msprobe_engine.report.graph.page.page import PageWriter
from msprobe_engine.report.graph.run import run
from msprobe_engine.report.graph.summary import Result
from msprobe_engine.report.graph.writer import Plan
from msprobe_engine.report.table.same_ranks import MANY

RANKS, STAGES, BAD = MANY + 4, 2, 5
SUMMED = "Distributed.all_reduce.0.forward"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two stages, each a group that sums. All ranks of a stage hold the same, but for rank 1 of the target, which is wrong, and rank
    `BAD` of both, which has another number."""
    sides = pair(tmp_path_factory.mktemp("many"), RANKS, wrong=3)
    for side in sides:
        for rank in range(RANKS):
            file = side / "step0" / f"rank{rank}" / "dump.json"
            document = json.loads(file.read_text())
            data = document.pop("data")  # what is behind it in the file is no header
            stage = rank * STAGES // RANKS
            group = [one for one in range(RANKS) if one * STAGES // RANKS == stage]
            place = {"pp": stage, "dp": rank - group[0], "tp": 0, "ep": rank % 2}
            document["parallel"] = {"rank": place, "size": {"pp": STAGES, "dp": RANKS // STAGES, "tp": 1, "ep": 2}}
            last = tensor(9.0 if rank == BAD else 3.0)
            summed = {"type": "torch.ProcessGroup", "group_ranks": group}
            data[SUMMED] = {"input_args": [last], "input_kwargs": {"group": summed}, "output": [last]}
            file.write_text(json.dumps(document | {"data": data}, indent=1))
    return sides


class Kept:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.made: list[Graph | Comparison] = []
        self.plan: Plan | None = None

    def add(self, made: Graph | Comparison) -> None:
        """Keep it."""
        self.made.append(made)

    def finish(self) -> list[Path]:
        """Nothing is written."""
        return []

    def abort(self) -> None:
        """Nothing was written."""


def drawn(monkeypatch: pytest.MonkeyPatch, out: Path, *sides: Path, many: int = MANY, merge: str = "") -> tuple[Result, Kept]:
    """What is given to a writer of pages."""
    kept = Kept()

    def opened(_mode: str, plan: Plan) -> Kept:
        kept.plan = plan
        return kept

    monkeypatch.setattr(module, "open_writer", opened)
    monkeypatch.setattr("msprobe_engine.report.table.same_ranks.MANY", many)
    return run(sides[0], sides[1] if len(sides) > 1 else None, out, GraphOptions(workers=1, merge=merge)), kept


@pytest.mark.parametrize("both", [False, True])
def test_the_same_is_said_with_fewer_graphs(both: bool, runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for each different rank: what is found, and each node's links to all ranks, are those of graphs of all ranks."""
    sides = runs if both else runs[1:]
    few, mine = drawn(monkeypatch, tmp_path, *sides)
    all_of_them, theirs = drawn(monkeypatch, tmp_path, *sides, many=RANKS)
    different = [0, 1, BAD, RANKS // STAGES] if both else [0, BAD, RANKS // STAGES]
    assert [one.rank for one in mine.made] == different
    assert len(theirs.made) == RANKS
    assert (few.finding, few.headline, few.why, few.exit_code) == (
        all_of_them.finding,
        all_of_them.headline,
        all_of_them.why,
        all_of_them.exit_code,
    )
    assert few.same == RANKS - len(different)
    assert f"{len(different)} ranks (and {few.same} that hold the same)" in few.text()
    whole = {one.rank: one for one in theirs.made}
    for one in mine.made:
        other = whole[one.rank]
        if isinstance(one, Comparison):
            assert isinstance(other, Comparison)
            assert (one.suspect, one.suspect_text, one.leading) == (other.suspect, other.suspect_text, other.leading)
            one, other = one.target, other.target
        assert isinstance(other, Graph)
        assert one.links == other.links
        (link,) = one.links[one.index[SUMMED]]
        assert len(link.nodes_info) == RANKS // STAGES - 1


def test_copies_of_a_model_that_are_put_together(runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is two ranks of a tensor parallel group; those with rank 1, which is wrong, and with rank `BAD` are different ones."""
    for file in (side / "step0" / f"rank{rank}" / "dump.json" for side in runs for rank in range(RANKS)):
        document, rank = json.loads(file.read_text()), int(file.parent.name[4:])
        place, size = {"pp": 0, "dp": rank // 2, "tp": rank % 2}, {"pp": 1, "dp": RANKS // 2, "tp": 2}
        directory = tmp_path / file.parent.relative_to(runs[0].parent)
        shutil.copytree(file.parent, directory)
        (directory / file.name).write_text(json.dumps(document | {"parallel": {"rank": place, "size": size}}, indent=1))
    sides = tmp_path / "target", tmp_path / "golden"
    few, mine = drawn(monkeypatch, tmp_path, *sides, merge="auto")
    all_of_them, theirs = drawn(monkeypatch, tmp_path, *sides, many=RANKS, merge="auto")
    assert [one.rank for one in mine.made] == [0, 2, BAD - 1]
    assert len(theirs.made) == RANKS // 2
    assert (few.finding, few.headline, few.why) == (all_of_them.finding, all_of_them.headline, all_of_them.why)
    assert few.same == RANKS // 2 - 3
    whole = {one.rank: one for one in theirs.made}
    for one in mine.made:
        other = whole[one.rank]
        assert isinstance(one, Comparison)
        assert isinstance(other, Comparison)
        assert one.target.names == other.target.names
        assert (one.suspect, one.suspect_text) == (other.suspect, other.suspect_text)
        assert repr(one.units) == repr(other.units)


def test_who_holds_the_same_and_where_all_stand(runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coordinates that are not needed to tell ranks apart are left out."""
    _, kept = drawn(monkeypatch, tmp_path, runs[1])
    assert kept.plan is not None
    alike = kept.plan.alike
    half = RANKS // STAGES
    assert alike.same == {(0, 0): [rank for rank in range(1, half) if rank != BAD], (0, half): list(range(half + 1, RANKS))}
    assert alike.axes == ("pp", "dp")
    assert alike.places == {rank: divmod(rank, half) for rank in range(RANKS)}


def test_a_rank_that_cannot_be_read_follows_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, golden = pair(tmp_path, RANKS)
    for rank in (0, 7):
        file = golden / "step0" / f"rank{rank}" / "dump.json"
        file.write_text(file.read_text()[:-40])
    found, kept = drawn(monkeypatch, tmp_path / "out", golden)
    assert [one.rank for one in kept.made] == [1]
    assert found.exit_code == 3
    assert {problem.partition("/dump.json")[0][-5:] for problem in found.problems} == {"rank0", "rank7"}
    assert kept.plan is not None
    assert sum(map(len, kept.plan.alike.same.values())) == RANKS - 3


def test_files_of_the_existing_tool_have_all_ranks(tmp_path: Path) -> None:
    _, golden = pair(tmp_path, RANKS, calls=2)
    found = run(golden, None, tmp_path / "out", GraphOptions(formats=(HTML, DB), workers=1))
    (file,) = (path for path in found.files if path.suffix == ".db")
    with sqlite3.connect(file) as database:
        assert database.execute("select count(distinct rank) from tb_nodes").fetchone() == (RANKS,)
    assert not found.same


def test_the_page_names_them(runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest has the ranks of each graph as ranges, and the place of every rank."""
    pages: list[dict[str, Any]] = []
    data = PageWriter._data

    def seen(self: PageWriter) -> Any:
        for name, content in data(self):
            if name == "graph-manifest":
                pages.append(json.loads(content))
            yield name, content

    monkeypatch.setattr(PageWriter, "_data", seen)
    run(runs[1], None, tmp_path, GraphOptions(workers=1))
    (manifest,) = pages
    half = RANKS // STAGES
    assert [pair["same"] for pair in manifest["pairs"]] == [[f"1-{BAD - 1}", f"{BAD + 1}-{half - 1}"], [], [f"{half + 1}-{RANKS - 1}"]]
    assert manifest["map"]["axes"] == ["pp", "dp"]
    assert manifest["map"]["ranks"] == list(range(RANKS))
