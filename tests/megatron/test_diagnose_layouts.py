"""Megatron-core with stages, interleaved stages and experts on two ranks beside one process: the layout is no difference, a defect is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "fault_set"))

from fault_megatron import dump
from fault_stages import LAYOUTS, PLANTED

from msprobe_engine.diagnose.run import diagnose

pytestmark = pytest.mark.framework
CASES = [
    ("wrong eps in a layer of the second half", "vpp"),
    ("gradient of a micro batch lost", "pp"),
    ("stale weight of one expert", "ep"),
    ("other routing on one rank", "ep"),
]
"""The others: `benchmarks/layouts.py --stages`."""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


def golden(dumps: Path, layout: str) -> Path:
    argv = LAYOUTS[layout][2]
    return dump(dumps / argv.replace(" ", ""), 1, argv)


@pytest.mark.parametrize(("layout", "turned"), [("pp", False), ("vpp", True), ("ep", False)])
def test_layout_is_no_difference(layout: str, turned: bool, dumps: Path) -> None:
    """Nothing is found, whichever of the two is called golden, and nearly all records were compared."""
    ranks, argv, _ = LAYOUTS[layout]
    both = dump(dumps / layout, ranks, argv), golden(dumps, layout)
    found = diagnose(*(reversed(both) if turned else both))
    assert found.finding == "none", found.headline()
    assert not found.problems
    assert any("different layouts" in line for line in found.evidence)
    assert found.looked_at["records"] > 2500
    assert found.looked_at["steps"] == "0, 1"


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_defect(name: str, layout: str, dumps: Path) -> None:
    """The first suspect is the planted defect: its record as the dump of the rank to blame has it, its module in the whole model."""
    (case,) = (case for case in PLANTED if case.name == name)
    ranks, argv, _ = LAYOUTS[layout]
    path = dump(dumps / f"{case.name} {layout}", ranks, argv, case.plant)
    first = diagnose(path, golden(dumps, layout)).first_suspect
    assert first is not None
    assert re.fullmatch(case.record, first.record), first
    assert re.fullmatch(case.module, first.module), first
    assert (first.rank, first.step) == (case.ranks[layout], 0)
