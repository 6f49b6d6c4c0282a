"""What the page of a run shows, as plain data: tensors added up to layers, steps to at most `BINS` bins, ranks to what stands out.

Sizes are bounded, so that the page of a run with thousands of tensors, steps and ranks still opens at once: a curve has one point per
bin (the largest value of its steps, so that a spike stays), per layer the largest value over the ranks is kept, and per rank how far it
is from the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.names import is_number, layer_of
from msprobe_engine.formats.monitor.completeness import missing_parts, still_running
from msprobe_engine.formats.monitor.reader import Run, Series, Table
from msprobe_engine.report.trends.alerts import Raised
from msprobe_engine.report.trends.monitored import titles

Floats = npt.NDArray[np.float64]

BINS = 240
"""Points of a curve."""
LINES = 8
"""Ranks with a curve of their own; of more, the smallest, the median and the largest are shown."""
WORST = 60
NOTABLE = 3.0
"""A layer stands out when it leaves its own median, or the other ranks, by this factor."""
_FILLING = ("exp_avg", "exp_avg_sq", "opt_state")
"""Families that begin at zero and fill: that they are small in the first steps is no news in any run."""

Progress = Callable[[str], None]


class Group(NamedTuple):
    """One picture: a family (of one phase, state or tag) and one statistic of it."""

    family: str
    statistic: str


@dataclass
class Picture:
    """Layers over steps, for all ranks together.

    Attributes:
        layers: names, in the order of the model.
        top: [layers, bins] largest over ranks; NaN where a rank has NaN, -inf where nothing was written.
        of_rank: rank to [layers, bins].
    """

    layers: dict[str, int] = field(default_factory=dict)
    of_rank: dict[int, Floats] = field(default_factory=dict)


@dataclass
class Collected:
    """The pictures of a run under way."""

    starts: npt.NDArray[np.int64]
    pictures: dict[Group, Picture] = field(default_factory=dict)


def collect(run: Run, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Everything the page needs, ready for JSON (no NaN in it: null is NaN or missing, see ``nonfinite``).

    Args:
        progress: told what is read next, once per rank and family.

    Raises:
        UsageError: the run holds no samples, no numbers and no alerts.
    """
    scalars = {rank: run.scalars(rank) for rank in run.ranks}
    alerts = [alert for rank in run.ranks for alert in run.alerts(rank)]
    parts = [(rank, family) for rank in run.ranks for family in run.families(rank)]
    steps = _all_steps(run, parts, scalars, alerts)
    if not len(steps):
        problems = "".join(f"; {what}" for what in list(run.problems)[:3])
        raise UsageError(f"{run.path}: nothing to show: no samples, numbers of steps or alerts were written{problems}")
    starts = np.array([chunk[0] for chunk in np.array_split(steps, min(BINS, len(steps)))], np.int64)
    found = Collected(starts)
    for rank, family in parts:
        progress(f"rank {rank} {family}")
        _add(found, run.table(rank, family), rank, family)
    stacked = {group: _stacked(picture, len(starts)) for group, picture in found.pictures.items() if picture.layers}
    raised = Raised.of(alerts)
    return {
        "run": run.path.resolve().name,
        "ranks": [{"rank": rank, **_facts(run.info(rank))} for rank in run.ranks],
        "first": int(steps[0]),
        "last": int(steps[-1]),
        "count": len(steps),
        "steps": starts.tolist(),
        "scalars": _scalars(scalars, starts),
        "pictures": [_picture(group, found.pictures[group], ranks) for group, ranks in stacked.items()],
        "worst": _worst(found, stacked, raised.began),
        "alerts": raised.rows(),
        "alerts_left_out": raised.left_out,
        "rules": raised.rules,
        "meanings": raised.meanings(),
        "timeline": _timeline(raised.began, starts),
        "missing": missing_parts(run),
        "running": still_running(run),
        "problems": run.problems,
    }


def shows_trouble(data: Mapping[str, Any]) -> bool:
    """Whether what `collect` gave holds an alert, or a number that is not finite."""
    pictures = (cells for picture in data["pictures"] for cells in picture["bad"])
    scalars = (scalar["bad"] for scalar in data["scalars"])
    return bool(data["rules"]) or any(w["first_bad"] is not None for w in data["worst"]) or any(pictures) or any(scalars)


def _facts(info: Mapping[str, Any]) -> dict[str, Any]:
    place = info.get("rank_info")
    return {str(k): v for k, v in place.items() if isinstance(v, (int, str))} if isinstance(place, Mapping) else {}


def _all_steps(
    run: Run, parts: Iterable[tuple[int, str]], scalars: Mapping[int, Mapping[str, Series]], alerts: Iterable[Mapping[str, Any]]
) -> npt.NDArray[np.int64]:
    seen = [np.unique(run.table(rank, family).steps) for rank, family in parts]
    seen += [series.steps for named in scalars.values() for series in named.values()]
    seen.append(np.array([a["step"] for a in alerts if isinstance(a.get("step"), int)], np.int64))
    return np.unique(np.concatenate(seen)) if seen else np.empty(0, np.int64)


def _add(found: Collected, table: Table, rank: int, family: str) -> None:
    """Put the table of a family into its pictures."""
    bins = len(found.starts)
    where = np.searchsorted(found.starts, table.steps, "right") - 1
    there = ~_empty(table)
    for title, wanted in titles(table, family).items():
        keys = [table.keys[i] for i in wanted]
        names = [layer_of(key.name, key.vpp_stage) for key in keys]
        for statistic, (values, kind) in _statistics(table, family).items():
            picture = found.pictures.setdefault(Group(title, statistic), Picture())
            for name in names:
                picture.layers.setdefault(name, len(picture.layers))
            layer = np.full(len(table.keys), -1, np.int64)
            layer[wanted] = [picture.layers[name] for name in names]
            micro = np.zeros(len(table.keys), np.int64)
            micro[wanted] = [max(key.micro_step, 0) for key in keys]
            rows = (layer[table.ids] >= 0) & there
            out = _by_layer(
                values[rows],
                kind,
                layer[table.ids][rows],
                micro[table.ids][rows],
                table.steps[rows],
                where[rows],
                len(picture.layers),
                bins,
            )
            old = picture.of_rank.get(rank)
            if old is not None:
                out[: len(old)] = np.fmax(out[: len(old)], old)
            picture.of_rank[rank] = out


def _empty(table: Table) -> npt.NDArray[np.bool_]:
    """Rows of tensors without elements (an expert without tokens): statistics are NaN there without one NaN in the tensor."""
    none = np.zeros(len(table.ids), bool)
    size = next((table.values[op] for op in ("norm", "min", "max") if op in table.values), None)
    return none if size is None or "nans" not in table.values else np.isnan(size) & (table.values["nans"] == 0)


def _statistics(table: Table, family: str) -> dict[str, tuple[Floats, str]]:
    """The statistics that a page shows, each with how tensors of a layer are put together."""
    v, out = table.values, {}
    if family.endswith("_hook"):
        return {column: (values, "max") for column, values in v.items()}
    if "norm" in v:
        out["norm"] = (v["norm"], "norm")
    if "min" in v and "max" in v:
        out["largest absolute value"] = (np.maximum(np.abs(v["min"]), np.abs(v["max"])), "max")
    for op, title in (("nans", "NaN elements"), ("infs", "Inf elements")):
        if op in v and np.nansum(v[op]) > 0:
            out[title] = (v[op], "sum")
    for op, title in (("zeros", "largest share of zeros"), ("kurtosis", "largest kurtosis"), ("underflow", "largest underflow share")):
        if op in v:
            out[title] = (v[op], "max")
    if not out:
        out = {op: (values, "max") for op, values in list(v.items())[:1]}
    return out


def _by_layer(values: Floats, kind: str, layer: Any, micro: Any, steps: Any, where: Any, layers: int, bins: int) -> Floats:
    """[layers, bins]: tensors of a layer put together within a step, micro steps and steps of a bin by the largest."""
    out = np.full((layers, bins), -np.inf)
    if not len(values):
        return out
    moment, index = np.unique(np.stack([layer, steps, micro]), axis=1, return_inverse=True)
    index = index.reshape(-1)
    total = np.full(moment.shape[1], -np.inf if kind == "max" else 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        if kind == "max":
            np.maximum.at(total, index, values)
        else:
            np.add.at(total, index, values * values if kind == "norm" else values)
        if kind == "norm":
            total = np.sqrt(total)
    column = np.zeros(moment.shape[1], np.int64)
    column[index] = where
    np.maximum.at(out, (moment[0], column), total)
    return out


class Stacked(NamedTuple):
    """A picture with its ranks put together: `stack` [ranks, layers, bins], `apart` [layers, ranks] as of `_apart`."""

    ranks: list[int]
    stack: Floats
    apart: Floats


def _stacked(picture: Picture, bins: int) -> Stacked:
    layers = len(picture.layers)
    whole = [
        np.concatenate([a, np.full((layers - len(a), bins), -np.inf)]) if len(a) < layers else a for a in picture.of_rank.values()
    ]  # a layer that a later rank has brought is missing in those before
    stack = np.stack(whole)
    return Stacked(list(picture.of_rank), stack, _apart(stack) if len(whole) > 1 else np.zeros((layers, 1)))


def _picture(group: Group, picture: Picture, stacked: Stacked) -> dict[str, Any]:
    ranks, stack, apart = stacked
    top = stack.max(0)
    names = _in_order(picture.layers)
    order = [picture.layers[name] for name in names]
    return {
        "family": group.family,
        "statistic": group.statistic,
        "layers": names,
        "ranks": ranks,
        "top": [_numbers(top[i]) for i in order],
        "bad": [[int(j) for j in np.flatnonzero(np.isnan(top[i]) | (top[i] == np.inf))] for i in order],
        "apart": [_numbers(apart[i]) for i in order] if len(ranks) > 1 else [],
        "lines": _lines({rank: _over_layers(a, group.statistic) for rank, a in zip(ranks, stack)}),
    }


def _over_layers(values: Floats, statistic: str) -> Floats:
    there = np.where(values == -np.inf, 0.0, values)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.sqrt((there * there).sum(0)) if statistic == "norm" else there.sum(0) if "elements" in statistic else values.max(0)
    return np.where((values == -np.inf).all(0), -np.inf, total)


def _apart(stack: Floats) -> Floats:
    """[layers, ranks]: largest factor (log10) over the bins between a rank and the median of all; inf where only this one is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(np.where(np.isfinite(stack) & (stack > 0), stack, np.nan))
        middle = np.zeros(stack.shape[1:])
        some = np.isfinite(logs).any(0)
        middle[some] = np.nanmedian(logs[:, some], axis=0)
        far = np.nan_to_num(np.abs(logs - middle[None]), nan=0.0).max(-1)
    bad = (np.isnan(stack) | (stack == np.inf)).any(-1)
    far[bad & ~bad.all(0)[None]] = np.inf
    return np.asarray(far.T)


def _in_order(layers: Mapping[str, int]) -> list[str]:
    """Layers as the model has them: numbers count as numbers, what has none stays where it was first seen."""

    first_of: dict[str, int] = {}  # place of the first layer below a stem
    for name, i in layers.items():
        first_of.setdefault(name.rpartition(".")[0], i)

    def key(item: tuple[str, int]) -> tuple[int, int]:
        name, i = item
        words = name.split(".")
        number = next((int(w) for w in words if is_number(w)), -1)
        stem = name.rpartition(".")[0] if is_number(words[-1]) else name
        return min(i, first_of.get(stem, i)) if number >= 0 else i, number

    return [name for name, _ in sorted(layers.items(), key=key)]


def _lines(curves: Mapping[int, Floats]) -> dict[str, list[float | None]]:
    if len(curves) <= LINES:
        return {f"rank {rank}": _numbers(values) for rank, values in curves.items()}
    stack = np.stack(list(curves.values()))
    stack = np.where(np.isfinite(stack), stack, np.nan)
    some = np.isfinite(stack).any(0)
    out = {}
    for name, reduce in (("smallest rank", np.nanmin), ("median", np.nanmedian), ("largest rank", np.nanmax)):
        line = np.full(stack.shape[1], np.nan)
        line[some] = reduce(stack[:, some], axis=0)
        out[name] = _numbers(line)
    return out


def _scalars(scalars: Mapping[int, Mapping[str, Series]], starts: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for named in scalars.values() for name in named)
    first = ("loss", "grad_norm", "update_norm", "param_norm", "learning_rate", "loss_scale", "skipped", "step_seconds")
    out = []
    for name in sorted(names, key=lambda n: (first.index(n) if n in first else len(first), n)):
        curves, bad = {}, set()
        for rank, named in scalars.items():
            if name in named:
                line = np.full(len(starts), -np.inf)
                where = np.searchsorted(starts, named[name].steps, "right") - 1
                with np.errstate(invalid="ignore"):  # NaN stays NaN
                    np.maximum.at(line, where, named[name].values)
                curves[rank] = line
                bad |= {int(i) for i in where[~np.isfinite(named[name].values)]}
        out.append({"name": name, "lines": _lines(curves), "bad": sorted(bad)})
    return out


def _timeline(alerts: Iterable[Mapping[str, Any]], starts: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], Counter[int]] = {}
    for alert in alerts:
        step = alert.get("step")
        if isinstance(step, int):
            key = str(alert.get("rule", "")), str(alert.get("severity", ""))
            rows.setdefault(key, Counter())[int(np.searchsorted(starts, step, "right")) - 1] += 1
    return [{"rule": rule, "severity": severity, "marks": sorted(count.items())} for (rule, severity), count in rows.items()]


def _worst(found: Collected, stacked: Mapping[Group, Stacked], alerts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Layers that stand out: not finite first, then by the largest jump over their own median or between ranks."""
    named = Counter(layer_of(str(a.get("name", ""))) for a in alerts)
    out: list[dict[str, Any]] = []
    for group, (ranks, stack, apart) in stacked.items():
        if group.statistic not in ("norm", "NaN elements", "Inf elements"):
            continue
        for name, i in found.pictures[group].layers.items():
            line = stack[:, i].max(0)
            bad = np.flatnonzero(np.isnan(line) | (line == np.inf)) if group.statistic == "norm" else np.flatnonzero(line > 0)
            jump, at, below = _jump(line, group.family) if group.statistic == "norm" else _NO_JUMP
            far_rank = int(np.argmax(apart[i]))
            factor = float(10 ** min(apart[i][far_rank], 300)) if np.isfinite(apart[i][far_rank]) else None
            if not len(bad) and jump < NOTABLE and (factor is not None and factor < NOTABLE):
                continue
            out.append({
                "layer": name, "family": group.family, "statistic": group.statistic,
                "first_bad": int(found.starts[bad[0]]) if len(bad) else None,
                "jump": round(jump, 3), "below": below, "jump_step": int(found.starts[at]) if at >= 0 else None,
                "rank": ranks[far_rank] if len(ranks) > 1 else None, "rank_factor": factor if factor is None else round(factor, 3),
                "alerts": named[name],
            })  # fmt: skip
    out.sort(key=lambda w: (w["first_bad"] is None, w["first_bad"] or 0, -w["alerts"], -max(w["jump"], w["rank_factor"] or 1e300)))
    once = {(w["layer"], w["family"]): w for w in reversed(out)}  # norm and counts of NaN say the same twice: the first in the order stays
    return [w for w in out if once[w["layer"], w["family"]] is w][:WORST]


_NO_JUMP = 1.0, -1, False


def _jump(line: Floats, family: str) -> tuple[float, int, bool]:
    """Largest factor between a curve and its own median, at which bin, and whether it is a fall."""
    usable = np.isfinite(line) & (line > 0)
    if usable.sum() < 2:
        return _NO_JUMP
    with np.errstate(divide="ignore", invalid="ignore"):
        far = np.log10(np.where(usable, line, np.nan) / np.median(line[usable]))
    if family in _FILLING:
        far = np.where(far < 0, 0.0, far)
    at = int(np.nanargmax(np.abs(far)))
    return float(10 ** abs(far[at])), at, bool(far[at] < 0)


def _numbers(values: Floats) -> list[float | None]:
    """Five significant digits, null for what is not finite."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]
