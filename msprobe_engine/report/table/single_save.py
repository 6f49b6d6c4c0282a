"""Compares what `SingleSave` wrote in two runs: one sheet per key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.npy_file import map_array
from msprobe_engine.core.io.output_files import guard_writing, write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.core.log import get_logger, one_line
from msprobe_engine.find.verdicts.single_save import CLOSE, DIFFERS, MISSING, SAME, UNREADABLE, Rule, compare
from msprobe_engine.report.table_files import check_format
from msprobe_engine.report.table_files.xlsx_book import Book, write_cell

_log = get_logger()
_NUMBERED = re.compile(r"(step|rank|micro_step)([0-9]{1,18})")
_INDEX = re.compile(r".*_([0-9]{1,9})", re.DOTALL)

HEADER = (
    *("step", "rank", "micro_step", "id", "shape1", "shape2"),
    *("相同元素百分比(%)", "首个不匹配元素索引", "最大绝对误差", "最大相对误差"),
    *("误差在千分之一内元素占比(%)", "误差在百分之一内元素占比(%)"),
    *("compared", "verdict", "note"),
)
"""Columns as the existing tool has them: share of equal elements, index of the first unequal one, largest absolute and relative
error, share of elements within one thousandth and one hundredth; then those of this tool, see `single_verdict`."""


class Place(NamedTuple):
    """Where an array belongs. `part` is the position in a list (an int), the key in a dict or the path through both."""

    step: int
    rank: int
    micro_step: int
    part: str


class SingleComparator:
    """Compares two directories that `SingleSave` wrote, of this tool or of the existing one."""

    result_header = list(HEADER)

    @classmethod
    def compare(
        cls,
        dir1: str | Path,
        dir2: str | Path,
        output_path: str | Path = "./msprobe_compare_output",
        num_processes: int = 8,
        file_format: str = "xlsx",
        *,
        rtol: float = 1e-3,
        atol: float = 0.0,
        masks: Mapping[str, str] | None = None,
        align: str = "start",
    ) -> list[Path]:
        """Write one sheet per key that either directory has: ``{output_path}/{key}.xlsx``, one row per array; and ``summary.csv``, one row
        per key, the worst first.

        Args:
            dir1, dir2: what was given to `SingleSave`.
            num_processes: how many keys are compared at the same time.
            file_format: ``xlsx`` (needs the extra ``xlsx``) or ``csv``.
            rtol, atol: an element is close up to ``atol + rtol * max(|a|, |b|)``.
            masks: key to the key whose arrays say which elements count (not 0), ``{"log_probs": "response_mask"}``.
            align: ``start`` or ``end``: the ends of sequences of different lengths that belong together.

        Returns:
            The sheets.

        Raises:
            UsageError: an argument is wrong.
            DumpFormatError: a directory holds nothing that `SingleSave` wrote.
            MissingExtraError: xlsx without the package for it.
            SinkError: a file cannot be written.
        """
        if file_format not in FORMATS:
            raise UsageError(f"SingleComparator: file_format is {file_format!r}; allowed: {', '.join(FORMATS)}")
        if not isinstance(num_processes, int) or isinstance(num_processes, bool) or num_processes < 1:
            raise UsageError(f"SingleComparator: num_processes is {num_processes!r}; allowed: an int >= 1")
        check_format(file_format)
        rule = Rule(rtol, atol, masks or {}, align)
        rule.check()
        first_keys, second_keys = _keys(dir1), _keys(dir2)
        for mask in set(rule.masks.values()) - (first_keys.keys() & second_keys.keys()):
            raise UsageError(f"SingleComparator: masks names the key {mask!r}, which is not in both directories")
        with guard_writing(output_path):
            make_directories(os.fspath(output_path))

        def compare_key(key: str) -> tuple[Path, list[list[Cell]]]:
            path = Path(output_path) / f"{key}.{file_format}"
            mask = rule.masks.get(key)
            sides = [_Side(_arrays(side.get(key)), None if mask is None else _arrays(side.get(mask))) for side in (first_keys, second_keys)]
            rows = _rows(key, sides[0], sides[1], rule)
            write_sheet(path, HEADER, rows)
            return path, rows

        # threads: the time goes into numpy and reading files, which let other threads run
        with ThreadPoolExecutor(min(num_processes, 64)) as pool:
            made = list(pool.map(compare_key, sorted(first_keys.keys() | second_keys.keys())))
        _summary(Path(output_path), {path.stem: rows for path, rows in made})
        return [path for path, _ in made]


def _keys(root: str | Path) -> dict[str, Path]:
    data = Path(root) / "data"
    if not data.is_dir():
        raise DumpFormatError(f"{data}: no such directory; give the directory that SingleSave was given")
    return {entry.name: Path(entry.path) for entry in os.scandir(data) if os.path.isdir(entry.path)}


def _list_numbered_directories(path: Path, word: str) -> Iterator[tuple[int, Path]]:
    for entry in os.scandir(path):
        match = _NUMBERED.fullmatch(entry.name)
        if match and match[1] == word and os.path.isdir(entry.path):
            yield int(match[2]), Path(entry.path)


def _arrays(key: Path | None) -> dict[Place, Path]:
    """The array files of one key. Without micro steps (``save_ex``) the files lie in the rank directory: micro step 0."""
    found: dict[Place, Path] = {}
    if key is None:
        return found
    for step, steps in _list_numbered_directories(key, "step"):
        for rank, ranks in _list_numbered_directories(steps, "rank"):
            for micro, directory in ((0, ranks), *_list_numbered_directories(ranks, "micro_step")):
                for entry in os.scandir(directory):
                    if entry.name.endswith(".npy") and os.path.isfile(entry.path):
                        found[Place(step, rank, micro, _part(entry.name[:-4], key.name))] = Path(entry.path)
    return found


def _part(stem: str, key: str) -> str:
    if stem.startswith(f"{key}."):
        return stem[len(key) + 1 :]
    index = _INDEX.fullmatch(stem)
    return index[1] if stem != key and index else "0"


def _order(place: Place) -> tuple[Any, ...]:
    return (*place[:3], [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in place.part.split(".")])


class _Side(NamedTuple):
    """The files of a key in one directory, and of its mask."""

    arrays: dict[Place, Path]
    masks: dict[Place, Path] | None

    def mask(self, place: Place) -> npt.NDArray[Any] | None:
        """What says which elements count: the mask of the same part, or of the whole place; None: it has none."""
        found = self.masks or {}
        path = found.get(place) or found.get(place._replace(part="0"))
        return None if path is None else _load(path)


def _rows(key: str, target: _Side, golden: _Side, rule: Rule) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    lonely = sorted(target.arrays.keys() ^ golden.arrays.keys(), key=_order)
    if lonely:
        p = lonely[0]
        first_of_them = f"step {p.step}, rank {p.rank}, micro step {p.micro_step}, id {one_line(p.part)}"
        _log.warning("%s: %d arrays are in one directory only and are not compared: %s ...", one_line(key), len(lonely), first_of_them)
    for place in sorted(target.arrays.keys() | golden.arrays.keys(), key=_order):
        part: Cell = int(place.part) if place.part.isdecimal() else place.part
        shapes: list[Cell] = [None, None]
        figures: list[Cell] = [None] * 6
        tail: list[Cell]
        try:
            sides = [side.arrays.get(place) for side in (target, golden)]
            arrays = [None if path is None else _load(path) for path in sides]
            shapes = [None if array is None else str(list(array.shape)) for array in arrays]
            if arrays[0] is None or arrays[1] is None:
                tail = [0, MISSING, f"only in the {'first' if arrays[1] is None else 'second'} directory"]
            else:
                compared = compare(arrays[0], arrays[1], (target.mask(place), golden.mask(place)), rule)
                figures, tail = list(compared.figures), [compared.elements, compared.verdict, compared.note]
        except DumpFormatError as error:
            _log.error("%s", error)
            tail = [0, UNREADABLE, str(error)]
        rows.append([*place[:3], part, *shapes, *figures, *tail])
    return rows


def _summary(directory: Path, keys: dict[str, list[list[Cell]]]) -> None:
    """One line for each key, and one in the log."""
    verdicts = (SAME, CLOSE, DIFFERS, MISSING, UNREADABLE)
    verdict_column = HEADER.index("verdict")
    lines: list[list[Cell]] = []
    for key, rows in keys.items():
        counts = [sum(row[verdict_column] == verdict for row in rows) for verdict in verdicts]
        bad = next((row for row in rows if row[verdict_column] not in (SAME, CLOSE)), None)
        where = (
            ""
            if bad is None
            else f"step {bad[0]}, rank {bad[1]}, micro_step {bad[2]}, id {bad[3]}: {bad[verdict_column]}: {bad[verdict_column + 1]}"
        )
        lines.append([key, *counts, where])
    lines.sort(key=lambda line: (-sum(int(n or 0) for n in line[3:6]), str(line[0])))
    stem = "summary"
    while stem in keys:
        stem += "_"
    path = directory / f"{stem}.csv"
    write_sheet(path, ("key", *verdicts, "first"), lines)
    off = [line for line in lines if line[-1]]
    if off:
        _log.warning("%d of %d keys differ; the first is %s (%s), see %s", len(off), len(lines), off[0][0], off[0][-1], path)
    else:
        _log.info("all %d keys agree, see %s", len(lines), path)


def _load(path: Path) -> npt.NDArray[Any]:
    """The array of a file, mapped and not read; objects in it are never unpickled."""
    array = map_array(path)
    if array.dtype.kind not in "biufc":
        raise DumpFormatError(f"{path}: holds {array.dtype}; only numbers can be compared. It is left out")
    return array


FORMATS = ("xlsx", "csv")
Cell = str | int | float | None


def write_sheet(path: Path, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Write a table to `path`; its suffix (``.xlsx``, ``.csv``) is the format. The file is there whole or not at all.

    None is an empty cell; NaN and infinities are text in xlsx, which has no such numbers. csv is UTF-8 with a byte order mark,
    which spreadsheet programs need to see that it is UTF-8.

    Raises:
        MissingExtraError: xlsx without the package xlsxwriter.
        SinkError: it cannot be written.
    """
    with guard_writing(path):
        if path.suffix == ".xlsx":
            check_format("xlsx")
            with Book(path) as whole:
                sheet = whole.book.add_worksheet()
                for number, cells in enumerate([header, *rows]):
                    for column, cell in enumerate(cells):
                        write_cell(sheet, number, column, cell)
        else:
            write_file(path, [_csv(header, rows)])


def _csv(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> bytes:
    lines = [",".join(safe_cell(c) if isinstance(c, str) else "" if c is None else repr(c) for c in cells) for cells in [header, *rows]]
    return b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode("utf-8", "backslashreplace")
