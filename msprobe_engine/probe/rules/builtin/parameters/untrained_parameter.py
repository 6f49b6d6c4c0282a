"""Rule ``untrained_parameter``: a parameter gets no gradient any more, or none ever, or is in no optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import FROZEN, LEFT_OPTIMIZER, NO_OPTIMIZER, Frame
from msprobe_engine.core.statistics.rows import COUNT, ZEROS, as_int64
from msprobe_engine.probe.rules.alert_factory import is_excluded, note_rest, scalar_alert
from msprobe_engine.probe.rules.arguments import CommonArgs, arg
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.builtin.parameters.dead_expert import EXPERT
from msprobe_engine.probe.rules.layout import Layout
from msprobe_engine.probe.rules.stateful_rule import kind_of

_LONGER = 2
"""Times the longest gap before that a gap is longer than what is usual for a parameter."""
_CHANCE = 3e-3
"""A gap that is less likely is not left to chance, where a parameter, or another of its kind, is left out as often as it was so far."""

_OUTSIDE = {LEFT_OPTIMIZER: "is in no optimizer any more", NO_OPTIMIZER: "has a gradient and is in no optimizer"}


@dataclass(frozen=True, kw_only=True)
class UntrainedParameterArgs(CommonArgs):
    patience: int = arg(3, "monitored steps in a row without a gradient that was there before, until the rule fires", minimum=1)
    never: int = arg(20, "monitored steps without a gradient that never was there, until the rule fires", minimum=1)


@dataclass
class _Gap:
    """Of one parameter that has been without a gradient: since which step and how long it is now; how long at most before, and in all, in
    how many gaps."""

    since: int = 0
    steps: int = 0
    longest: int = 0
    past: int = 0
    ended: int = 0
    said: bool = False


class UntrainedParameterRule(Rule):
    """Warnings for parameters that require a gradient and have none (or one of exact zeros, as has the whole module) while others have: of
    those that had one for `patience` monitored steps, twice as long as ever before and longer than chance makes it (layers
    that are left out at random), of others for `never`, or `patience` where most parameters have none. And for parameters with a
    gradient that no optimizer has: for `patience` monitored steps, or at once where one had them before. Experts are the business of
    ``dead_expert``, and all of them without a gradient that of ``no_progress``."""

    name = "untrained_parameter"
    fires = (
        "a parameter has no gradient any more, or never had one, while others have, for longer than chance makes it where parameters are "
        "left out of some steps; or it has a gradient and is in no optimizer"
    )
    meaning = (
        "It is not trained: a branch that is not called or is detached, a parameter that was frozen on the way, parameter groups that "
        "were made again without it, or a module that was replaced when the optimizer was there."
    )
    next = "look for what changed in this step: detach, no_grad, requires_grad, conditions in forward, the groups of the optimizer"
    all_kinds = ("grad",)
    args_type = UntrainedParameterArgs
    args: UntrainedParameterArgs

    def setup(self) -> None:
        self._gaps: dict[str, _Gap] = {}
        self._alike: dict[str, list[_Gap]] = {}
        self._known: dict[str, int] = {}
        self._steps = 0
        self._outside: dict[str, int] = {}
        self._layout: Layout | None = None
        self._rows: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        self._names: list[str] = []
        self._modules: list[tuple[str, int]] = []

    def check(self, frame: Frame) -> list[Alert]:
        if not frame.complete or frame.skipped:
            return []
        without = self._without(frame)
        if without is None:
            return []
        self._steps += 1
        most = 2 * len(without) > len(without.union(self._names))  # of one branch alone there may be a reason
        fired = [name for name in sorted(without) if self._lasts(name, frame, most)]
        for name, gap in self._gaps.items():
            if name not in without and gap.steps:
                gap.longest, gap.past, gap.ended = max(gap.longest, gap.steps), gap.past + gap.steps, gap.ended + 1
                gap.steps, gap.said = 0, False
        outside = {name: why for name, why in frame.untrained.items() if why in _OUTSIDE and not is_excluded(name, self.args.exclude)}
        self._outside = {name: self._outside.get(name, 0) + 1 for name in outside}
        alerts = [
            self._alert(frame, name, _OUTSIDE[why], self._outside[name])
            for name, why in sorted(outside.items())
            if self._outside[name] == (1 if why == LEFT_OPTIMIZER else self.args.patience)
        ]
        alerts += [self._alert(frame, name, self._describe_gap(name, frame, without), self._gaps[name].steps) for name in fired]
        return note_rest(alerts[: self.args.max_alerts], len(alerts))

    def _without(self, frame: Frame) -> set[str] | None:
        """Parameters without a gradient; None where no gradients are monitored, or there is none at all."""
        layout = self.layouts.of(frame)
        if layout is not self._layout:
            chosen = [s for s in frame.samples if s.family == "grad_reduced" and s.ref.row >= 0]
            self._layout, self._rows = layout, np.array([s.ref.row for s in chosen], np.intp)
            self._names = [(f"{s.name} (vpp stage {s.vpp_stage})" if s.vpp_stage else s.name) for s in chosen]
            self._modules = [(s.name.rpartition(".")[0] or s.name, s.vpp_stage) for s in chosen]
        if not len(self._rows):
            return None
        ints = as_int64(frame.rows[self._rows])
        zero = ints[:, ZEROS] == ints[:, COUNT]
        if zero.all():
            return None
        trained = {self._modules[i] for i in np.flatnonzero(~zero)}  # the gradient of a bias may cancel out in the loss
        names = {self._names[i] for i in np.flatnonzero(zero) if self._modules[i] not in trained}
        names |= {name for name, why in frame.untrained.items() if why not in _OUTSIDE}
        return {name for name in names if not EXPERT.match(name) and not is_excluded(name, self.args.exclude)}

    def _lasts(self, name: str, frame: Frame, most: bool) -> bool:
        """One more step without: is it to be said? `most`: more than half of the parameters are without."""
        gap = self._gaps.get(name)
        if gap is None:
            gap = self._gaps[name] = _Gap()
            self._alike.setdefault(kind_of(name), []).append(gap)
            self._known[name] = self._steps - 1  # it had one in all steps before
        gap.since = gap.since if gap.steps else frame.step
        gap.steps += 1
        if gap.said:
            return False
        had = self._known[name] > 0 or gap.longest > 0
        never = min(self.args.never, self.args.patience) if most else self.args.never
        enough = gap.steps >= self.args.patience and gap.steps > _LONGER * gap.longest if had else gap.steps >= never
        gap.said = enough and (frame.untrained.get(name) == FROZEN or self._chance(name, had) < _CHANCE)
        return gap.said

    def _chance(self, name: str, had: bool) -> float:
        """How likely a gap as long as this one is, if its steps are left out as often as those before: by the rule of succession, of itself
        where it `had` a gradient before, and of others of its kind with gaps that ended; the largest counts. Of many gaps one is long."""
        own = self._gaps[name]
        alike = [gap for gap in self._alike[kind_of(name)] if gap.past or (had and gap is own)]
        return max(((gap.ended + 1) * _succeed(self._steps - gap.steps, gap.past, own.steps) for gap in alike), default=0.0)

    def _describe_gap(self, name: str, frame: Frame, without: set[str]) -> str:
        gap = self._gaps[name]
        had = self._known[name] > 0 or gap.longest > 0
        if name in frame.untrained:
            what, before = "without a gradient", "was there before" if had else "was never there"
        else:
            what, before = "with a gradient of exact zeros", "was not zero before" if had else "was always zero"
        module, count = self._find_module(name, without)
        alike = f", as all {count} parameters of {module}," if count > 1 else ""
        return f"{what}{alike} since step {gap.since} ({gap.steps} monitored steps); it {before}"

    def _find_module(self, name: str, without: set[str]) -> tuple[str, int]:
        """The largest module that this parameter is in and of which all parameters are without, and how many those are."""
        known = without.union(self._names)
        found, count = "", 0
        module = name.rpartition(".")[0]
        while module:
            inside = {other for other in known if other.startswith(f"{module}.")}
            if not inside <= without:
                break
            found, count, module = module, len(inside), module.rpartition(".")[0]
        return found, count

    def _alert(self, frame: Frame, name: str, seen: str, steps: int) -> Alert:
        return scalar_alert(frame, name, "grad", rule=self, value=float(steps), expected="a parameter that is trained", seen=seen)


def _succeed(steps: int, left_out: int, more: int) -> float:
    """Probability that the next `more` steps are left out, too, where `left_out` of `steps` were and every rate was as likely before."""
    return math.exp(math.lgamma(left_out + more + 1) + math.lgamma(steps + 2) - math.lgamma(steps + more + 2) - math.lgamma(left_out + 1))
