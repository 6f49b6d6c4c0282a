"""Numbers of two monitored runs, paired: of each rank, family, tensor, statistic and step that both have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.records import BATCH_DIGEST, UPDATES_MADE
from msprobe_engine.formats.monitor.alert_order import Moment, order_of
from msprobe_engine.formats.monitor.anomalies import word_of
from msprobe_engine.formats.monitor.completeness import passed_over
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import EMPTY, Key, Series, steps_of

COMPARED = ("norm", "max", "min")
"""What is derived from these says nothing more; a mean is compared beside them, in units of the largest element."""
Table = Mapping[Any, Series]
"""Of one column: key to numbers."""
Steps = npt.NDArray[np.int64]
_OF_UPDATES = re.compile(r"(updates_made|learning_rate|lr|weight_decay|beta[12]|eps|momentum)(?![a-z])", re.I)
_OF_GROUPS = re.compile(r"(.+)_group_\d+")
_OUTPUT = re.compile(r"output_?.*")
OF_THE_MACHINE = re.compile(r"seconds|time|per_sec|throughput|t?flops|memory|bytes|elapsed", re.I)
"""Numbers of the step that say how fast it went: no two runs have the same."""


def is_compared(name: str) -> bool:
    """A number of the step that the training itself has made; which batch it had is asked by itself (`find.monitor.given_batches`)."""
    return not OF_THE_MACHINE.search(name) and name != BATCH_DIGEST


class Number(NamedTuple):
    """One number of both runs: sorts by execution."""

    step: int
    order: tuple[int, int, int, int]
    rank: int
    family: str
    key: Key
    op: str
    target: float
    golden: float
    size: float = 0.0
    """What a difference is a share of, where it is more than both numbers."""

    @property
    def distance(self) -> float:
        if self.target == self.golden or (math.isnan(self.target) and math.isnan(self.golden)):
            return 0.0
        if not math.isfinite(self.target - self.golden):
            return math.inf
        return abs(self.target - self.golden) / max(abs(self.target), abs(self.golden), self.size)


def _steps(run: Run, rank: int) -> npt.NDArray[np.int64]:
    """Steps of which anything was written, also where the file of the step's own numbers is gone."""
    return steps_of(every_series(run, rank))


def every_series(run: Run, rank: int) -> Iterator[Series]:
    """The numbers of the step, and one column of each tensor."""
    yield from run.scalars(rank).values()
    yield from series_of_tensors(run, rank)


def series_of_tensors(run: Run, rank: int) -> Iterator[Series]:
    """One column of each tensor."""
    for family in run.families(rank):
        for op in run.ops(rank, family)[:1]:
            yield from run.series(rank, family, op).values()


def given_besides(target: Iterable[Key], golden: Iterable[Key]) -> set[str]:
    """Names of results that a module gives in one run alone, where it gives others in both: a fused attention gives no weights, and that is
    no difference where it gives its result."""
    known = {key.name.rpartition(".")[0] for key in golden}
    names = {key.name for key in target} - {key.name for key in golden}
    return {name for name in names if _OUTPUT.fullmatch(name.rpartition(".")[2]) and name.rpartition(".")[0] in known}


def _list_unpaired_numbers(table: Table, other_table: Table, steps: Steps, passed: Steps, what: str) -> Iterator[str]:
    """Numbers of a table, of steps that both runs have, that another table has not, though its run did not pass over the step: one that it
    has in other steps alone is of those it looked at."""
    for key, series in table.items():
        has = other_table[key].steps if key in other_table else EMPTY.steps
        alone = np.setdiff1d(np.intersect1d(series.steps, steps), has)
        if len(has) and not np.isin(has, passed).any():
            alone = np.setdiff1d(alone, passed)
        for step in alone.tolist():
            yield f"{what}{key.name if isinstance(key, Key) else key}, step {step}"


def paired_numbers(run: Run, other: Run) -> tuple[list[Number], tuple[list[str], list[str]]]:
    """All numbers that both runs have, and the names of those that one run has alone of a rank and step that both have."""
    items: list[Number] = []
    alone: tuple[list[str], list[str]] = ([], [])
    for rank in sorted(set(run.ranks) & set(other.ranks)):
        steps = np.intersect1d(_steps(run, rank), _steps(other, rank))
        regrouped = _find_regrouped_settings(run.scalars(rank), other.scalars(rank))
        of_rank = [{name: series for name, series in one.scalars(rank).items() if name not in regrouped} for one in (run, other)]
        scalars, other_scalars = _with_groups(*of_rank), _with_groups(*of_rank[::-1])
        for k, (one, two) in enumerate(((run, other), (other, run))):
            numbers = {name: one for name, one in of_rank[k].items() if is_compared(name) and name != UPDATES_MADE}
            numbers = {name: one for name, one in numbers.items() if not _is_no_scale(name, one)}
            passed = passed_over(two, rank)
            alone[k].extend(_list_unpaired_numbers(numbers, _with_groups(of_rank[1 - k], numbers), steps, passed, f"rank {rank}, "))
            for family in one.families(rank):
                ops = [op for op in _list_compared_columns(one, rank, family) if op != "nans"][:1]
                known = set(two.ops(rank, family)) if family in two.families(rank) else set()
                for op in ops:
                    table = _column(two, rank, family, op) if op in known else {}
                    column = _column(one, rank, family, op)
                    besides = given_besides(column, table)
                    compared = {key: series for key, series in column.items() if key.name not in besides}
                    alone[k].extend(_list_unpaired_numbers(compared, table, steps, passed, f"rank {rank}, {family}/"))
        for name in (name for name in scalars if name in other_scalars and is_compared(name)):
            items += _pair_numbers(rank, "loss" if "loss" in name else "step", 0, Key(0, name), "value", scalars[name], other_scalars[name])
        families = other.families(rank)
        for family in (family for family in run.families(rank) if family in families):
            items += _statistics(run, other, rank, family)
            for k, (one, two) in enumerate(((run, other), (other, run))):
                known = set(two.ops(rank, family))
                lacking = set(one.ops(rank, family)) - known if known else set()  # of an empty table each row is said
                alone[k].extend(f"rank {rank}, {family}: statistic {op}" for op in sorted(lacking))
    return items, alone


def _is_no_scale(name: str, series: Series) -> bool:
    """A loss scale that is 1 in every step: an engine writes it where a loop without one writes nothing."""
    return name.endswith("loss_scale") and bool((series.values == 1).all())


def _with_groups(scalars: Mapping[str, Series], other: Mapping[str, Series]) -> Mapping[str, Series]:
    """A setting of a group of parameters (``weight_decay_group_1``) is written where it is not that of the first group; it is that of the
    first one in a run that does not write it."""
    of_groups = {name: _OF_GROUPS.fullmatch(name) for name in other if name not in scalars}
    return {**scalars, **{name: scalars[match[1]] for name, match in of_groups.items() if match and match[1] in scalars}}


def _find_regrouped_settings(run: Mapping[str, Series], other: Mapping[str, Series]) -> set[str]:
    """Settings of groups of runs that group their parameters otherwise, where they have the same values, whatever the groups' numbers."""
    groups = [{name: match[1] for name in one if (match := _OF_GROUPS.fullmatch(name))} for one in (run, other)]
    regrouped: set[str] = set()
    for first in {*groups[0].values(), *groups[1].values()}:
        names = [{first, *(name for name, its_first in some.items() if its_first == first)} for some in groups]
        values = [
            {pair for name in some if name in one for pair in zip(one[name].steps.tolist(), one[name].values.tolist())}
            for one, some in zip((run, other), names)
        ]
        if names[0] != names[1] and values[0] == values[1]:
            regrouped |= names[0] | names[1]
    return regrouped


def _column(run: Run, rank: int, family: str, op: str) -> Table:
    """A statistic of tensors, of the steps in which they have one: of a part of a sum there is not even a count of NaN."""
    table = run.series(rank, family, op)
    counts = run.series(rank, family, "nans") if "nans" in run.ops(rank, family) else {}
    column = dict(table)
    for key, series in table.items():
        if key in counts and (uncounted := np.isnan(counts[key].values)).any():
            kept = ~(np.isnan(series.values) & np.isin(series.steps, counts[key].steps[uncounted]))
            column[key] = Series(series.steps[kept], series.values[kept])
    return column


def _statistics(run: Run, other: Run, rank: int, family: str) -> Iterator[Number]:
    """The numbers of a family that both have. Of what is neither compared nor a count of NaN (the share of zeros, kurtosis) only whether it
    is a number: round-off moves it, and how far is not known."""
    compared = _list_compared_columns(run, rank, family)
    tops = [other.series(rank, family, op) for op in ("max", "min") if op in other.ops(rank, family)]
    for op in run.ops(rank, family):
        golden = _column(other, rank, family, op)
        for number, (key, series) in enumerate(_column(run, rank, family, op).items()):
            if key not in golden:
                continue
            for item in _pair_numbers(rank, family, number, key, op, series, golden[key]):
                if op in ("max", "min", "mean") and (op in compared or op == "mean"):
                    yield item._replace(size=max((_at(table, key, item.step) for table in tops), default=0.0))
                elif op in compared or op == "nans" or math.isfinite(item.target) != math.isfinite(item.golden):
                    yield item


def _at(table: Mapping[Key, Series], key: Key, step: int) -> float:
    """The size of a tensor's number in a step, 0 where there is none."""
    series = table.get(key)
    place = int(np.searchsorted(series.steps, step)) if series is not None else 0
    if series is None or place == len(series.steps) or series.steps[place] != step:
        return 0.0
    value = abs(float(series.values[place]))
    return value if math.isfinite(value) else 0.0


def _list_compared_columns(run: Run, rank: int, family: str) -> list[str]:
    """Columns of features have names of their own; all of them count."""
    ops = run.ops(rank, family)
    return [op for op in ops if op in COMPARED] or ops


def _pair_numbers(rank: int, family: str, number: int, key: Key, op: str, target: Series, golden: Series) -> Iterator[Number]:
    steps, i, j = np.intersect1d(target.steps, golden.steps, assume_unique=True, return_indices=True)
    order = order_in_step(family, key, number)
    for step, target_value, golden_value in zip(steps.tolist(), target.values[i].tolist(), golden.values[j].tolist()):
        yield Number(step, order, rank, family, key, op, target_value, golden_value)


def order_in_step(family: str, key: Key, number: int) -> tuple[int, int, int, int]:
    if family == "step" and _OF_UPDATES.match(key.name):  # the update of the step takes it
        return 2, 0, int(Moment.STATES), -1
    return (*order_of(word_of(family, key.phase), key.micro_step), number)
