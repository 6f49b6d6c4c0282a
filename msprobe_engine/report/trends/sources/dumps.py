"""Dumps of several steps as the source of a trends page. Metrics are those of `msprobe_engine.formats.monitor.convert.dump2db`.

What the records of a dump are called on a trends page.

Calls of functions are numbered through a step in a dump, so one call more in any module shifts the numbers of all behind it, and rows of
two runs, or of two steps of one, would not be the same calls. Here a call is named after the module it runs in, and numbered within it.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.find.nonfinite.first_over_ranks import analyse
from msprobe_engine.find.nonfinite.load import load_step
from msprobe_engine.find.nonfinite.trace import module_path
from msprobe_engine.formats.dump.completeness import missing_ranks, missing_steps
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.reader import DumpDirectory
from msprobe_engine.formats.dump.replicas.reader import ReplicaReader
from msprobe_engine.formats.dump.replicas.shared_columns import SharedColumns
from msprobe_engine.formats.monitor.convert.dump2db import place_of, ranks_of
from msprobe_engine.formats.monitor.series import Ids
from msprobe_engine.report.trends.findings import moment_of
from msprobe_engine.report.trends.pairing import depth, unwrap_name
from msprobe_engine.report.trends.sources.order import Order
from msprobe_engine.report.trends.sources.source import Part, Progress, Target, Wanted, with_absmax

KEPT_ROWS = 1_000_000
"""Rows of all ranks that stay in memory between the two passes over a run, about 100 MB; the files of further ranks are read twice."""
_AHEAD = 64
"""Ranks whose files a cluster reads at a time."""
_NEVER = 1 << 62
STATISTICS = ("norm", "max", "min", "mean")
_BACKWARDS = ("backward", "parameters_grad")
"""Metrics that a dump has from the end of the model to its beginning; the rows of a page are in the order of the model."""


class DumpSource:
    """The statistics of a dump; every step of a rank is one file, read when its rank is asked for.

    Args:
        scheduler: address of a Dask scheduler whose workers read the files, of some ranks at a time; "": they are read here.

    Attributes:
        unwrap: how many ``module.`` are taken off the names of modules; to be set before anything is read.
    """

    def __init__(self, dump: DumpDirectory, wanted: Wanted, path: Path, scheduler: str = "") -> None:
        self.path = path
        self._scheduler = scheduler
        self._reader: ReplicaReader | None = None
        self._expected: list[int] = []
        self.kinds: tuple[str, ...] = ("dump",)
        self._wanted = wanted
        self._dump = dump
        steps = [step for step in dump.steps if wanted.steps is None or step in wanted.steps]
        self._places = [(step, rank, name) for step in steps for rank, name in ranks_of(dump, step)]
        self.ranks = sorted({rank for _, rank, _ in self._places if wanted.ranks is None or rank in wanted.ranks})
        missing = [*missing_steps(dump, wanted.steps or ()), *(sentence for step in steps for sentence in missing_ranks(dump, step))]
        self._problems: dict[str, int] = dict.fromkeys(missing, 1)
        self._kept: dict[int, list[Part]] = {}
        self._room = KEPT_ROWS
        self._told: set[int] = set()
        self._searched: dict[int, dict[int, str] | None] = {}
        self.unwrap = 0

    @property
    def left_out(self) -> int:
        return len(self._problems)

    def wrappers(self) -> int | None:
        """How often all modules have ``module.`` in front, by the first file that can be read; None: no file, or no module in it."""
        for step, _, name in self._places:
            with contextlib.suppress(DumpFormatError, UsageError):
                return wrappers(read_side(self._dump.file(step, name)))
        return None

    @property
    def problems(self) -> Mapping[str, int]:
        return self._problems

    def pieces(self) -> int:
        return sum(rank in self.ranks for _, rank, _ in self._places)

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]:
        """Rows of a rank, metric by metric."""
        parts = self._kept.get(rank)
        if parts is None:
            parts = self._read_rank(rank, progress)
            count = sum(len(part.ids) for part in parts)
            if count <= self._room:
                self._kept[rank] = parts
                self._room -= count
        yield from parts

    def _read_rank(self, rank: int, progress: Progress) -> list[Part]:
        self._expect(rank)
        rows: dict[str, _Rows] = {}
        for step, of, name in self._places:
            if of == rank:
                if rank not in self._told:  # `pieces` counts one reading
                    progress(f"step {step} rank {rank}")
                self._read_step(step, rank, name, rows)
        self._told.add(rank)
        made = (found.part(rank, metric) for metric, found in rows.items())
        return [part for each in made if (part := self._wanted.restrict_part(each)) is not None]

    def _expect(self, rank: int) -> None:
        """The workers of a cluster read the files of this rank and of some behind it."""
        if not self._scheduler or rank in self._expected:
            return
        place = self.ranks.index(rank)
        self._expected = self.ranks[place : place + _AHEAD]
        self._reader = ReplicaReader(SharedColumns(), scheduler=self._scheduler)
        files: list[Path] = []
        for step, of, name in self._places:
            with contextlib.suppress(DumpFormatError, UsageError):  # said when it is read
                files += [self._dump.file(step, name)] if of in self._expected else []
        self._reader.expect(files)

    def _read_step(self, step: int, rank: int, name: int | str, rows: dict[str, _Rows]) -> None:
        try:
            file = self._dump.file(step, name)
            table = read_side(file) if self._reader is None else self._reader.read(file)
        except (DumpFormatError, UsageError) as error:
            self._problems[f"step {step} rank {rank}: {error}"] = 1
            return
        calls = calls_of(table, self.unwrap)
        self._problems |= dict.fromkeys(table.problems, 1)
        seen: dict[str, list[str]] = {}
        records = [(op, call) for op, record in enumerate(table.ops) if (call := calls.get(record)) is not None]
        when = dict(zip((table.ops[op] for op, _ in records), moment_of(call.metric for _, call in records)))
        ahead = [one for one in records if one[1].metric not in _BACKWARDS]
        back = [one for one in records if one[1].metric in _BACKWARDS]
        stated = table.stated[:, 0] | table.stated[:, 3]
        for op, call in (*ahead, *reversed(back)):
            metric_rows = rows.setdefault(call.metric, _Rows())
            tensors = [row for row in table.rows(op) if stated[row]]
            for row in reversed(tensors) if call.metric in _BACKWARDS else tensors:
                target = f"{call.name}.{table.place(row)}" + (f" #{call.number}" if call.number else "")
                target += f" [micro {call.micro}]" if self._wanted.micro_steps else ""
                metric_rows.add(target, step, table, row, when[table.ops[op]])
                seen.setdefault(call.metric, []).append(target)
        for metric, targets in seen.items():
            rows[metric].order.add(targets)
        if any(metric_rows.has_infinity(step) for metric_rows in rows.values()) and (begins := self._begins(step)) is not None:
            limit = when.get(begins.get(rank, ""), 0) if begins else _NEVER  # what another rank has made may be here, too
            for metric_rows in rows.values():
                metric_rows.masks_until[step] = limit

    def _begins(self, step: int) -> dict[int, str] | None:
        """Rank -> the record in which the search for the first NaN sees the first that matters: infinities before it are those of masks.
        All ranks of the step are read for it, once; None: none can be read."""
        if step not in self._searched:
            traces, _ = load_step(self._dump, step, reader=ReplicaReader(SharedColumns(), scheduler=self._scheduler))
            suspects = analyse(traces).suspects if traces else []
            self._searched[step] = {one.rank: one.call.name for one in reversed(suspects)} if traces else None
        return self._searched[step]


class _Rows:
    """Rows of one metric while they are read, as columns of numbers."""

    def __init__(self) -> None:
        self.names = Ids()
        self.order: Order[str] = Order()
        self.ids = array("q")
        self.steps = array("q")
        self.when = array("q")
        self.columns = {name: array("d") for name in (*STATISTICS, "nans", "infs")}
        self.there = {name: bytearray() for name in self.columns}
        self.masks_until: dict[int, int] = {}  # step -> moment before which infinities are those of masks
        self._infinite: set[int] = set()

    def add(self, name: str, step: int, table: DumpTable, row: int, when: int) -> None:
        self.ids.append(self.names[name])
        self.steps.append(step)
        self.when.append(when)
        top, bottom, mean, norm = table.numbers[4 * row : 4 * row + 4]
        if math.isinf(top) or math.isinf(bottom):
            self._infinite.add(step)
        has_top, has_bottom, has_mean, has_norm = table.stated[row].tolist()
        counted = table.header.get("nonfinite_counts") is True
        for statistic, value, there in (
            *(("norm", norm, has_norm), ("max", top, has_top), ("min", bottom, has_bottom), ("mean", mean, has_mean)),
            *((name, counts.get(row, 0), counted or row in counts) for name, counts in (("nans", table.nans), ("infs", table.infs))),
        ):
            self.columns[statistic].append(value if there else math.nan)
            self.there[statistic].append(there)

    def has_infinity(self, step: int) -> bool:
        """An extreme of a row of the step is infinite."""
        return step in self._infinite

    def part(self, rank: int, metric: str) -> Part:
        """The rows as a part; a statistic that no row has is left out, one that the file does not have in a row is missing there."""
        masks = {name: np.frombuffer(mask, bool) for name, mask in self.there.items()}
        values = {name: np.frombuffer(column, np.float64) for name, column in self.columns.items() if masks[name].any()}
        there = {name: masks[name] for name in values if not masks[name].all()}
        places = {name: i for i, name in enumerate(self.order)}  # a call that a later step alone makes stands where it ran
        ids = np.array([places[name] for name in self.names], np.int64)[np.frombuffer(self.ids, np.int64)]
        targets, steps = [Target(name) for name in places], np.frombuffer(self.steps, np.int64)
        when, masked = np.frombuffer(self.when, np.int64), np.empty(0, bool)
        if self.masks_until:
            masked = when < np.array([self.masks_until.get(step, -1) for step in self.steps], np.int64)
            for statistic in ("max", "min", "nans"):
                numbers = values.get(statistic, np.zeros(0))
                masked &= ~((numbers > 0) if statistic == "nans" else np.isnan(numbers)) if len(numbers) else True
        return Part(rank, metric, targets, ids, steps, *with_absmax(values, there), when, masked=masked)


OPTIMIZER = "optimizer"
"""Metric of the calls behind the last backward call, outside of all modules: the optimizer's. A dump calls them forward calls."""


class Call(NamedTuple):
    """A record of a dump."""

    metric: str
    """``forward``, ``backward``, ``recompute``, ``parameters_grad`` or `OPTIMIZER`."""
    name: str
    """``layers.3.mlp: Functional.linear``, ``Module.layers.3.mlp.MLP``."""
    number: int
    """Of the calls with this name in this micro step, from 0."""
    micro: int
    """Micro step: which call of its module at the top of the model this is a part of."""


def wrappers(table: DumpTable) -> int | None:
    """How often all modules of a dump have ``module.`` in front; None without any."""
    modules = {*map(module_path, table.ops), *(module_path(parent) for parent in table.parents.values() if parent)} - {""}
    return min((depth(f"{path}.") for path in modules), default=None)


def calls_of(table: DumpTable, times: int = 0) -> dict[str, Call]:
    """All records of one rank and step that belong to a pass, by their names in the dump.

    Args:
        times: how many ``module.`` are taken off the front of the names of modules. What ran in the wrapped module itself has no module
            then, and is numbered with what ran outside of it: a dump of the bare model does not tell them apart.
    """
    construct = table.parents
    recomputed = {table.ops[op] for op, tags in table.tags.items() if tags.get("is_recompute")}
    micro_of_root = _micro_steps(construct, recomputed)
    updates = _updates(table)
    calls: list[tuple[str, Call]] = []
    roots: dict[str, str] = {}
    for name in table.ops:
        place = place_of(name, name in recomputed)
        if place is None:
            continue
        metric, prefix, number = place
        metric = OPTIMIZER if name in updates else metric
        # a backward call is where its forward call is: the same row of another metric
        node = name.replace(".backward", ".forward")
        node = node if node in construct else name
        micro = micro_of_root.get(_root(construct, node, roots), 0)
        if module_path(name):
            prefix = unwrap_name(prefix, times)
        elif module := module_path(construct.get(node) or ""):
            module = unwrap_name(f"{module}.", times).rstrip(".")
            prefix, micro = (f"{module}: {prefix}", micro) if module else (prefix, 0)
        calls.append((name, Call(metric, prefix, number, micro)))
    numbers: dict[tuple[str, str, int], set[int]] = {}
    for _, call in calls:
        numbers.setdefault((call.metric, call.name, call.micro), set()).add(call.number)
    ranks = {group: {number: i for i, number in enumerate(sorted(members))} for group, members in numbers.items()}
    return {name: call._replace(number=ranks[call.metric, call.name, call.micro][call.number]) for name, call in calls}


def _updates(table: DumpTable) -> set[str]:
    """Calls behind everything of the model; none in a step without a backward pass."""
    names = table.ops
    if not any(".backward" in name for name in names):
        return set()
    last = max((i for i, name in enumerate(names) if ".backward" in name or module_path(name) or table.parents.get(name)), default=-1)
    return set(names[last + 1 :])


def _micro_steps(construct: Mapping[str, str | None], recomputed: set[str]) -> dict[str, int]:
    """Micro step of each forward call of a module at the top. One model may have several such modules, each called once in a micro step."""
    calls: dict[tuple[str, bool], list[tuple[int, str]]] = {}
    for name, parent in construct.items():
        head, _, number = name.rpartition(".")
        if parent is None and head.endswith(".forward") and number.isdigit():
            calls.setdefault((head, name in recomputed), []).append((int(number), name))
    return {name: i for members in calls.values() for i, (_, name) in enumerate(sorted(members))}


def _root(construct: Mapping[str, str | None], node: str, known: dict[str, str]) -> str:
    """The forward call at the top that a node is inside of.

    Args:
        known: what was found before, added to: a chain of parents is gone up once, however many of its nodes are asked for.
    """
    passed: dict[str, None] = {}
    while node not in known and node not in passed:  # a damaged file may go round in circles
        passed[node] = None
        parent = construct.get(node)
        if not parent:
            break
        node = parent.replace(".backward", ".forward")
    root = known.get(node, node)
    known.update(dict.fromkeys(passed, root))
    return root
