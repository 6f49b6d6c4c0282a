"""What rules with a memory share."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frames_of_lists import frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.records import Sample
from msprobe_engine.probe.rules.builtin.parameters.layer_gradients import ExplodingGradientRule, VanishingGradientRule
from msprobe_engine.probe.rules.layout import LayoutCache
from msprobe_engine.probe.rules.stateful_rule import layer_of, part_of
from msprobe_engine.probe.rules.tracked_series import Episodes, Level, RunningMedian, Watch

ONE = np.zeros(1, np.intp)
YES = np.ones(1, np.bool_)


def by_name(sample: Sample) -> str | None:
    return sample.name if sample.name != "not this" else None


def test_slots_stay_when_others_come_and_go() -> None:
    """A tensor keeps its slot over frames without it, frames without anything, and other orders."""
    watch = Watch(LayoutCache(), by_name)
    first = watch.of(frame_of({"a": [1.0], "b": [2.0]}))
    assert first is not None
    assert first.slots.tolist() == [0, 1]
    assert watch.of(frame_of(scalars={"loss": 1.0})) is None
    assert watch.of(frame_of({"not this": [1.0]})) is None
    then = watch.of(frame_of({"c": [5.0], "b": [2.0], "not this": [9.0], "a": [3.0]}))
    assert then is not None
    assert [watch.names[i] for i in then.slots] == ["c", "b", "a"]
    assert then.spread(then.table.squares).tolist() == [9.0, 4.0, 25.0]


def test_one_slot_for_several_tensors_adds_up() -> None:
    """Tensors with one key share a slot and `total` adds them; the slot's first tensor is remembered."""
    watch = Watch(LayoutCache(), lambda sample: layer_of(sample.name))
    view = watch.of(frame_of({"x.0.w": [3.0], "x.1.w": [1.0], "x.0.b": [4.0]}))
    assert view is not None
    assert watch.names == ["x.0", "x.1"]
    assert view.total(view.table.squares).tolist() == [25.0, 1.0]
    assert watch.first == [0, 1]


def test_layers() -> None:
    """A layer is the name up to the first number, or the owner of the parameter."""
    names = ["decoder.layers.3.mlp.experts.7.w", "tokens.weight", "scale", "0.weight", "norm2.bias", "h.11"]
    assert [layer_of(n) for n in names] == ["decoder.layers.3", "tokens", "scale", "0", "norm2", "h.11"]


def test_parts_of_layers() -> None:
    """The first module below the layer; layers that are numbered twice have it below the second number."""
    names = [
        "decoder.layers.3.mlp.experts.7.w",
        "encoder.block.0.layer.1.attention.q.weight",
        "tokens.weight",
        "0.weight",
        "h.11.norm.bias",
    ]
    assert [part_of(n) for n in names] == ["decoder.layers.3.mlp", "encoder.block.0.layer.1.attention", None, None, "h.11.norm"]


@pytest.mark.parametrize(("steps", "expected"), [(20, {"layers.0.mlp"}), (1, set())], ids=["scaled twice", "one hard batch"])
def test_a_part_of_a_layer_whose_gradient_stays_high(steps: int, expected: set[str]) -> None:
    """A part whose gradient is small beside that of its layer is named where it stays 64 times as large, not the layer."""
    draw, rule = np.random.default_rng(5), ExplodingGradientRule()
    alerts = []
    for step in range(60):
        factor = 64.0 if 40 <= step < 40 + steps else 1.0
        sizes = {"attention": 1.0, "mlp": 0.05 * factor}
        layers = {f"layers.{i}.{part}.w": draw.normal(0.0, size if i == 0 else 1.0, 1024) for i in (0, 1) for part, size in sizes.items()}
        alerts += rule.check(frame_of({name: values.tolist() for name, values in layers.items()}, step=step))
    assert {alert.name for alert in alerts if not alert.extra.get("over")} == expected
    assert all(alert.step == 41 for alert in alerts)


def episodes_slowly(bad: list[bool], patience: int, recovery: int) -> list[tuple[int, bool, int]]:
    """The definition, one step after the other: (step, over, steps)."""
    out, run, fine, length, open_ = [], 0, 0, 0, False
    for step, wrong in enumerate(bad):
        run, fine = (run + 1, 0) if wrong else (0, fine + 1)
        if open_:
            length += 1
            if fine >= recovery:
                out.append((step, True, length - fine))
                open_ = False
        elif run >= patience:
            open_, length = True, run
            out.append((step, False, run))
    return out


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_episodes_are_said_once_and_ended_once(steps: list[list[bool]], patience: int, recovery: int) -> None:
    """Every slot by itself: said after `patience` bad steps, over after `recovery` good ones, with the number of steps it lasted."""
    episodes = Episodes(patience, recovery)
    found: dict[int, list[tuple[int, bool, int]]] = {0: [], 1: [], 2: []}
    for number, bad in enumerate(steps):
        for episode in episodes.update(np.array(bad), np.arange(3)):
            found[episode.slot].append((number, episode.over, episode.steps))
    for slot in range(3):
        assert found[slot] == episodes_slowly([bad[slot] for bad in steps], patience, recovery)


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=60))
def test_a_level_never_moves_by_more_than_its_share_of_an_octave(values: list[float]) -> None:
    """However far away a value is, it moves the level by at most one octave times its weight."""
    level = Level(window=9, warmup=1)
    last = math.nan
    for i, value in enumerate(values):
        distance = level.measure(np.array([value]), ONE, YES)
        level.add(distance, ONE, YES)
        now = level.value(0)
        assert i == 0 or abs(math.log(now / last)) <= max(1.0 / (i + 1), 0.2) * math.log(2.0) + 1e-9
        last = now


@given(st.lists(st.floats(1e-6, 1e6), min_size=6, max_size=40))
def test_the_running_median_is_one(values: list[float]) -> None:
    """Right after a refresh it is the (upper) median of the last values; values that do not count never enter."""
    median = RunningMedian(window=8, warmup=2)
    for i, value in enumerate(values):
        distance = median.measure(np.array([value]), ONE, YES)
        if i % median.EVERY == 0 and i:
            past = sorted(values[max(0, i - 8) : i])
            assert math.isclose(median.value(0), past[len(past) // 2], rel_tol=1e-9)
        median.add(distance, ONE, YES)
        median.add(distance, ONE, ~YES)


def test_unknown_until_warm() -> None:
    """Neither level says anything before it has seen enough."""
    for level in (Level(10, 3), RunningMedian(10, 3)):
        said = []
        for _ in range(5):
            distance = level.measure(np.array([2.0]), ONE, YES)
            said.append(bool(np.isnan(distance.away[0])))
            level.add(distance, ONE, YES)
        assert said[:3] == [True, True, True]
        assert not said[-1]


@pytest.mark.parametrize(("loss_falls", "fires"), [(True, False), (False, True)])
def test_gradients_that_fall_with_the_loss(loss_falls: bool, fires: bool) -> None:
    """A task that is learned has no gradient any more, as its loss has none: nothing vanishes. That of a loss that stays has."""
    rule = VanishingGradientRule()
    left = [1.0] * 30 + [10.0**-i for i in range(8)] + [1e-8] * 20
    frames = [frame_of({"layers.0.w": [x, -x]}, scalars={"loss": x if loss_falls else 1.0}, step=i) for i, x in enumerate(left)]
    assert bool([alert for frame in frames for alert in rule.check(frame)]) == fires
