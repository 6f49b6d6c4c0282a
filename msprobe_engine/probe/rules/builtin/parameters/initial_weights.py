"""Rule ``initial_weights``: what is wrong with the parameters before the first step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.alert_factory import is_excluded, note_rest, scalar_alert
from msprobe_engine.probe.rules.arguments import CommonArgs
from msprobe_engine.probe.rules.base import Rule


def not_finite(bad: int, count: int) -> str:
    """What is said of a parameter with `bad` of `count` elements that are not finite."""
    return f"{bad} of {count} elements are NaN or Inf"


def parted(other: str) -> str:
    """What is said of an output layer that is a copy of the embedding `other`."""
    return f"holds the same bits as {other} and is another parameter: they were tied, and are not any more"


def not_tied(other: str) -> str:
    """What is said of an output layer that is not the embedding `other`, which the configuration of the model wants."""
    return f"is another parameter than {other}, and tie_word_embeddings is true"


@dataclass(frozen=True, kw_only=True)
class InitialWeightsArgs(CommonArgs):
    """Arguments of the rule."""


class InitialWeightsRule(Rule):
    """Warnings for parameters that hold NaN or Inf before the first step, also where no batch uses them (a row of an embedding), and for
    an embedding and an output layer that are two parameters although they are meant to be one. Weights are read once, for the digests in
    the configuration pack (``config_check.weights``)."""

    name = "initial_weights"
    fires = (
        "before the first step a parameter holds NaN or Inf, or the output layer is not the embedding although the model's configuration "
        "says so or both hold the same bits (needs `config_check.weights`)"
    )
    meaning = (
        "A checkpoint is damaged, rows that were added are not initialised, or weights that were tied are two after loading: they are "
        "trained apart from now on."
    )
    next = "look at what was loaded (`msprobe ckpt show CHECKPOINT --tensors`), at rows that were added, and tie the weights after loading"
    all_kinds = ("param",)
    args_type = InitialWeightsArgs
    args: InitialWeightsArgs

    def check(self, frame: Frame) -> list[Alert]:
        found = {name: said for name, said in frame.doubtful.items() if not is_excluded(name, self.args.exclude)}
        alerts = [
            scalar_alert(frame, name, "param", rule=self, value=math.nan, expected="weights as the model means them", seen=said, order=0)
            for name, said in sorted(found.items())
        ]
        return note_rest(alerts[: self.args.max_alerts], len(alerts))
