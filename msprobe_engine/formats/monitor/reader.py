"""Reads what a monitored run has written: CSV directories (ours and the existing tool's), JSON lines, the trend data base.

>>> run = open_run("out")                                   # doctest: +SKIP
>>> run.series(0, "grad_reduced", "norm")                   # doctest: +SKIP
{Key(vpp_stage=0, name='fc.weight', micro_step=-1, phase='reduced', detail=''): Series(steps=array([0, 1]), values=array([...]))}

Reading goes as far as it can: what is damaged is left out and counted in `Run.problems`.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.core.records import FAMILIES
from msprobe_engine.core.text import notebook
from msprobe_engine.formats.dump.find_dumps import IN_RUN, Entries, holds_dump
from msprobe_engine.formats.monitor import run_layout
from msprobe_engine.formats.monitor.losses import ENDING as LOSSES_ENDING
from msprobe_engine.formats.monitor.losses import FILE as LOSSES
from msprobe_engine.formats.monitor.losses import Kept, read_losses
from msprobe_engine.formats.monitor.reader_csv import (
    ALERTS_FILE,
    INTERRUPTED,
    CsvSource,
    Problems,
    families_of,
)
from msprobe_engine.formats.monitor.reader_json import CUT
from msprobe_engine.formats.monitor.run_layout import Launch, RankDirectory, between, rank_directories, rank_directory, scan
from msprobe_engine.formats.monitor.series import EMPTY, SAMPLES_EVERY, Key, Kind, Series, Table, steps_of

__all__ = ["Key", "Run", "Series", "Table", "open_run"]

PARQUET, HIDDEN = ".parquet", "_"
"""Readers of data sets (pandas, Spark) take every file of a directory for a part of the table, but those with this prefix."""
_LOOKED_INTO = 64
"""Entries looked into where no monitor has written, to say in which of them one has."""
_KEPT = 24
"""Tables that stay in memory."""
_LARGE = 1 << 29
"""Bytes of tables above which `Run.forget` gives them back."""


class Source(Protocol):
    """One way of writing a run. Methods put what they cannot read into `problems`: file to counts."""

    problems: dict[str, Problems]

    def ranks(self) -> list[int]: ...
    def info(self, rank: int) -> dict[str, Any]: ...
    def families(self, rank: int) -> list[str]: ...
    def read(self, rank: int, family: str) -> dict[str, Table]:
        """The table of the family, and those that came with it in the same files."""
        ...

    def scalars(self, rank: int) -> dict[str, Series]: ...
    def alerts(self, rank: int) -> list[dict[str, Any]]: ...
    def paths(self, rank: int) -> list[Path]: ...
    def other_runs(self, rank: int) -> list[Launch]: ...


class Run:
    """A monitored run, as `open_run` gives it. Files are read when they are asked for.

    Attributes:
        format: ``csv``, ``jsonl``, ``sqlite`` or ``parquet``.
        ranks: ranks that have written, ascending.
    """

    def __init__(self, path: Path, kind: str, source: Source) -> None:
        self.path = path
        self.format = kind
        self.ranks: list[int] = source.ranks()
        self._source = source
        self._tables: OrderedDict[tuple[int, str], Table] = OrderedDict()
        self._repeated: dict[tuple[int, str], int] = {}
        self._thinned: dict[int, str] = {}
        self._recorded: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        self._same: dict[frozenset[int], frozenset[int]] = {}

    def without_ranks(self, ranks: Set[int]) -> Run:
        """The same run, of which these ranks are not looked at."""
        some = copy(self)
        some.ranks = [rank for rank in self.ranks if rank not in ranks]
        return some

    @property
    def problems(self) -> dict[str, int]:
        """What could not be read so far: ``{file}: {what}`` to how often. Grows while files are read."""
        found = {f"{file}: {what}": n for file, counts in self._source.problems.items() for what, n in counts.items()}
        for (rank, family), count in self._repeated.items():
            found[f"rank {rank} {family}: row written again, the later one counts"] = count
        return found | Counter(self._thinned.values())

    @property
    def left_out(self) -> int:
        """How many rows, records and files were left out so far: the sum of `damage`."""
        return sum(self.damage.values())

    @property
    def damage(self) -> dict[str, int]:
        """Of `problems` what is damage: rows, records and files that were left out. A last line that is cut is none."""
        return {f"{file}: {what}": n for file, counts in self._source.problems.items() for what, n in counts.items() if what != CUT}

    def info(self, rank: int) -> dict[str, Any]:
        """What the run said about itself (run.json): rank, world_size, rank_info, version, monitor, ...; ``{}`` when it did not."""
        return self._source.info(rank)

    def paths(self, rank: int) -> list[Path]:
        """Directories (or the file) of a rank, the oldest first; several after a resume."""
        return self._source.paths(rank)

    def families(self, rank: int) -> list[str]:
        """Families of a rank, in the order of `msprobe_engine.core.records.FAMILIES`, others behind."""
        order = {family: i for i, family in enumerate(FAMILIES)}
        return sorted(self._source.families(rank), key=lambda family: (order.get(family, len(order)), family))

    def table(self, rank: int, family: str) -> Table:
        """All rows of a family as columns, empty when there are none."""
        key = rank, family
        if key not in self._tables:
            with collection_paused(), guard_reading(self.path, "files of a monitor"):
                read = self._source.read(rank, family) if rank in self.ranks else {}
            for other, table in {family: EMPTY, **read}.items():
                self._tables[rank, other] = table
                if table.repeated:
                    self._repeated[rank, other] = table.repeated
            self._tables.move_to_end(key)
            while len(self._tables) > _KEPT:
                self._tables.popitem(last=False)
        return self._tables[key]

    def forget(self, rank: int) -> None:
        """Give back the memory of a rank whose tables are large; they are read again when they are asked for."""
        keys = [key for key in self._tables if key[0] == rank]
        if sum(table.nbytes for table in self._tables.values()) > _LARGE:
            for key in keys:
                del self._tables[key]

    def ops(self, rank: int, family: str) -> list[str]:
        """Statistics (for features: columns) that a family has."""
        return list(self.table(rank, family).values)

    def series(self, rank: int, family: str, op: str) -> dict[Key, Series]:
        """One statistic of every tensor of a family over the steps, empty when there is none."""
        return self.table(rank, family).series(op)

    def kinds(self, rank: int, family: str) -> Mapping[Key, frozenset[Kind]]:
        """Shapes and data types of the tensors of a family, where the files say them."""
        return self.table(rank, family).kinds

    def scalars(self, rank: int) -> dict[str, Series]:
        """Numbers of the steps by name (``loss``, ``grad_norm``, ...)."""
        with guard_reading(self.path, "files of a monitor"):
            found = self._source.scalars(rank)
        if (every := found.get(SAMPLES_EVERY)) is not None and len(every.steps):
            self._thinned[rank] = _describe_thinning(every)
        return found

    def to_arrow(self, ranks: Sequence[int] | None = None, families: Sequence[str] | None = None) -> Any:
        """A ``pyarrow.Table`` with a row per tensor and step, see `msprobe_engine.formats.monitor.arrow_tables`; for pandas
        ``.to_pandas()``, for DuckDB as it is.

        Args:
            ranks: only these; None: all.
            families: only these, ``scalar`` for the scalars; None: all.

        Raises:
            MissingExtraError: pyarrow is not installed.
        """
        from msprobe_engine.formats.monitor.arrow_tables import SCALAR, VALUE, concatenate_tables, table_of

        tables = []
        for rank in self.ranks if ranks is None else ranks:
            if families is None or SCALAR in families:
                for name, series in self.scalars(rank).items():
                    tables.append(table_of(rank, series.steps, SCALAR, [Key(0, name)] * len(series.steps), {VALUE: series.values}))
            for family in self.families(rank):
                if families is None or family in families:
                    table = self.table(rank, family)
                    tables.append(table_of(rank, table.steps, family, [table.keys[i] for i in table.ids.tolist()], table.values))
        return concatenate_tables(tables or [table_of(0, 0, SCALAR, [], {VALUE: []})])

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.format}, {len(self.ranks)} ranks>"

    def _repr_html_(self) -> str:
        rows = []
        for rank in self.ranks:
            scalars = self.scalars(rank)
            steps = steps_of(scalars.values())
            last = ", ".join(f"{name} {series.values[-1]:.6g}" for name, series in scalars.items() if len(series.values))
            rows.append(
                (rank, f"{steps[0]} to {steps[-1]}" if len(steps) else "", ", ".join(self.families(rank)), last, len(self.alerts(rank)))
            )
        return notebook.table(f"Run {self.path} ({self.format})", ("rank", "steps", "families", "last numbers", "alerts"), rows)

    def recorded_steps(self, rank: int) -> tuple[frozenset[int], frozenset[int]]:
        """Steps that have numbers of the step, and those of them that were interrupted. Read once; equal sets are one object."""
        if rank not in self._recorded:
            numbers = self.scalars(rank)
            steps = steps_of(numbers.values())
            cut = numbers.get(INTERRUPTED)
            found = frozenset(steps.tolist()), frozenset(cut.steps[cut.values > 0].tolist() if cut is not None else ())
            every, interrupted = (self._same.setdefault(one, one) for one in found)
            self._recorded[rank] = every, interrupted
        return self._recorded[rank]

    def alerts(self, rank: int) -> list[dict[str, Any]]:
        """Alerts in the order in which they were raised, each with the fields of `msprobe_engine.probe.rules.base.Alert`."""
        with guard_reading(self.path, "files of a monitor"):
            found = self._source.alerts(rank)
        for file, kept in self.losses(rank) if not self.other_runs(rank) else ():  # which counts theirs, too
            if kept is not None and file.name != LOSSES and len(found) < kept.alerts:  # of CSV directories its reader tells
                what = f"{len(found)} alerts of rank {rank} are here, and it says that {kept.alerts} were written"
                self._source.problems[str(file)] = Counter([what])
        return found

    def other_runs(self, rank: int) -> list[Launch]:
        """Launches in the files of a rank that are none of this run and were left out, see `msprobe_engine.formats.monitor.run_layout`."""
        return self._source.other_runs(rank)

    def losses(self, rank: int) -> list[tuple[Path, Kept | None]]:
        """The files that tell what a rank could not write, and what they say; None: it cannot be read."""
        hidden = HIDDEN if self.format == "parquet" else ""
        files = (path / LOSSES if path.is_dir() else path.with_name(f"{hidden}rank{rank}{LOSSES_ENDING}") for path in self.paths(rank))
        return [(file, read_losses(file)) for file in dict.fromkeys(files)]


def _describe_thinning(every: Series) -> str:
    """What the scalar `SAMPLES_EVERY` says of a rank."""
    thinned = every.values[np.isfinite(every.values)]
    said = f"the samples of steps are missing from step {every.steps[0]} on: sinks.max_gb was nearly used up"
    said += f", at least one step in {thinned.max():.0f} is there" if len(thinned) else ""
    return said + ("" if len(thinned) == len(every.values) else f"; used up, nothing was written after step {every.steps[-1]}")


def open_run(path: Path | str, *, since: str | None = None, until: str | None = None) -> Run:
    """Open a monitored run.

    Args:
        path: a directory that holds directories of ranks (``monitor`` of an output directory), the output directory, the directory
            of one rank, the directory with the JSON lines, or a ``.jsonl`` or ``.db`` file. Where a run was written in several
            ways, the CSV files are taken.
        since, until: only directories whose time stamp (``Dec03_21-34-40``) lies in this range, ends included; CSV only.

    Raises:
        UsageError: there is nothing of a monitor at this path, or a stamp is none.
    """
    root = Path(path)
    first = None if since is None else run_layout.stamp_argument(since, "since")
    last = None if until is None else run_layout.stamp_argument(until, "until")
    if root.is_file():
        if root.name.endswith(".jsonl"):
            return _json_lines(root, [root])
        if root.suffix == ".db":
            return _sqlite(root, [root])
        raise UsageError(f"{root}: is no file of a monitor; give a directory, a .jsonl file or a .db file")
    if not root.is_dir():
        raise UsageError(f"{root}: no such directory; give the output directory of the run or its monitor directory")
    entries = scan(root)
    if directories := _rank_directories(root, entries):
        chosen = [d for d in directories if d.stamp is None or between(d.stamp, first, last)]
        if not chosen:
            stamps = ", ".join(dict.fromkeys(str(d.stamp) for d in directories))
            place = directories[0].path.parent
            raise UsageError(f"{place}: no directory has a time stamp from {since or 'the first'} to {until or 'the last'}: {stamps}")
        return Run(root, "csv", CsvSource(chosen))
    if (found := _files(root, entries)) is not None:
        return found[0](root, found[1])
    if any(map(holds_dump, (root, root / IN_RUN))):
        raise UsageError(f"{root}: no monitor has written here; it holds a dump, of which msprobe diagnose {root} says what is wrong")
    listing = ", ".join(entry.name for entry in entries[:8]) or "nothing"
    runs = _runs_below(entries)
    hint = f"; give one of them: {', '.join(runs[:3])}" if len(runs) > 1 else f"; give {runs[0]}" if runs else ""
    raise UsageError(
        f"{root}: no monitor has written here; expected directories like Dec03_21-34-40-rank0-1a2b3c4d, found: {listing}{hint}"
    )


def has_monitor(path: Path, entries: Entries | None = None) -> bool:
    """Has a monitor written here, in any format? What `open_run` takes, but for damage.

    Args:
        entries: what is in a directory, where that was listed before.
    """
    if not path.is_dir():
        return path.is_file() and (path.name.endswith(".jsonl") or path.suffix == ".db")
    try:
        listed = scan(path) if entries is None else entries
        return bool(_rank_directories(path, listed)) or _files(path, listed) is not None
    except UsageError:  # it must not be listed
        return False


def _rank_directories(root: Path, entries: Entries) -> list[RankDirectory]:
    if (single := rank_directory(root.resolve())) is not None and any(families_of(entry.name) for entry in entries):
        return [single._replace(path=root)]
    return rank_directories(root, entries=entries) or (rank_directories(root / "monitor") if (root / "monitor").is_dir() else [])


def _files(root: Path, entries: Entries) -> tuple[Callable[[Path, Sequence[Path]], Run], list[Path]] | None:
    """Files of the first other format that is there, in a directory or in that of the format; and what opens them."""
    for name, ending, opened in (("jsonl", ".jsonl", _json_lines), ("trend", ".trend.db", _sqlite), ("parquet", PARQUET, _parquet)):
        for listed in (entries, scan(root / name) if (root / name).is_dir() else ()):
            if files := [Path(entry.path) for entry in listed if entry.name.endswith(ending) and entry.name != ALERTS_FILE]:
                return opened, files
    return None


def _runs_below(entries: Entries) -> list[str]:
    """Directories among them in which a monitor has written."""
    return [entry.path for entry in entries[:_LOOKED_INTO] if os.path.isdir(entry.path) and has_monitor(Path(entry.path))]


def _json_lines(root: Path, files: Sequence[Path]) -> Run:
    from msprobe_engine.formats.monitor.reader_json import JsonLinesSource

    return Run(root, "jsonl", JsonLinesSource(files))


def _sqlite(root: Path, files: Sequence[Path]) -> Run:
    from msprobe_engine.formats.monitor.reader_sqlite import SqliteSource

    return Run(root, "sqlite", SqliteSource(files))


def _parquet(root: Path, files: Sequence[Path]) -> Run:
    from msprobe_engine.formats.monitor.arrow_tables import ParquetSource

    return Run(root, "parquet", ParquetSource(files))
