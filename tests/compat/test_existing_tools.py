"""The existing tool's own compare and graph build take our dumps of the same training."""

from __future__ import annotations

from pathlib import Path

import existing_environment
import existing_tool
import graphs
import pytest
from cells import SUITE, Cell
from matching import Context, differences, load, owner
from suite import pairs

pytestmark = [pytest.mark.framework, pytest.mark.existing_tool, pytest.mark.timeout(1800)]
COMPARED = [("statistics", "statistics"), ("statistics", "md5"), ("tensor", "statistics")]
GOOD = ("", "pass", "Pass", "Yes")
ROUNDING = 1e-3
"""Percent: 1e-5, of means near zero."""


def both(version: str, cell: Cell) -> tuple[Path, Path]:
    """The rank directories of the first step, ours and theirs."""
    return pairs(SUITE.ours(), SUITE.theirs(version), cell)[0]


def with_reason(version: str, cell: Cell, ours: Path, theirs: Path) -> set[str]:
    """The records in which the two dumps differ by a documented rule."""
    context = Context(cell, version, load(ours), load(theirs))
    explained = [d for d in differences(context.ours, context.theirs) if SUITE.explain(d, context)]
    return {d.record for d in explained} | {d.theirs for d in explained if d.kind == "name"}


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize(("task", "mode"), COMPARED)
@pytest.mark.parametrize("version", existing_environment.VERSIONS)
def test_compare_matches_our_dump_with_theirs(tmp_path: Path, version: str, task: str, mode: str, level: str) -> None:
    """Its dump as target, ours as golden: no error, a row for every row of theirs, matched and judged good but for the records that
    a documented rule names; and the other way round no error either."""
    cell = Cell(task, level, mode, 1)
    ours, theirs = both(version, cell)
    venv = existing_environment.existing_tool(version).directory
    rows = existing_tool.compare(version, venv, theirs / "dump.json", ours / "dump.json", tmp_path / "theirs")
    data = load(theirs).data
    bad = {owner(row["NPU Name"], data) for row in rows if not _good(row)}
    assert bad - with_reason(version, cell, ours, theirs) == set()
    good = sum(_good(row) for row in rows)
    print(version, cell, f"{good} of {len(rows)} rows matched and good")
    assert good > 0.5 * len(rows)
    if mode == "statistics":
        back = existing_tool.compare(version, venv, ours / "dump.json", theirs / "dump.json", tmp_path / "ours")
        assert len(back) >= good


def _good(row: dict[str, str]) -> bool:
    """Matched, and the same by its verdict. It warns when an output differs ten times as much as its input, however little that is:
    sums in double and sums in float32 differ by 1e-8 where those of the input happen to agree. And two nulls have no verdict."""
    if row["Bench Name"] in ("N/A", ""):
        return False
    if row["NPU Dtype"] == row["Bench Dtype"] == "None":
        return True
    verdict = row.get("Result", row.get("Accuracy Reached or Not", ""))
    if verdict == "warning" and "10 times that of input" in row["Err_message"]:
        return all(float(row[f"{kind}RelativeErr"].rstrip("%")) < ROUNDING for kind in ("Max", "Min", "Mean", "Norm"))
    return verdict in GOOD


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("version", existing_environment.VERSIONS)
def test_graph_of_our_dump(tmp_path: Path, version: str, level: str) -> None:
    """The graph of our dump has every node of theirs under the same parent, modules and calls alike, but for documented differences;
    compared with each other, the same nodes are matched."""
    cell = Cell("statistics", level, "statistics", 1)
    ours, theirs = both(version, cell)
    venv = existing_environment.existing_tool(version).directory
    reasons = with_reason(version, cell, ours, theirs)
    mine = graphs.build(version, venv, tmp_path / "ours", ours)["NPU"]
    other = graphs.build(version, venv, tmp_path / "theirs", theirs)["NPU"]
    common = [name for name in other if name in mine]
    assert {n for n in other if n not in mine and other[n].kind != "collection"} - reasons == set()
    assert {
        n for n in common if mine[n] != other[n] and "collection" not in (mine.get(mine[n].parent, other[n]).kind, other[n].kind)
    } <= reasons
    extra = [n for n in mine if n not in other and mine[n].kind != "collection"]
    assert set(extra) <= reasons
    print(version, cell, f"nodes: {len(mine)} ours, {len(other)} theirs, {len(common)} in both, {len(extra)} only ours")
    matched = graphs.build(version, venv, tmp_path / "both", theirs, ours)["NPU"]
    # it numbers groups of calls between modules and matches their members by that number; calls of its own (8.1.1) make more groups
    shifted = {n for n in matched if version == "8.1.1" and matched.get(matched[n].parent, matched[n]).kind == "collection"}
    assert {n for n, node in matched.items() if not node.matched and node.kind != "collection"} - reasons - shifted <= {"DefaultModel"}


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_graph_of_the_task_structure(tmp_path: Path, level: str) -> None:
    """A dump of task structure, which is made for graphs, gives the nodes of the statistics dump that are forward calls or gradients."""
    ours, _ = both("26.2.0", Cell("structure", level, "statistics", 1))
    venv = existing_environment.existing_tool("26.2.0").directory
    graph = graphs.build("26.2.0", venv, tmp_path / "graph", ours)["NPU"]
    assert set(load(ours).construct) - {"megatron_micro_step_number"} <= set(graph)
