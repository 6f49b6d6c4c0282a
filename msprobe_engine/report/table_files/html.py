"""A table as one html file that is searched and sorted in the browser without a network.

Its size is bounded: of long tables the rows that are not ``pass`` come first in what is kept, then the others, up to `MOST_ROWS`; the
page says how many rows the whole table has.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.io.safe_cells import utf8
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.measure.columns import COLOUR, GOLDEN_NAME, MESSAGE, TARGET_NAME, UNMATCHED
from msprobe_engine.report.table_files.tablefile import Block, TableFile
from msprobe_engine.report.web.markup import Html, paragraph, text, tiles
from msprobe_engine.report.web.page import Verdict, page
from msprobe_engine.report.web.sentences import both
from msprobe_engine.report.web.words import needs_scripts, words

MOST_ROWS = 20_000
_LONGEST = 2_000
"""Characters of a cell."""
_VERDICTS = ("Result", "Accuracy Reached or Not")
_TONES: tuple[Verdict, ...] = ("bad", "warn", "good")
_GOOD = frozenset(("pass", "Yes", "", None, "N/A"))


class HtmlTable:
    """See `msprobe_engine.report.table_files.Table`."""

    def __init__(self, path: Path, columns: Sequence[str], title: str, most_rows: int = MOST_ROWS, compat: bool = False) -> None:
        self.files = [path]
        self._columns = [name for name in columns if name != COLOUR]
        self._verdict = next((i for i, name in enumerate(self._columns) if name in _VERDICTS), None)
        self._titles = [name if compat else _title(name) for name in self._columns]
        self._title = title
        self._compat = compat
        self._most = most_rows
        self._file = TableFile(path)
        self._bad: list[tuple[int, list[Any]]] = []
        self._good: list[tuple[int, list[Any]]] = []
        self._rows = 0
        self._verdicts: Counter[str] = Counter()

    def write(self, block: Block) -> None:
        """Take rows, while there is room."""
        columns = [c.tolist() if isinstance(c, np.ndarray) else c for c in (block[name] for name in self._columns)]
        for row in zip(*columns):
            if self._verdict is not None:
                self._verdicts[str(row[self._verdict])] += 1
            bad = self._verdict is not None and row[self._verdict] not in _GOOD
            kept = self._bad if bad else self._good
            if len(kept) < self._most:
                kept.append((self._rows, [_cell(cell) for cell in row]))
            self._rows += 1

    def close(self) -> None:
        """Write the page."""
        kept = sorted([*self._bad, *self._good[: max(0, self._most - len(self._bad))]], key=lambda item: item[0])
        shown, rows = f"{len(kept):,}", f"{self._rows:,}"
        note = words("table", "rows", rows) if len(kept) == self._rows else words("table", "rows_left_out", rows, shown)
        said = -1 if self._compat or MESSAGE not in self._columns else self._columns.index(MESSAGE)
        shown_rows = [[both(cell) if i == said else cell for i, cell in enumerate(row)] for _, row in kept]
        data = {"columns": self._columns, "titles": self._titles, "verdict": self._verdict, "rows": shown_rows}
        island = json.dumps(data, ensure_ascii=True, separators=(",", ":")).encode()
        for piece in page(
            self._title,
            kind="table",
            body=self._tiles() + paragraph(note, soft=True) + needs_scripts(),
            scripts=("table.js",),
            sections=("table",),
            data=[("table", island)],
            headline=self._headline(),
            verdict=min(map(_tone, self._verdicts), key=_TONES.index, default=None),
            wide=True,
        ):
            self._file.write(piece)
        self._file.close()

    def _headline(self) -> Html | None:
        """Which row is off first, and why; None: the table has no verdicts (or is one of the existing tool's)."""
        if self._verdict is None or not self._rows or self._compat:
            return None
        if not self._bad:
            return words("table", "none_off")
        _, row = min(self._bad, key=lambda item: (_TONES.index(_tone(str(item[1][self._verdict or 0]))), item[0]))
        cells = dict(zip(self._columns, row))
        name = next((cells[side] for side in (TARGET_NAME, GOLDEN_NAME) if cells.get(side) not in (None, "", UNMATCHED)), "")
        reason = str(cells.get(MESSAGE) or "").strip().partition("\n")[0]
        return Html(words("table", "first_off", name) + text(Sentence("{0}", reason or row[self._verdict])))

    def _tiles(self) -> Html:
        """How many rows have which verdict, the worst first."""
        order = sorted((value for value in self._verdicts if value), key=lambda value: (_TONES.index(_tone(value)), value))
        return tiles((_cell(value), f"{self._verdicts[value]:,}", "" if _tone(value) == "good" else _tone(value)) for value in order)

    def abort(self) -> None:
        self._file.abort()


def _title(column: str) -> str:
    """A column in the words of the pages; only files of the existing tool speak of NPU and Bench."""
    for side, word in (("NPU", ""), ("Bench", "golden"), ("BENCH", "golden")):
        if column.startswith((f"{side} ", f"{side}_")):
            return f"{word} {column[len(side) + 1 :].replace('_', ' ')}".strip()
    return column.replace("_", " ")


def _tone(verdict: str) -> Verdict:
    return "bad" if verdict in ("error", "No", "Warning", "Different") else "warn" if verdict == "warning" else "good"


def _cell(cell: Any) -> Any:
    if cell is None or isinstance(cell, bool):
        return "" if cell is None else str(cell)
    if isinstance(cell, (int, float)):
        return cell if cell - cell == 0 and abs(cell) < 2**53 else str(cell)
    text = utf8(str(cell))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
