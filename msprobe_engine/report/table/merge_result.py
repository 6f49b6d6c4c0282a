"""``merge_result``: chosen rows (communication calls) of the tables of many ranks in one file, a sheet per metric, a column per rank.

Reads the names of both versions of the existing tool (``compare_result_rank0_{ts}.xlsx``, ``compare_result_rank0-rank0_{ts}.xlsx``) and
this tool's, as csv and xlsx. Names in the file: as the existing tool has them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError, NothingCapturedError, SettingsError
from msprobe_engine.core.io.input_files import open_input, read_input
from msprobe_engine.core.io.output_files import guard_writing
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.io.yaml_text import parse_yaml
from msprobe_engine.measure.columns import COSINE, DIFFERENCES, GRAD_EQUAL, METRICS, RELATIVE, TARGET_MD5, TARGET_NAME
from msprobe_engine.report.table_files import check_format
from msprobe_engine.report.table_files.reading import Row, read_table
from msprobe_engine.report.table_files.xlsx_book import Book, write_cell

_NAME = re.compile(r"compare_result_rank([0-9]{1,9})(?:-rank\1)?_[0-9]{14}(?:_slice_[0-9]+|_part_[0-9]+)?\.(xlsx|csv)", re.ASCII)
_REPLACED = frozenset(("N/A", "unsupported", "Nan"))
"""Values in whose place the maxima stand: of an argument the maximum is its value, of a group its ranks."""
_LARGEST = 1 << 24
"""Bytes of the configuration."""
_MAXIMA = ("NPU max", "Bench max")


@dataclass(frozen=True)
class Wanted:
    """The configuration.

    Attributes:
        api: parts of row names, ``Distributed.all_reduce`` or longer.
        metrics: columns; empty: all of the kind of table.
    """

    api: tuple[str, ...]
    metrics: tuple[str, ...]


@dataclass
class Merged:
    """Attributes:
    path: the file.
    ranks: whose rows are in it.
    rows: row names.
    notes: tables and calls that were left out, and why.
    lost: how many tables are not, or not whole, in it.
    """

    path: Path
    ranks: list[int]
    rows: int
    notes: list[str] = field(default_factory=list)
    lost: int = 0


def merge_result(input_dir: str | Path, output_dir: str | Path, config_path: str | Path) -> Merged:
    """Merge the tables in a directory into ``multi_ranks_compare_merge_{ts}.xlsx``.

    Raises:
        DumpFormatError: a table cannot be read.
        MissingExtraError: xlsxwriter is not installed.
        NothingCapturedError: fewer than two tables, or no row that is asked for.
        SettingsError: the configuration is wrong.
        SinkError: the output cannot be written.
    """
    check_format("xlsx")
    wanted = read_wanted(Path(config_path))
    notes: list[str] = []
    lost: list[str] = []
    ranks: dict[int, dict[str, dict[str, str]]] = {}
    metrics: tuple[str, ...] | None = None
    for rank, paths in sorted(_tables(Path(input_dir), notes, lost).items()):
        for path in paths:
            values = _read_metrics(path, wanted, metrics, notes, lost)
            if values is not None:
                metrics, rows = values
                ranks.setdefault(rank, {}).update(rows)
    if metrics is None or not any(ranks.values()):
        raise NothingCapturedError(f"{input_dir}: no row to merge. {' '.join(lost + notes)}")
    path = Path(output_dir) / f"multi_ranks_compare_merge_{time.strftime('%Y%m%d%H%M%S')}.xlsx"
    names = list(dict.fromkeys(name for rows in ranks.values() for name in rows))
    _write(path, metrics, names, ranks)
    return Merged(path, sorted(ranks), len(names), lost + notes, len(lost))


def read_wanted(path: Path) -> Wanted:
    """Read the yaml: ``api`` is a list of texts, ``compare_index`` optional, a list of columns.

    Raises:
        SettingsError: it is not there or not like that.
    """
    try:
        document = parse_yaml(read_input(path, _LARGEST).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(f"{path}: cannot be read as yaml ({why})") from None
    api = document.get("api") if isinstance(document, dict) else None
    if not isinstance(api, list) or not api or not all(isinstance(name, str) and name for name in api):
        raise SettingsError(f"{path}: key 'api' is {str(api)[:200]!r}; a list of calls is needed, for example [Distributed.all_reduce]")
    metrics = document.get("compare_index") or []
    known = {*DIFFERENCES, *RELATIVE, *METRICS, GRAD_EQUAL}
    if not isinstance(metrics, list) or not all(isinstance(name, str) for name in metrics):
        raise SettingsError(f"{path}: key 'compare_index' is {str(metrics)[:200]!r}; a list of columns is allowed")
    unknown = [name for name in metrics if name not in known]
    if unknown:
        raise SettingsError(f"{path}: compare_index {unknown[0]!r} is not known; allowed are {', '.join(sorted(known))}")
    return Wanted(tuple(api), tuple(metrics))


def _tables(directory: Path, notes: list[str], lost: list[str]) -> dict[int, list[Path]]:
    """Rank -> its tables. Of several comparisons in the directory the latest of each rank counts."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise DumpFormatError(f"{directory}: cannot be listed ({error.strerror}); give the directory of the tables") from None
    tables: dict[int, dict[str, list[Path]]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match:
            stamp = re.sub(r"(_slice|_part)_\d+$", "", name.rpartition(".")[0])[-14:] + ("0" if match[2] == "csv" else "1")
            tables.setdefault(int(match[1]), {}).setdefault(stamp, []).append(directory / name)
        elif name.startswith("compare_result") and name.endswith((".xlsx", ".csv")):
            notes.append(f"{name} is left out: its name has no rank.")
    if len(tables) < 2:
        raise NothingCapturedError(
            f"{directory}: {len(tables)} ranks have a table here; two are needed, named compare_result_rank0_<time>.csv or .xlsx. "
            + " ".join(notes)
        )
    for rank, stamps in tables.items():
        lost += [f"{path.name} ends in the middle of a line: it was cut off." for path in stamps[max(stamps)] if _cut_off(path)]
        if len(stamps) > 1:
            notes.append(f"rank {rank} has {len(stamps)} tables; the latest counts.")
    return {rank: stamps[max(stamps)] for rank, stamps in tables.items()}


def _cut_off(path: Path) -> bool:
    """Tables of both tools end with a line feed; what is no csv finds its end by itself."""
    if path.suffix != ".csv":
        return False
    try:
        with open_input(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return file.read(1) not in (b"\n", b"")
    except OSError:
        return False  # reading it says so


def _read_metrics(
    path: Path, wanted: Wanted, metrics: tuple[str, ...] | None, notes: list[str], lost: list[str]
) -> tuple[tuple[str, ...], dict[str, dict[str, str]]] | None:
    """The metrics, and name -> metric -> value; None when the table is of another kind."""
    rows = read_table(path)
    header = next(rows, [])
    own_metrics = _metrics(header)
    if not own_metrics:
        kind = "checksums" if TARGET_MD5 in header else "no comparison"
        lost.append(f"{path.name} is left out: it holds {kind}; tables of statistics or tensors can be merged.")
        return None
    if wanted.metrics:
        own_metrics = tuple(name for name in wanted.metrics if name in own_metrics)
        if len(own_metrics) < len(wanted.metrics):
            lost.append(f"{path.name} is left out: it has no {', '.join(set(wanted.metrics) - set(own_metrics))}.")
            return None
    if metrics is not None and own_metrics != metrics:
        lost.append(f"{path.name} is left out: its metrics are not those of the others.")
        return None
    name_at, places = header.index(TARGET_NAME), {name: header.index(name) for name in own_metrics}
    values_of: dict[str, dict[str, str]] = {}
    for row in rows:
        if len(row) > name_at and any(f"{api}." in row[name_at] for api in wanted.api):
            values_of.setdefault(row[name_at], {name: _value(row, column, header) for name, column in places.items()})
    missing = [api for api in wanted.api if not any(f"{api}." in name for name in values_of)]
    if missing:
        notes.append(f"{path.name} has no {', '.join(missing)}.")
    return own_metrics, values_of


def _metrics(header: Row) -> tuple[str, ...]:
    if TARGET_NAME not in header:
        return ()
    kinds: Sequence[str] = METRICS if COSINE in header else (*DIFFERENCES, *RELATIVE) if DIFFERENCES[0] in header else ()
    return tuple(name for name in (*kinds, GRAD_EQUAL) if name in header) if kinds else ()


def _value(row: Row, at: int, header: Row) -> str:
    value = row[at] if at < len(row) else ""
    if value not in _REPLACED or not all(name in header for name in _MAXIMA):
        return value
    target, golden = (row[header.index(name)] if header.index(name) < len(row) else "" for name in _MAXIMA)
    return f"NPU:{target}  Bench:{golden}"


def _write(path: Path, metrics: Sequence[str], names: Sequence[str], ranks: Mapping[int, Mapping[str, Mapping[str, str]]]) -> None:
    with guard_writing(path):
        make_directories(os.fspath(path.parent))
        with Book(path) as whole:
            for metric in metrics:
                sheet = whole.book.add_worksheet(metric[:31])  # a limit of Excel
                rows: list[list[Any]] = [[TARGET_NAME, *(f"rank{rank}" for rank in sorted(ranks))]]
                rows += [[name, *(ranks[rank].get(name, {}).get(metric, "") for rank in sorted(ranks))] for name in names]
                for at, row in enumerate(rows):
                    for column, cell in enumerate(row):
                        write_cell(sheet, at, column, _number(cell) if at and column else cell)


def _number(text: str) -> str | float | None:
    try:
        number = float(text)
    except ValueError:
        return text or None
    return number if number - number == 0 and "_" not in text else text
