"""Base of the rules that say a lasting condition once when it begins and once when it is over."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.alert_factory import is_excluded, note_rest, over_alert, scalar_alert
from msprobe_engine.probe.rules.arguments import LastingArgs
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.tracked_series import Episode, Episodes

A = TypeVar("A", bound=LastingArgs)

_SLOT, _BAD, _FINE = np.zeros(1, np.intp), np.ones(1, np.bool_), np.zeros(1, np.bool_)
_NUMBER = re.compile(r"(?<![^. ])[0-9]+(?![^.])")
_LAYER = re.compile(r"(?:[^.]+\.)*?[0-9]+(?=\.|$)")
_PART = re.compile(r"(?:[^.]+\.)*?[0-9]+(?:\.[^.]+\.[0-9]+)*\.[^.]+(?=\.)")


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: its name up to the first number, or the module that owns it where there is none.

    ``decoder.layers.3.mlp.fc1.weight`` -> ``decoder.layers.3``, ``embedding.weight`` -> ``embedding``, ``scale`` -> ``scale``.
    """
    match = _LAYER.match(name)
    return match[0] if match else name.rpartition(".")[0] or name


def part_of(name: str) -> str | None:
    """The part of a layer that a parameter belongs to, None where there are none.

    ``layers.3.mlp.fc1.weight`` -> ``layers.3.mlp``, ``block.0.layer.1.attention.q.weight`` -> ``block.0.layer.1.attention``,
    ``embedding.weight`` -> None.
    """
    match = _PART.match(name)
    return match[0] if match else None


def kind_of(name: str) -> str:
    """The same for parameters whose names differ in numbers only: of all layers, adapters, heads."""
    return _NUMBER.sub("", name)


class LastingRule(Rule, Generic[A]):
    """A rule with the episodes of its slots; the first of `all_kinds` is that of alerts that belong to no single tensor."""

    args_type: type[A]
    args: A

    @functools.cached_property
    def episodes(self) -> Episodes:
        return Episodes(self.args.patience, self.args.recovery)

    def left_out(self, name: str) -> bool:
        """Is it excluded by the arguments?"""
        return is_excluded(name, self.args.exclude)

    def build_alerts(
        self, frame: Frame, episodes: Sequence[Episode], names: Callable[[int], str], describe: Callable[[Episode], Alert], kind: str = ""
    ) -> list[Alert]:
        """Alerts for what began, at most `max_alerts`, and one for all that is over.

        Args:
            names: name of a slot.
            describe: the alert for an episode that begins.
        """
        return episode_alerts(
            frame, episodes, names, describe, rule=self.name, kind=kind or self.all_kinds[0], max_alerts=self.args.max_alerts
        )

    def say_number(
        self,
        frame: Frame,
        name: str,
        bad: bool,
        value: float,
        words: Callable[[], tuple[str, str]],
        *,
        kind: str = "",
        episodes: Episodes | None = None,
    ) -> list[Alert]:
        """As `build_alerts`, for one number of the step.

        Args:
            bad: does the condition hold now?
            words: what was expected, and what was seen; asked when something has begun.
            episodes: those of the number, where the rule looks at several.
        """

        def describe(_: Episode) -> Alert:
            expected, seen = words()
            return scalar_alert(frame, name, kind or self.all_kinds[0], rule=self, value=value, expected=expected, seen=seen)

        changes = (episodes or self.episodes).update(_BAD if bad else _FINE, _SLOT)
        return self.build_alerts(frame, changes, lambda _slot: name, describe, kind)


def episode_alerts(
    frame: Frame,
    episodes: Sequence[Episode],
    names: Callable[[int], str],
    describe: Callable[[Episode], Alert],
    *,
    rule: str,
    kind: str,
    max_alerts: int,
) -> list[Alert]:
    """Alerts for what began, at most `max_alerts`, and one of `kind` for all that is over.

    Args:
        names: name of a slot.
        describe: the alert for an episode that begins.
    """
    begun = [episode for episode in episodes if not episode.over]
    over = [episode for episode in episodes if episode.over]
    alerts = note_rest([describe(episode) for episode in begun[:max_alerts]], len(begun))
    if over:
        first = over[0]
        alerts.append(over_alert(frame, names(first.slot), kind, rule=rule, steps=first.steps, more=len(over) - 1))
    return alerts
