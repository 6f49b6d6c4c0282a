"""All ranks of one step: the earliest origin in the partial order that collectives and messages impose.

Every rank is scanned alone (`scan`), then each rank's first surviving origin is a candidate, and a candidate that another one
can have caused (happens-before along `links`) is dropped. What is left could not be ordered: several suspects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.collectives.links import Links, match_traces
from msprobe_engine.find.nonfinite.flags import INF, NAN, NONFINITE, Call, Trace
from msprobe_engine.find.nonfinite.scan import Arrival, NonFiniteOrigin, Scan, ends_bad, loss_or_gradient_bad, scan

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
    "unrecorded": 2,
}


@dataclass
class Verdict:
    """What was found in one step.

    Attributes:
        suspects: earliest origins, most likely first; empty when the step is clean.
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
    if not verdict.suspects and any(loss_or_gradient_bad(trace) for trace in traces.values()):
        # only masks are left, and they were not swallowed: then they are the fault
        scans = _scan_all(traces, links, follow_masks=False)
        unmasked = _judge(step, traces, links, scans)
        if unmasked.suspects:
            for origin in unmasked.suspects:
                origin.notes.append(Sentence("looks like a mask, but the infinity reached the loss or a gradient"))
            return unmasked
    return verdict


def _scan_all(traces: Mapping[int, Trace], links: Links, *, follow_masks: bool) -> dict[int, Scan]:
    masked: set[tuple[int, int]] = set()
    scans: dict[int, Scan] = {}
    for _ in range(3):  # masks may cross ranks; each round lets them go one rank further
        scans = {rank: scan(trace, _arrival(traces, links, rank, masked), follow_masks=follow_masks) for rank, trace in traces.items()}
        crossing = _masks_that_crossed(traces, links, scans) if follow_masks else set()
        if crossing <= masked:
            break
        masked |= crossing
    return scans


def _arrival(traces: Mapping[int, Trace], links: Links, rank: int, masked: set[tuple[int, int]]) -> Arrival:
    def explain(call: Call) -> tuple[str, list[int]]:
        here = (rank, call.index)
        if here in masked:
            return "masked", []
        missing: list[int] = []
        found = links.at.get(here, [])
        for link in found:
            if here not in link.sinks:
                continue
            peers = [peer for peer, index in link.sources if peer != rank and traces[peer].calls[index].in_flags & NONFINITE]
            if peers:
                return "brought", peers
            missing.extend(link.missing)
        if missing:
            return "missing", sorted(set(missing))
        return ("born", []) if found else ("missing", [])

    return explain


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
    origins = [origin for one in scans.values() for origin in one.origins]
    verdict.harmless = [origin for origin in origins if origin.swallowed]
    alive = [origin for origin in origins if not origin.swallowed]
    if not any(_makes_nan(origin, traces[origin.rank]) for origin in alive):
        survives = any(ends_bad(trace, scans[rank].masked) for rank, trace in traces.items())
        if not survives:
            verdict.harmless += alive
            alive = []
    first: dict[int, NonFiniteOrigin] = {}
    for origin in alive:
        if origin.rank not in first or origin.position < first[origin.rank].position:
            first[origin.rank] = origin
    # what is born in a collective is born on all its ranks at once: it does not precede itself there
    starts = {
        rank: origin.position + (0.25 if origin.call.kind == "collective" and origin.position == origin.call.index else 0)
        for rank, origin in first.items()
    }
    preceded = links.preceded(starts, {rank: origin.position for rank, origin in first.items()})
    left = [origin for rank, origin in first.items() if rank not in preceded]
    verdict.suspects = _rank_suspects(left, links, traces) if left else []
    verdict.ordered = len(verdict.suspects) <= 1
    verdict.spread = [_spread(origin, links, traces, scans) for origin in verdict.suspects]
    return verdict


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


def _rank_suspects(left: list[NonFiniteOrigin], links: Links, traces: Mapping[int, Trace]) -> list[NonFiniteOrigin]:
    """Most likely first; what the record does not order is ordered by likelihood.

    Ranks that ran the same calls up to there (replicas, tensor parallel ranks at L0, where no collective is recorded) are compared
    by position. Otherwise an arrival from outside gives way to a birth on another rank: at L0 that is a pipeline's hidden receive.
    """
    kept = [
        weak
        for weak in left
        if _STRENGTH[weak.cause] == 3
        or (_linked(weak.rank, links) and weak.cause == "unrecorded")
        or not any(_STRENGTH[s.cause] == 3 and not (weak.position < s.position and _alike(weak, s, traces)) for s in left)
    ]
    if all(_alike(kept[0], other, traces) for other in kept[1:]):
        return sorted(kept, key=lambda origin: (origin.position, -_STRENGTH[origin.cause], origin.rank))
    return sorted(kept, key=lambda origin: (-_STRENGTH[origin.cause], origin.position, origin.rank))


def _alike(a: NonFiniteOrigin, b: NonFiniteOrigin, traces: Mapping[int, Trace]) -> bool:
    """Did both ranks run the same calls up to the later of the two places?"""
    end = int(max(a.position, b.position)) + 1
    one, two = traces[a.rank].calls[:end], traces[b.rank].calls[:end]
    return len(one) == len(two) and all(x.name == y.name for x, y in zip(one, two))


def _linked(rank: int, links: Links) -> bool:
    return any(member[0] == rank for link in links.links for member in link.members)


def _spread(origin: NonFiniteOrigin, links: Links, traces: Mapping[int, Trace], scans: Mapping[int, Scan]) -> list[tuple[int, Call]]:
    """Up to eight calls that got it next: on the rank itself, then the first one on every other rank that can know of it."""
    here = scans[origin.rank]
    own = sorted(i for i in here.bad if i > origin.position and traces[origin.rank].calls[i] is not origin.call)[:5]
    out = [(origin.rank, traces[origin.rank].calls[i]) for i in own]
    for rank, at in sorted(links.reach(origin.rank, origin.position).items()):
        if rank == origin.rank:
            continue
        later = [i for i in scans[rank].bad if i >= at]
        if later:
            out.append((rank, traces[rank].calls[min(later)]))
    return out[:16]
