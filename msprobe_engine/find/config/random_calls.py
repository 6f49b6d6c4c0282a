"""Random calls of two runs: from the same places, as often, with the same seeds.

A call's place is its stack by file name, function and text of the line; line numbers and directories move without a change of the
program. Every stack of one side is matched with one of the other at most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msprobe_engine.config.severity import CHANGES, ERROR, MAY, WARNING
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config.difference import RANDOM, SIDES, Difference, Sheet, merge_ranks, short

NO_MATCH = "no match stack"
_FRAME = re.compile(r"File (?P<file>.*), line (?P<line>[0-9]+), in (?P<function>[^,]*), ?(?P<code>.*)", re.DOTALL)
_SEED = re.compile(r"(?:^|[._])(?:manual_seed(?:_all)?|seed(?:_all)?|set_seed|default_rng)$")
_INSIDE = re.compile(r"[/\\\\](?:torch|numpy|mindspore)[/\\\\](?:\w+[/\\\\])*random\.py:")
"""The framework's own file from which its seeding functions call each other."""
_SEEDED = Sentence("the random numbers after it are others")
_COUNT = Sentence("numbers are drawn more or less often, so all later ones of this stream are others")

Stack = tuple[tuple[str, str, str], ...]
Arguments = Mapping[tuple[str, str], Any]


def compare_random(
    bench: Mapping[int, Any], cmp: Mapping[int, Any], calls: tuple[Mapping[int, Any], Mapping[int, Any]] = ({}, {})
) -> Sheet:
    """Compare the random calls of the ranks that both sides have.

    Args:
        bench, cmp: rank to ``{function: [{"count", "stack"}]}``, the existing tool's entry.
        calls: rank to our entry of both sides, empty where a pack has none: arguments, seeds and states of the generators.
    """
    sheet = Sheet(RANDOM)
    by_rank: list[tuple[tuple[int, ...], Difference]] = []
    both = sorted(set(bench) & set(cmp))
    for rank in both:
        own_entries = tuple(side.get(rank) or {} for side in calls)
        arguments = _seeds(own_entries[0]), _seeds(own_entries[1])
        differences: list[Difference] = []
        for function in sorted(set(bench[rank]) | set(cmp[rank])):
            for row, deviation in _function(function, rank, bench[rank].get(function, ()), cmp[rank].get(function, ()), arguments):
                sheet.rows.append(row)
                sheet.compared += 1
                if deviation is not None:
                    differences.append(deviation)
        by_rank += [((rank,), deviation) for deviation in _attach_causes(differences, _states(own_entries[0], own_entries[1]))]
    sheet.differences = merge_ranks(by_rank, tuple(both))
    return sheet


def _function(
    name: str, rank: int, golden_calls: Sequence[Any], target_calls: Sequence[Any], seeds: tuple[Arguments, Arguments]
) -> list[tuple[dict[str, Any], Difference | None]]:
    """A row for every place a function is called from."""
    out = []
    for golden_call, target_call in match_calls([_call(one) for one in golden_calls], [_call(one) for one in target_calls]):
        counts = (golden_call[1] if golden_call else 0), (target_call[1] if target_call else 0)
        stacks = ["\n".join(one[2]) if one else NO_MATCH for one in (golden_call, target_call)]
        one = _difference(name, golden_call, target_call, seeds)
        row = {
            "op": name,
            "rank": rank,
            "bench_stack": stacks[0],
            "cmp_stack": stacks[1],
            "bench_count": counts[0],
            "cmp_count": counts[1],
            "check_result": one is None,
        }
        out.append((row if one is None else {**row, "severity": one.severity, "why": one.why}, one))
    return out


Call = tuple[Stack, int, Sequence[str]]


def _call(one: Any) -> Call:
    stack = one.get("stack") if isinstance(one, Mapping) else None
    lines = [str(line) for line in stack] if isinstance(stack, list) else []
    count = one.get("count", 0) if isinstance(one, Mapping) else 0
    return tuple(_frame(line) for line in lines), count if isinstance(count, int) else 0, lines


def _frame(line: str) -> tuple[str, str, str]:
    m = _FRAME.fullmatch(line)
    if m is None:
        return "", "", " ".join(line.split())
    return m["file"].replace("\\", "/").rpartition("/")[2], m["function"], " ".join(m["code"].split())


def match_calls(golden_calls: list[Call], target_calls: list[Call]) -> list[tuple[Call | None, Call | None]]:
    """Pairs of calls from the same place: first those whose stacks are equal, then those in the same functions with another line of
    code. Calls of the same stack are one, their counts added."""
    golden_stacks, target_stacks = _sum_equal_stacks(golden_calls), _sum_equal_stacks(target_calls)
    out: list[tuple[Call | None, Call | None]] = [
        (golden_stacks.pop(stack), target_stacks.pop(stack)) for stack in list(golden_stacks) if stack in target_stacks
    ]
    for rough in (_functions, _last_function):
        left: dict[Any, list[Stack]] = {}
        for stack in target_stacks:
            left.setdefault(rough(stack), []).append(stack)
        for stack in list(golden_stacks):
            near = left.get(rough(stack))
            if near:
                out.append((golden_stacks.pop(stack), target_stacks.pop(near.pop(0))))
    return [*out, *((one, None) for one in golden_stacks.values()), *((None, one) for one in target_stacks.values())]


def _sum_equal_stacks(calls: list[Call]) -> dict[Stack, Call]:
    sums: dict[Stack, Call] = {}
    for stack, count, lines in calls:
        before = sums.get(stack)
        sums[stack] = (stack, count + before[1], before[2]) if before else (stack, count, lines)
    return sums


def _functions(stack: Stack) -> Any:
    return tuple((file, function) for file, function, _ in stack)


def _last_function(stack: Stack) -> Any:
    return stack[-1] if stack else ()


def _difference(name: str, golden: Call | None, target: Call | None, seeds: tuple[Arguments, Arguments]) -> Difference | None:
    seeding = _SEED.search(name) is not None
    if golden is None or target is None:
        only, side = (golden, "bench") if target is None else (target, "cmp")
        assert only is not None
        why = Sentence("called on the {0} side only, at {1}; {2}", SIDES[side], _where(only), _SEEDED if seeding else _COUNT)
        names = (name, "") if target is None else ("", name)
        counts = (_times(only), "") if target is None else ("", _times(only))
        return Difference(RANDOM, *names, *counts, CHANGES if seeding else MAY, why, level=ERROR)
    given = tuple(side.get((name, _base(_where(call)))) for side, call in zip(seeds, (golden, target)))
    code = tuple(call[0][-1][2] if call[0] else "" for call in (golden, target))
    if seeding and None not in given and given[0] != given[1]:
        return Difference(
            RANDOM, name, name, short(str(given[0])), short(str(given[1])), CHANGES, f"{_SEEDED}; {_where(target)}", level=ERROR
        )
    if code[0] != code[1] and (None in given or given[0] != given[1]):
        severity, verdict = (CHANGES, ERROR) if seeding else (MAY, WARNING)
        why = Sentence("the line that calls it is another one, so what is drawn may be; {0}", _where(target))
        return Difference(RANDOM, name, name, short(code[0]), short(code[1]), severity, why, level=verdict)
    if golden[1] != target[1]:
        return Difference(RANDOM, name, name, _times(golden), _times(target), MAY, f"{_COUNT}; {_where(target)}", level=ERROR)
    if None not in given and given[0] != given[1]:
        why = Sentence("it is called with other arguments, so other numbers are drawn; {0}", _where(target))
        return Difference(RANDOM, name, name, short(str(given[0])), short(str(given[1])), MAY, why, level=WARNING)
    return None


def _times(call: Call) -> str:
    return f"{call[1]} call{'' if call[1] == 1 else 's'}"


def _where(call: Call) -> str:
    m = _FRAME.fullmatch(call[2][-1]) if call[2] else None
    return f"{m['file']}:{m['line']} in {m['function']}" if m else "an unknown place"


def _base(where: str) -> str:
    """``file:line in function`` without directories."""
    return where.replace("\\", "/").rpartition("/")[2]


def _seeds(entry: Mapping[str, Any]) -> Arguments:
    """(function, place) to the arguments a function was called with there; of seeding functions those of all calls."""
    seeds: dict[tuple[str, str], Any] = {}
    calls = entry.get("calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, Mapping) and "where" in call:
            seeds.setdefault((str(call.get("name")), _base(str(call["where"]))), call.get("seeds") or call.get("arguments"))
    return seeds


def _attach_causes(calls: list[Difference], states: list[Difference]) -> list[Difference]:
    """What is to be said of one rank: seeding functions that a seeding function of the framework calls, and states that are others
    because of calls, are told with their cause."""
    causes = [one for one in calls if not _INSIDE.search(one.why)]
    inside = [one for one in calls if one not in causes and not any((one.bench, one.cmp) == (o.bench, o.cmp) for o in causes)]
    if causes and states:
        names = ", ".join(one.name.removeprefix("state of ") for one in states)
        causes[0] = replace(causes[0], why=Sentence("{0} (the state of {1} is another one too)", causes[0].why, names))
        states = []
    return [*causes, *inside, *states]


def _states(golden: Mapping[str, Any], target: Mapping[str, Any]) -> list[Difference]:
    """Generators whose state is another one at the same point; only the first such point of each says where it began."""
    out: list[Difference] = []
    golden_states, target_states = golden.get("states"), target.get("states")
    if not (isinstance(golden_states, Mapping) and isinstance(target_states, Mapping)):
        return out
    seen: dict[str, list[str]] = {}
    both = [
        str(point) for point in golden_states if isinstance(golden_states[point], Mapping) and isinstance(target_states.get(point), Mapping)
    ]
    for point in both:
        for name in sorted(set(golden_states[point]) & set(target_states[point])):
            if golden_states[point][name] != target_states[point][name]:
                seen.setdefault(name, []).append(str(point))
    for name, points in seen.items():
        earlier = both[: both.index(points[0])]
        equal = [point for point in earlier if name in golden_states[point] and name in target_states[point]]
        untouched = [point for point in earlier if name not in golden_states[point] and name not in target_states[point]]
        if equal:
            since = f"equal {equal[-1]}, another one {points[0]}"
        elif untouched:  # a stream is recorded when it has left the state that the system's entropy gave it
            nothing = f"neither run had seeded or used it before ({untouched[-1]})"
            since = f"another one {points[0]}; {nothing}, so it began with the entropy of the system"
        else:
            since = f"another one from the first look on ({points[0]})"
        out.append(Difference(RANDOM, f"state of {name}", f"state of {name}", "", "", CHANGES, f"the stream of random numbers is {since}"))
    return out
