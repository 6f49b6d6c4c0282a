"""With `compat` the tables equal those of the existing tool cell for cell, of statistics and of saved tensors: its dumps, its comparisons
(`tests/fixtures/compare`, made by `make_existing_compare.py` and `make_existing_tensors.py`)."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from msprobe_engine.align.calls.match import match
from msprobe_engine.find.verdicts.advisor import Advisor
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_engine.measure.columns import COLOUR
from msprobe_engine.measure.options import NEW, OLD, CompareOptions
from msprobe_engine.measure.tensors.mode import Pair, TensorMode
from msprobe_engine.report.table.pairs import compare_pair

FIXTURES = Path(__file__).parents[2] / "fixtures" / "compare"
GROUPS = [(path.parent.name, path.name.removesuffix(".tar.xz")) for path in sorted(FIXTURES.glob("*/*.tar.xz"))]

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(version, column) -> why its cells are not compared."""

PROCESSOR = ("Cosine", "EucDist")
"""Columns from numpy's BLAS, whose order of summation is that of the processor: the existing tool itself, run on another machine, has
another last digit there (seen: 0.03599008454025963 and ...64 for one pair). They are compared to four rounding units."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The archives, unpacked."""
    found = {}
    for version, group in GROUPS:
        found[version, group] = root = tmp_path_factory.mktemp(f"{version}_{group}")
        with tarfile.open(FIXTURES / version / f"{group}.tar.xz") as archive:
            archive.extractall(root, filter="data")
    return found


def _theirs(path: Path) -> tuple[list[str], list[list[Any]], list[str]]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
        return rows[0], rows[1:], []
    document = json.loads(path.read_text())
    return document["rows"][0], document["rows"][1:], document["colours"]


def _equal(version: str, column: str, ours: Any, theirs: Any) -> bool:
    """csv: the same text. xlsx: numbers are stored with 16 digits; an empty cell is None, and what is no finite number is text."""
    if column in PROCESSOR and isinstance(ours, float) and abs(ours - _number(theirs)) <= 4 * 2.2e-16 * abs(ours):
        return True
    if version == "26.2.0":
        if isinstance(ours, float) and ours in (float("inf"), -float("inf")):
            return bool(theirs == f" {ours}")
        return bool(theirs == str(ours))
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return abs(ours - theirs) <= 2e-16 * abs(ours) or f"{ours:.16g}" == f"{theirs:.16g}"
    if isinstance(ours, float) and str(ours) in ("inf", "-inf", "nan"):
        return bool(theirs == f"{ours}\t")
    if isinstance(ours, int) and not isinstance(ours, bool):
        return bool(ours == theirs)
    return (theirs or "") == str(ours)


def _number(cell: Any) -> float:
    """A cell of either table as a number, NaN where it is none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return math.nan


@pytest.mark.fast_cells("26.2.0-debug", "26.2.0-md5_mix", "26.2.0-statistics_L0", "26.2.0-statistics_L1")
@pytest.mark.parametrize(("version", "group"), GROUPS)
def test_every_cell_equals_theirs(version: str, group: str, unpacked: dict[tuple[str, str], Path]) -> None:
    """Columns, rows, cells, colours of rows, and the row that the advice names."""
    root = unpacked[version, group]
    tables = [path for path in sorted((root / "tables").iterdir()) if path.suffix in (".csv", ".json")]
    assert tables, f"no table of {version} in {group}"
    for path in tables:
        fault, _, rank = path.stem.partition("_rank")
        name = "debug.json" if group == "debug" else "dump.json"
        sides = (fault if (root / fault).exists() else "golden", "golden")  # "same" is not kept everywhere
        target, golden = (read_side(root / side / (f"rank{rank}" if rank else "") / name) for side in sides)
        options = CompareOptions(columns=version, compat=True, workers=1)
        blocks = list(compare_pair(target, golden, match(target, golden, options), options))
        header, theirs, colours = _theirs(path)
        names = [column for column in blocks[0] if column != COLOUR]
        assert names == header
        rows = [cells for block in blocks for cells in zip(*(block[column] for column in names))]
        assert len(rows) == len(theirs), path.name
        wrong = [
            (mine[0], column, cell, other)
            for mine, row in zip(rows, theirs)
            for column, cell, other in zip(names, mine, row)
            if (version, column) not in EXCEPTIONS and not _equal(version, column, cell, other)
        ]
        assert not wrong, f"{path.name}: {len(wrong)} cells, first {wrong[:3]}"
        if version == "8.1.1":
            shown = [colour for block in blocks for colour in block.get(COLOUR, [""] * len(block[names[0]]))]
            assert shown == colours, path.name
            advisor = Advisor()
            for block in blocks:
                advisor.add_block(block)
            assert advisor.text().splitlines()[:2] == path.with_suffix(".txt").read_text().splitlines()[:2], path.name


SPEC = importlib.util.spec_from_file_location("make_existing_tensors", FIXTURES.parent / "make_existing_tensors.py")
assert SPEC is not None
assert SPEC.loader is not None
MAKER = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MAKER)


def close(ours: object, theirs: str) -> bool:
    """Equal text, or the number that the cell shows: a sheet keeps 16 digits of it."""
    theirs = theirs.strip()
    if isinstance(ours, str):
        return ours == theirs
    try:
        return ours == pytest.approx(float(theirs), rel=1e-14, abs=0)
    except ValueError:
        return False


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for side, which in (("target", 0), ("golden", 1)):
        folder = tmp_path_factory.mktemp(side)
        (folder / "dump_tensor_data").mkdir()
        for number, pair in enumerate(MAKER.pairs().values()):
            if pair[which] is not None:
                torch.save(pair[which], folder / "dump_tensor_data" / f"{number}.pt")
        found[side] = folder
    return found


@pytest.mark.parametrize("rule", [OLD, NEW])
def test_every_cell_is_the_existing_tools(rule: str, sides: dict[str, Path]) -> None:
    """Odd pairs: all dtypes, zeros, NaN, Inf, single elements, views, missing files. The messages of 26.2.0 are not in its table."""
    expected = json.loads((FIXTURES / f"odd_tensors_{rule}.json").read_text())
    mode = TensorMode(TensorFiles(sides["target"]), TensorFiles(sides["golden"]), rule)
    wrong = {}
    for number, name in enumerate(MAKER.pairs()):
        if name not in expected:
            continue
        found = mode.measure(Pair(f"{number}.pt", f"{number}.pt"))
        theirs = expected[name]
        if not all(map(close, found.cells, theirs[:6])):
            wrong[name] = found.cells, theirs[:6]
        if rule == OLD and not name.endswith("file missing"):
            reason = theirs[7].split("\nmaximum absolute error")[0]  # of the colours
            if found.message.strip() != reason.strip():
                wrong[name, "message"] = found.message, reason
    assert not wrong
    assert len(expected) >= 45
