"""Which rows of two runs are the same: rows of one name, where what a wrapper puts into the names of one run does not count: the
``module.`` of data parallelism, and the class names of FSDP2."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msprobe_engine.report.trends.sources.source import DUMPED, SCALARS, Target

_WRAPPER = re.compile(r"((?:Module|Cell)\.)?module\.")
_WRAPPERS = re.compile(r"((?:Module|Cell)\.)?((?:module\.)+)")
_NO_MODULE = re.compile(r"(?!Module\.|Cell\.)[A-Z][A-Za-z]*\.")
"""A function in a dump that ran outside of all modules: `Functional.relu.0`."""
_SHARDED = re.compile(r"(Module\.(?:[^:]*\.)?)FSDP([A-Za-z_]\w*\.[^:]*)")
"""A module in a dump whose class was made by ``fully_shard``: `Module.layers.0.FSDPBlock.output.0`."""

Rows = Mapping[str, Sequence[Target]]
"""Metric to its rows."""


class Names(NamedTuple):
    """The rows of a run that have other names in the other run.

    Attributes:
        of: metric and row in the files of this run to the row of both.
        unwrapped: whether ``module.`` was taken off.
        unsharded: whether ``FSDP`` was taken off class names.
    """

    of: dict[tuple[str, Target], Target]
    unwrapped: bool
    unsharded: bool


def pair_rows(target: Rows, golden: Rows) -> tuple[Names, Names]:
    """Names under which the rows of two runs are the same."""
    depths: dict[bool, tuple[int, int]] = {}
    for dumped in (False, True):  # a run may have both: the monitor has taken wrappers off its names, dumps never do
        target_rows, golden_rows = ({name: rows for name, rows in side.items() if (name in DUMPED) == dumped} for side in (target, golden))
        depths[dumped] = count_extra_wrappers(target_rows, golden_rows)
    plain = []
    for i, side in enumerate((target, golden)):
        plain.append({m: {row: unwrap_target(row, depths[m in DUMPED][i]) for row in rows} for m, rows in side.items() if m != SCALARS})
    target_names, golden_names = (_build_names(plain[i], plain[1 - i], any(pair[i] for pair in depths.values())) for i in (0, 1))
    return target_names, golden_names


def _build_names(rows_of: Mapping[str, dict[Target, Target]], others: Mapping[str, dict[Target, Target]], unwrapped: bool) -> Names:
    names: dict[tuple[str, Target], Target] = {}
    unsharded = False
    for metric, rows in rows_of.items():
        other_targets, own_targets = set(others.get(metric, {}).values()), set(rows.values())
        for row, plain in rows.items():
            sharded = _SHARDED.fullmatch(plain.name)
            other = plain._replace(name=sharded[1] + sharded[2]) if sharded else plain
            if other != plain and other in other_targets and other not in own_targets and plain not in other_targets:
                plain, unsharded = other, True
            if plain != row:
                names[metric, row] = plain
    return Names(names, unwrapped, unsharded)


def count_extra_wrappers(target: Rows, golden: Rows) -> tuple[int, int]:
    """How often ``module.`` is to be taken off the names of each run: as often as all rows of it have it in front more often than all rows
    of the other. Data parallel wrappers put it there. Numbers of the steps and functions outside of modules have no say."""
    names = _of_modules(target), _of_modules(golden)
    if not all(names):
        return 0, 0
    target_depth, golden_depth = (min(map(depth, side)) for side in names)
    return max(target_depth - golden_depth, 0), max(golden_depth - target_depth, 0)


def unwrap_target(target: Target, times: int) -> Target:
    """The row without the outermost wrappers in its name, as many as `times` says."""
    return target._replace(name=unwrap_name(target.name, times))


def unwrap_name(name: str, times: int) -> str:
    """A name without its outermost ``module.``, taken off so many times."""
    for _ in range(times):
        if _WRAPPER.match(name):
            name = _WRAPPER.sub(r"\1", name, count=1)
    return name


def outside(name: str) -> bool:
    """Whether a row of a dump is a function that ran outside of all modules: of the loss, of the optimizer."""
    return _NO_MODULE.match(name) is not None


def depth(name: str) -> int:
    """How often a name has ``module.`` in front."""
    found = _WRAPPERS.match(name)
    return len(found[2]) // len("module.") if found else 0


def _of_modules(rows: Rows) -> list[str]:
    return [t.name for metric, targets in rows.items() if metric != SCALARS for t in targets if not outside(t.name)]
