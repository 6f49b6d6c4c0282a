"""The cells that have run, kept beside the page: one JSON object per line, sorted, each with the tests that prove it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cell_names import FEATURES, FRAMEWORKS, checked

FILE = Path(__file__).with_name("cells.jsonl")
ROOT = Path(__file__).parents[3]
_ORDER = {name: i for i, name in enumerate(FRAMEWORKS)}


class Row(NamedTuple):
    """One row of the table."""

    framework: str
    version: str
    layout: str


class Cell(NamedTuple):
    """One cell that has run and was correct."""

    row: Row
    feature: str
    torch: tuple[str, ...]
    """Versions of torch that it ran with."""
    python: tuple[str, ...]
    tests: tuple[str, ...]
    """``file::function`` without parameters."""
    compared: bool = True
    """Were its values compared? False: what was asked for was there."""


def number(version: str) -> tuple[int, ...]:
    """Sorts 0.9 before 0.16; what is no number counts nothing."""
    return tuple(map(int, re.findall(r"\d+", version)))


def order(row: Row) -> tuple[object, ...]:
    """Sorts rows as the page has them: the newest version first."""
    return (_ORDER[row.framework], [-n for n in number(row.version)], row.layout)


def gathered(directory: Path) -> list[Cell]:
    """What the test processes have written there (``MSPROBE_TABLE``)."""
    found: dict[tuple[Row, str, bool], list[set[str]]] = {}
    for file in sorted(directory.glob("cells-*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            note = json.loads(line)
            checked(note["framework"], (note["feature"],))
            torch, python, tests = found.setdefault(
                (Row(note["framework"], note["version"], note["layout"]), note["feature"], note["compared"]), [set(), set(), set()]
            )
            torch.add(note["torch"])
            python.add(note["python"])
            tests.add(note["test"].partition("[")[0])
    return [
        Cell(row, feature, *(tuple(sorted(s)) for s in sets), compared)
        for (row, feature, compared), sets in found.items()
        if compared or (row, feature, True) not in found
    ]


def merged(kept: Iterable[Cell], new: Iterable[Cell], root: Path = ROOT) -> list[Cell]:
    """New cells, and kept ones that the new run did not have and that still have a test below `root`."""
    new = list(new)
    ran = {(cell.row, cell.feature) for cell in new}
    left = [cell._replace(tests=tuple(test for test in cell.tests if _exists(test, root))) for cell in kept]
    return _sorted([*new, *(cell for cell in left if cell.tests and (cell.row, cell.feature) not in ran)])


def _exists(test: str, root: Path) -> bool:
    file, *_, function = test.split("::")
    path = root / file
    return path.is_file() and re.search(rf"^\s*def {re.escape(function)}\(", path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def read(file: Path = FILE) -> list[Cell]:
    """The kept cells; none when there is no file."""
    if not file.exists():
        return []
    cells = []
    for line in file.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        checked(item["framework"], (item["feature"],))
        row = Row(item["framework"], item["version"], item["layout"])
        cells.append(Cell(row, item["feature"], tuple(item["torch"]), tuple(item["python"]), tuple(item["tests"]), item["compared"]))
    return _sorted(cells)


def write(cells: Iterable[Cell], file: Path = FILE) -> None:
    """Keep these cells."""
    with open(file, "w", encoding="utf-8") as f:
        for cell in _sorted(cells):
            f.write(json.dumps({**cell.row._asdict(), **{k: v for k, v in cell._asdict().items() if k != "row"}}) + "\n")


def _sorted(cells: Iterable[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: (*order(cell.row), FEATURES.index(cell.feature)))
