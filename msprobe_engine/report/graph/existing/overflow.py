"""Which calls make NaN, Inf or numbers that grow a hundredfold: the overflow levels of the existing tool (``-oc``).

A level is the first of these that holds:

* ``critical``: what goes in is finite, what comes out is not;
* ``high``: neither is;
* ``medium``: what goes in is not finite, what comes out is;
* ``high``: the largest norm that comes out is more than 100 times the largest that goes in.

Calls that are known to be harmless have none: memory that nobody has written yet, buffers that are received into, values that are masked.
There the existing tool also loses a receive or gather that brings NaN in; here it is ``high``: what it takes in from other ranks is not
finite. Nor does it look into dictionaries and the messages of ``batch_isend_irecv``. With `exact` the levels are its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable
from msprobe_engine.measure import factorize
from msprobe_engine.measure.factorize import Bools, Integers
from msprobe_engine.report.graph.nodes.model import Graph
from msprobe_engine.report.graph.nodes.rows import Floats

MEDIUM, HIGH, CRITICAL = "medium", "high", "critical"
_WORDS = (None, MEDIUM, HIGH, CRITICAL)
_NONE, _MEDIUM, _HIGH, _CRITICAL = range(4)
_JUMP = 100.0
_NOT_FINITE = frozenset(("nan", "inf", "-inf"))


class _Harmless(NamedTuple):
    """What may be NaN or Inf in a call: positions and names of arguments, positions of results. Where there are none of a kind, that kind
    is not looked at."""

    places: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()


_FIRST = frozenset("0")
_HARMLESS = {
    "torch.empty": _Harmless(results=_FIRST),
    "torch.empty_like": _Harmless(results=_FIRST),
    "torch.empty_strided": _Harmless(results=_FIRST),
    "distributed.recv": _Harmless(_FIRST, frozenset(("tensor",))),
    "distributed.all_gather": _Harmless(_FIRST),
    "distributed.reduce_scatter": _Harmless(_FIRST, frozenset(("output",))),
    "distributed._reduce_scatter_base": _Harmless(_FIRST),
    "distributed.all_gather_into_tensor": _Harmless(_FIRST),
    "distributed.reduce_scatter_tensor": _Harmless(_FIRST),
    "tensor.masked_fill_": _Harmless(_FIRST),
}
"""Function -> what is harmless there; the rules that come with the existing tool."""
_BRINGS = frozenset(("distributed.irecv", "distributed.batch_isend_irecv"))
"""Receives of which the existing tool has no rule. What is not finite in them is another rank's."""


def mark(graph: Graph, exact: bool = False) -> None:
    """Fill in `Graph.overflow`.

    Args:
        graph: with a side; without one nothing is known.
        exact: with the levels of the existing tool, and no others.
    """
    graph.overflow = [None] * len(graph)
    if graph.side is None or not len(graph.side):
        return
    found = levels(graph.side, exact).tolist()
    graph.overflow = [_WORDS[found[record]] if record >= 0 else None for record in graph.records]


def levels(side: DumpTable, exact: bool = False) -> Integers:
    """int64 (records,): 0 for none, 1 `MEDIUM`, 2 `HIGH`, 3 `CRITICAL`."""
    role = np.frombuffer(bytes(side.role), np.uint8)
    places = _Places(side)
    bad = _not_finite(side)
    bad_rows = bad & ~places.nested if exact else bad
    inside, outside = (_any(side, bad_rows & (role == wanted_role)) for wanted_role in (INPUT, OUTPUT))
    node_levels = np.where(outside, np.where(inside, _HIGH, _CRITICAL), np.where(inside, _MEDIUM, _NONE))
    node_levels[(node_levels == _NONE) & _jumps(side, role, places.single)] = _HIGH
    for record in np.flatnonzero(node_levels).tolist():
        api = ".".join(side.ops[record].split(".", 2)[:2]).lower()
        rule = _HARMLESS.get(api)
        if api in _BRINGS and not exact and node_levels[record] == _CRITICAL:
            node_levels[record] = _HIGH
        elif rule is not None and _is_harmless(side, record, rule, bad & places.single, places):
            brought = outside[record] and api.startswith("distributed.") and not exact
            node_levels[record] = _HIGH if brought else _NONE
    return np.asarray(node_levels, np.int64)


class _Places:
    """Where in their records rows stand.

    Attributes:
        single: bool (rows,): an argument or result itself, no part of one.
        nested: bool (rows,): inside of a dictionary or of a message.
    """

    def __init__(self, side: DumpTable) -> None:
        self._side = side
        known: dict[str, int] = {}
        numbers = np.fromiter((known.setdefault(self.text(row), len(known)) for row in range(len(side))), np.int64, len(side))
        parts = [text.split(".")[2:] for text in known]  # the first is empty, the second the kind
        self.single: Bools = np.array([len(part) == 1 for part in parts] or [False])[numbers]
        self.nested: Bools = np.array([any(not one.isdecimal() for one in part[1:]) for part in parts] or [False])[numbers]
        messages = factorize.mask((row for row, facts in side.extra.items() if "peer" in facts), len(side))
        self.single &= ~messages
        self.nested |= messages

    def text(self, row: int) -> str:
        """``.input.0.1``."""
        return self._side.name[row][len(self._side.ops[self._side.op[row]]) :]


def _not_finite(side: DumpTable) -> Bools:
    """bool (rows,): tensors of which Max, Min or Mean is NaN or infinite."""
    found: Bools = np.asarray(~np.isfinite(side.stats[:, :3]).all(1))
    for row, four in side.nonfloat_stats.items():
        found[row] = any(str(value).lower() in _NOT_FINITE for value in four[:3])
    return found & ~factorize.mask(side.values, len(side))


def _any(side: DumpTable, chosen: Bools) -> Bools:
    """bool (records,): some of a record's rows are chosen."""
    return np.bincount(np.array(side.op, np.int64)[chosen], minlength=len(side.ops)) > 0


def _jumps(side: DumpTable, role: npt.NDArray[np.uint8], single: Bools) -> Bools:
    """bool (records,): the norm grows a hundredfold."""
    tensor = factorize.of_each(side.dtype, lambda dtype: str(dtype).startswith("torch."), bool)
    tensor &= factorize.of_each(side.shape, lambda shape: type(shape) is list, bool) & ~factorize.mask(side.values, len(side))
    norms = side.stats[:, 3]
    known = tensor & single & ~np.isnan(norms)
    inside, outside = (_largest(side, norms, known & (role == one)) for one in (INPUT, OUTPUT))
    with np.errstate(all="ignore"):
        grown = np.where(inside == 0, outside > _JUMP, outside / inside > _JUMP)
    return np.asarray(grown & ~np.isnan(inside) & ~np.isnan(outside))


def _largest(side: DumpTable, values: Floats, chosen: Bools) -> Floats:
    """float64 (records,): the largest of the chosen rows, NaN where there is none."""
    found = np.full(len(side.ops), np.nan)
    np.fmax.at(found, np.array(side.op, np.int64)[chosen], values[chosen])
    return found


def _is_harmless(side: DumpTable, record: int, rule: _Harmless, bad: Bools, places: _Places) -> bool:
    """All that is not finite, among the kinds that the rule speaks of, may be so."""
    for row in side.rows(record):
        if not bad[row]:
            continue
        place = places.text(row).rpartition(".")[2]
        if side.role[row] == OUTPUT:
            allowed = rule.results
        elif side.role[row] == INPUT:
            allowed = rule.places if place.isdecimal() else rule.words
        else:
            continue
        if allowed and place not in allowed:
            return False
    return True
