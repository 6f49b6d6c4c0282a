"""Puts an origin into words: one sentence, the two rows side by side, the module and the line of source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from msprobe_engine.compare.side import OUTPUT, Side
from msprobe_engine.diagnose import findings, measure
from msprobe_engine.diagnose import origin as origins
from msprobe_engine.diagnose.divergence import Divergence
from msprobe_engine.diagnose.facts import forward_twin, module_path
from msprobe_engine.diagnose.findings import Suspect
from msprobe_engine.diagnose.origin import Origin
from msprobe_engine.diagnose.origins import Walker
from msprobe_engine.diagnose.report import own_line

_STATISTICS = ("Max", "Min", "Mean", "Norm")


def suspect(step: int, rank: int, origin: Origin, walker: Walker) -> Suspect:
    """The suspect of an origin."""
    side, golden = walker.side, walker.golden.side
    missing = origin.kind == origins.MISSING
    shown, op = (golden, origin.partner) if missing else (side, origin.op)
    stack = stack_of(shown, shown.ops[op])
    return Suspect(
        record=shown.ops[op],
        module=module_of(walker, origin),
        rank=rank,
        step=step,
        source=own_line(stack) or "",
        kind=origin.kind,
        why=why(origin, walker, step),
        tensor=side.name[origin.row] if origin.row >= 0 else "",
        partner=golden.ops[origin.partner] if origin.partner >= 0 else "",
        numbers=numbers(origin, walker),
        distance=origin.distance,
        limit=origin.limit,
        stack=stack,
    )


def stack_of(side: Side, record: str) -> list[str]:
    """Call stack of a record; of a backward record that of its forward call."""
    return list(side.stacks.get(record) or side.stacks.get(forward_twin(record)) or [])


def module_of(walker: Walker, origin: Origin) -> str:
    """Path of the innermost module around the record."""
    tree, op = (walker.golden, origin.partner) if origin.kind == origins.MISSING else (walker.target, origin.op)
    record = tree.side.ops[op]
    names = [record, *(tree.side.ops[above] for above in tree.above(op)), *_around(tree.side, forward_twin(record))]
    return _innermost(names)


def module_around(side: Side, record: str) -> str:
    """Path of the innermost module around a record, as construct.json has it."""
    return _innermost(_around(side, record))


def _innermost(names: Iterable[str]) -> str:
    return next((path for path in map(module_path, names) if path), "")


def _around(side: Side, record: str) -> Iterator[str]:
    """The records and nodes that enclose one, innermost first; stops at a circle of a damaged file."""
    parent, seen = side.parent(record), set()
    while parent and parent not in seen:
        seen.add(parent)
        yield parent
        parent = side.parent(parent)


def why(origin: Origin, walker: Walker, step: int) -> str:
    """One sentence; `step`: where it was found, counted from 0."""
    side, golden = walker.side, walker.golden.side
    place = _place(side, origin.row) if origin.row >= 0 else "it"
    user = side.ops[side.op[origin.row]] if origin.row >= 0 else ""
    size = _size(origin, side, golden)
    if origin.kind == origins.NONFINITE:
        theirs = [origin.other] if origin.other >= 0 else []
        other = f"holds {_bad(golden, origin.other)}" if measure.nonfinite(golden, theirs).any() else "is finite"
        return f"{place} holds {_bad(side, origin.row)}, and everything that went in is finite; the golden side {other} here"
    if origin.kind == origins.ARGUMENT:
        x, y = side.values.get(origin.row), golden.values.get(origin.other)
        return f"called with {place} = {x!r}, the golden side with {y!r}; the result differs by {size}"
    if origin.kind == origins.GRADLESS:
        with_it, without = ("this run", "the golden side") if side.requires_grad[origin.row] else ("the golden side", "this run")
        taken = "" if origin.op == side.op[origin.row] else f"its own code gives {user} what it takes in: "
        return f"{taken}{place} requires a gradient in {with_it} and none in {without}"
    if origin.kind == origins.EXTRA:
        return f"only this run makes this call, and what it gives goes into {user}, where {place} differs by {size}"
    if origin.kind == origins.MISSING:
        return f"only the golden side makes this call; without it {user} takes in {place} that differs by {size}"
    if origin.kind == origins.UNSUMMED:
        return f"what it gives is part of a sum over ranks, and {user} takes it in before it is summed: {place} differs by {size}"
    if origin.kind == origins.UNUSED:
        return f"its result is right and is not used: {user} takes in {place} that differs by {size}"
    if origin.kind == origins.CHANGED:
        return f"its result is right, and {user} takes it in as {place} changed by {size}: something that no record has lies between"
    if origin.kind == origins.INSIDE:
        if side.role[origin.row] == OUTPUT:
            return (
                f"what it takes in is the same, and its own code gives {user} the same numbers in another order: {place} differs by {size}"
            )
        return f"what it takes in is the same, and its own code gives {user} {place} that differs by {size}"
    if origin.kind in (origins.TAKEN, origins.PARAMETER):
        what = "parameter" if origin.kind == origins.PARAMETER else "what it takes in as"
        made = "before it made that difference"
        since = f"of this step {made}: step {step - 1} and its optimizer lie before" if step else made
        return f"{what} {place} differs by {size}, and no call {since}"
    grown = f"; what goes in differs by {_percent(origin.inside)}" if origin.inside else "; what goes in is the same"
    return f"{place} differs by {size}{grown}"


def _place(side: Side, row: int) -> str:
    """Where in its record a row stands; its whole name where a record stands for several of the file."""
    name, record = side.name[row], side.ops[side.op[row]]
    return (name[len(record) + 1 :] if name.startswith(record) else name) or "it"


def _size(origin: Origin, side: Side, golden: Side) -> str:
    if math.isinf(origin.distance):
        return f"more than numbers can say{_beyond_numbers(origin, side, golden)}"
    times = origin.distance / origin.limit if origin.limit else math.inf
    return f"{_percent(origin.distance)} ({times:,.0f} times round-off)" if math.isfinite(times) else _percent(origin.distance)


def _beyond_numbers(origin: Origin, side: Side, golden: Side) -> str:
    """What the two rows hold that has no distance: NaN or Inf, or another shape."""
    mine, theirs = origin.row, origin.other
    if mine < 0 or theirs < 0 or mine in side.values or theirs in golden.values:
        return ""
    bad = bool(measure.nonfinite(side, [mine]).any()), bool(measure.nonfinite(golden, [theirs]).any())
    if any(bad):
        here, there = (_bad(one, row) if holds else "finite" for one, row, holds in ((side, mine, bad[0]), (golden, theirs, bad[1])))
        return f" ({here}, on the golden side {there})"
    if side.shape[mine] != golden.shape[theirs]:
        return f" (shape {side.shape[mine]}, on the golden side {golden.shape[theirs]})"
    return ""


def _percent(value: float) -> str:
    return "another kind of value" if math.isinf(value) else f"{value:.2%}" if value >= 1e-3 else f"{value:.1e}"


def _bad(side: Side, row: int) -> str:
    nans, infs = side.nans.get(row), side.infs.get(row)
    if nans or infs:
        return " and ".join(f"{n} {word}" for n, word in ((nans, "NaN"), (infs, "Inf")) if n)
    return "NaN" if any(isinstance(v, float) and math.isnan(v) for v in side.four(row)) else "Inf"


def overflows(origin: Origin, walker: Walker) -> bool:
    """Infinity without NaN: a number that its dtype cannot hold."""
    side, row = walker.side, origin.row
    nans = bool(side.nans.get(row)) or any(isinstance(v, float) and math.isnan(v) for v in side.four(row)[:2])
    return not nans


def numbers(origin: Origin, walker: Walker) -> dict[str, Any]:
    """The row on both sides: dtype, shape, statistics."""
    out: dict[str, Any] = {}
    for word, side, row in (("target", walker.side, origin.row), ("golden", walker.golden.side, origin.other)):
        if row >= 0:
            out[word] = {"row": side.name[row], "dtype": side.dtype[row], "shape": side.shape[row]} | dict(zip(_STATISTICS, side.four(row)))
    return out


def finding_of(found: Divergence, rank: int, origin: Origin) -> str:
    """Which of the findings an origin is."""
    walker = found.walkers[rank]
    at = walker.pair_of(origin.row)
    if at >= 0 and walker.measured.bad_target[at] and not walker.measured.bad_golden[at]:
        return findings.OVERFLOW if overflows(origin, walker) else findings.NONFINITE
    if origin.kind == origins.RESULT and walker.side.ops[origin.op].startswith("Distributed."):
        return findings.COLLECTIVE
    return findings.DIVERGENCE
