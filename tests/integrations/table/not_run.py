"""Cells that have not run, with the reason: tests/integrations/not_run.yaml. The first row of the file that fits a cell counts.

- framework: DeepSpeed      # "*": all
  version: "0.15.4"         # left out: all; other: all but the newest that has run
  layout: ZeRO 3, 2 ranks   # a list: what is left of these rows; "*": what is left of every row that the table has anyway
  features: [dump L1]       # all: every feature that did not run
  status: not supported     # or: not run here
  why: one sentence
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from cell_names import FEATURES, FRAMEWORKS
from cells_file import Cell, Row

FILE = Path(__file__).parents[1] / "not_run.yaml"
STATES = ("not run here", "not supported")
_KEYS = {"framework", "version", "layout", "features", "status", "why"}


class Reason(NamedTuple):
    """One row of the file."""

    framework: str
    version: str | None
    layouts: tuple[str, ...]
    features: tuple[str, ...]
    status: str
    why: str

    def fits(self, row: Row, feature: str, newest: Collection[Row]) -> bool:
        """Is this the reason for that cell, when it has not run? `newest`: rows of the newest version of each framework."""
        return (
            self.framework in ("*", row.framework)
            and (self.version in (None, row.version) or (self.version == "other" and row not in newest))
            and ("*" in self.layouts or row.layout in self.layouts)
            and feature in self.features
        )


def read(file: Path = FILE) -> list[Reason]:
    """The rows of the file; raises ValueError for one that is wrong."""
    return [_reason(number, item) for number, item in enumerate(yaml.safe_load(file.read_text(encoding="utf-8")) or [], 1)]


def _reason(number: int, item: dict[str, Any]) -> Reason:
    where = f"row {number} of {FILE.name}"
    if set(item) - _KEYS or not {"framework", "layout", "features", "status", "why"} <= set(item):
        raise ValueError(f"{where} has the keys {sorted(item)}; allowed are {sorted(_KEYS)}, all but version must be there")
    layouts = tuple(item["layout"]) if isinstance(item["layout"], list) else (item["layout"],)
    features = FEATURES if item["features"] == "all" else tuple(item["features"])
    if item["framework"] not in ("*", *FRAMEWORKS) or not set(features) <= set(FEATURES) or item["status"] not in STATES:
        raise ValueError(f"{where}: framework {item['framework']!r}, features {features} or status {item['status']!r} is not in the table")
    version = item.get("version")
    return Reason(
        item["framework"], None if version is None else str(version), layouts, features, item["status"], " ".join(item["why"].split())
    )


def rows(cells: Iterable[Cell], reasons: Iterable[Reason], versions: dict[str, str]) -> set[Row]:
    """All rows of the table: what ran, and layouts of which a reason says that nothing did.

    Args:
        versions: of frameworks of which no version is in such a row.
    """
    found = {cell.row for cell in cells}
    for reason in (reason for reason in reasons if reason.features == FEATURES):
        for layout in reason.layouts:
            there = any(row.framework == reason.framework and row.layout == layout for row in found)
            if "*" not in (reason.framework, layout) and reason.version != "other" and not there:
                found.add(Row(reason.framework, reason.version or versions.get(reason.framework) or "any", layout))
    return found


def contradictions(cells: Iterable[Cell], reasons: Iterable[Reason]) -> list[str]:
    """Cells that have run although a row for one layout that names the feature says they have not."""
    found = []
    for reason in reasons:
        if (
            "*" in (reason.framework, *reason.layouts)
            or len(reason.layouts) > 1
            or reason.features == FEATURES
            or reason.version == "other"
        ):
            continue
        for cell in cells:
            if reason.fits(cell.row, cell.feature, ()):
                found.append(f"{' / '.join(cell.row)} / {cell.feature}: {reason.status}: {reason.why}; but it ran: {', '.join(cell.tests)}")
    return found
