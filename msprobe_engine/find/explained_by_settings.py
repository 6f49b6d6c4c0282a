"""A setting that is not the same on both sides and explains where the numbers begin to differ: it stands first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msprobe_engine.config.severity import CHANGES, MAY
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config.difference import DATASET, SETTINGS, WEIGHTS, Difference
from msprobe_engine.find.findings import Suspect

_OF_OPTIMIZER = re.compile(
    r"adam_.*|learning_rate|(min_|max_)?lr.*|weight_decay.*|decay_.*|decoupled_.*|momentum|optimizer|clip_grad|bias_correction|warmup.*"
)
"""Common names of settings that an update is made with."""


def explaining(first: Suspect, differences: Sequence[Difference]) -> Difference | None:
    """The difference of settings that the first suspect follows from: one with its very values; in an update, one of the optimizer; of
    numbers of a monitor, the only one there is (where the two numbers of a step are said, one that only may change numbers is not).

    Args:
        differences: the worst first.
    """
    settings = [one for one in differences if one.severity == CHANGES and one.sheet == SETTINGS]
    values = [first.numbers.get(side, {}).get("value") for side in ("target", "golden")]
    if None not in values:
        same = next((one for one in settings if [_number(one.cmp), _number(one.bench)] == [_number(value) for value in values]), None)
        if same is not None:
            return same
    if first.kind == "series":
        only = _only_one(differences)
        return None if only is not None and only.severity == MAY and first.cause else only
    return next((one for one in settings if _of_optimizer(one)), None) if first.parameter else None


def _only_one(differences: Sequence[Difference]) -> Difference | None:
    """Where numbers part that name no call: the setting that is the only thing which the runs were started with and that changes numbers,
    else the only one that may. Samples and weights follow from settings, and those of the optimizer have a series of their own."""
    others = [one for one in differences if one.matters and one.sheet not in (DATASET, WEIGHTS) and not _of_optimizer(one)]
    for severity in (CHANGES, MAY):
        if found := [one for one in others if one.severity == severity]:
            return found[0] if len(found) == 1 and found[0].sheet == SETTINGS else None
    return None


def _of_optimizer(one: Difference) -> bool:
    return bool(one.term and _OF_OPTIMIZER.fullmatch(one.term)) or one.name.startswith("optimizer.")


def _number(value: Any) -> Any:
    """A number whatever its spelling; all else as text."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)


def lead_with_setting(suspects: Sequence[Suspect], one: Difference) -> None:
    """Name the setting as the cause of the first suspect and of all that say the same, and in front of what the numbers say of it."""
    first = suspects[0]
    same = first.same_elsewhere()
    cause = Sentence("{0} = {1}, golden {2}", one.name, *one.both)
    for suspect in suspects:
        if (first.parameter and suspect.parameter) or suspect.same_elsewhere() == same:
            suspect.cause = cause
    first.why = Sentence("{0} in the settings ({1}); {2}", cause, one.why, first.why)
