"""Rule extreme_value."""

from __future__ import annotations

import math

from frames_of_lists import frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.probe.rules.builtin.values.extreme_value import ExtremeValueArgs, ExtremeValueRule


@given(st.lists(st.lists(st.floats(-1e4, 1e4) | st.sampled_from([math.nan, math.inf]), max_size=4), max_size=5))
def test_fires_where_a_finite_value_is_too_large(tensors: list[list[float]]) -> None:
    """Exactly the records with a finite absolute value above the threshold; NaN and Inf neither count nor hide."""
    frame = frame_of({f"p{i}": v for i, v in enumerate(tensors)})
    wanted = [f"p{i}" for i, values in enumerate(tensors) if any(math.isfinite(v) and abs(v) > 100.0 for v in values)]
    alerts = ExtremeValueRule(ExtremeValueArgs(threshold=100.0)).check(frame)
    assert [a.name for a in alerts] == wanted
    assert all(abs(a.value) > 100.0 and a.severity == "warning" for a in alerts)


def test_value_keeps_its_sign() -> None:
    """The value reported is the one that is too large, with its sign."""
    (alert,) = ExtremeValueRule(ExtremeValueArgs(threshold=10.0)).check(frame_of({"w": [3.0, -50.0]}))
    assert alert.value == -50.0
    assert "min -50; expected absolute values up to 10" in alert.message


def test_mask_fill_is_not_data() -> None:
    """The lowest float32 in an activation is the fill of a mask; in a gradient it is a fault."""
    fill = -3.4028234663852886e38
    assert ExtremeValueRule().check(frame_of(entries={"Tensor.add.0.forward": [0.0, fill]})) == []
    assert len(ExtremeValueRule().check(frame_of({"g": [0.0, fill]}))) == 1


def test_scalars_but_not_the_loss_scale() -> None:
    """A loss above the threshold fires; a loss scale is large on purpose."""
    alerts = ExtremeValueRule().check(frame_of(scalars={"loss": 1e12, "loss_scale": 2.0**40, "grad_norm": math.nan}))
    assert [a.name for a in alerts] == ["loss"]


def test_memory_that_nothing_has_computed_is_no_fault() -> None:
    """A huge number in a view of a buffer is what the memory held; computed by an operation it is an alert."""
    frame = frame_of(entries={"Tensor.view.2.forward": [1e38], "Torch.mul.0.forward": [1e38]})
    assert [a.name for a in ExtremeValueRule().check(frame)] == ["Torch.mul.0.forward.output.0"]
