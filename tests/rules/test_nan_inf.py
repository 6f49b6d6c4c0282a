"""Rule nan_inf."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.errors import SettingsError
from msprobe_engine.rules.nan_inf import NanInfArgs, NanInfRule
from msprobe_engine.testing import frame_of

NAN, INF = math.nan, math.inf


@given(st.lists(st.lists(st.floats(width=32), max_size=4), max_size=6))
def test_fires_exactly_where_something_is_not_finite(tensors: list[list[float]]) -> None:
    """One alert for every gradient with a value that is not finite, in order, and no other."""
    frame = frame_of({f"p{i}": values for i, values in enumerate(tensors)})
    wanted = [f"p{i}" for i, values in enumerate(tensors) if not all(map(math.isfinite, values))]
    assert [a.name for a in NanInfRule().check(frame)] == wanted


def test_message_and_fields() -> None:
    """The alert is one line with rule, name, rank, step, what was seen and what is expected; it is critical."""
    (alert,) = NanInfRule().check(frame_of({"w": [1.0, NAN, INF]}, step=7, rank=3, micro_step=2))
    assert (
        alert.message
        == "nan_inf: w (grad_reduced, reduced), rank 3 step 7 micro step 2: 1 NaN, 1 +Inf of 3 elements; expected only finite values"
    )
    assert (alert.severity, alert.kind, alert.step, alert.rank, alert.micro_step) == ("critical", "grad", 7, 3, 2)
    assert math.isnan(alert.value)
    assert (alert.extra["nans"], alert.extra["infs"]) == (1, 1)


def test_scalars_and_their_kind() -> None:
    """A loss that is NaN is an alert of kind loss, after all tensors."""
    alerts = NanInfRule().check(frame_of({"w": [NAN]}, scalars={"loss": NAN, "grad_norm": INF, "learning_rate": 0.1}))
    assert [(a.name, a.kind) for a in alerts] == [("w", "grad"), ("loss", "loss"), ("grad_norm", "step")]
    assert alerts[0].order < alerts[1].order


def test_no_more_than_asked_for_and_the_rest_is_counted() -> None:
    """At most max_alerts records, the earliest; the last one says how many more there were."""
    frame = frame_of({f"p{i}": [NAN] for i in range(30)})
    alerts = NanInfRule(NanInfArgs(max_alerts=5)).check(frame)
    assert [a.name for a in alerts] == ["p0", "p1", "p2", "p3", "p4"]
    assert alerts[-1].extra["more"] == 25
    assert alerts[-1].message.endswith("(and 25 more)")


def test_attention_masks_are_fine_but_not_in_gradients() -> None:
    """-Inf alone is a mask in an activation, and a fault everywhere else or when masks are switched off."""
    mask = frame_of({"g": [1.0]}, entries={"Functional.softmax.0.forward": [0.0, -INF]})
    assert NanInfRule().check(mask) == []
    assert len(NanInfRule(NanInfArgs(masks=False)).check(mask)) == 1
    assert len(NanInfRule().check(frame_of({"g": [-INF]}))) == 1
    assert len(NanInfRule().check(frame_of(entries={"Functional.softmax.0.forward": [INF, -INF]}))) == 1


def test_overflow_under_a_loss_scale_is_a_warning() -> None:
    """With loss scaling an overflow in gradients is part of the method; in parameters it never is."""
    scaled = {"loss_scale": 65536.0}
    assert [a.severity for a in NanInfRule().check(frame_of({"w": [INF]}, scalars=scaled))] == ["warning"]
    assert [a.severity for a in NanInfRule().check(frame_of({"w": [INF]}, scalars={"loss_scale": 1.0}))] == ["critical"]
    assert [a.severity for a in NanInfRule().check(frame_of({"w": [INF]}, family="param_updated", scalars=scaled))] == ["critical"]
    assert [a.severity for a in NanInfRule(severity="critical").check(frame_of({"w": [INF]}, scalars=scaled))] == ["critical"]
    assert [a.severity for a in NanInfRule().check(frame_of(scalars={"grad_norm": INF, **scaled}))] == ["warning"]


def test_kinds_and_exclude() -> None:
    """Only the kinds asked for, and no record whose name contains an excluded word."""
    frame = frame_of({"w": [NAN], "b": [NAN]}, entries={"Module.fc.Linear.forward.0": [NAN]}, scalars={"loss": NAN})
    assert [a.name for a in NanInfRule(kinds=("loss",)).check(frame)] == ["loss"]
    assert [a.name for a in NanInfRule(NanInfArgs(exclude=("Linear", "b")), kinds=("activation", "grad")).check(frame)] == ["w"]
    with pytest.raises(SettingsError, match="kinds = 'weights'"):
        NanInfRule(kinds=("weights",))


def test_empty_frame() -> None:
    """A frame without tensors and numbers is healthy."""
    assert NanInfRule().check(frame_of()) == []
