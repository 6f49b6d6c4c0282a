"""All ranks of one step: the earliest origin in the partial order that collectives and messages impose.

Every rank is scanned alone (`scan`), then each rank's first surviving origin is a candidate, and a candidate that another one
can have caused (happens-before along `links`) is dropped. What is left could not be ordered: several suspects.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from msprobe_engine.core.text.ranges import in_short
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.collectives.links import Link, Links, match_traces
from msprobe_engine.find.nonfinite.flags import INF, NAN, NONFINITE, Call, Trace
from msprobe_engine.find.nonfinite.scan import NonFiniteOrigin, Scan, ends_bad, loss_or_gradient_bad, scan
from msprobe_engine.find.nonfinite.trace import is_interesting

_STRENGTH = {
    "operator": 3,
    "module": 3,
    "gradient": 3,
    "collective": 3,
    "parameter": 3,
    "sample": 3,
    "update": 3,
    "missing": 1,
    "data": 1,
    "held": 1,
    "unrecorded": 2,
}


MOST_SUSPECTS = 20
"""Of more, those that are the same on several ranks are one."""


@dataclass
class Verdict:
    """What was found in one step.

    Attributes:
        suspects: earliest origins, most likely first; empty when the step is clean. Of very many those of several ranks are folded.
        harmless: origins that were swallowed again, for the notes of the report.
        ordered: False when more than one suspect is left and nothing recorded orders them.
        spread: per suspect, the calls that got it next, (rank, call), in order of arrival.
    """

    step: int
    traces: Mapping[int, Trace]
    suspects: list[NonFiniteOrigin] = field(default_factory=list)
    harmless: list[NonFiniteOrigin] = field(default_factory=list)
    ordered: bool = True
    spread: list[list[tuple[int, Call]]] = field(default_factory=list)


def analyse(traces: Mapping[int, Trace]) -> Verdict:
    """Find the first NaN/Inf of one step.

    Args:
        traces: rank to trace, all of the same step.
    """
    step = next(iter(traces.values())).step
    links = match_traces(traces)
    scans = _scan_all(traces, links, follow_masks=True)
    verdict = _judge(step, traces, links, scans)
    if not verdict.suspects and _ends_bad_unexplained(verdict):
        # only masks are left, and they were not swallowed: then they are the fault
        scans = _scan_all(traces, links, follow_masks=False)
        unmasked = _judge(step, traces, links, scans)
        if unmasked.suspects:
            for origin in unmasked.suspects:
                origin.notes.append(Sentence("looks like a mask, but the infinity reached the loss or a gradient"))
            return unmasked
    return verdict


def _ends_bad_unexplained(verdict: Verdict) -> bool:
    """Is a loss or a gradient of a rank not finite, although no origin that was swallowed passed there?"""
    explained: dict[int, set[int]] = {}
    for origin in verdict.harmless:
        explained.setdefault(origin.rank, set()).update((origin.call.index, *origin.spread))
    different = {(id(trace.calls), frozenset(explained.get(rank, ()))): trace for rank, trace in verdict.traces.items()}
    return any(loss_or_gradient_bad(trace, passed) for (_, passed), trace in different.items())


def _scan_all(traces: Mapping[int, Trace], links: Links, *, follow_masks: bool) -> dict[int, Scan]:
    masked: set[tuple[int, int]] = set()
    scans: dict[int, Scan] = {}
    for _ in range(3):  # masks may cross ranks; each round lets them go one rank further
        scans = _scan_each(traces, Arrivals(traces, links, masked), follow_masks)
        crossing = _masks_that_crossed(traces, links, scans) if follow_masks else set()
        if crossing <= masked:
            break
        masked |= crossing
    return scans


def _scan_each(traces: Mapping[int, Trace], arrivals: Arrivals, follow_masks: bool) -> dict[int, Scan]:
    """Ranks with the same calls, to which the same comes from others, are scanned once."""
    asked: dict[int, list[Call]] = {}
    known: dict[Hashable, Scan] = {}
    scans: dict[int, Scan] = {}
    for rank, trace in traces.items():
        if id(trace.calls) not in asked:
            asked[id(trace.calls)] = [call for call in trace.calls if call.kind == "collective" and is_interesting(call)]
        answers = ((kind, tuple(ranks)) for kind, ranks in (arrivals.explain(rank, call) for call in asked[id(trace.calls)]))
        key = (id(trace.calls), *answers)
        if key not in known:
            known[key] = scans[rank] = scan(trace, partial(arrivals.explain, rank), follow_masks=follow_masks)
            continue
        same = known[key]
        origins = [replace(origin, rank=rank, notes=list(origin.notes)) for origin in same.origins]
        scans[rank] = Scan(trace, origins, same.masked, same.bad)
    return scans


class Arrivals:
    """What communication calls with clean inputs and a bad output mean (`scan.Arrival`), in time that is linear in the ranks of a group.

    Args:
        masked: (rank, call) to which nothing but masks came.
    """

    def __init__(self, traces: Mapping[int, Trace], links: Links, masked: set[tuple[int, int]]) -> None:
        self._traces, self._links, self._masked = traces, links, masked
        self._bad: dict[int, list[int]] = {}  # link -> ranks that put something bad in, two at most: one of them is another rank

    def explain(self, rank: int, call: Call) -> tuple[str, list[int]]:
        """For `scan`."""
        place = (rank, call.index)
        if place in self._masked:
            return "masked", []
        missing: list[int] = []
        links = self._links.at.get(place, [])
        for link in links:
            if link.sinks is not link.members and place not in link.sinks:
                continue
            if any(peer != rank for peer in self._bad_sources(link)):
                return "brought", []
            missing.extend(link.missing)
        if missing:
            return "missing", sorted(set(missing))
        return ("born", []) if links else ("missing", [])

    def _bad_sources(self, link: Link) -> list[int]:
        if id(link) not in self._bad:
            bad = {rank: None for rank, index in link.sources if self._traces[rank].calls[index].in_flags & NONFINITE}
            self._bad[id(link)] = list(bad)[:2]
        return self._bad[id(link)]


def _masks_that_crossed(traces: Mapping[int, Trace], links: Links, scans: Mapping[int, Scan]) -> set[tuple[int, int]]:
    """Communication calls whose infinite output came from peers that hold nothing but masks there."""
    out: set[tuple[int, int]] = set()
    for link in links.links:
        bad = [(rank, index) for rank, index in link.sources if traces[rank].calls[index].in_flags & NONFINITE]
        if bad and all(index not in scans[rank].bad and not traces[rank].calls[index].in_flags & NAN for rank, index in bad):
            for rank, index in link.sinks:
                call = traces[rank].calls[index]
                if call.out_flags & INF and not call.out_flags & NAN:
                    out.add((rank, index))
    return out


def _judge(step: int, traces: Mapping[int, Trace], links: Links, scans: Mapping[int, Scan]) -> Verdict:
    verdict = Verdict(step, traces)
    origins = [origin for scan in scans.values() for origin in scan.origins]
    verdict.harmless = [origin for origin in origins if origin.swallowed]
    alive = [origin for origin in origins if not origin.swallowed]
    if not any(_makes_nan(origin, traces[origin.rank]) for origin in alive):
        ends = {(id(trace.calls), frozenset(scans[rank].masked)): trace for rank, trace in traces.items()}
        survives = any(ends_bad(trace, masked) for (_, masked), trace in ends.items())
        if not survives:
            verdict.harmless += alive
            alive = []
    first_of_rank: dict[int, NonFiniteOrigin] = {}
    for origin in alive:
        if origin.rank not in first_of_rank or origin.position < first_of_rank[origin.rank].position:
            first_of_rank[origin.rank] = origin
    # what is born in a collective is born on all its ranks at once: it does not precede itself there
    starts = {
        rank: origin.position + (0.25 if origin.call.kind == "collective" and origin.position == origin.call.index else 0)
        for rank, origin in first_of_rank.items()
    }
    preceded = links.find_possible_followers(starts, {rank: origin.position for rank, origin in first_of_rank.items()})
    remaining = [origin for rank, origin in first_of_rank.items() if rank not in preceded]
    verdict.suspects = _rank_suspects(remaining, links, traces) if remaining else []
    verdict.ordered = len(verdict.suspects) <= 1
    if len(verdict.suspects) > MOST_SUSPECTS:
        verdict.suspects = _fold(verdict.suspects)
    verdict.spread = [_spread(origin, links, traces, scans) for origin in verdict.suspects]
    return verdict


def _fold(suspects: list[NonFiniteOrigin]) -> list[NonFiniteOrigin]:
    """What is the same on several ranks, as the most likely of them, which says on which."""
    same: dict[Hashable, list[NonFiniteOrigin]] = {}
    for origin in suspects:
        same.setdefault((origin.call.name, origin.position, origin.cause, origin.flags), []).append(origin)
    for first, *others in same.values():
        if others:
            ranks = sorted({first.rank, *(origin.rank for origin in others)})
            first.notes.append(Sentence("the same on ranks {0}", in_short(ranks)))
    return [some[0] for some in same.values()]


def _makes_nan(origin: NonFiniteOrigin, trace: Trace) -> bool:
    """Is the origin a NaN, or an infinity that became one?"""
    if origin.flags & NAN:
        return True
    first = next((trace.calls[i] for i in origin.spread if trace.calls[i].out_flags & NAN), None)
    if first is not None:
        note = Sentence("the infinity became NaN in {0}", first.name)
        if note not in origin.notes:
            origin.notes.append(note)
    return first is not None


def _rank_suspects(origins: list[NonFiniteOrigin], links: Links, traces: Mapping[int, Trace]) -> list[NonFiniteOrigin]:
    """Most likely first; what the record does not order is ordered by likelihood.

    Ranks that ran the same calls up to there (replicas, tensor parallel ranks at L0, where no collective is recorded) are compared
    by position. Otherwise an arrival from outside gives way to a birth on another rank: at L0 that is a pipeline's hidden receive.
    """
    linked = {rank for link in links.links for rank, _ in link.members}
    strong = [origin for origin in origins if _STRENGTH[origin.cause] == 3]
    kept = [
        weak
        for weak in origins
        if _STRENGTH[weak.cause] == 3
        or (weak.rank in linked and weak.cause == "unrecorded")
        or not any(not (weak.position < s.position and _alike(weak, s, traces)) for s in strong)
    ]
    if all(_alike(kept[0], other, traces) for other in kept[1:]):
        return sorted(kept, key=lambda origin: (origin.position, -_STRENGTH[origin.cause], origin.rank))
    return sorted(kept, key=lambda origin: (-_STRENGTH[origin.cause], origin.position, origin.rank))


def _alike(origin: NonFiniteOrigin, other: NonFiniteOrigin, traces: Mapping[int, Trace]) -> bool:
    """Did both ranks run the same calls up to the later of the two places?"""
    if traces[origin.rank].calls is traces[other.rank].calls:
        return True
    end = int(max(origin.position, other.position)) + 1
    calls, other_calls = traces[origin.rank].calls[:end], traces[other.rank].calls[:end]
    return len(calls) == len(other_calls) and all(call.name == other_call.name for call, other_call in zip(calls, other_calls))


def _spread(origin: NonFiniteOrigin, links: Links, traces: Mapping[int, Trace], scans: Mapping[int, Scan]) -> list[tuple[int, Call]]:
    """Up to eight calls that got it next: on the rank itself, then the first one on every other rank that can know of it."""
    scan = scans[origin.rank]
    own = sorted(i for i in scan.bad if i > origin.position and traces[origin.rank].calls[i] is not origin.call)[:5]
    out = [(origin.rank, traces[origin.rank].calls[i]) for i in own]
    for rank, position in sorted(links.reach(origin.rank, origin.position).items()):
        if rank == origin.rank:
            continue
        later = [i for i in scans[rank].bad if i >= position]
        if later:
            out.append((rank, traces[rank].calls[min(later)]))
    return out[:16]
