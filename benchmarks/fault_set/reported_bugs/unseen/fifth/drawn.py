"""What is drawn at random for the fifth set, and short ways to plant a fault in its program."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from reported_bugs.case import Plant
from reported_bugs.training import Program
from reported_bugs.unseen.second import named

DRAW = random.Random(5107)


def drawn(low: float, high: float) -> float:
    return round(DRAW.uniform(low, high), 3)


def some(levels: tuple[str, ...], count: int = 2) -> tuple[str, ...]:
    """Two of them, drawn."""
    return tuple(sorted(DRAW.sample(levels, min(count, len(levels))), key=levels.index))


LAYER = DRAW.choice((0, 1))
FACTOR, SMALL, RATE, LOSS_SHARE = drawn(0.5, 0.8), drawn(0.02, 0.08), drawn(1.3, 2.4), drawn(1.6, 3.0)
DECAY, OFFSET, STEP, START = drawn(0.3, 0.9), DRAW.randint(300, 500), DRAW.randint(3, 7), DRAW.randint(14, 22)


def instead(name: str, method: Callable[..., Any], **kept: Any) -> Plant:
    """Another method of the program, which is given it."""

    def plant(p: Any) -> None:
        setattr(p, name, lambda *args, **more: method(p, *args, **more))
        for key, value in kept.items():
            setattr(p, key, value)

    return named(plant, f"{name} {method.__name__}")


def with_values(**values: Any) -> Plant:
    """Other values of the program's own attributes."""

    def plant(p: Program) -> None:
        for key, value in values.items():
            setattr(p, key, value)

    return named(plant, f"{values}")


def attentions(model: Any) -> list[Any]:
    return [layer.attention for layer in getattr(model, "decoder", model).layers.values()]
