"""Puts an origin into words: one sentence, the two rows side by side, the module and the line of source."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from msprobe_engine.core.dtypes import is_bool, is_not_float, plain_name
from msprobe_engine.core.names import forward_twin
from msprobe_engine.core.text.sentences import Sentence, join_sentences
from msprobe_engine.core.text.source_line import source_of
from msprobe_engine.find import findings
from msprobe_engine.find import origin as origins
from msprobe_engine.find.argument_names import argument_name, find_callee_name
from msprobe_engine.find.difference import attribution
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.nonfinite.made_by import why_not_finite
from msprobe_engine.find.nonfinite.trace import module_path
from msprobe_engine.find.origin import DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import distances, dump_dialects, factorize, missing_statistics, roundoff

_FEW = 3
"""Tensors that could not be compared and that are named."""
_BY_DTYPE = (origins.RESULT, origins.TAKEN, origins.GRADIENT)
_LONG = 8
"""Characters of a number that are all shown."""
_STATISTICS = ("Max", "Min", "Mean", "Norm")


def suspect(step: int, rank: int, origin: DifferenceOrigin, walker: DifferenceWalk) -> Suspect:
    """The suspect of an origin."""
    located = place(step, rank, origin, walker)
    stack = stack_of(walker.golden.side if origin.kind == origins.MISSING else walker.side, located.record)
    return dataclasses.replace(
        located,
        module=module_of(walker, origin),
        source=source_of(stack),
        why=why(origin, walker, step),
        cause=cause(origin, walker),
        numbers=numbers(origin, walker),
        distance=origin.distance,
        limit=origin.limit,
        stack=stack,
    )


def place(step: int, rank: int, origin: DifferenceOrigin, walker: DifferenceWalk) -> Suspect:
    """Where an origin is, without words."""
    side, golden = walker.side, walker.golden.side
    shown, op = (golden, origin.partner) if origin.kind == origins.MISSING else (side, origin.op)
    tensor = side.name[origin.row] if origin.row >= 0 else ""
    partner = golden.ops[origin.partner] if origin.partner >= 0 else ""
    return Suspect(shown.ops[op], "", rank, step, kind=origin.kind, tensor=tensor, partner=partner)


def stack_of(side: DumpTable, record: str) -> list[str]:
    """Call stack of a record; of a backward record that of its forward call."""
    return list(side.stacks.get(record) or side.stacks.get(forward_twin(record)) or [])


def module_of(walker: DifferenceWalk, origin: DifferenceOrigin) -> str:
    """Path of the innermost module around the record."""
    tree, op = (walker.golden, origin.partner) if origin.kind == origins.MISSING else (walker.target, origin.op)
    record = tree.side.ops[op]
    names = [record, *(tree.side.ops[above] for above in tree.above(op)), *_around(tree.side, forward_twin(record))]
    return _innermost(names)


def module_around(side: DumpTable, record: str) -> str:
    """Path of the innermost module around a record, as construct.json has it."""
    return _innermost(_around(side, record))


def _innermost(names: Iterable[str]) -> str:
    return next((path for path in map(module_path, names) if path), "")


def _around(side: DumpTable, record: str) -> Iterator[str]:
    """The records and nodes that enclose one, innermost first; stops at a circle of a damaged file."""
    parent, seen = side.parent(record), set()
    while parent and parent not in seen:
        seen.add(parent)
        yield parent
        parent = side.parent(parent)


def why(origin: DifferenceOrigin, walker: DifferenceWalk, step: int) -> Sentence:
    """One sentence, which says another data type before the numbers; `step`: where it was found, counted from 0."""
    numbers_differ = _why(origin, walker, step)
    dtypes = _other_dtypes(origin, walker)
    if dtypes is None:
        return numbers_differ
    return Sentence("{0}; {1}", Sentence("{0} has dtype {1}, in the golden run {2}", *dtypes), numbers_differ)


def _other_dtypes(origin: DifferenceOrigin, walker: DifferenceWalk) -> tuple[str, str, str] | None:
    """The first tensor of the record that has another floating point type, where most have the same: its place, and its types."""
    side, golden, m = walker.side, walker.golden.side, walker.measured
    if origin.kind not in _BY_DTYPE or dump_dialects.differ(side, golden) or distances.of_other_precision(m.dtype, m.argument):
        return None
    for pair in walker.span_of(origin.op):
        row, golden_row = walker.rows[pair]
        if m.dtype[pair] and not m.argument[pair] and roundoff.eps(side.dtype[row]) and roundoff.eps(golden.dtype[golden_row]):
            return place_of(side, row), plain_name(str(side.dtype[row])), plain_name(str(golden.dtype[golden_row]))
    return None


def _why(origin: DifferenceOrigin, walker: DifferenceWalk, step: int) -> Sentence:
    side, golden = walker.side, walker.golden.side
    place = place_of(side, origin.row) if origin.row >= 0 else Sentence("it")
    user = side.ops[side.op[origin.row]] if origin.row >= 0 else ""
    size = _size(origin, side, golden)
    if origin.kind == origins.NONFINITE:
        golden_rows = [origin.other] if origin.other >= 0 else []
        golden_state = (
            Sentence("holds {0}", _bad(golden, origin.other)) if distances.nonfinite(golden, golden_rows).any() else Sentence("is finite")
        )
        held = _bad(side, origin.row)
        return Sentence("{0} holds {1}, and everything that went in is finite; the golden run {2} here", place, held, golden_state)
    if origin.kind == origins.ARGUMENT or (origin.kind == origins.DEFAULT and origin.op in walker.lone_arguments):
        if (unknown := walker.not_compared(origin.op, given=True)) and not walker.is_off(origin.op):
            template = "{0}; its result could not be compared ({1}), and what is made of it differs by {2}"
            return Sentence(template, cause(origin, walker), _why_unknown(walker, unknown[0]), size)
        return Sentence("{0}; the result differs by {1}", cause(origin, walker), size)
    if origin.kind == origins.GRADLESS:
        this_run, golden_run = Sentence("this run"), Sentence("the golden run")
        with_it, without = (this_run, golden_run) if side.requires_grad[origin.row] else (golden_run, this_run)
        taken = Sentence("") if origin.op == side.op[origin.row] else Sentence("its own code gives {0} what it takes in: ", user)
        said = Sentence("{0}{1} requires a gradient in {2} and none in {3}", taken, place, with_it, without)
        name = _parameter(walker, origin.row)
        return Sentence("parameter {0}: {1}", name, said) if name else said
    if origin.kind == origins.EXTRA:
        return Sentence("only this run makes this call; {0} takes in its result, and there {1} differs by {2}", user, place, size)
    if origin.kind == origins.MISSING:
        return Sentence("only the golden run makes this call; without it {0} takes in {1} that differs by {2}", user, place, size)
    if origin.kind == origins.UNSUMMED and side.op[origin.row] == origin.op:
        template = "each rank updates all of the parameter, and with another {0}: it was not summed over ranks, and differs by {1}"
        return Sentence(template, place, size)
    if origin.kind == origins.UNSUMMED:
        template = "its result is one rank's part of a sum, and {0} uses it before it is summed over ranks: {1} differs by {2}"
        return Sentence(template, user, place, size)
    if origin.kind == origins.UNUSED:
        return Sentence("its result is right but is not used: {0} gets another {1}, which differs by {2}", user, place, size)
    if origin.kind == origins.CHANGED:
        template = "its result is right, but {0} gets it as {1}, which differs by {2}: something that is not recorded changed it in between"
        return Sentence(template, user, place, size)
    if origin.kind == origins.INSIDE:
        if side.role[origin.row] == OUTPUT:
            template = "its inputs are the same, but its own code hands {0} the same numbers in another order: {1} differs by {2}"
            return Sentence(template, user, place, size)
        return Sentence("its inputs are the same, but its own code hands {0} another {1}: it differs by {2}", user, place, size)
    if origin.kind in (origins.TAKEN, origins.PARAMETER):
        subject = Sentence("parameter {0}", place) if origin.kind == origins.PARAMETER else place
        if not step:
            return Sentence("{0} differs by {1} where it comes in, and no call before makes that difference", subject, size)
        template = "{0} differs by {1} where it comes in, and no call of this step makes that difference: step {2} or its optimizer did"
        return Sentence(template, subject, size, step - 1)
    if origin.inside:
        return Sentence("{0} differs by {1}; what goes in differs by {2}", place, size, _percent(origin.inside))
    if _takes_redacted(walker, origin.op):
        return Sentence("{0} differs by {1}; of what goes in values are redacted, and whether they are the same is not known", place, size)
    if unknown := walker.not_compared(origin.op):
        template = "{0} differs by {1}; {2} could not be compared ({3}), and the rest of what goes in has the same statistics"
        return Sentence(
            template, place, size, join_sentences(", ", (place_of(side, row) for row in unknown[:_FEW])), _why_unknown(walker, unknown[0])
        )
    if _other_dtypes(origin, walker) is not None:
        return Sentence("{0} differs by {1}", place, size)
    if _same_elements(walker, origin.op):
        return Sentence("{0} differs by {1}; what goes in is the same", place, size)
    said = Sentence("{0} differs by {1}; what goes in has the same statistics", place, size)
    if (own := attribution.lone_shuffle(walker, walker.target, walker.extra, origin.op)) is not None:
        return Sentence("{0}, and its elements may stand in other places: only this run calls {1}", said, side.ops[own])
    if (lost := attribution.lone_shuffle(walker, walker.golden, walker.missing, origin.op)) is not None:
        return Sentence("{0}, and its elements may stand in other places: only the golden run calls {1}", said, golden.ops[lost])
    return said


def _same_elements(walker: DifferenceWalk, op: int) -> bool:
    """What a record takes in has the same statistics: are its elements the same, too? Digests say so, elements that were saved, and
    statistics of one number."""
    side, golden, measured = walker.side, walker.golden.side, walker.measured
    for pair in walker.span_of(op):
        row, golden_row = walker.rows[pair]
        if side.role[row] in (OUTPUT, PARAMETERS_GRAD) or row in side.values or measured.elements[pair]:
            continue
        digests = (side.md5[row] and golden.md5[golden_row]) or (
            "digest" in side.extra.get(row, ()) and "digest" in golden.extra.get(golden_row, ())
        )
        largest, least, *_ = side.stats[row]
        if not digests and distances.elements(side.shape[row]) > 1 and largest != least:
            return False
    return True


def cause(origin: DifferenceOrigin, walker: DifferenceWalk) -> Sentence:
    """Why in a few words of the source, for the first line; nothing where it would say no more than that a number differs."""
    side, golden = walker.side, walker.golden.side
    if origin.kind in (origins.NONFINITE, origins.RESULT, origins.EXTRA) and (born := why_not_finite(side, origin.op)):
        return born
    if (dtypes := _other_dtypes(origin, walker)) is not None:
        return Sentence("{0} is {1}, golden {2}", *dtypes)
    if origin.kind == origins.ARGUMENT:
        return other_argument(side, origin.row, golden, origin.other)
    if origin.kind == origins.DEFAULT and (lone := walker.lone_arguments.get(origin.op)) is not None:
        record = side.ops[origin.op]
        name = argument_name(record, f"input.{lone.place}", stack_of(side, record))
        if lone.here:
            return Sentence("only this run gives {0} = {1}", name, repr(lone.value))
        return Sentence("only the golden run gives {0} = {1}", name, repr(lone.value))
    if origin.kind in (origins.EXTRA, origins.MISSING):
        record = side.ops[origin.op] if origin.kind == origins.EXTRA else golden.ops[origin.partner]
        if origin.kind == origins.EXTRA:
            return Sentence("only this run calls {0}", find_callee_name(record))
        return Sentence("only the golden run calls {0}", find_callee_name(record))
    if origin.kind == origins.GRADLESS:
        record, place = side.ops[origin.op], place_of(side, origin.row)
        name = _parameter(walker, origin.row) or argument_name(record, place, stack_of(side, record))
        if side.requires_grad[origin.row]:
            return Sentence("{0} requires a gradient in this run alone", name)
        return Sentence("{0} requires a gradient in the golden run alone", name)
    if origin.kind == origins.TAKEN and origin.row not in walker.target.producers and _is_integer(side.dtype[origin.row]):
        return Sentence("other samples, or another order of them: {0} holds other integers", place_of(side, origin.row))
    if origin.kind == origins.TAKEN and origin.op == side.op[origin.row]:
        return _explain_input(origin, walker)
    if origin.kind == origins.PARAMETER:
        return Sentence("parameter {0} is not the same", place_of(side, origin.row).removeprefix("parameters."))
    return Sentence("")


def _explain_input(origin: DifferenceOrigin, walker: DifferenceWalk) -> Sentence:
    """What a call takes in is not the same: where it comes from, where that is known."""
    side, golden = walker.side, walker.golden.side
    record, place = side.ops[origin.op], place_of(side, origin.row)
    name = argument_name(record, place, stack_of(side, record))
    target_source, golden_source = walker.target.producers.get(origin.row), walker.golden.producers.get(origin.other)
    later = -1 if golden_source is None else walker.back.get(golden_source, -1)
    if target_source is None and later > origin.op:
        return Sentence("{0} is taken in before {1} is called, in the golden run after it", name, side.ops[later])
    if target_source is not None and golden_source is not None and walker.back.get(golden_source) != target_source:
        return Sentence("{0} comes from {1}, in the golden run from {2}", name, side.ops[target_source], golden.ops[golden_source])
    if target_source is not None and golden_source is None:
        return Sentence("{0} is what {1} gives; in the golden run it is changed in between", name, side.ops[target_source])
    if golden_source is not None and target_source is None and not attribution.adds_micro_batch(walker, golden_source):
        return Sentence("{0} is not what {1} gives, as it is in the golden run", name, golden.ops[golden_source])
    return Sentence("{0} is not the same", name) if name != place else Sentence("")


def other_argument(side: DumpTable, row: int, golden: DumpTable, other: int) -> Sentence:
    """An argument and its two values: ``eps = 1e-05, golden 1e-06``."""
    record = side.ops[side.op[row]]
    return Sentence(
        "{0} = {1}, golden {2}",
        argument_name(record, place_of(side, row), stack_of(side, record)),
        *_apart(side.values.get(row), golden.values.get(other)),
    )


def _apart(*values: Any) -> tuple[str, ...]:
    """Values as text; numbers with as few digits as tell them apart."""
    short = tuple(f"{value:.6g}" if type(value) is float and len(repr(value)) > _LONG else repr(value) for value in values)
    return short if len(set(short)) == len(short) else tuple(map(repr, values))


def _is_integer(dtype: str | None) -> bool:
    return dtype is not None and is_not_float(dtype) and not is_bool(dtype)


def _why_unknown(walker: DifferenceWalk, row: int) -> Sentence:
    """Why a tensor could not be compared."""
    if walker.measured.bounds[walker.pair_of(row)]:
        return Sentence("of {0} the dumps hold Max and Min alone", plain_name(str(walker.side.dtype[row])))
    return Sentence("the dumps hold no number of it that both runs have")


def _takes_redacted(walker: DifferenceWalk, op: int) -> bool:
    """Does a record take in what cannot be compared, because its values were left out?"""
    hidden = walker.measured.one_sided[:, missing_statistics.REDACTED]
    return any(hidden[pair] and walker.side.role[walker.rows[pair][0]] == INPUT for pair in walker.span_of(op))


def place_of(side: DumpTable, row: int) -> str:
    """Where in its record a row stands; its whole name where a record stands for several of the file."""
    name, record = side.name[row], side.ops[side.op[row]]
    return (name[len(record) + 1 :] if name.startswith(record) else name) or Sentence("it")


def _size(origin: DifferenceOrigin, side: DumpTable, golden: DumpTable) -> str:
    if math.isinf(origin.distance):
        return _beyond_numbers(origin, side, golden)
    share = _percent(origin.distance)
    return Sentence("{0} ({1} times round-off)", share, f"{origin.times:,.0f}") if 1 < origin.times < roundoff.MOST_TIMES else share


def _beyond_numbers(origin: DifferenceOrigin, side: DumpTable, golden: DumpTable) -> Sentence:
    """What tells two rows apart that have no distance: NaN or Inf, or another shape."""
    target_row, golden_row, held = origin.row, origin.other, Sentence("")
    if min(target_row, golden_row) >= 0 and target_row not in side.values and golden_row not in golden.values:
        bad = bool(distances.nonfinite(side, [target_row]).any()), bool(distances.nonfinite(golden, [golden_row]).any())
        if any(bad):
            pairs = ((side, target_row, bad[0]), (golden, golden_row, bad[1]))
            held = Sentence(
                " ({0}, in the golden run {1})", *(_bad(table, row) if holds else Sentence("finite") for table, row, holds in pairs)
            )
        elif side.shape[target_row] != golden.shape[golden_row]:
            return Sentence("its shape ({0}, in the golden run {1})", side.shape[target_row], golden.shape[golden_row])
    return Sentence("an infinite amount{0}", held)


def _percent(value: float) -> str:
    return Sentence("another kind of value") if math.isinf(value) else f"{value:.2%}" if value >= 1e-3 else f"{value:.1e}"


def _bad(side: DumpTable, row: int) -> str:
    nans, infs = side.nans.get(row), side.infs.get(row)
    if nans and infs:
        return Sentence("{0} NaN and {1} Inf", nans, infs)
    if nans or infs:
        return f"{nans} NaN" if nans else f"{infs} Inf"
    return "NaN" if any(isinstance(v, float) and math.isnan(v) for v in side.stats_of(row)) else "Inf"


def overflows(origin: DifferenceOrigin, walker: DifferenceWalk) -> bool:
    """Infinity without NaN: a number that its dtype cannot hold."""
    side, row = walker.side, origin.row
    nans = bool(side.nans.get(row)) or any(isinstance(v, float) and math.isnan(v) for v in side.stats_of(row)[:2])
    return not nans


def numbers(origin: DifferenceOrigin, walker: DifferenceWalk) -> dict[str, Any]:
    """The row on both sides: dtype, shape, statistics; of an argument that is no tensor its value."""
    out: dict[str, Any] = {}
    for word, side, row in (("target", walker.side, origin.row), ("golden", walker.golden.side, origin.other)):
        if row >= 0:
            if row in side.values:
                out[word] = {"row": side.name[row], "value": side.values[row]}
                continue
            out[word] = {"row": side.name[row], "dtype": side.dtype[row], "shape": side.shape[row]} | dict(
                zip(_STATISTICS, side.stats_of(row))
            )
            if (trues := side.true_count(row)) is not None:
                out[word]["true_count"] = trues
    return out


def _parameter(walker: DifferenceWalk, row: int) -> str:
    """Name of the parameter of a module that a row is, by its numbers; "" when it is none."""
    side = walker.side
    known = side.stats[row].tobytes()
    for other in np.flatnonzero(np.frombuffer(bytes(side.role), np.uint8) == PARAMETERS).tolist():
        if side.shape[other] == side.shape[row] and side.stats[other].tobytes() == known:
            path, place = module_path(side.ops[side.op[other]]), place_of(side, other).removeprefix("parameters.")
            return f"{path}.{place}" if path else place
    return ""


def _numbers_agree(divergence: Divergence) -> bool:
    """No tensor that both sides have differs; what one of them has none of is no number."""
    for walker in divergence.different().walkers.values():
        m, (target_rows, golden_rows) = walker.measured, factorize.columns(walker.rows)
        tensors = [
            factorize.of_each(table.shape, _is_shape, bool)[rows]
            for table, rows in ((walker.side, target_rows), (walker.golden.side, golden_rows))
        ]
        if ((np.array(walker.carried.alone) > 1) & ~m.argument & tensors[0] & tensors[1]).any():
            return False
    return True


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list)


def finding_of(divergence: Divergence, rank: int, origin: DifferenceOrigin) -> str:
    """Which of the findings an origin is."""
    walker = divergence.walkers[rank]
    if origin.kind == origins.GRADLESS and _numbers_agree(divergence):
        return findings.STRUCTURE
    pair = walker.pair_of(origin.row)
    if pair >= 0 and walker.measured.bad_target[pair] and not walker.measured.bad_golden[pair]:
        return findings.OVERFLOW if overflows(origin, walker) else findings.NONFINITE
    if origin.kind == origins.RESULT and walker.side.ops[origin.op].startswith("Distributed."):
        return findings.COLLECTIVE
    return findings.DIVERGENCE
