"""The learning rate at an update, as each framework computes it: schedules of other names and parameters are compared by what they give.

Sources: Megatron-LM d98e8a64, core/optimizer_param_scheduler.py; Transformers 5.23.0, optimization.py; torchtitan 0.3.0,
components/optimizer/lr_scheduler.py. Updates are counted from 1: the rate of update t is what the optimizer takes in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from msprobe_engine.config.settings import derived
from msprobe_engine.config.settings.pack_settings import PackSettings
from msprobe_engine.core.text.sentences import Sentence

TERMS = frozenset(
    (
        *("learning_rate", "lr_schedule", "min_lr", "min_lr_ratio", "warmup_init", "warmup_max_lr", "warmup_type", "warmup_steps"),
        *("warmup_samples", "warmup_fraction", "decay_steps", "decay_samples", "decay_ratio", "wsd_decay", "train_steps", "train_samples"),
        *("epochs", "global_batch_size", "micro_batch_size", "gradient_accumulation"),
    )
)
"""A difference of one of these says already why rates differ."""
CLOSE = 1e-6
"""Relative; frameworks compute rates in another order of operations."""


@dataclass(frozen=True)
class Schedule:
    """A schedule that can be evaluated.

    Attributes:
        rate: update, from 1 -> learning rate.
        warmup, end: updates where it stops rising, and stops falling.
    """

    rate: Callable[[int], float]
    warmup: int
    end: int


@dataclass(frozen=True)
class _Shape:
    peak: float
    low: float
    first: float
    warmup: int
    end: int
    style: str


def schedule(side: PackSettings) -> Schedule | None:
    """The schedule of one side; None: something of it is not known, or it is of a kind that is not computed here."""
    framework = next((name for name in _RATES if name in side.frameworks), "")
    shape = _shape(side, framework)
    make = _RATES.get(framework)
    if shape is None or make is None:
        return None
    rate = make(shape, side)
    return None if rate is None else Schedule(rate, shape.warmup, shape.end)


def points(golden: Schedule, target: Schedule) -> dict[str, int]:
    """Updates that tell schedules apart: the first, the end of the warm-up, the middle of the fall, the last."""
    warm, end = max(golden.warmup, target.warmup), min(golden.end, target.end)
    updates = {
        Sentence("first"): 1,
        Sentence("end of warm-up"): max(1, warm),
        Sentence("middle"): max(1, (warm + end) // 2),
        Sentence("last"): end,
    }
    return {name: update for name, update in updates.items() if 1 <= update <= end}


def _shape(side: PackSettings, framework: str) -> _Shape | None:
    style = side.quantity_of("lr_schedule") or side.default(side.terms["lr_schedule"])
    peak, warm = side.number("learning_rate"), derived.quantity(side, "warmup_steps")
    end = derived.quantity(side, "decay_steps") or derived.quantity(side, "train_steps")
    low = derived.quantity(side, "min_lr")
    if style is None or not isinstance(style.value, str) or peak is None:
        return None
    steps = end.value if end is not None else None
    if not isinstance(steps, int) or steps < 1:
        return None
    warmup = warm.value if warm is not None and isinstance(warm.value, int) else (200 if framework == "torchtitan" else 0)
    first = side.number("warmup_init") or 0.0
    floor = low.value if low is not None and isinstance(low.value, (int, float)) else 0.0
    return _Shape(peak, floor, first, warmup, steps, style.value)


def _megatron(s: _Shape, _: PackSettings) -> Callable[[int], float] | None:
    if s.style not in ("linear", "cosine", "constant", "inversesqrt"):
        return None

    def rate(update: int) -> float:
        updates = update - 1  # Megatron sets the rate of the next update when one is done
        if s.warmup > 0 and updates <= s.warmup:
            return s.first + (s.peak - s.first) * updates / s.warmup
        if s.style == "constant":
            return s.peak
        if updates > s.end:
            return s.low
        if s.style == "inversesqrt":
            warmup = max(s.warmup, 1)
            return max(s.low, s.peak * math.sqrt(warmup) / math.sqrt(max(updates, 1)))
        share = (updates - s.warmup) / max(s.end - s.warmup, 1)
        return s.low + (s.peak - s.low) * (1 - share if s.style == "linear" else 0.5 * (math.cos(math.pi * share) + 1))

    return rate


def _transformers(s: _Shape, side: PackSettings) -> Callable[[int], float] | None:
    others = [name for name in side.settings if name.startswith("lr_scheduler_kwargs.") and not name.endswith(("min_lr", "min_lr_rate"))]
    if s.style not in ("linear", "cosine", "constant", "cosinewithminlr") or others or (s.low and s.style == "linear"):
        return None

    def rate(update: int) -> float:
        updates = update - 1
        if updates < s.warmup:
            return s.peak * updates / max(1, s.warmup)
        if s.style == "constant":
            return s.peak
        share = (updates - s.warmup) / max(1, s.end - s.warmup)
        if s.style == "linear":
            return s.peak * max(0.0, 1 - share)
        low = s.low / s.peak if s.peak else 0.0
        return s.peak * (max(0.0, 0.5 * (1 + math.cos(math.pi * share))) * (1 - low) + low)

    return rate


def _torchtitan(s: _Shape, side: PackSettings) -> Callable[[int], float] | None:
    ratio = side.number("decay_ratio")
    said, steps = side.number("decay_steps"), derived.quantity(side, "train_steps")  # total_steps of the schedule, else all of the training
    total = said if said is not None else steps.value if steps is not None else None
    if s.style not in ("linear", "cosine", "sqrt") or not isinstance(total, int):
        return None
    warmup = min(s.warmup, total)
    falls = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    stable = total + 1 - warmup - falls
    low = s.low / s.peak if s.peak else 0.0

    def rate(update: int) -> float:
        updates = update - 1
        if updates < warmup:
            return s.peak * (updates + 1) / warmup
        if updates < warmup + stable:
            return s.peak
        share = (updates + 1 - (warmup + stable)) / max(falls, 1)
        shape = {"linear": 1 - share, "sqrt": 1 - math.sqrt(share), "cosine": 0.5 * (1 + math.cos(math.pi * share))}[s.style]
        return s.peak * (low + (1 - low) * shape)

    return rate


_RATES: dict[str, Callable[[_Shape, PackSettings], Callable[[int], float] | None]] = {
    "megatron": _megatron,
    "transformers": _transformers,
    "torchtitan": _torchtitan,
}
