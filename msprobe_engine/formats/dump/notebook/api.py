"""A dump as Python objects, for notebooks and scripts: `read` opens it, files are read when they are needed.

>>> from msprobe import dump
>>> out = dump.read("msprobe_output/dump")                 # doctest: +SKIP
>>> snapshot = out[3, 0]                                   # doctest: +SKIP
>>> for record in snapshot.find("*.softmax.*", kind="api"):  # doctest: +SKIP
...     print(record.name, record.tensor("output.0").max)

`docs/guide/read-a-dump.md` is the guide.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.text import notebook
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import warn_of_earlier_runs
from msprobe_engine.formats.dump.notebook.shapes import with_shapes
from msprobe_engine.formats.dump.notebook.snapshot import NoSuchRecord, Record, Snapshot, Tensor
from msprobe_engine.formats.dump.notebook.step_dump import KINDS
from msprobe_engine.formats.dump.reader import DumpDirectory, Rank, open_dump

__all__ = ["KINDS", "Dump", "NoSuchRecord", "Record", "Snapshot", "Tensor", "read"]

_KEPT = 4  # snapshots that stay in memory


def read(path: Path | str) -> Dump:
    """Open a dump by any of its paths (see `msprobe_engine.formats.dump.reader.open_dump`)."""
    dump = open_dump(path)
    warn_of_earlier_runs(dump)
    return Dump(dump)


class Dump:
    """The steps and ranks of a dump directory. ``dump[step, rank]`` is one `Snapshot`; the last four are kept."""

    def __init__(self, directory: DumpDirectory) -> None:
        self._directory = directory
        self._kept: OrderedDict[tuple[int, Rank], Snapshot] = OrderedDict()

    @property
    def root(self) -> Path:
        """The directory that was opened."""
        return self._directory.root

    @property
    def steps(self) -> list[int]:
        """Dumped steps, ascending."""
        return self._directory.steps

    def ranks(self, step: int) -> list[Rank]:
        """Ranks of a step, ascending; directories that do not say their rank come last, by name.

        Raises:
            UsageError: no such step.
        """
        return self._directory.ranks(step)

    def __getitem__(self, key: int | tuple[int, Rank]) -> Snapshot:
        """``dump[step, rank]``; ``dump[step]`` when the step has one rank.

        Raises:
            UsageError: no such step or rank, or several ranks and none chosen.
            DumpFormatError: a file is damaged.
        """
        step, rank = key if isinstance(key, tuple) else (key, None)
        if rank is None:
            self._directory.path(step)  # raises when there are several
            rank = self.ranks(step)[0]
        snapshot = self._kept[step, rank] = self._load(step, rank)
        self._kept.move_to_end((step, rank))
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return snapshot

    def __iter__(self) -> Iterator[Snapshot]:
        """Every rank of every step, in order, read one after the other."""
        for step in self.steps:
            for rank in self.ranks(step):
                yield self._load(step, rank)

    def frame(self, steps: Sequence[int] | None = None, ranks: Sequence[Rank] | None = None, **wanted: Any) -> Any:
        """A ``pandas.DataFrame`` with one row per tensor; columns: `msprobe_engine.formats.dump.notebook.pandas_table.COLUMNS`.

        Args:
            steps, ranks: only these; None is all.
            wanted: arguments of `Snapshot.find`.

        Raises:
            MissingExtraError: pandas is not installed.
            UsageError: a step that was not dumped.
        """
        from msprobe_engine.formats.dump.notebook import pandas_table

        pandas_table.pandas()  # before a long read, not after it

        snapshots = (
            self._load(step, rank)
            for step in (self.steps if steps is None else steps)
            for rank in self.ranks(step)
            if ranks is None or rank in ranks
        )
        return pandas_table.frame(row for snapshot in snapshots for record in snapshot.find(**wanted) for row in record.rows())

    def _load(self, step: int, rank: Rank) -> Snapshot:
        kept = self._kept.get((step, rank))
        if kept is not None:
            return kept
        loaded = self._directory.load(step, rank)
        if loaded.task == "structure" and (loaded.directory / layout.SHAPES).exists():
            loaded, _ = with_shapes(loaded)
        return Snapshot(loaded, step, rank)

    def __repr__(self) -> str:
        steps = self.steps
        shown = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        return f"<Dump {self.root}: {shown}>"

    def _repr_html_(self) -> str:
        rows = ((step, ", ".join(map(str, self.ranks(step)))) for step in self.steps)
        return notebook.table(f"Dump {self.root}", ("step", "ranks"), rows)
