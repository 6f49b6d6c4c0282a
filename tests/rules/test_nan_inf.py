"""Rule nan_inf."""

from __future__ import annotations

import math

import pytest
from frames_of_lists import frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.probe.rules.builtin.values.nan_inf import NanInfArgs, NanInfRule

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


def test_calls_that_follow_the_backward_pass_say_so() -> None:
    """What is called between backward calls, as a recomputed forward call, does not follow the backward pass."""
    calls = ("Torch.exp.0.forward", "Torch.exp.0.backward", "Torch.exp.1.forward", "Torch.exp.1.backward", "Torch.vector_norm.0.forward")
    alerts = NanInfRule().check(frame_of({"w": [NAN]}, entries={call: [NAN] for call in calls}))
    said = [alert.name for alert in alerts if alert.extra.get("after_backward")]
    assert (len(alerts), said) == (6, ["Torch.vector_norm.0.forward.output.0"])


@pytest.mark.parametrize(
    ("grad", "first", "loss", "severity"),
    [([1.0], [1.0], 1.0, "warning"), ([NAN], [1.0], 1.0, "critical"), ([1.0], [INF], 1.0, "critical"), ([1.0], [1.0], NAN, "critical")],
)
def test_what_no_gradient_of_a_parameter_takes_over(grad: list[float], first: list[float], loss: float, severity: str) -> None:
    """An infinite gradient of an activation is harmless where those of the parameters and of the first call, and the loss, are finite."""
    calls = {"Tensor.sqrt.0.backward": [INF], "Functional.linear.0.backward": first}
    alerts = NanInfRule().check(frame_of({"w": grad}, entries=calls, scalars={"loss": loss}))
    assert {alert.severity for alert in alerts} == {severity}
    (alone,) = NanInfRule().check(frame_of(entries={"Tensor.sqrt.0.backward": [INF]}))
    assert alone.severity == "critical"  # no gradient of a parameter was seen


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
    """-Inf alone is a mask in an activation of a step in which nothing is wrong, and a fault everywhere else or when masks are off."""
    mask = frame_of({"g": [1.0]}, entries={"Functional.softmax.0.forward": [0.0, -INF]})
    assert NanInfRule().check(mask) == []
    assert len(NanInfRule(NanInfArgs(masks=False)).check(mask)) == 1
    assert len(NanInfRule().check(frame_of({"g": [-INF]}))) == 1
    assert len(NanInfRule().check(frame_of(entries={"Functional.softmax.0.forward": [INF, -INF]}))) == 1


LOG = {"Torch.log.0.forward": [0.5, -INF], "Module.log.Log.forward.0": [0.5, -INF], "Functional.linear.0.forward": [INF, 1.0]}
MASKED = {"Tensor.masked_fill.0.forward": [0.5, -INF], "Functional.softmax.0.forward": [1.0, 0.0], "Functional.linear.0.forward": [NAN]}
ADDED = {"Torch.triu.0.forward": [0.0, -INF], "Torch.log.0.forward": [0.0, -INF, -INF], "Functional.linear.0.forward": [NAN]}


@pytest.mark.parametrize(
    ("entries", "scalars", "named", "masks"),
    [
        (LOG, {}, list(LOG), 0),
        ({name: values for name, values in LOG.items() if "linear" not in name}, {"loss": -INF}, [*list(LOG)[:2], "loss"], 0),
        ({name: values for name, values in LOG.items() if "linear" not in name}, {"loss": 1.0}, [], 0),
        (MASKED, {}, ["Functional.linear.0.forward"], 1),
        (ADDED, {}, ["Functional.linear.0.forward"], 2),
    ],
    ids=["a logarithm of zero", "one that reaches the loss", "one that does no harm", "filled scores", "additive masks"],
)
def test_a_mask_does_no_harm(entries: dict[str, list[float]], scalars: dict[str, float], named: list[str], masks: int) -> None:
    """Where something after it is wrong, a -Inf that was born in the forward pass is named before it; masks are not, and the alert says
    that there were some."""
    alerts = NanInfRule().check(frame_of(entries=entries, scalars=scalars))
    assert [alert.name.removesuffix(".output.0") for alert in alerts] == named
    assert [alert.extra.get("masks", 0) for alert in alerts[:1]] == [masks][: len(named)]
    assert ("was taken for that of masks, the first is " in "".join(alert.message for alert in alerts)) == bool(masks)


def test_what_did_no_harm_is_known() -> None:
    """A tensor that held -Inf in a step in which nothing was wrong is that of a mask later, too; what was passed over is told."""
    rule = NanInfRule()
    scores, healthy = {"Module.scores.Scores.forward.0": [0.5, -INF]}, {"Module.head.Linear.forward.0": [1.0]}
    assert rule.check(frame_of(entries={**scores, **healthy}, step=3)) == []
    assert rule.passed_over == {"tensors": 1, "first": "Module.scores.Scores.forward.0.output.0", "step": 3}
    (alert,) = rule.check(frame_of(entries={**scores, "Module.head.Linear.forward.0": [NAN]}, step=4))
    assert alert.name == "Module.head.Linear.forward.0.output.0"
    assert [a.name for a in NanInfRule().check(frame_of(entries={**scores, "Module.head.Linear.forward.0": [NAN]}))] == [
        "Module.scores.Scores.forward.0.output.0",
        "Module.head.Linear.forward.0.output.0",
    ]


CALLS = {
    "born in the module": ({"a.input": [1.0], "a.output": [0.5, -INF], "b.input": [0.5, -INF], "b.output": [NAN]}, ["a.output", "b.input"]),
    "given to the model": ({".input": [0.5, -INF], "a.input": [0.5, -INF], "a.output": [NAN], ".output": [NAN]}, [".input", "a.input"]),
    "taken away by the module": ({"a.input": [0.5, -INF], "a.output": [1.0], "b.output": [NAN]}, []),
    "handed on by the module": (
        {"a.input_1": [0.5, -INF], "a.output": [0.5, -INF], "c.input": [0.5, -INF], "c.output": [1.0]},
        ["a.input_1"],
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_masks_of_watched_modules(case: str) -> None:
    """The monitor has no operators: there the other tensors of a module tell."""
    tensors, named = CALLS[case]
    frame = frame_of(tensors, family="actv", phase="", micro_step=0, scalars={"loss": NAN})
    assert [alert.name for alert in NanInfRule().check(frame) if math.isinf(alert.value)] == named


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


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        ((1, 1, 1, 1, 0, 0, 0), 0),
        ((0, 0, 1, 0, 0, 1, 0), 0),
        ((0, 0, 1, 1, 1, 0, 0), 2),
    ],
    ids=["looks for its scale", "tries a larger one", "overflows again and again"],
)
def test_steps_that_a_loss_scaler_skips(skipped: tuple[int, ...], said: int) -> None:
    """A scaler finds its scale by overflows; what overflows at every scale is wrong."""
    rule = NanInfRule()
    alerts = []
    for step, skip in enumerate(skipped):
        scalars = {"loss_scale": 2.0 ** (20 - step), "skipped": float(skip)}
        alerts += rule.check(frame_of({"w": [INF if skip else 1.0]}, scalars=scalars, step=step))
    assert [alert.severity for alert in alerts] == ["warning"] * said
