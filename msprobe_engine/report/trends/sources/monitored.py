"""A monitored run as the source of a trends page, in any format that the monitor writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.monitor.completeness import missing_parts, remarks, still_running
from msprobe_engine.formats.monitor.reader import Run, Series, Table
from msprobe_engine.formats.monitor.series import Floats, Ids
from msprobe_engine.report.trends.facts import Facts
from msprobe_engine.report.trends.sources.source import DUMPED, SCALARS, VALUE, Part, Progress, Target, Wanted, with_absmax

_EITHER = "NaN or were not written, this data base does not say which: shown as NaN"
_MOST_STAGES = 1 << 20
_GRADIENTS = ("grad_unreduced", "grad_reduced")


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
        self._notes = [*still_running(run), *remarks(run)]
        self._seconds: dict[int, float] = {}

    @property
    def problems(self) -> Mapping[str, int]:
        return {**dict.fromkeys([*self._missing, *self._notes], 1), **self._run.problems, **self._ambiguous}

    @property
    def left_out(self) -> int:
        return len(self._missing) + self._run.left_out

    def alerts(self) -> list[dict[str, Any]]:
        """What rules raised on the ranks and in the steps asked for."""
        steps = self._wanted.steps
        found = (alert for rank in self.ranks for alert in self._run.alerts(rank))
        return [alert for alert in found if steps is None or alert.get("step") in steps]

    def facts(self) -> Facts:
        """What the run says of itself; how long its steps took once all parts have been read."""
        return Facts.of((self._run.info(rank) for rank in self.ranks), self._seconds.values())

    def pieces(self) -> int:
        return 2 * sum(len(self._run.families(rank)) for rank in self.ranks)

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]:
        """Rows of a rank, metric by metric.

        Raises:
            UsageError: a file cannot be listed.
        """
        families, scalars = self._run.families(rank), self._run.scalars(rank)
        if (times := scalars.get("step_seconds")) is not None:
            self._seconds[rank] = float(times.values[np.isfinite(times.values)].sum())
        scalars = scalars if scalars or families else self._count_alerts(rank)
        if scalars and (part := self._wanted.restrict_part(scalar_part(rank, scalars))) is not None:
            yield part
        for family in families:
            progress(f"rank {rank} {family}")
            table = self._run.table(rank, family)
            for metric, keys in titles(table, family).items():
                if (part := self._wanted.restrict_part(self._part(rank, metric, family, table, keys))) is not None:
                    yield part
        self._run.forget(rank)

    def _count_alerts(self, rank: int) -> dict[str, Series]:
        """How many alerts a rank has in each step, for a rank that has written nothing else."""
        found = Counter(step for alert in self._run.alerts(rank) if isinstance(step := alert.get("step"), int))
        steps = sorted(found)
        return {"alerts": Series(np.array(steps, np.int64), np.array([found[step] for step in steps], np.float64))} if found else {}

    def _find_masked_rows(self, rank: int, table: Table) -> npt.NDArray[np.bool_]:
        """Rows with -Inf, and nothing else that is not finite, in steps without an alert, of a run that says that there were masks: its
        rule has looked at them and has seen no fault."""
        columns = table.values
        if not isinstance(self._run.info(rank).get("masks"), Mapping) or not {"min", "max"} <= columns.keys():
            return np.empty(0, bool)
        alerts = [step for alert in self._run.alerts(rank) if isinstance(step := alert.get("step"), int)]
        found = (columns["min"] == -np.inf) & (columns["max"] < np.inf) & ~np.isin(table.steps, np.array(alerts, np.int64))
        return np.asarray(found & (columns["nans"] == 0) if "nans" in columns else found, bool)

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
        masked = self._find_masked_rows(rank, table) if family == "actv" else np.empty(0, bool)
        part = Part(rank, metric, list(numbers), ids, table.steps, dict(table.values), masked=masked)
        if (outside := ids < 0).any():
            part = part.of(~outside)
        if "nans" not in part.values and self._run.format == "sqlite":
            count = sum(int(np.isnan(v).sum()) for v in part.values.values())
            if count:
                self._ambiguous[f"{metric}: numbers that are {_EITHER}"] = count
        values, there = with_absmax(part.values, mask_written(part.values))
        return replace(part, values=values, there=there)


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


def mask_written(values: Mapping[str, Floats]) -> dict[str, npt.NDArray[np.bool_]]:
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


def titles(table: Table, family: str) -> dict[str, list[int]]:
    """Keys of each metric of a family: phases, states and tags are told apart; but for names of collectives and what they hold."""
    out: dict[str, list[int]] = {}
    for i, key in enumerate(table.keys):
        plain = family == "other" and key.detail != "mg_direction"
        more = "" if plain else key.detail or (key.phase if family in _GRADIENTS else "")
        out.setdefault(f"{family}, {more}" if more else family, []).append(i)
    return out
