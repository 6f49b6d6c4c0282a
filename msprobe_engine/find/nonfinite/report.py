"""What the user gets: a text whose first lines are the finding, and the JSON file of the existing tool with more fields."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.dtypes import plain_name
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.log import one_line
from msprobe_engine.core.names import forward_twin, is_module
from msprobe_engine.core.operator_traits import normal_op, sums_products
from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.source_line import place_in_source, source_of
from msprobe_engine.find.launch_line import again_alone
from msprobe_engine.find.nonfinite.first_over_ranks import Verdict
from msprobe_engine.find.nonfinite.flags import INF, NAN, NONFINITE, POS_INF, Call, Trace, what
from msprobe_engine.find.nonfinite.made_by import why_not_finite
from msprobe_engine.find.nonfinite.scan import NonFiniteOrigin
from msprobe_engine.find.nonfinite.trace import module_path
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, DumpTable
from msprobe_engine.formats.dump.stream import read_record

_GROWING = frozenset(("pow", "square", "mul", "multiply"))
"""Calls that make large numbers of numbers that are not small."""

CAUSES: Mapping[str, str] = {
    "operator": Sentence("what goes in is in order, what comes out is not: this call made it"),
    "module": Sentence("its inputs are finite, its output is not: an operator inside this module made it (a dump of level mix names it)"),
    "gradient": Sentence("the gradient that comes in is finite, that of the parameter is not: the weight gradient of this module made it"),
    "collective": Sentence(
        "the inputs of all recorded ranks are finite, the output is not: the collective made it (its sum overflows, or a link is bad)"
    ),
    "missing": Sentence("the input of this rank is finite, the output is not: a rank without a dump brought it, or the collective made it"),
    "parameter": Sentence(
        "the parameter was already bad when the step used it: look at the gradients and the optimizer of the step before"
    ),
    "data": Sentence("no recorded call made it: the batch holds it, or what was done to the batch before the first recorded call made it"),
    "held": Sentence(
        "no recorded call made it: what this rank put into the collective was bad before (a parameter or its shard, a buffer, the batch)"
    ),
    "unrecorded": Sentence("between two recorded calls: an operation that the dump does not hold"),
    "sample": Sentence("first bad sample of the monitor, which knows no operators: msprobe run --preset nan -- LAUNCH LINE keeps them"),
    "update": Sentence("the recorded calls of the step are finite: it was made between the backward pass and the update, or in the update"),
}
WITHIN = Sentence(
    "Only modules were recorded: a NaN or Inf that a module makes and that is gone again in what it gives does not show; at level mix the"
    " calls tell."
)


def say_after_update(step: int) -> Sentence:
    """Of a forward call that a loop makes when the update of the step is done."""
    template = "it was made after the update of step {0} and before the next forward pass: it may belong to step {1}"
    return Sentence(template, step, step + 1)


def again_with_operators() -> list[str]:
    """Commands that name the operator of a NaN, where none was recorded."""
    return again_alone("--preset nan")


def where(trace: Trace, call: Call) -> tuple[str, str]:
    """(module path, operator) of a call. The module path is "" at level L1."""
    names = [call.name, *trace.ancestors(call)]
    if call.direction == "backward":
        # backward records may have no parents of their own: those of the forward twin say where it is
        twin = forward_twin(call.name)
        names += [twin, *_up(trace, twin)]
    path = next((module for name in names if (module := module_path(name))), "")
    return path, call.op


def _up(trace: Trace, name: str) -> list[str]:
    out: list[str] = []
    parent = trace.parents.get(name)
    while parent and parent not in out:
        out.append(parent)
        parent = trace.parents.get(parent)
    return out


def build_finding(verdict: Verdict, number: int) -> dict[str, Any]:
    """One suspect, JSON-ready: the keys of the existing file (op_name, data_info, construct_info, stack_info) and ours."""
    origin = verdict.suspects[number]
    trace, call = verdict.traces[origin.rank], origin.call
    path, op = where(trace, call)
    # of an unrecorded operation the next recorded call is nearer than the module around it
    nearest = trace.calls[origin.spread[0]] if origin.cause == "unrecorded" and origin.spread else call
    stacks = trace.dump.stacks
    stack = stacks.get(nearest.name) or stacks.get(forward_twin(nearest.name)) or []
    record = {} if call.kind == "sample" else read_record(trace.dump.path, call.name)
    after_update = trace.dump.is_after_update(call.name)
    keys = ("input_args", "input_kwargs", "output") if call.direction == "forward" else ("input", "output")
    before = [c for c in trace.calls[: int(max(0, origin.position))] if not (c.in_flags | c.out_flags | c.parameter_flags) & NONFINITE]
    return {
        "op_name": call.name,
        "data_info": {key: record[key] for key in keys if key in record},
        "construct_info": [*reversed(trace.ancestors(call)), call.name],
        "stack_info": list(stack),
        "step": trace.step,
        "rank": origin.rank,
        "what": what(origin.flags),
        "cause": origin.cause,
        "explanation": CAUSES[origin.cause],
        "why": _short_reason(origin),
        "module": path,
        "operator": op,
        "direction": call.direction,
        "source_line": source_of(stack) or None,
        "tensors": [fact.describe() for fact in origin.facts],
        "notes": [*origin.notes, *_finite_elsewhere(verdict, origin), *([say_after_update(trace.step)] if after_update else [])],
        "after_update": after_update,
        "clean_calls_before": [c.name for c in before[-5:]],
        "spread": [{"rank": rank, "op_name": c.name} for rank, c in verdict.spread[number]],
        "dump": trace.path,
        "complete": trace.complete,
    }


def _short_reason(origin: NonFiniteOrigin) -> str:
    """For the first line: why the numbers of the call were not finite, or what brought them; "" where the numbers do not say."""
    place = origin.facts[0].place if origin.facts else ""
    if origin.cause == "operator":
        return why_not_finite(origin.call.dump, origin.call.record)
    if origin.cause in ("data", "held") and place:
        fact = origin.facts[0]
        count = fact.nans if origin.flags & NAN else fact.infs
        amount = f"{count:,} {what(origin.flags)}" if count else what(origin.flags)
        if origin.cause == "held":
            return Sentence("this rank put {0} into it that no recorded call made: {1} {2}", amount, place, list(fact.shape))
        return Sentence("the input data hold {0} already: {1} {2}", amount, place, list(fact.shape))
    if origin.cause == "parameter" and place:
        return Sentence("parameter {0} was not finite before the step used it", place.removeprefix("parameters."))
    return Sentence("the collective made it") if origin.cause == "collective" else ""


def _finite_elsewhere(verdict: Verdict, origin: NonFiniteOrigin) -> list[str]:
    """Of bad data, the ranks whose same call took in something finite."""
    if origin.cause not in ("data", "held"):
        return []
    same = {rank: trace.find_call(origin.call.name) for rank, trace in verdict.traces.items() if rank != origin.rank}
    finite = [rank for rank, call in same.items() if call is not None and not call.in_flags & NONFINITE]
    return [Sentence("what this call takes in is finite on {0}", ranks_text(sorted(finite)))] if finite else []


def as_json(findings: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """``{"rank_1": [finding, ...]}``, the layout of the existing file."""
    out: dict[str, list[Mapping[str, Any]]] = {}
    for item in findings:
        out.setdefault(f"rank_{item['rank']}", []).append(item)
    return out


def write_json(findings: Sequence[Mapping[str, Any]], directory: Path) -> Path:
    """Write ``anomaly_analyze_{time_ns}.json`` (mode 0640) and return its path."""
    make_directories(str(directory))
    path = directory / f"anomaly_analyze_{time.time_ns()}.json"
    write_file(path, [(json.dumps(as_json(findings), indent=1) + "\n").encode()])
    return path


def text(verdict: Verdict, findings: Sequence[Mapping[str, Any]]) -> str:
    """The console report. The first line names step, rank, direction, module and operator."""
    if not findings:
        return f"step {verdict.step}: no NaN or Inf that matters, {_describe_coverage(verdict)}." + _harmless(verdict)
    lines: list[str] = []
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in findings:
        groups.setdefault((item["op_name"], item["cause"]), []).append(item)
    for n, items in enumerate(groups.values()):
        lines += lines_of(items, first=n == 0)
    if not verdict.ordered:
        if len(groups) > 1:
            lines.append(f"{len(groups)} suspects: nothing recorded says which of them came first.")
        else:
            lines.append("The ranks named above show it independently of each other.")
    lines.append(f"Looked at: step {verdict.step}, {_describe_coverage(verdict)}.{_harmless(verdict)}")
    return "\n".join(lines)


def lines_of(items: Sequence[Mapping[str, Any]], *, first: bool) -> list[str]:
    """What is said of one place, on whichever ranks it is."""
    item = items[0]
    ranks = ", ".join(str(i["rank"]) for i in items)
    place = f"module {item['module']}, " if item["module"] else ""
    where_seen = (
        f"step {item['step']}, rank{'s' if len(items) > 1 else ''} {ranks}, {item['direction']}, "
        f"{place}{'' if item['cause'] in ('sample', 'update') else 'operator '}{item['operator']}"
    )
    said = [part for part in (place_in_source(item["source_line"] or ""), item["why"]) if part]
    lines = [
        f"{'First' if first else 'Also'} {item['what']}: {': '.join(said)}{f' ({where_seen})' if said else where_seen}",
        f"  record    {item['op_name']}",
        f"  cause     {item['explanation']}",
    ]
    if item["source_line"]:
        lines.append(f"  {'next at ' if item['cause'] == 'unrecorded' else 'source  '}  {' '.join(str(item['source_line']).split())}")
    for fact in item["tensors"][:4]:
        lines.append(f"  tensor    {_fact(fact)}")
    for note in item["notes"]:
        lines.append(f"  note      {note}")
    if item["clean_calls_before"] and item["cause"] != "sample":
        lines += label_lines("before", [f"{name}  (clean)" for name in item["clean_calls_before"]])
    if item["spread"]:
        lines += label_lines("spread", [f"rank {s['rank']}  {s['op_name']}" for s in item["spread"][:8]])
    if not item["complete"]:
        lines.append("  note      this rank's record of the step is incomplete")
    return [one_line(line) for line in lines]


def label_lines(word: str, items: Sequence[str], width: int = 8) -> list[str]:
    """Lines with the word in front of the first."""
    return [f"  {word if n == 0 else '':{width}}  {item}" for n, item in enumerate(items)]


def _fact(fact: Mapping[str, Any]) -> str:
    counts = [f"{fact[key]} {word}" for key, word in (("nans", "NaN"), ("infs", "Inf")) if fact.get(key)]
    what_it_holds = ", ".join(counts) if counts else fact["what"]
    shape = fact.get("shape")
    return f"{fact['place']}  {fact.get('dtype', '')} {shape if isinstance(shape, list) else []}: {what_it_holds}"


def _describe_coverage(verdict: Verdict) -> str:
    calls = sum(len(trace.calls) for trace in verdict.traces.values())
    return f"{len(verdict.traces)} rank{'s' if len(verdict.traces) != 1 else ''}, {calls} records"


def _harmless(verdict: Verdict) -> str:
    if not verdict.harmless:
        return ""
    names = ", ".join(f"{_inf_or_nan(o)} of {o.call.name} (rank {o.rank})" for o in verdict.harmless[:3])
    more = f" and {len(verdict.harmless) - 3} more" if len(verdict.harmless) > 3 else ""
    return one_line(f" Not counted, gone again before the end: {names}{more}.")


def describe_lost_numbers(verdict: Verdict) -> list[str]:
    """A square or a product that outgrew float16, of the first call that gives one: no mask makes such an infinity, and where what is made
    of it is finite again (a norm divides by it) its numbers are zero, or the largest there are. Where no calls of functions were recorded,
    the zeros of such a module."""
    for origin in verdict.harmless:
        call, op = origin.call, normal_op(origin.call.op)
        grown = any(fact.flags & POS_INF and plain_name(str(fact.side.dtype[fact.row])) == "float16" for fact in origin.facts)
        if grown and call.kind == "api" and call.direction == "forward" and (op in _GROWING or sums_products(call.op)):
            template = (
                "step {0}, rank {1}: {2} gives Inf of finite numbers: they outgrow float16, and what is made of the Inf is finite again,"
                " so that no NaN tells of numbers that are lost"
            )
            return [Sentence(template, verdict.step, origin.rank, call.name)]
    for rank, trace in sorted(verdict.traces.items()):
        if only_modules(trace) and (name := _module_of_zeros(trace.dump)) is not None:
            template = (
                "step {0}, rank {1}: {2} gives zeros alone, and neither what it takes in nor one of its parameters is zero: numbers may be"
                " lost in it, as by an Inf that it divides by; at level mix its calls tell"
            )
            return [Sentence(template, verdict.step, rank, name)]
    return []


def only_modules(trace: Trace) -> bool:
    """Of the calls of the way forward those of modules alone were recorded: what is gone again within one of them shows nowhere."""
    forward = [call for call in trace.calls if call.direction == "forward"]
    return bool(forward) and all(call.kind == "module" for call in forward)


def _module_of_zeros(side: DumpTable) -> str | None:
    """A module that makes exact zeros of numbers of both signs, with parameters of one dimension of which none is zero: a norm whose
    squares outgrew float16. Behind a matrix a relu may get numbers of one sign."""
    for op, name in enumerate(side.ops):
        if not is_module(name) or ".forward." not in name:
            continue
        rows: dict[int, list[int]] = {INPUT: [], PARAMETERS: [], OUTPUT: []}
        for row in side.rows(op):
            if side.role[row] in rows and isinstance(side.shape[row], list):
                rows[side.role[row]].append(row)
        if not all(rows.values()):
            continue
        largest, least, _, norm = side.stats.T
        taken, given = rows[INPUT][0], rows[OUTPUT]
        zero = all(largest[row] == least[row] == 0 for row in given)
        scales = all(len(side.shape[row]) == 1 and norm[row] > 0 for row in rows[PARAMETERS])
        if zero and scales and largest[taken] > 0.0 > least[taken]:
            return name
    return None


def _inf_or_nan(origin: NonFiniteOrigin) -> str:
    return what(origin.flags & (NAN | INF))
