"""Dumps of several steps as the source of a trends page. Metrics, targets and calls are those of `msprobe_engine.monitor.dump2db`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.dump.parsed import DumpedTensor
from msprobe_engine.dump.reader import DumpDirectory
from msprobe_engine.errors import DumpFormatError, UsageError
from msprobe_engine.monitor.dump2db import ranks_of, tensors_of
from msprobe_engine.monitor.series import Ids
from msprobe_engine.trends.source import Part, Progress, Target, Wanted, with_absmax

STATISTICS = ("norm", "max", "min", "mean")
_COUNTS = {"nans": "nan_count", "infs": "inf_count"}


class DumpSource:
    """The statistics of a dump; every step of a rank is one file, read when its rank is asked for."""

    def __init__(self, dump: DumpDirectory, wanted: Wanted, path: Path) -> None:
        self.path = path
        self.kinds: tuple[str, ...] = ("dump",)
        self._wanted = wanted
        self._dump = dump
        steps = [step for step in dump.steps if wanted.steps is None or step in wanted.steps]
        self._places = [(step, rank, name) for step in steps for rank, name in ranks_of(dump, step)]
        self.ranks = sorted({rank for _, rank, _ in self._places if wanted.ranks is None or rank in wanted.ranks})
        self._problems: dict[str, int] = {}
        self._kept: dict[int, list[Part]] = {}

    @property
    def problems(self) -> Mapping[str, int]:
        return self._problems

    def pieces(self) -> int:
        return sum(rank in self.ranks for _, rank, _ in self._places)

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]:
        """Rows of a rank, metric by metric; the files are parsed once."""
        if rank not in self._kept:
            rows: dict[str, _Rows] = {}
            for step, of, name in self._places:
                if of == rank:
                    progress(f"step {step} rank {rank}")
                    self._read(step, rank, name, rows)
            parts = [found.part(rank, metric) for metric, found in rows.items()]
            self._kept[rank] = [part for each in parts if (part := self._wanted.cut(each)) is not None]
        yield from self._kept[rank]

    def _read(self, step: int, rank: int, name: int | str, rows: dict[str, _Rows]) -> None:
        try:
            dump = self._dump.load(step, name)
        except (DumpFormatError, UsageError) as error:
            self._problems[f"step {step} rank {rank}: {error}"] = 1
            return
        for place, tensor, micro in tensors_of(dump, micro_steps=True, strays=True):
            found = rows.setdefault(place.metric, _Rows())
            call = place.key.micro_step
            target = f"{place.key.name} #{call}" if call > 0 else place.key.name
            if self._wanted.micro_steps:
                target += f" [micro {micro}]"
            found.add(target, step, tensor)


class _Rows:
    """Rows of one metric, as lists while they are read."""

    def __init__(self) -> None:
        self.names = Ids()
        self.ids: list[int] = []
        self.steps: list[int] = []
        self.columns: dict[str, list[Any]] = {name: [] for name in (*STATISTICS, *_COUNTS)}

    def add(self, name: str, step: int, tensor: DumpedTensor) -> None:
        self.ids.append(self.names[name])
        self.steps.append(step)
        for statistic in STATISTICS:
            self.columns[statistic].append(getattr(tensor, statistic))
        for statistic, attribute in _COUNTS.items():
            self.columns[statistic].append(getattr(tensor, attribute))

    def part(self, rank: int, metric: str) -> Part:
        """The rows as a part; a statistic that no row has is left out, one that the file does not have in a row is missing there."""
        values, there = {}, {}
        for name, column in self.columns.items():
            mask = np.array([value is not None for value in column], bool)
            if mask.any():
                values[name] = np.array([np.nan if value is None else float(value) for value in column], np.float64)
                if not mask.all():
                    there[name] = mask
        targets = [Target(name) for name in self.names]
        return Part(rank, metric, targets, np.array(self.ids, np.int64), np.array(self.steps, np.int64), *with_absmax(values, there))
