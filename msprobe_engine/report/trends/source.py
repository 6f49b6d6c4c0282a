"""What a run has written, as parts: the rows of one metric of one rank, whatever wrote them.

A metric is a family of the monitor (one phase, state or tag of it) or a pass of a dump (``forward``, ``backward``, ``recompute``,
``parameters_grad``, ``optimizer``); the numbers of the steps (loss, gradient norm, ...) are the metric `SCALARS`. A target is a tensor
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.formats.monitor.completeness import missing_parts, still_running
from msprobe_engine.formats.monitor.reader import Run, Series, Table, open_run
from msprobe_engine.formats.monitor.series import Floats, Ids, Integers
from msprobe_engine.report.run.data import titles

SCALARS = "numbers of the steps"
VALUE = "value"
"""The statistic of `SCALARS`."""
ABSMAX = "largest absolute value"
DUMPED = frozenset(("forward", "backward", "recompute", "parameters_grad", "optimizer"))
"""Metrics of dumps, whose `Key.micro_step` is the number of the call."""
_EITHER = "NaN or were not written, this data base does not say which: shown as NaN"

_PROBLEMS_SAID = 5
_MOST_STAGES = 1 << 20

Progress = Callable[[str], None]


class Target(NamedTuple):
    """A row of a heat map.

    Attributes:
        name: as the files have it, with what tells it apart from others of this name behind: ``#2`` is the third call, ``[micro 3]``
            the fourth micro batch of the step.
        pp, vpp: stage of the pipeline and chunk: names of Megatron's layers count from 0 in every one of them.
    """

    name: str
    pp: int = 0
    vpp: int = 0

    @property
    def shown(self) -> str:
        """The name with stage and chunk in front where there are several."""
        stage = f"pp{self.pp}:" if self.pp else ""
        return f"{stage}{self.vpp}:{self.name}" if self.vpp > 0 else f"{stage}{self.name}"


@dataclass(frozen=True)
class Part:
    """Rows of one metric of one rank. A row may occur several times (micro batches, calls): all of them count.

    Attributes:
        targets: what `ids` refer to.
        ids, steps: of every row, int64 [n].
        values: statistic to float64 [n].
        there: statistic to which rows have it, [n]; all where it is not named. NaN elsewhere is a real NaN.
        order: of dumps: when in its step a row was made, int64 [n], as `msprobe_engine.report.trends.findings.moment_of` makes it; empty:
            of other files, which do not say.
    """

    rank: int
    metric: str
    targets: Sequence[Target]
    ids: Integers
    steps: Integers
    values: Mapping[str, Floats]
    there: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    order: Integers = field(default_factory=lambda: np.empty(0, np.int64))


class Source(Protocol):
    """A run that can be read twice: once to see what there is, once to take it."""

    path: Path
    kinds: tuple[str, ...]
    ranks: list[int]

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]: ...

    def pieces(self) -> int:
        """How often reading it twice tells `progress`."""
        ...

    @property
    def problems(self) -> Mapping[str, int]: ...

    @property
    def left_out(self) -> int:
        """Of `problems` what is damage or missing: rows, records and files that were left out, ranks and steps that are not here."""
        ...


@dataclass(frozen=True)
class Wanted:
    """What of a run is asked for.

    Attributes:
        ranks, steps: only these; None: all.
        metrics, statistics, targets: only those whose name holds one of these texts; empty: all.
        micro_steps: micro batches of a step are targets of their own; else the extremes over them count.
    """

    ranks: frozenset[int] | None = None
    steps: frozenset[int] | None = None
    metrics: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    micro_steps: bool = False

    def takes(self, text: str, of: Sequence[str]) -> bool:
        """Whether a name is among those wanted."""
        return not of or any(word.casefold() in text.casefold() for word in of)

    def cut(self, part: Part) -> Part | None:
        """The part without what is not wanted, None when nothing is left."""
        if not self.takes(part.metric, self.metrics):
            return None
        keep = np.ones(len(part.ids), bool)
        if self.targets:
            keep &= np.array([self.takes(target.shown, self.targets) for target in part.targets], bool)[part.ids]
        if self.steps is not None:
            keep &= np.isin(part.steps, np.array(sorted(self.steps), np.int64))
        chosen = {name: values for name, values in part.values.items() if self.takes(name, self.statistics)}
        if not chosen or not keep.any():
            return None
        if keep.all():
            return replace(part, values=chosen)
        used, ids = np.unique(part.ids[keep], return_inverse=True)
        return Part(
            part.rank,
            part.metric,
            [part.targets[i] for i in used.tolist()],
            ids.astype(np.int64),
            part.steps[keep],
            {name: values[keep] for name, values in chosen.items()},
            {name: mask[keep] for name, mask in part.there.items() if name in chosen},
            part.order[keep] if len(part.order) else part.order,
        )


def open_source(path: Path | str, wanted: Wanted | None = None) -> Source:
    """What there is of a run: files of the monitor (all formats), trend data bases, dumps of one or more steps, or several of these.

    Args:
        path: output directory, its ``monitor`` or ``dump`` directory, a directory of one rank, a ``.jsonl`` or ``.db`` file, a dump.

    Raises:
        UsageError: there is nothing of the kind, or no rank of it is wanted.
    """
    wanted = wanted or Wanted()
    root = Path(path)
    found: list[Source] = []
    reasons: list[str] = []
    try:
        found.append(MonitorSource(open_run(root), wanted))
    except UsageError as error:
        reasons.append(str(error))
    if root.is_dir() or root.suffix == ".json":
        try:
            found.append(_dump(root, wanted))
        except (DumpFormatError, UsageError) as error:
            reasons.append(str(error))
    if not found:
        raise UsageError(f"{root}: holds no files of a monitor, no trend data base and no dump. {' '.join(reasons)}")
    joined = found[0] if len(found) == 1 else Both(root, found)
    if not joined.ranks:
        if joined.problems:
            raise UsageError(f"{root}: no rank of it can be read{said(joined.problems)}")
        raise UsageError(f"{root}: has none of the ranks asked for" if wanted.ranks else f"{root}: no rank has written a number")
    return joined


def said(problems: Mapping[str, int]) -> str:
    """The first problems of a run as the end of a message, "" without any."""
    return "".join(f"\n  {what}" for what in list(problems)[:_PROBLEMS_SAID])


def _dump(root: Path, wanted: Wanted) -> Source:
    from msprobe_engine.formats.dump.reader import open_dump
    from msprobe_engine.report.trends.dumps import DumpSource

    return DumpSource(open_dump(root), wanted, root)


class Both:
    """Several sources of one run, each with metrics of its own."""

    def __init__(self, path: Path, sources: Sequence[Source]) -> None:
        self.path = path
        self.kinds = tuple(kind for source in sources for kind in source.kinds)
        self.ranks = sorted({rank for source in sources for rank in source.ranks})
        self.sources = sources

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]:
        for source in self.sources:
            if rank in source.ranks:
                yield from source.parts(rank, progress)

    def pieces(self) -> int:
        return sum(source.pieces() for source in self.sources)

    @property
    def problems(self) -> Mapping[str, int]:
        return {what: count for source in self.sources for what, count in source.problems.items()}

    @property
    def left_out(self) -> int:
        return sum(source.left_out for source in self.sources)


class MonitorSource:
    """A monitored run in any of its formats."""

    def __init__(self, run: Run, wanted: Wanted) -> None:
        self.path = run.path
        self.kinds: tuple[str, ...] = (run.format,)
        self.ranks = [rank for rank in run.ranks if wanted.ranks is None or rank in wanted.ranks]
        self._run, self._wanted = run, wanted
        self._ambiguous: Counter[str] = Counter()
        stages = {rank: _stage(run.info(rank)) for rank in run.ranks}
        self._stages = stages if len(set(stages.values())) > 1 else {}
        self._missing = missing_parts(run) if wanted.ranks is None and wanted.steps is None else []
        self._running = still_running(run)

    @property
    def problems(self) -> Mapping[str, int]:
        return {**dict.fromkeys([*self._missing, *self._running], 1), **self._run.problems, **self._ambiguous}

    @property
    def left_out(self) -> int:
        return len(self._missing) + self._run.left_out

    def alerts(self) -> list[dict[str, Any]]:
        """What rules raised on the ranks and in the steps asked for."""
        steps = self._wanted.steps
        found = (alert for rank in self.ranks for alert in self._run.alerts(rank))
        return [alert for alert in found if steps is None or alert.get("step") in steps]

    def pieces(self) -> int:
        return 2 * sum(len(self._run.families(rank)) for rank in self.ranks)

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]:
        """Rows of a rank, metric by metric.

        Raises:
            UsageError: a file cannot be listed.
        """
        if scalars := self._run.scalars(rank):
            part = self._wanted.cut(scalar_part(rank, scalars))
            if part is not None:
                yield part
        for family in self._run.families(rank):
            progress(f"rank {rank} {family}")
            table = self._run.table(rank, family)
            for metric, keys in titles(table, family, layers=False).items():
                if (part := self._wanted.cut(self._part(rank, metric, family, table, keys))) is not None:
                    yield part
        self._run.forget(rank)

    def _part(self, rank: int, metric: str, family: str, table: Table, wanted: Sequence[int]) -> Part:
        pp = self._stages.get(rank, 0)
        numbers = Ids()
        of_key = np.full(len(table.keys), -1, np.int64)
        for i in wanted:
            key = table.keys[i]
            micro = key.micro_step
            name = key.name
            if family == "other" and key.detail not in ("", "mg_direction"):
                name = f"{name}/{key.detail}"
            if family in DUMPED:
                name = f"{name} #{micro}" if micro > 0 else name
            elif self._wanted.micro_steps and micro >= 0:
                name = f"{name} [micro {micro}]"
            of_key[i] = numbers[Target(name, pp, max(key.vpp_stage, 0))]
        ids = of_key[table.ids]
        rows = ids >= 0
        everything = bool(rows.all())
        values = dict(table.values) if everything else {op: v[rows] for op, v in table.values.items()}
        there = written(values)
        if "nans" not in values and self._run.format == "sqlite":
            count = sum(int(np.isnan(v).sum()) for v in values.values())
            if count:
                self._ambiguous[f"{metric}: numbers that are {_EITHER}"] = count
        return Part(
            rank, metric, list(numbers), ids if everything else ids[rows], table.steps if everything else table.steps[rows],
            *with_absmax(values, there),
        )  # fmt: skip


def _stage(info: Mapping[str, Any]) -> int:
    place = info.get("rank_info")
    stage = place.get("pp") if isinstance(place, Mapping) else None
    try:
        return min(max(int(stage), 0), _MOST_STAGES) if isinstance(stage, (int, str)) else 0
    except ValueError:
        return 0


def scalar_part(rank: int, scalars: Mapping[str, Series]) -> Part:
    """The numbers of the steps as rows."""
    first = ("loss", "grad_norm", "update_norm", "param_norm", "learning_rate", "loss_scale", "skipped", "step_seconds")
    names = sorted(scalars, key=lambda name: (first.index(name) if name in first else len(first), name))
    lengths = [len(scalars[name].steps) for name in names]
    return Part(
        rank,
        SCALARS,
        [Target(name) for name in names],
        np.repeat(np.arange(len(names)), lengths),
        np.concatenate([scalars[name].steps for name in names]).astype(np.int64),
        {VALUE: np.concatenate([scalars[name].values for name in names]).astype(np.float64)},
    )


def written(values: Mapping[str, Floats]) -> dict[str, npt.NDArray[np.bool_]]:
    """Which rows have a number: a NaN is one only where the count of NaN or other statistics do not say that there was nothing.

    A tensor without elements has no norm and 0 NaN; a row that the existing tool fills with ``nan`` has no count either.
    """
    nans = values.get("nans")
    if nans is None:
        return {}
    size = next((values[op] for op in ("norm", "min", "max") if op in values), None)
    nothing = np.isnan(nans) if size is None else np.isnan(size) & ~(nans > 0)
    if not nothing.any():
        return {}
    return {op: ~(nothing & np.isnan(v)) for op, v in values.items()}


def with_absmax(
    values: Mapping[str, Floats], there: Mapping[str, npt.NDArray[np.bool_]]
) -> tuple[dict[str, Floats], dict[str, npt.NDArray[np.bool_]]]:
    """The statistics and, where there are smallest and largest, the largest absolute value of them."""
    out, masks = dict(values), dict(there)
    if "min" in out and "max" in out:
        out[ABSMAX] = np.maximum(np.abs(out["min"]), np.abs(out["max"]))
        if "min" in masks:
            masks[ABSMAX] = masks["min"] & masks.get("max", masks["min"])
    return out, masks
