"""Which rows of two runs are the same: rows of one name, where a wrapper around the model of one run (``module.``) does not count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msprobe_engine.trends.source import SCALARS, Target

_WRAPPER = re.compile(r"((?:Module|Cell)\.)?module\.")
_WRAPPERS = re.compile(r"((?:Module|Cell)\.)?((?:module\.)+)")
_NO_MODULE = re.compile(r"(?!Module\.|Cell\.)[A-Z][A-Za-z]*\.")
"""A function in a dump that ran outside of all modules: `Functional.relu.0`."""

Rows = Mapping[str, Sequence[Target]]
"""Metric to its rows."""


def wrapped(one: Rows, other: Rows) -> tuple[int, int]:
    """How often ``module.`` is to be taken off the names of each run: as often as all rows of it have it in front more often than all rows
    of the other. Data parallel wrappers put it there. Numbers of the steps and functions outside of modules have no say."""
    names = _of_modules(one), _of_modules(other)
    if not all(names):
        return 0, 0
    mine, theirs = (min(map(_depth, side)) for side in names)
    return max(mine - theirs, 0), max(theirs - mine, 0)


def renamed(target: Target, depth: int) -> Target:
    """The row without the outermost `depth` wrappers in its name."""
    name = target.name
    for _ in range(depth):
        name = _without(name)
    return target._replace(name=name)


def _of_modules(rows: Rows) -> list[str]:
    return [t.name for metric, targets in rows.items() if metric != SCALARS for t in targets if not _NO_MODULE.match(t.name)]


def _depth(name: str) -> int:
    found = _WRAPPERS.match(name)
    return len(found[2]) // len("module.") if found else 0


def _without(name: str) -> str:
    return _WRAPPER.sub(r"\1", name, count=1) if _WRAPPER.match(name) else name
