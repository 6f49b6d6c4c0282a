"""What 8.1.1, 26.2.0 and this tool write in other ways of one and the same training: between their dumps it is no difference of the runs.

* 8.1.1 turns integers and float64 into float32 before it takes their statistics: 2**40 + 2 is 2**40 there, and 1e300 is an infinity.
* The existing tool writes the gradients of the last autograd node of a function, this one, and the existing one for MindSpore, those of
  the arguments.
* After several backward passes 8.1.1 has the last increment of a parameter gradient, the others have the sum.
* Each has its own list of functions that it records.

`docs/reference/compatibility.md` names the rules (`float32`, `last-node`, `gradient-places`, `accumulated`, `not-listed`, `own-calls`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from msprobe_engine.core import names
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import OUTPUT, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import factorize, roundoff
from msprobe_engine.measure.factorize import Integers

Bools = npt.NDArray[np.bool_]

OURS, OLD, NEW = "ours", "8.1.1", "26.2.0"

_KEYS = frozenset(("nonfinite_counts", "summary_mode"))
_WIDE = frozenset(("int64", "long", "int32", "int", "uint64", "uint32", "float64", "double"))
"""Dtypes that float32 does not hold."""


def recorder(side: DumpTable) -> str:
    """Who wrote a dump: `OURS` (its header says how NaN and Inf are told, or what stands in place of statistics), `OLD` (every record says
    whether it is a recomputation) or `NEW`."""
    if not _KEYS.isdisjoint(side.header):
        return OURS
    return OLD if any(tags.get("is_recompute") is False for tags in side.tags.values()) else NEW


def differ(target: DumpTable, golden: DumpTable) -> bool:
    """Two tools have written them: the last bits of their statistics say nothing."""
    return recorder(target) != recorder(golden)


def find_rows_in_float32(side: DumpTable) -> Bools:
    """bool (rows,): where the numbers of a file are those of the tensor in float32. 8.1.1 writes four floats for such tensors, 26.2.0 has
    no mean and no norm of them."""
    if "nonfinite_counts" in side.header:
        return np.zeros(len(side), bool)
    wide: Bools = factorize.of_each(side.dtype, _is_wide, bool)[: len(side)]
    return wide & ~factorize.mask(side.nonfloat_stats, len(side))


def as_float32(stats: npt.NDArray[np.float64], rows: Bools) -> npt.NDArray[np.float64]:
    """float64 (rows, 4), with the chosen rows as float32 holds them."""
    rounded: npt.NDArray[np.float64] = stats.copy()
    with np.errstate(all="ignore"):
        rounded[rows] = rounded[rows].astype(np.float32)
    return rounded


def find_incomparable(target: DumpTable, golden: DumpTable, target_rows: Integers, golden_rows: Integers) -> Bools:
    """bool (pairs of rows,): where both recorders put something else into one place."""
    incomparable = np.zeros(len(target_rows), bool)
    target_recorder, golden_recorder = recorder(target), recorder(golden)
    crossed = target.framework != golden.framework
    if target_recorder == golden_recorder and not (crossed and target_recorder != OURS):
        return incomparable
    old, role = OLD in (target_recorder, golden_recorder), np.frombuffer(bytes(golden.role), np.uint8)[golden_rows]
    passes = Counter(name.rpartition(".backward.")[0] for name in golden.ops if names.is_module(name)) if old else Counter()
    for position in np.flatnonzero((role == OUTPUT) | (role == PARAMETERS_GRAD)).tolist():
        name = golden.ops[golden.op[int(golden_rows[position])]]
        if role[position] == PARAMETERS_GRAD:
            incomparable[position] = old and passes[name.partition(".parameters_grad")[0]] > 1
        else:
            incomparable[position] = (crossed or OURS in (target_recorder, golden_recorder)) and name.endswith(".backward")
    return incomparable


def recorded_by_both(side: DumpTable, other: DumpTable) -> Bools:
    """bool (records of `side`,): calls of which one can tell that the other side does not make them, because its recorder knows the
    function: it has a call of it, or the recorders are the same."""
    if recorder(side) == recorder(other):
        return np.ones(len(side.ops), bool)
    known = {_function(name) for name in other.ops}
    return np.fromiter((names.is_module(name) or _function(name) in known for name in side.ops), bool, len(side.ops))


def _function(name: str) -> str:
    """``Torch.mul.1.forward`` -> ``Torch.mul.forward``; of others the name."""
    head, _, direction = name.rpartition(".")
    call, _, number = head.rpartition(".")
    return f"{call}.{direction}" if number.isdecimal() else name


def has_all_statistics(dtype: str | None) -> bool:
    """Every recorder writes all four numbers of a tensor of this type. 26.2.0 has no mean and no norm of integers and float64, neither
    version of the existing tool a norm of complex numbers."""
    return str(dtype).rpartition(".")[2].lower().startswith(("float32", "float16", "float8", "bfloat16", "half"))


def _is_wide(dtype: str | None) -> bool:
    return str(dtype).rpartition(".")[2].lower() in _WIDE


_SLACK = 1e-3
"""Of a number's size: sums are made in any order."""


def say_contradictions(target: DumpTable, golden: DumpTable, rows: Sequence[tuple[int, int]]) -> bool:
    """Say on the target how many pairs of rows have one checksum and other statistics.

    Args:
        rows: those that belong together.

    Returns:
        whether there is one.
    """
    if not any(target.md5) or not any(golden.md5) or differ(target, golden) or target.framework != golden.framework:
        return False
    same = [(i, j) for i, j in rows if target.md5[i] and target.md5[i] == golden.md5[j] and _one_kind(target, golden, i, j)]
    if not same:
        return False
    target_rows, golden_rows = np.array(same, np.int64).T
    target_stats, golden_stats = target.stats[target_rows], golden.stats[golden_rows]
    with np.errstate(invalid="ignore"):
        size = np.nan_to_num(np.fmax(np.abs(target_stats), np.abs(golden_stats)), nan=0.0, posinf=0.0)
        size[:, :3] = size[:, :3].max(1, keepdims=True)
        slack = _SLACK + 4 * np.array([roundoff.eps(target.dtype[i]) for i in target_rows.tolist()])
        apart = np.abs(target_stats - golden_stats)
        contradicting = np.flatnonzero((np.isfinite(apart) & (apart > slack[:, None] * size)).any(1))
    if not len(contradicting):
        return False
    template = "{0} against {1}: the statistics of {2} rows contradict their checksums, which are equal and count; the first is {3}"
    target.add_problem(Sentence(template, target.path, golden.path, f"{len(contradicting):,}", target.name[same[contradicting[0]][0]]))
    return True


def _one_kind(target: DumpTable, golden: DumpTable, i: int, j: int) -> bool:
    """Both are tensors of one type; the checksum of anything else is our own text."""
    return i not in target.values and j not in golden.values and target.dtype[i] == golden.dtype[j]
