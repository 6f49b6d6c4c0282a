"""Statistics that cannot be right: of tensors whose bytes are the same, as their checksums say, they are other ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure import dump_dialects, roundoff

_SLACK = 1e-3
"""Of a number's size: sums are made in any order."""


def say_contradictions(target: DumpTable, golden: DumpTable, rows: Sequence[tuple[int, int]]) -> bool:
    """Say on the target how many pairs of rows have one checksum and other statistics.

    Args:
        rows: those that belong together.

    Returns:
        whether there is one.
    """
    if not any(target.md5) or not any(golden.md5) or dump_dialects.differ(target, golden) or target.framework != golden.framework:
        return False
    same = [(i, j) for i, j in rows if target.md5[i] and target.md5[i] == golden.md5[j] and _one_kind(target, golden, i, j)]
    if not same:
        return False
    left, right = np.array(same, np.int64).T
    a, b = target.stats[left], golden.stats[right]
    with np.errstate(invalid="ignore"):
        size = np.nan_to_num(np.fmax(np.abs(a), np.abs(b)), nan=0.0, posinf=0.0)
        size[:, :3] = size[:, :3].max(1, keepdims=True)
        slack = _SLACK + 4 * np.array([roundoff.eps(target.dtype[i]) for i in left.tolist()])
        apart = np.abs(a - b)
        found = np.flatnonzero((np.isfinite(apart) & (apart > slack[:, None] * size)).any(1))
    if not len(found):
        return False
    template = "{0} against {1}: the statistics of {2} rows contradict their checksums, which are equal and count; the first is {3}"
    target.say(Sentence(template, target.path, golden.path, f"{len(found):,}", target.name[same[found[0]][0]]))
    return True


def _one_kind(target: DumpTable, golden: DumpTable, i: int, j: int) -> bool:
    """Both are tensors of one type; the checksum of anything else is our own text."""
    return i not in target.values and j not in golden.values and target.dtype[i] == golden.dtype[j]
