"""The well-known faults, planted in made-up frames: each is caught by its rule within the stated number of steps, and noise is not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from frames_of_lists import frame_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import NO_GRADIENT, UPDATED_BY, Frame
from msprobe_engine.core.settings.schema import ProbeSettings, RuleSettings
from msprobe_engine.core.statistics.rows import BELOW, FLAGS, HAS_BELOW, as_int64
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.build import build_rules
from msprobe_engine.probe.rules.builtin.progress.repeated_batch import RepeatedBatchRule
from msprobe_engine.probe.rules.registry import RULES

LAYERS = [f"layers.{i}" for i in range(4)]


def rule(name: str, **args: object) -> Rule:
    return build_rules(ProbeSettings(rules=(RuleSettings(rule=name, args=args),)))[0]


def join(*frames: Frame) -> Frame:
    """One frame with the samples of several, and all their numbers."""
    samples = []
    first = 0
    for frame in frames:
        samples += [s._replace(ref=s.ref._replace(row=s.ref.row + first)) for s in frame.samples]
        first += len(frame.rows)
    scalars = {name: value for frame in frames for name, value in frame.scalars.items()}
    return dataclasses.replace(frames[0], rows=np.concatenate([f.rows for f in frames]), samples=samples, scalars=scalars)


def noisy(rng: np.random.Generator, step: int, factor: float = 1.0, layer: str = "") -> Frame:
    """Gradients, updates and numbers of a healthy step; those of `layer` times `factor`."""
    g = {f"{n}.w": (rng.normal(0, 1, 16) * (factor if n == layer else 1.0)).tolist() for n in LAYERS}
    u = {f"{n}.w": (rng.normal(0, 1, 16) * (factor if n == layer else 1.0)).tolist() for n in LAYERS}
    numbers = {"loss": 3.0 - 0.005 * step + 0.05 * rng.normal(), "grad_norm": float(np.exp(0.2 * rng.normal())), "learning_rate": 1e-3}
    return join(frame_of(g, step=step, scalars=numbers), frame_of(u, step=step, family="update", phase=""))


def first_alert(checked: Rule, frames: list[Frame]) -> Alert | None:
    for frame in frames:
        for alert in checked.check(frame):
            return alert
    return None


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 10_000))
@pytest.mark.slow
def test_noise_is_no_fault(seed: int) -> None:
    """No rule of the set says anything about 120 steps of noise around a level, with all that they look at."""
    rng = np.random.default_rng(seed)
    rules = build_rules(ProbeSettings(rules=(RuleSettings(rule="recommended", args={"update_norm_doubling": {"elements": 1}}),)))
    for step in range(120):
        assert [a.message for r in rules for a in r.check(noisy(rng, step))] == []


@pytest.mark.parametrize(
    ("name", "args", "factor", "within"),
    [
        ("exploding_gradient", {}, 200.0, 1),
        ("vanishing_gradient", {}, 1e-5, 10),
        ("update_norm_doubling", {"elements": 1}, 6.0, 1),
    ],
)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), where=st.sampled_from(LAYERS), start=st.integers(30, 60))
def test_one_layer_leaves_its_level(
    name: str, args: dict[str, object], factor: float, within: int, seed: int, where: str, start: int
) -> None:
    """A layer that explodes, vanishes or doubles its update is named, within the stated number of steps, and the end is said."""
    rng = np.random.default_rng(seed)
    checked = rule(name, **args)
    assert first_alert(checked, [noisy(rng, step) for step in range(start)]) is None
    alert = first_alert(checked, [noisy(rng, step, factor, where) for step in range(start, start + within)])
    assert alert is not None
    assert alert.extra["meaning"]
    names = {alert.name} if name != "update_norm_doubling" else {alert.name, where}
    assert where in names
    over = first_alert(checked, [noisy(rng, step) for step in range(start + within, start + within + 12)])
    assert over is not None
    assert over.extra["over"] is True


def test_a_layer_that_never_had_a_gradient_to_speak_of() -> None:
    """A gradient a million times smaller than that of the median layer is vanishing from the start; exact zeros are not."""
    small = {f"{n}.w": [1e-8 if n == LAYERS[0] else 0.0 if n == LAYERS[1] else 1.0] * 4 for n in (*LAYERS, "a", "b")}
    alert = first_alert(rule("vanishing_gradient"), [frame_of(small, step=i) for i in range(10)])
    assert alert is not None
    assert alert.name == LAYERS[0]


def test_gradients_are_compared_without_their_loss_scale() -> None:
    """A loss scale that changes by 2**16 is no exploding and no vanishing gradient."""
    for name in ("exploding_gradient", "vanishing_gradient", "turbulence"):
        checked = rule(name)
        for step in range(80):
            scale = 2.0**16 if step > 40 else 1.0
            scalars = {"loss_scale": scale}
            assert checked.check(frame_of({"layers.0.w": [scale, scale]}, step=step, scalars=scalars)) == []


@given(st.integers(0, 1000), st.floats(1.5, 100.0))
@settings(max_examples=8, deadline=None)
def test_loss_spike(seed: int, jump: float) -> None:
    """A loss that jumps by half its value is said at once, one that falls never; a level that stays becomes the normal one."""
    rng = np.random.default_rng(seed)
    checked = rule("loss_spike", recovery=2)
    for step in range(60):
        assert checked.check(frame_of(scalars={"loss": 3.0 - 0.02 * step + 0.03 * rng.normal()}, step=step)) == []
    (alert,) = checked.check(frame_of(scalars={"loss": 1.8 * (1 + jump)}, step=60))
    assert (alert.name, alert.kind) == ("loss", "loss")
    said = [len(checked.check(frame_of(scalars={"loss": 1.8 * (1 + jump)}, step=61 + i))) for i in range(120)]
    assert sum(said) == 1  # over


@given(st.integers(0, 1000), st.floats(-4.0, 1.0), st.floats(0.0, 0.05))
@example(0, 1.0, 0.03125)
@example(412, 0.0, 0.003048519434743725)
@settings(max_examples=20, deadline=None)
def test_loss_around_zero(seed: int, level: float, slope: float) -> None:
    """A loss that becomes negative step by step (a likelihood, a critic) does not fall at once, one that leaves all it had does."""
    rng = np.random.default_rng(seed)
    checked = rule("loss_spike")
    losses = [level - slope * step + 0.02 * rng.normal() for step in range(80)]
    for step, loss in enumerate(losses):
        assert checked.check(frame_of(scalars={"loss": loss}, step=step)) == []
    far = min(losses) - 2.0 * max(abs(min(losses)), slope * 80, 0.5)
    (alert,) = checked.check(frame_of(scalars={"loss": far}, step=80))
    assert "at least" in alert.message


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([0.554, 1.336, 1.861, 0.935, 1.103, 1.053, 1.738, 0.736, 0.611], []),
        ([4.4, 4.5, 21.8, 26.7, 60.2, 56.4, 67.5, 68.7], [7]),
        ([4.0 * 1.5**step for step in range(19)], [12]),
        ([2.3, 30.0, 25.0, 28.0, 31.0, 30.0, 29.0], [5]),
        ([4.3, 17.9, 29.4, 44.8, 48.6, 61.6, 43.1, 28.2], [5]),
        ([9.85, 17.41, 31.89, 20.91, 8.28, 17.59, 9.7, 10.7, 29.91, 24.12, 21.88, 23.96, 26.3, 23.46, 23.26, 9.29, 31.7, 24.7], []),
        ([9.28, 18.21, 15.93, 14.59, 16.06, 14.2, 7.2, 23.07, 24.93, 24.14, 10.57, 20.52, 6.1, 11.85, 24.07, 18.88, 12.09, 13.42], []),
    ],
)
def test_losses_far_above_the_first_one(losses: list[float], steps: list[int]) -> None:
    """Before there is a median: losses that stay far above the first ones are said, however they grow; no first one that is the smallest of
    losses that scatter as much, as those of small batches."""
    checked = rule("loss_spike")
    assert [step for step, loss in enumerate(losses) if checked.check(frame_of(scalars={"loss": loss}, step=step))] == steps


@pytest.mark.parametrize(
    ("rise", "steps", "said"),
    [(0.5, 100, False), (0.5, 60, False), (2.0, 100, True), (0.5, 10, True)],
    ids=["", "faster", "far", "at once"],
)
def test_a_loss_that_climbs_evenly(rise: float, steps: int, said: bool) -> None:
    """A critic whose returns grow: by half within the window, on the line of the losses before, is no spike; from one step to the next, or
    further, it is."""
    rng = np.random.default_rng(0)
    losses = [1.0 + rise * min(max(step - 100 + steps, 0) / steps, 1.0) + 0.01 * rng.normal() for step in range(100)]
    frames = [frame_of(scalars={"loss": loss}, step=step) for step, loss in enumerate(losses)]
    assert (first_alert(rule("loss_spike"), frames) is not None) == said


def test_a_loss_that_climbs_without_end() -> None:
    """Evenly, but on and on: what is above half more than the lowest level of the run is a spike."""
    rng = np.random.default_rng(0)
    losses = [2.0 * 1.005 ** max(step - 100, 0) * (1.0 + 0.01 * rng.normal()) for step in range(400)]
    alert = first_alert(rule("loss_spike"), [frame_of(scalars={"loss": loss}, step=step) for step, loss in enumerate(losses)])
    assert alert is not None
    assert losses[alert.step] < 5.0


def test_losses_that_are_high_again_and_again() -> None:
    """Two levels from the start, as of a critic and a generator, are no spikes, though both rise; a value far above the high level is,
    unless it is that of another optimizer. What only later comes again and again is said twice."""
    rng = np.random.default_rng(0)
    scatter, rare = rng.normal(0.0, 0.03, 300), rule("loss_spike")
    checked = rule("loss_spike")
    levels = [(1.5 if step % 5 == 4 else 0.7) + 0.002 * step for step in range(300)]
    frames = [frame_of(scalars={"loss": level + scatter[step]}, step=step) for step, level in enumerate(levels)]
    assert first_alert(checked, frames) is None
    high = frame_of(scalars={"loss": 5.0}, step=300)
    assert first_alert(checked, [dataclasses.replace(high, facts={UPDATED_BY: 2.0})]) is None
    assert first_alert(checked, [high]) is not None
    losses = [2.0 * (1.0 + (step % 50 == 49)) + scatter[step] for step in range(300)]
    found = [
        a.step
        for step, loss in enumerate(losses)
        for a in rare.check(frame_of(scalars={"loss": loss}, step=step))
        if not a.extra.get("over")
    ]
    assert found == [49, 99]


def written(step: int, **changes: float) -> Frame:
    """Two layers of two parameters and a head; each is as the update has left it, or times what `changes` says by its name with _ for a
    dot."""
    values = {f"layers.{i}.{name}": [1.0 + i + step, 2.0, 0.5] for i in (0, 1) for name in ("w", "b")} | {"head.w": [3.0 + step, 1.0, 0.5]}
    before = {name: [x * changes.get(name.replace(".", "_"), 1.0) for x in value] for name, value in values.items()}
    after = {name: [value[0] + 1.0, *value[1:]] for name, value in values.items()}
    return join(frame_of(before, step=step, family="param_origin", phase=""), frame_of(after, step=step, family="param_updated", phase=""))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({4: {"layers_0_w": 2.0}}, [("layers.0.w", 4)]),
        ({4: {"head_w": 2.0}, 6: {"head_w": 2.0}}, [("head.w", 4)]),
        ({4: {"layers_0_w": 2.0, "layers_0_b": 2.0}}, [("layers.0.w", 4), ("layers.0.b", 4)]),
        ({4: {"layers_0_w": 2.0, "layers_1_w": 2.0}}, []),
        ({1: {"head_w": 2.0}}, [("head.w", 2)]),
        ({step: {"head_w": 2.0} for step in range(1, 9)}, []),
    ],
)
def test_written_parameter(changes: dict[int, dict[str, float]], said: list[tuple[str, int]]) -> None:
    """A parameter that is written once is said, also where nothing is known of the steps before it, as is a whole layer; all of a kind, and
    one that is written in every step from the start on, are what the program does."""
    checked = rule("written_parameter")
    found = [(a.name, step) for step in range(9) for a in checked.check(written(step, **changes.get(step, {})))]
    assert found == said


@pytest.mark.parametrize(("zeros", "fires"), [([0, 1, 2], False), ([5, 6, 7], True)])
def test_a_pruned_parameter_is_not_written_into(zeros: list[int], fires: bool) -> None:
    """Its smallest elements have become zero; large ones are no pruning."""
    checked = rule("written_parameter")
    for step in range(4):
        value = [float(i + 1) for i in range(8)]
        before = [0.0 if step == 3 and i in zeros else x for i, x in enumerate(value)]
        names = [("param_origin", before), ("param_updated", value)]
        frames = [frame_of({"w": x, "v": [1.0], "u": [1.0]}, step=step, family=family, phase="") for family, x in names]
        assert bool(checked.check(join(*frames))) == (fires and step == 3)


def test_layers_that_are_left_out_at_random() -> None:
    """A layer without a gradient for as long as chance makes it, where its kind is left out as often, is no fault; for good it is, and
    so is the first gap where none was left out before."""
    rng = np.random.default_rng(0)
    names = [f"layers.{i}.w" for i in range(4)]

    def step_of(step: int, gone: set[str]) -> Frame:
        frame = frame_of({name: [1.0] for name in ["head.w", *names] if name not in gone}, step=step)
        return dataclasses.replace(frame, untrained=dict.fromkeys(gone, NO_GRADIENT))

    checked = rule("untrained_parameter")
    gaps = [{name for name in names if rng.random() < 0.25} for _ in range(300)]
    assert first_alert(checked, [step_of(step, gone) for step, gone in enumerate(gaps)]) is None
    alert = first_alert(checked, [step_of(300 + step, {names[0]}) for step in range(20)])
    assert alert is not None
    assert (alert.name, alert.step <= 312) == (names[0], True)
    alert = first_alert(rule("untrained_parameter"), [step_of(step, {names[0]} if step > 14 else set()) for step in range(20)])
    assert (alert and alert.step) == 17


def test_most_parameters_without_a_gradient_from_the_start() -> None:
    """A branch that begins without a gradient may get one; where most of a model has none it is said soon."""
    for without, step in ((3, 2), (1, 19)):
        names = [f"layers.{i}.w" for i in range(4)]
        frames = [frame_of({name: [0.0] if i < without else [1.0] for i, name in enumerate(names)}, step=step) for step in range(25)]
        alert = first_alert(rule("untrained_parameter"), frames)
        assert (alert and alert.step) == step


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_not_finite(value: float) -> None:
    """NaN and Inf are said once, critically, and so is the end."""
    checked = rule("loss_not_finite", recovery=1)
    found = [checked.check(frame_of(scalars={"loss": x}, step=i)) for i, x in enumerate([1.0, value, value, 1.0])]
    assert [[(a.severity, bool(a.extra.get("over"))) for a in f] for f in found] == [[], [("critical", False)], [], [("warning", True)]]


def test_dead_activation() -> None:
    """An output of zeros is named after `patience` steps; inputs, small outputs and outputs with one other value are not."""
    zeros = [0.0] * 64
    tensors = {"a.output": zeros, "a.input": zeros, "b.output": [0.0] * 63 + [1.0], "c.output_1": zeros, "d.output": [0.0] * 8}
    checked = rule("dead_activation")
    found = [checked.check(frame_of(tensors, family="actv", phase="", step=i)) for i in range(12)]
    assert [[a.name for a in f] for f in found] == [[]] * 9 + [["a.output", "c.output_1"]] + [[]] * 2


def parameters(step: int, changed: bool, gradient: list[float] | None, *, digest: bool = False, rate: float = 1e-3) -> Frame:
    value = [1.0 + 0.001 * step]
    frames = [
        frame_of({"w": value, "v": value}, family="param_origin", phase="", step=step, scalars={"learning_rate": rate}),
        frame_of({"w": [value[0] + 0.001 * changed], "v": [value[0] + 1.0]}, family="param_updated", phase="", step=step),
    ]
    if gradient is not None:
        frames.append(frame_of({"w": gradient, "v": [1.0]}, step=step))
    frame = join(*frames)
    if digest:
        from msprobe_engine.core.statistics.rows import DIGEST, HAS_DIGEST

        ints = as_int64(frame.rows)
        ints[:, FLAGS] |= HAS_DIGEST
        ints[:, DIGEST] = [1, 2, 1 + changed, 3, *range(len(frame.rows) - 4)]
    return frame


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize(
    ("changed", "gradient", "rate", "fires"),
    [
        (False, [1.0], 1e-3, True),
        (True, [1.0], 1e-3, False),
        (False, [0.0], 1e-3, False),
        (False, [math.nan], 1e-3, False),
        (False, [1.0], 0.0, False),
        (False, None, 1e-3, True),
    ],
)
def test_unchanged_parameter(digest: bool, changed: bool, gradient: list[float] | None, rate: float, fires: bool) -> None:
    """A parameter with a gradient that stays is named after three steps, by digest or by the other words; without a gradient to use, or
    with learning rate 0, it is not."""
    checked = rule("unchanged_parameter")
    found = [checked.check(parameters(step, changed, gradient, digest=digest, rate=rate)) for step in range(5)]
    assert [[a.name for a in f] for f in found] == ([[], [], ["w"], [], []] if fires else [[]] * 5)


def test_frozen_parameters_are_told_apart() -> None:
    """With `frozen` a parameter with a gradient of zeros is named, too, and the alert says which case it is."""
    for gradient, word in (([0.0], "zero or missing"), ([1.0], "other than zero"), (None, "not monitored")):
        alert = first_alert(rule("unchanged_parameter", frozen=True), [parameters(i, False, gradient) for i in range(3)])
        assert alert is not None
        assert alert.extra["gradient"] == word


def test_gradient_underflow_by_count_and_by_zeros() -> None:
    """A tenth of the elements below the limit fires; so does a share of zeros that rises by 0.3 while the others become smaller. A share
    that was always high, a mask and a gradient of zeros alone do not."""
    tensor = {"w": [0.0] * 32 + [1.0] * 32}
    checked = rule("gradient_underflow", patience=2)
    assert first_alert(checked, [frame_of(tensor, step=i) for i in range(40)]) is None
    others = {"v": [1.0] * 64, "u": [1.0] * 64}
    for rest in ([1.0] * 8, [0.0] * 8):
        assert first_alert(checked, [frame_of({"w": [0.0] * 56 + rest, **others}, step=i) for i in range(40, 42)]) is None
    frames = [frame_of({"w": [0.0] * 56 + [0.1] * 8}, step=i) for i in range(42, 44)]
    alert = first_alert(checked, frames)
    assert alert is not None
    assert alert.value == 56 / 64
    counted = [frame_of(tensor, step=i) for i in range(2)]
    for frame in counted:
        as_int64(frame.rows)[0, FLAGS] |= HAS_BELOW
        as_int64(frame.rows)[0, BELOW] = 32 + 8
    alert = first_alert(rule("gradient_underflow", patience=2), counted)
    assert alert is not None
    assert alert.value == 8 / 32


def test_dead_expert() -> None:
    """An expert without gradient is named while a neighbour has one: as zeros, as a missing row, or never seen but as a parameter."""
    names = [f"moe.experts.{i}.w" for i in range(3)]
    known = frame_of({n: [1.0] for n in names}, family="param_origin", phase="")
    for gradients in ({names[0]: [0.0], names[1]: [1.0], names[2]: [1.0]}, {names[1]: [1.0], names[2]: [1.0]}):
        checked = rule("dead_expert", patience=3)
        frames = [join(dataclasses.replace(known, step=i), frame_of(gradients, step=i)) for i in range(3)]
        alert = first_alert(checked, frames)
        assert alert is not None
        assert (alert.name, alert.step) == ("moe.experts.0", 2)
    silent = [frame_of({n: [0.0] for n in names}, step=i) for i in range(9)]
    assert first_alert(rule("dead_expert", patience=3), silent) is None


def test_dead_expert_by_the_count_of_the_router() -> None:
    """A router with more experts without tokens than at the beginning is named after `patience` steps; others are not."""
    checked = rule("dead_expert", patience=2, warmup=3)
    found = []
    for step in range(6):
        frame = frame_of({"a": [2.0 if step > 2 else 0.0], "b": [0.0], "c": [1.0]}, family="moe_router_logit_hook", phase="", step=step)
        frame.samples[:] = [s._replace(extra={"column": "dead_experts"}) for s in frame.samples]
        found += checked.check(frame)
    assert [(a.name, a.step, a.value, a.kind) for a in found] == [("a", 4, 2.0, "feature")]


def test_loss_scale_collapse_and_skipped_updates() -> None:
    """Halving again and again after the beginning, and the bottom, are said; the search at the beginning and a fixed scale are not."""
    search = [2.0 ** max(16, 32 - i) for i in range(150)]
    for name, scales, fires in (
        ("loss_scale_collapse", search, False),
        ("loss_scale_collapse", [1.0] * 150, False),
        ("loss_scale_collapse", [*search, *[2.0 ** (15 - i) for i in range(6)]], True),
        ("loss_scale_collapse", [4.0, 2.0, 1.0], True),
    ):
        alert = first_alert(rule(name), [frame_of(scalars={"loss_scale": s}, step=i) for i, s in enumerate(scales)])
        assert (alert is not None) == fires
    skips = rule("skipped_updates")
    early = [frame_of(scalars={"loss_scale": 2.0**32, "skipped": float(i < 16)}, step=i) for i in range(100)]
    assert first_alert(skips, early) is None
    late = first_alert(skips, [frame_of(scalars={"loss_scale": 4.0, "skipped": 1.0}, step=100 + i) for i in range(4)])
    assert late is not None
    assert late.step == 103


@pytest.mark.parametrize(
    ("rates", "at"),
    [
        ([1e-3] * 40 + [3e-2] * 5, 40),
        ([1e-3] * 40 + [0.0, 1e-3, 5e-3], 42),
        ([0.0, *(1e-5 * i for i in range(1, 100)), *(1e-3 * 0.9**i for i in range(50))], None),  # warm-up and decay
        ([0.5 * (1 + math.cos(math.pi * (i % 20) / 20)) for i in range(100)], None),  # warm restarts
        ([1e-9 * 10**i for i in range(9)], None),  # an exponential warm-up of a few steps
        ([1e-4] * 50 + [3e-4] * 50, None),  # another stage of training
    ],
)
def test_a_learning_rate_that_leaves_its_schedule(rates: list[float], at: int | None) -> None:
    """Far above all that was before, it is said in that step; schedules that people use are not."""
    alert = first_alert(rule("rate_jump"), [frame_of(scalars={"learning_rate": rate}, step=i) for i, rate in enumerate(rates)])
    assert (alert and alert.step) == at


def told(step: int, **facts: float) -> Frame:
    return dataclasses.replace(frame_of(step=step), facts=facts)


@pytest.mark.parametrize(
    ("made", "rate", "at"),
    [
        (1000, lambda i: 1e-3 * min(1.0, (i + 1) / 50), 5),
        (1000, lambda i: 1e-3 if i == 0 else 1e-3 * i / 50, 6),  # the rate that was loaded, and then that of a new schedule
        (0, lambda i: 1e-3 * min(1.0, (i + 1) / 50), None),
        (20, lambda i: 1e-3 * (i + 21) / 1000, None),  # a warm-up that is gone on with
        (20, lambda i: 1e-3 * (1 - math.cos(math.pi * (i + 21) / 1000)), None),
        (1000, lambda i: 1e-3 * (1 - i / 1000), None),
        (1000, lambda i: 1e-6 if i < 20 else 1e-3, 20),  # a jump
        (1000, lambda i: 1e-4 + 1e-5 * (i % 20), None),  # cycles that do not begin near zero
    ],
)
def test_a_resumed_run_that_warms_up_again(made: int, rate: Callable[[int], float], at: int | None) -> None:
    """The optimizer has made updates before, and the rate rises as at the beginning of a training: said in the sixth step."""
    frames = [frame_of(scalars={"learning_rate": rate(i), "updates_made": float(made + i)}, step=i) for i in range(60)]
    alert = first_alert(rule("rate_jump"), frames)
    assert (alert and alert.step) == at


@pytest.mark.parametrize(
    ("ages", "kept", "at", "noted"),
    [
        ([0] * 9 + [1] * 20, False, 18, None),  # stuck
        ([0] + [1] * 30, False, None, ("one batch", 31)),  # from the start on
        (([0] + [1] * 29) * 3, False, None, ("one batch", 30)),  # thirty steps on each batch
        ([0] * 12 + [12] * 30, False, None, ("one order", 12)),  # data that are not shuffled
        ([0] * 12 + [12] * 30, True, 23, None),  # a sampler that should shuffle them
        ([0] * 40, True, None, None),
        ([0, 7, 3, 9] * 10, False, None, None),  # batches drawn with replacement from a few
    ],
)
def test_batches_that_come_again(ages: list[int], kept: bool, at: int | None, noted: tuple[str, int] | None) -> None:
    """By how many steps ago each step's batch was there: what cannot be meant is said once, what may be meant is a note in the files."""
    checked = rule("repeated_batch")
    more = {"order_kept": 1.0} if kept else {}
    frames = [told(i, batch_age=age, **more) for i, age in enumerate(ages)]
    assert [alert.step for frame in frames for alert in checked.check(frame)] == ([] if at is None else [at])
    assert checked.passed_over == ({"first": noted[0], "steps": noted[1]} if noted else {})


def test_a_batch_of_all_ranks() -> None:
    """Data-parallel ranks with the same batch are named at the second check in a row; not where the run has one batch at all."""
    checked = RepeatedBatchRule()
    for step in range(3):
        checked.check(frame_of(step=step))
    assert [len(checked.compare_ranks(step, [0, 1], equal)) for step, equal in enumerate((True, False, True, True, True))] == [
        0,
        0,
        0,
        1,
        0,
    ]
    by_heart = RepeatedBatchRule()
    for step in range(20):
        by_heart.check(told(step, batch_age=step > 0))
    assert not [alert for step in range(3) for alert in by_heart.compare_ranks(step, [0, 1], True)]


def test_updates_that_rounding_takes_away() -> None:
    """More than half of the elements, three times in a row; not where the rate is 0, or a schedule has made it small, or the update was
    skipped."""
    for first, more, at in (
        ({}, {}, 3),
        ({}, {"learning_rate": 0.0}, None),
        ({"learning_rate": 1e-3}, {"learning_rate": 5e-4}, None),
        ({"learning_rate": 1e-3}, {"learning_rate": 6e-4}, 3),
        ({}, {"skipped": 1.0}, None),
    ):
        frames = [dataclasses.replace(told(i, updates_lost=0.9 if i else 0.4), scalars=more if i else first) for i in range(6)]
        alert = first_alert(rule("lost_updates"), frames)
        assert (alert and alert.step) == at


@pytest.mark.parametrize(("grown", "falls", "at"), [(20.0, False, 5), (20.0, True, None), (6.0, False, None)])
def test_weights_that_grow_for_nothing(grown: float, falls: bool, at: int | None) -> None:
    """Ten times as large as at first while the loss is where it was: once. Not where it falls, as that of weights that began near 0."""
    frames = [
        dataclasses.replace(told(i, weights_grown=1.0 if i < 5 else grown), scalars={"loss": 3.0 - 0.1 * i if falls else 3.0 + i % 3})
        for i in range(12)
    ]
    checked = rule("growing_weights")
    assert [alert.step for frame in frames for alert in checked.check(frame)] == ([] if at is None else [at])


def test_an_expert_that_is_never_used() -> None:
    """Where only gradients are watched, and it never had one: after 7 steps if all others have one in each, else after 20."""
    untrained = {"moe.experts.2.w": NO_GRADIENT, "other.w": NO_GRADIENT}
    for others, at in (([1.0], 6), ([0.0], 19)):
        frames = []
        for step in range(22):
            gradients = {"moe.experts.0.w": [1.0], "moe.experts.1.w": others if step == 3 else [1.0]}
            frames.append(dataclasses.replace(frame_of(gradients, step=step), untrained=untrained))
        alert = first_alert(rule("dead_expert"), frames)
        assert alert is not None
        assert (alert.name, alert.step) == ("moe.experts.2", at)


@pytest.mark.parametrize("name", [n for n in RULES if n not in ("learned", "condition")])
def test_odd_frames_are_no_problem(name: str) -> None:
    """Empty frames, frames that were cut off, tensors without elements and NaN everywhere raise nothing in any rule."""
    checked = rule(name)
    for step in range(30):
        checked.check(frame_of(step=step))
        checked.check(frame_of({"a.0.w": [], "b.0.output": [math.nan, math.inf]}, step=step, complete=step % 2 == 0))
        for family in ("actv", "update", "param_updated", "param_origin", "moe_router_logit_hook"):
            checked.check(frame_of({"experts.1.w": [math.inf], "x": []}, family=family, phase="", step=step, scalars={"loss": math.nan}))
