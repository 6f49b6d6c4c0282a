"""Rule no_progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from frames_of_lists import frame_of, row_of

from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.builtin.progress.no_progress import NoProgressArgs, NoProgressRule


def test_loss_that_does_not_move() -> None:
    """The same loss for `patience` steps fires once, and again after as many more; one change starts over."""
    rule = NoProgressRule(NoProgressArgs(patience=3))
    losses = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    fired = [bool(rule.check(frame_of(scalars={"loss": x}, step=i))) for i, x in enumerate(losses)]
    assert fired == [False, False, False, True, False, False, True, False, False, False]


def test_all_gradients_zero() -> None:
    """Reduced gradients that are all exactly zero fire; a single one that is not does not let it."""
    rule = NoProgressRule(NoProgressArgs(patience=2))
    assert rule.check(frame_of({"a": [0.0], "b": [0.0, 0.0]})) == []
    (alert,) = rule.check(frame_of({"a": [0.0], "b": [0.0, 0.0]}))
    assert (alert.name, alert.kind, alert.severity) == ("all reduced gradients", "grad", "warning")
    rule = NoProgressRule(NoProgressArgs(patience=1))
    assert rule.check(frame_of({"a": [0.0], "b": [0.0, 1e-30]})) == []


def _steps(rule: NoProgressRule, losses: list[float], zero: Callable[[int], bool]) -> list[str]:
    """What is said of trainings with these losses, whose gradients are all zero in some steps."""
    frames = [frame_of({"a": [0.0 if zero(i) else 1.0]}, scalars={"loss": loss}, step=i) for i, loss in enumerate(losses)]
    return [alert.message for frame in frames for alert in rule.check(frame)]


def test_gradients_that_are_zero_in_every_other_step() -> None:
    """They are set to zero before the update: the losses of these steps are as those of others. Said once. Where nothing was left to learn
    from a batch, its loss shows it: the least, or that of all such batches."""
    draw = np.random.default_rng(3)
    losses = [5.0 + 0.1 * float(draw.standard_normal()) for _ in range(60)]
    (said,) = _steps(NoProgressRule(), losses, lambda i: i >= 20 and i % 2 == 0)
    assert "exactly zero at the update in 10 of the last" in said
    assert not _steps(NoProgressRule(), [0.0 if i % 2 else loss - 5.0 for i, loss in enumerate(losses)], lambda i: i % 2 == 1)
    assert not _steps(NoProgressRule(), [1.0 + (0.0 if i % 2 else loss) for i, loss in enumerate(losses)], lambda i: i % 2 == 1)
    assert not _steps(NoProgressRule(), losses, lambda i: i % 12 == 0)  # a batch without labels now and then


@pytest.mark.parametrize(("way", "fires"), [((5.0, 1.0, 0.1), False), ((5.0, 4.9, 4.8), True)], ids=["learned", "labels lost"])
def test_a_task_that_is_learned_is_no_standstill(way: tuple[float, ...], fires: bool) -> None:
    """A loss that has come down to nothing on its way leaves nothing to learn; one that is nothing at once has lost its labels."""
    said = _steps(NoProgressRule(), [*way, *[0.0] * 40], lambda i: i >= 3)
    assert bool(said) == fires


def test_parameters_that_stay() -> None:
    """Parameters with the same digests fire, even when every statistic but the digest is equal they do not."""

    def params(digest: int | None, step: int, **scalars: float) -> Frame:
        frame = frame_of({"w": [1.0, 2.0]}, family="param_updated", phase="", scalars=scalars, step=step)
        return dataclasses.replace(frame, rows=np.concatenate([row_of([1.0, 2.0], digest)]))

    for digests, count in (((5, 5, 5), 1), ((5, 6, 7), 0), ((None, None, None), 1)):
        rule = NoProgressRule(NoProgressArgs(patience=2))
        assert sum(len(rule.check(params(d, i))) for i, d in enumerate(digests)) == count
    rule = NoProgressRule(NoProgressArgs(patience=1))
    assert sum(len(rule.check(params(5, i, learning_rate=0.0))) for i in range(4)) == 0


def test_what_is_not_there_is_not_judged() -> None:
    """Frames without a loss, gradients or parameters, and steps cut off, never fire."""
    rule = NoProgressRule(NoProgressArgs(patience=1))
    assert all(rule.check(frame_of({"a": [1.0]}, family="actv", phase="")) == [] for _ in range(5))
    assert all(rule.check(frame_of(scalars={"loss": 1.0}, complete=False)) == [] for _ in range(5))


@pytest.mark.parametrize(
    ("noise", "fires"), [((1.0, 1.0), False), ((1.0, 0.0), True), ((0.0, 0.0), False)], ids=["other batches", "one batch", "always even"]
)
def test_a_loss_that_stops_to_scatter(noise: tuple[float, float], fires: bool) -> None:
    """One batch over and over: the loss scattered and falls evenly then. Said once; a training that never scattered is one of few data."""
    draw = np.random.default_rng(1)
    rule = NoProgressRule()
    losses = [5.0 - 0.03 * i + 0.1 * draw.standard_normal() * noise[i >= 60] for i in range(120)]
    found = [i for i, x in enumerate(losses) if rule.check(frame_of(scalars={"loss": x}, step=i))]
    assert (len(found) == 1) == fires
    assert all(70 <= i <= 75 for i in found)


@pytest.mark.slow
def test_a_loss_that_scatters_is_no_even_one() -> None:
    """Of many trainings whose loss falls fast between batches of other difficulty none is taken for one batch."""
    for seed in range(200):
        draw, rule = np.random.default_rng(seed), NoProgressRule()
        losses = [5.0 * np.exp(-i / 60) + 0.05 * draw.standard_normal() for i in range(150)]
        assert not [i for i, x in enumerate(losses) if rule.check(frame_of(scalars={"loss": float(x)}, step=i))]
