"""Rule condition: expressions of the settings over frames."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from frames_of_lists import frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.settings.schema import ProbeSettings, RuleSettings
from msprobe_engine.probe.rules.build import build_rules
from msprobe_engine.probe.rules.builtin.values.condition import ConditionArgs, ConditionRule

element = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))


def test_from_yaml_to_an_alert(tmp_path: Path) -> None:
    """A condition of a file fires after for_steps steps, once, with its own words, and says when it is over."""
    path = tmp_path / "probe.yaml"
    path.write_text(
        """
monitor: {}
rules:
  - rule: condition
    severity: critical
    args:
      name: loss_high
      when: loss > 2 * median(loss)
      for_steps: 2
      warmup: 3
      recovery: 2
      message: the loss doubled
      meaning: a bad batch
      next: look at the data
"""
    )
    (rule,) = build_rules(load_settings(path))
    alerts = [rule.check(frame_of(scalars={"loss": x}, step=i)) for i, x in enumerate([1, 1, 1, 5, 5, 5, 1, 1, 1])]
    assert [len(a) for a in alerts] == [0, 0, 0, 0, 1, 0, 0, 1, 0]
    (first,), (last,) = alerts[4], alerts[7]
    assert (first.rule, first.severity, first.value, first.kind) == ("loss_high", "critical", 5.0, "loss")
    assert first.message == "loss_high: the loss doubled, rank 0 step 4 for 2 steps: loss = 5, median(loss) = 1"
    assert (first.extra["meaning"], first.extra["next"]) == ("a bad batch", "look at the data")
    assert (last.extra["over"], last.severity) == (True, "warning")


@given(st.dictionaries(st.sampled_from(["layers.0.w", "layers.0.b", "layers.1.w", "head.w"]), st.lists(element, max_size=5)))
def test_statistics_are_those_of_all_elements_together(tensors: dict[str, list[float]]) -> None:
    """norm, rms, min, max, absmax, mean, zeros, nans, infs over a selection are what numpy says of its concatenation."""
    chosen = [v for name, v in tensors.items() if name.startswith("layers.")]
    x = np.array([e for v in chosen for e in v], np.float64)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = {
            "norm": np.sqrt((x * x).sum()),
            "rms": np.sqrt((x * x).mean()) if len(x) else math.nan,
            "min": x.min() if len(x) else math.nan,
            "max": x.max() if len(x) else math.nan,
            "absmax": np.abs(x).max() if len(x) else math.nan,
            "mean": x.mean() if len(x) else math.nan,
            "zeros": (x == 0).mean() if len(x) else math.nan,
            "nans": np.isnan(x).sum(),
            "infs": np.isinf(x).sum(),
        }
    frame = frame_of(tensors)
    for op, value in wanted.items():
        text = f'{op}("grad_reduced", "layers.*")'
        rule = ConditionRule(ConditionArgs(name="a", when=f"{text} == {text} or isnan({text})"))
        alerts = rule.check(frame)
        if not chosen:
            assert alerts == []
            continue
        seen = alerts[0].value
        if math.isnan(value) or (op in ("norm", "rms") and not len(x)):
            assert math.isnan(seen)
        else:
            assert seen == pytest.approx(float(value), rel=1e-9, abs=1e-9 * (1.0 + float(np.abs(x[np.isfinite(x)]).sum())))


def test_phase_is_the_third_text() -> None:
    """Only samples of the phase are looked at, where one is named."""
    rule = ConditionRule(ConditionArgs(name="a", when='norm("grad_reduced", "*", "clipped") > 0'))
    assert rule.check(frame_of({"w": [1.0]})) == []
    assert len(rule.check(frame_of({"w": [1.0]}, phase="clipped"))) == 1


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"when": "loss > 1"}, "name = ''"),
        ({"name": "Loss high", "when": "loss > 1"}, "small letters"),
        ({"name": "nan_inf", "when": "loss > 1"}, "name of a rule"),
        ({"name": "a"}, "is empty"),
        ({"name": "a", "when": "loss.x > 1"}, "condition 'a', when, column 1"),
        ({"name": "a", "when": "loss > 1", "for_step": 3}, "did you mean 'for_steps'"),
    ],
)
def test_mistakes(args: dict[str, str], text: str) -> None:
    """Mistakes are found when the settings are read."""
    with pytest.raises(SettingsError, match=text):
        build_rules(ProbeSettings(rules=(RuleSettings(rule="condition", args=args),)))


def test_two_of_one_name() -> None:
    """Two conditions need two names: alerts and metrics are told apart by them."""
    one = RuleSettings(rule="condition", args={"name": "a", "when": "loss > 1"})
    with pytest.raises(SettingsError, match="two conditions"):
        build_rules(ProbeSettings(rules=(one, one)))


def test_a_number_that_never_comes_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt number or pattern is named after ten monitored steps, with what there is; one that comes later, or that only steps
    without tensors lack, is not."""
    layer = 'loss > 3 and norm("grad_reduced", "layer.*") > 1'
    for when, steps in [("los > 3", 10), (layer, 10), ("loss > 3 * median(loss)", 10), ("los > 1", 9)]:
        rule = ConditionRule(ConditionArgs(name="mine", when=when, warmup=50))
        for step in range(40):
            tensors = {"layers.0.w": [1.0]} if step < steps else {}
            rule.check(frame_of(tensors, step=step, scalars={"loss": 1.0, "lr": 2.0}))
    assert [record.getMessage() for record in caplog.records] == [
        f"rules: condition 'mine': no step has had {what} so far: misspelt, or not watched? "
        "Numbers of the step: loss, lr; families: grad_reduced"
        for what in ("los", "norm('grad_reduced', 'layer.*')")
    ]
