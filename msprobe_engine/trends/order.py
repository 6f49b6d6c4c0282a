"""Targets in the order of the model, whatever order the ranks wrote them in."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msprobe_engine.trends.source import Target

_NUMBER = re.compile(r"\d{1,18}")
"""Numbers of layers; longer rows of digits are no numbers, and int() of a huge text fails."""


def in_order(targets: Sequence[Target]) -> list[Target]:
    """Targets as they were first seen, with layers of one list beside each other by their numbers.

    ``layers.10.w`` stands behind ``layers.9.w`` also where another rank wrote it first. Stages of the pipeline follow each other within
    a chunk, as the layers of the model do. A module of a dump stands with the calls in it (``Module.layers.9.Block``, ``layers.9: ...``).
    """
    first: dict[str, int] = {}
    keys = {}
    for i, target in enumerate(targets):
        name = target.name.removeprefix("Module.").removeprefix("Cell.")
        match = _NUMBER.search(name)
        stem = name[: match.start()] if match else name
        place = first.setdefault(f"{target.vpp} {target.pp} {stem}", i)
        keys[target] = (target.vpp, target.pp, place, int(match.group()) if match else -1, i)
    return sorted(targets, key=keys.__getitem__)
