"""Megatron-core with stages, interleaved stages and experts on two ranks beside one process: the layout is no difference, a defect is."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "fault_set"))

from fault_megatron import dump
from fault_stages import LAYOUTS, PLANTED

from msprobe_engine.find.run import diagnose
from msprobe_engine.report.graph.global_suspect import node_of
from msprobe_engine.report.graph.merge.make import build_merged_graph
from msprobe_engine.report.graph.nodes.model import Comparison, Graph
from msprobe_engine.report.graph.options import GraphOptions
from msprobe_engine.report.graph.source import jobs_of

pytestmark = pytest.mark.framework
CASES = [
    ("wrong eps in a layer of the second half", "vpp"),
    ("gradient of a micro batch lost", "pp"),
    ("stale weight of one expert", "ep"),
    ("other routing on one rank", "ep"),
]
"""The others: `benchmarks/layouts.py --stages`."""
STEPS = {"pp": 1, "vpp": 1, "ep": 2}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


def golden(dumps: Path, layout: str) -> Path:
    argv = LAYOUTS[layout][2]
    return dump(dumps / argv.replace(" ", ""), 1, argv, steps=STEPS[layout])


def dealt_out(dumps: Path, layout: str) -> Path:
    """The same on several ranks."""
    return dump(dumps / layout, *LAYOUTS[layout][:2], steps=STEPS[layout])


@functools.cache
def diagnosed(dumps: Path, name: str, layout: str) -> tuple[Path, Any]:
    """A dump with a defect, of one step, and the first suspect in it."""
    (case,) = (case for case in PLANTED if case.name == name)
    path = dump(dumps / f"{name} {layout}", *LAYOUTS[layout][:2], case.plant, steps=1)
    return path, diagnose(path, golden(dumps, layout)).first_suspect


@pytest.mark.fast_cells("pp-False")
@pytest.mark.parametrize(("layout", "turned"), [("pp", False), ("vpp", True), ("ep", False)])
@pytest.mark.slow
def test_layout_is_no_difference(layout: str, turned: bool, dumps: Path) -> None:
    """Nothing is found, whichever of the two is called golden, and nearly all records were compared; of experts on other ranks, those
    that are no part of a sum over tokens."""
    both = dealt_out(dumps, layout), golden(dumps, layout)
    found = diagnose(*(reversed(both) if turned else both))
    assert found.finding == "none", found.headline()
    assert not found.problems
    assert any("different layouts" in line for line in found.evidence)
    assert found.looked_at["records"] > (1150 if layout == "ep" else 1250) * STEPS[layout]
    assert found.looked_at["steps"] == ("0, 1" if STEPS[layout] == 2 else "0")


@pytest.mark.fast_cells("gradient of a micro batch lost-pp")
@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.slow
def test_defect(name: str, layout: str, dumps: Path) -> None:
    """The first suspect is the planted defect: its record as the dump of the rank to blame has it, its module in the whole model."""
    (case,) = (case for case in PLANTED if case.name == name)
    _, first = diagnosed(dumps, name, layout)
    assert first is not None
    assert re.fullmatch(case.record, first.record), first
    assert re.fullmatch(case.module, first.module), first
    assert (first.rank, first.step) == (case.ranks[layout], 0)


AUTO = GraphOptions(merge="auto", steps=frozenset({0}))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp", "vpp", "ep"])
def test_one_graph_of_all_ranks(layout: str, dumps: Path) -> None:
    """The graph has the layers and the experts of the whole model, each once, and against one process no node is an error.

    The checks of 26.2.0 compare numbers that are arguments exactly: a coefficient of clipping whose norm was summed in another order is an
    error for them, and one that happens to round alike is none.
    """
    one, target = golden(dumps, layout), dealt_out(dumps, layout)
    (job,) = jobs_of(target, None, AUTO).jobs
    alone = build_merged_graph(job, AUTO, [], [])
    assert isinstance(alone, Graph)
    (job,) = jobs_of(target, one, AUTO).jobs
    both = build_merged_graph(job, AUTO, [], [])
    assert isinstance(both, Comparison)
    modules = [{name for name in graph.names if name.startswith("Module.") and ".forward.0" in name} for graph in (alone, both.golden)]
    assert modules[1] <= modules[0]
    assert both.suspect is None
    assert not any(value == 1 and both.units[node] > 1 for node, value in enumerate(both.index))
    compared = [node for node, units in enumerate(both.units) if units == units]
    assert len(compared) > 1000
    assert sum(both.units[node] > 1 for node in compared) < 0.01 * len(compared)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("wrong eps in a layer of the second half", "vpp"), ("stale weight of one expert", "ep")])
def test_a_defect_has_its_node_in_the_whole(name: str, layout: str, dumps: Path) -> None:
    """What is named with a rank is found in the graph of all ranks, inside of the planted module."""
    (case,) = (case for case in PLANTED if case.name == name)
    path, first = diagnosed(dumps, name, layout)
    assert first is not None
    (job,) = jobs_of(path, golden(dumps, layout), AUTO).jobs
    found = build_merged_graph(job, AUTO, [], [])
    assert isinstance(found, Comparison)
    node = node_of(found.target, first.rank, first.record)
    assert node is not None
    assert found.suspect == node
    around = [found.target.names[one] for one in (*found.target.ancestors(node, 100), node)]
    assert any(re.search(rf"Module\.{case.module}\.", label) for label in around), around
