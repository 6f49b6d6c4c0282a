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
    found: list[tuple[tuple[int, ...], Difference]] = []
    both = sorted(set(bench) & set(cmp))
    for rank in both:
        ours = tuple(side.get(rank) or {} for side in calls)
        arguments = _seeds(ours[0]), _seeds(ours[1])
        mine: list[Difference] = []
        for function in sorted(set(bench[rank]) | set(cmp[rank])):
            for row, one in _function(function, rank, bench[rank].get(function, ()), cmp[rank].get(function, ()), arguments):
                sheet.rows.append(row)
                sheet.compared += 1
                if one is not None:
                    mine.append(one)
        found += [((rank,), one) for one in _attach_causes(mine, _states(ours[0], ours[1]))]
    sheet.differences = merge_ranks(found, tuple(both))
    return sheet


def _function(
    name: str, rank: int, mine: Sequence[Any], theirs: Sequence[Any], seeds: tuple[Arguments, Arguments]
) -> list[tuple[dict[str, Any], Difference | None]]:
    """A row for every place a function is called from."""
    out = []
    for a, b in match_calls([_call(one) for one in mine], [_call(one) for one in theirs]):
        counts = (a[1] if a else 0), (b[1] if b else 0)
        stacks = ["\n".join(one[2]) if one else NO_MATCH for one in (a, b)]
        one = _difference(name, a, b, seeds)
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


def match_calls(mine: list[Call], theirs: list[Call]) -> list[tuple[Call | None, Call | None]]:
    """Pairs of calls from the same place: first those whose stacks are equal, then those in the same functions with another line of
    code. Calls of the same stack are one, their counts added."""
    a, b = _sum_equal_stacks(mine), _sum_equal_stacks(theirs)
    out: list[tuple[Call | None, Call | None]] = [(a.pop(stack), b.pop(stack)) for stack in list(a) if stack in b]
    for rough in (_functions, _last_function):
        left: dict[Any, list[Stack]] = {}
        for stack in b:
            left.setdefault(rough(stack), []).append(stack)
        for stack in list(a):
            near = left.get(rough(stack))
            if near:
                out.append((a.pop(stack), b.pop(near.pop(0))))
    return [*out, *((one, None) for one in a.values()), *((None, one) for one in b.values())]


def _sum_equal_stacks(calls: list[Call]) -> dict[Stack, Call]:
    found: dict[Stack, Call] = {}
    for stack, count, lines in calls:
        before = found.get(stack)
        found[stack] = (stack, count + before[1], before[2]) if before else (stack, count, lines)
    return found


def _functions(stack: Stack) -> Any:
    return tuple((file, function) for file, function, _ in stack)


def _last_function(stack: Stack) -> Any:
    return stack[-1] if stack else ()


def _difference(name: str, a: Call | None, b: Call | None, seeds: tuple[Arguments, Arguments]) -> Difference | None:
    seeding = _SEED.search(name) is not None
    if a is None or b is None:
        only, side = (a, "bench") if b is None else (b, "cmp")
        assert only is not None
        why = Sentence("called on the {0} side only, at {1}; {2}", SIDES[side], _where(only), _SEEDED if seeding else _COUNT)
        names = (name, "") if b is None else ("", name)
        counts = (_times(only), "") if b is None else ("", _times(only))
        return Difference(RANDOM, *names, *counts, CHANGES if seeding else MAY, why, level=ERROR)
    given = tuple(side.get((name, _base(_where(call)))) for side, call in zip(seeds, (a, b)))
    code = tuple(call[0][-1][2] if call[0] else "" for call in (a, b))
    if seeding and None not in given and given[0] != given[1]:
        return Difference(RANDOM, name, name, short(str(given[0])), short(str(given[1])), CHANGES, f"{_SEEDED}; {_where(b)}", level=ERROR)
    if code[0] != code[1] and (None in given or given[0] != given[1]):
        severity, verdict = (CHANGES, ERROR) if seeding else (MAY, WARNING)
        why = Sentence("the line that calls it is another one, so what is drawn may be; {0}", _where(b))
        return Difference(RANDOM, name, name, short(code[0]), short(code[1]), severity, why, level=verdict)
    if a[1] != b[1]:
        return Difference(RANDOM, name, name, _times(a), _times(b), MAY, f"{_COUNT}; {_where(b)}", level=ERROR)
    if None not in given and given[0] != given[1]:
        why = Sentence("it is called with other arguments, so other numbers are drawn; {0}", _where(b))
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
    found: dict[tuple[str, str], Any] = {}
    calls = entry.get("calls")
    for one in calls if isinstance(calls, list) else ():
        if isinstance(one, Mapping) and "where" in one:
            found.setdefault((str(one.get("name")), _base(str(one["where"]))), one.get("seeds") or one.get("arguments"))
    return found


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


def _states(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Generators whose state is another one at the same point; only the first such point of each says where it began."""
    out: list[Difference] = []
    mine, theirs = a.get("states"), b.get("states")
    if not (isinstance(mine, Mapping) and isinstance(theirs, Mapping)):
        return out
    seen: dict[str, list[str]] = {}
    both = [str(point) for point in mine if isinstance(mine[point], Mapping) and isinstance(theirs.get(point), Mapping)]
    for point in both:
        for name in sorted(set(mine[point]) & set(theirs[point])):
            if mine[point][name] != theirs[point][name]:
                seen.setdefault(name, []).append(str(point))
    for name, points in seen.items():
        earlier = both[: both.index(points[0])]
        equal = [point for point in earlier if name in mine[point] and name in theirs[point]]
        untouched = [point for point in earlier if name not in mine[point] and name not in theirs[point]]
        if equal:
            since = f"equal {equal[-1]}, another one {points[0]}"
        elif untouched:  # a stream is recorded when it has left the state that the system's entropy gave it
            nothing = f"neither run had seeded or used it before ({untouched[-1]})"
            since = f"another one {points[0]}; {nothing}, so it began with the entropy of the system"
        else:
            since = f"another one from the first look on ({points[0]})"
        out.append(Difference(RANDOM, f"state of {name}", f"state of {name}", "", "", CHANGES, f"the stream of random numbers is {since}"))
    return out
