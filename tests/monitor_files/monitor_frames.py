"""Frames of every family for tests of what is written and read, and what a reader has to give for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from frames_of_lists import TENSOR, row_of
from hypothesis import strategies as st

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame, Sample, TensorRef
from msprobe_engine.core.statistics.columns import column
from msprobe_engine.formats.monitor.reader import Key, Run
from msprobe_engine.probe.sinks.csv.features import FEATURES

OPS = ("norm", "min", "max", "mean", "nans")
PHASES = {"grad_unreduced": ("local", "accumulated"), "grad_reduced": ("reduced", "clipped")}
MICRO = ("actv", "actv_grad", "attention_hook", "moe_router_logit_hook")
PLAIN = ("param_origin", "param_updated", "exp_avg", "update", "opt_state", "other")

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
VALUES = st.lists(st.floats(width=32), min_size=1, max_size=3)


@st.composite
def samples(draw: st.DrawFn) -> tuple[Sample, list[float]]:
    """A sample of any family without a row, and the values of its tensor."""
    family = draw(st.sampled_from((*PHASES, *MICRO, *PLAIN, "linear_hook")))
    extra: dict[str, Any] = {}
    if family == "opt_state":
        extra["state"] = draw(st.sampled_from(("momentum_buffer", "a,b")))
    if family == "other":
        extra["tag"] = draw(st.sampled_from(("mg_direction", "pre_0", "post_0")))
    if family in FEATURES:
        extra["column"] = draw(st.sampled_from((*FEATURES[family], "more")))
    phase = draw(st.sampled_from(PHASES.get(family, ("",))))
    micro = draw(st.integers(0, 2)) if family in MICRO else -1
    values = draw(st.lists(st.floats(width=32), min_size=1, max_size=1) if family in FEATURES else VALUES)
    return Sample(family, draw(NAMES), TensorRef(-1, TENSOR), phase, micro, draw(st.integers(0, 1)), extra), values


@st.composite
def runs(draw: st.DrawFn) -> list[Frame]:
    """Some steps of one rank; every sample has a key of its own in its step."""
    out = []
    for step in draw(st.lists(st.integers(0, 300), min_size=1, max_size=4, unique=True)):
        seen: dict[Any, tuple[Sample, list[float]]] = {}
        for sample, values in draw(st.lists(samples(), max_size=6)):
            seen[sample.family, key_of(sample), sample.extra.get("column")] = sample, values
        rows = [row_of(values) for _, values in seen.values()]
        placed = [sample._replace(ref=TensorRef(i, TENSOR)) for i, (sample, _) in enumerate(seen.values())]
        scalars = draw(st.dictionaries(NAMES, st.floats(), max_size=3))
        out.append(Frame(step, 0, np.concatenate(rows) if rows else np.empty((0, 16)), samples=placed, scalars=scalars))
    return out


def key_of(sample: Sample) -> Key:
    detail = {"opt_state": "state", "other": "tag"}.get(sample.family, "")
    return Key(sample.vpp_stage, sample.name, sample.micro_step, sample.phase, sample.extra.get(detail, ""))


def wanted(frames: Sequence[Frame]) -> dict[tuple[str, str, Key, int], float]:
    """Family, statistic, key and step to the number."""
    out = {}
    for frame in frames:
        for sample in frame.samples:
            row = frame.rows[[sample.ref.row]]
            if sample.family in FEATURES:
                out[sample.family, sample.extra["column"], key_of(sample), frame.step] = float(column(row, "mean")[0])
            else:
                for op in OPS:
                    out[sample.family, op, key_of(sample), frame.step] = float(column(row, op)[0])
    return out


def check(run: Run, frames: Sequence[Frame]) -> None:
    """The run has exactly the numbers of the frames: samples and scalars."""
    expected = wanted(frames)
    found = {}
    for family in run.families(0):
        for op in run.ops(0, family):
            for key, series in run.series(0, family, op).items():
                assert (np.diff(series.steps) > 0).all()
                for step, value in zip(series.steps.tolist(), series.values.tolist()):
                    if (family, op, key, step) in expected or (op in OPS or not math.isnan(value)):
                        found[family, op, key, step] = value
    assert found.keys() == {place for place in expected if place in found or not math.isnan(expected[place])}
    for place, value in found.items():
        # SQLite keeps no sign of a zero.
        assert value == expected[place] or (math.isnan(value) and math.isnan(expected[place])), place
        assert run.format == "sqlite" or math.copysign(1, value) == math.copysign(1, expected[place]) or math.isnan(value), place
    scalars = {(n, s): v for n, x in run.scalars(0).items() for s, v in zip(x.steps.tolist(), x.values.tolist())}
    np.testing.assert_equal(scalars, {(n, f.step): v for f in frames for n, v in f.scalars.items()})


def alert(step: int, value: float = math.nan, **more: Any) -> Alert:
    return Alert("nan_inf", "critical", "grad", "w", step, 0, value, "finite", "w is NaN", extra={"x": math.inf, **more})
