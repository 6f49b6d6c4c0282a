"""Which dump files are put together: of each step one job per copy of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.dump.stream import open_records
from msprobe_engine.errors import DumpFormatError, UsageError
from msprobe_engine.graph.merge import places
from msprobe_engine.graph.options import GraphOptions, Layout
from msprobe_engine.graph.source import Job, Jobs

_Members = tuple[tuple[int, Path], ...]


def merged(target: Jobs, golden: Jobs | None, options: GraphOptions) -> Jobs:
    """Put jobs of single ranks together.

    Args:
        target, golden: one job per step and rank; golden None: there is one side only.
        options: says how the ranks belong together, or that the dumps do.

    Raises:
        UsageError: what was given does not fit the ranks that are there, or no step is on both sides.
    """
    found = Jobs(notes=list(target.notes), lost=list(target.lost))
    given = options.layouts or (None, None)
    ours = _by_step(target)
    if golden is None:
        for step, members in ours.items():
            found.jobs += [Job(some[0][1], None, step, some[0][0], members=some) for some in _models(members, given[0], found, alone=True)]
        return found
    found.notes += golden.notes
    found.lost += golden.lost
    theirs = _by_step(golden)
    steps = sorted(set(ours) & set(theirs))
    pairs = [(step, step) for step in steps]
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = [(next(iter(ours)), next(iter(theirs)))]
    if not pairs:
        raise UsageError(f"graph: no step is on both sides: {sorted(ours)} and {sorted(theirs)}")
    for name, one, other in (("target", ours, theirs), ("golden run", theirs, ours)):
        alone = sorted(set(one) - set(other))
        if alone and steps:
            found.notes.append(f"steps {', '.join(map(str, alone[:16]))} are of the {name} alone and left out.")
    for step, golden_step in pairs:
        found.jobs += _pairs(ours[step], theirs[golden_step], step, golden_step, given, found)
    return found


def _pairs(ours: _Members, theirs: _Members, step: int, golden_step: int, given: tuple[Layout | None, ...], found: Jobs) -> list[Job]:
    groups = _models(ours, given[0], found), _models(theirs, given[-1], found)
    cut = _cut(ours, given[0]) != _cut(theirs, given[-1])
    if cut or len(groups[0]) != len(groups[1]):
        whole = tuple(tuple(one for some in side for one in some) for side in groups)
        pairs = [(whole[0], whole[1])]
    else:
        pairs = list(zip(*groups))
    return [
        Job(
            a[0][1],
            b[0][1],
            step,
            a[0][0],
            golden_step,
            b[0][0],
            members=a,
            golden_members=b,
            across=cut or len(groups[0]) != len(groups[1]),
        )
        for a, b in pairs
    ]


def _by_step(jobs: Jobs) -> dict[int, _Members]:
    found: dict[int, list[tuple[int, Path]]] = {}
    for job in jobs.jobs:
        found.setdefault(job.step, []).append((job.rank, job.target))
    return {step: tuple(sorted(members)) for step, members in sorted(found.items())}


def _models(members: _Members, given: Layout | None, found: Jobs, alone: bool = False) -> list[_Members]:
    """The ranks of each copy of the model. `alone`: they are not compared with another run, whose shapes say more."""
    files = dict(members)
    if given is not None:
        places.check(given, files)
        numbers = places.given(given)
        copies = sorted({place["dp"] for place in numbers.values()})
        return [tuple((rank, files[rank]) for rank in sorted(files) if numbers[rank]["dp"] == copy) for copy in copies]
    headers = {rank: _header(path) for rank, path in members}
    size = places.whole_size(headers)
    if size and size != len(files):
        found.lost.append(
            f"{members[0][1].parent.parent}: has {len(files)} of the {size} ranks of the job; what the others held is missing in the whole"
        )
    if alone and not size and len(files) > 1:
        text = (
            f"{members[0][1].parent.parent}: the dumps do not say how the job was cut, so each rank is drawn by itself; "
            "give --rank_size, --tp and --pp to put them together."
        )
        if text not in found.notes:
            found.notes.append(text)
    return [tuple((rank, files[rank]) for rank in ranks) for ranks in places.models(headers)]


def _cut(members: _Members, given: Layout | None) -> Any:
    """What must be the same on both sides for a copy of the model to be compared with a copy of the model."""
    if given is not None:
        return replace(given, order="")
    header = _header(members[0][1])
    said = places.told(header)
    if said is None:
        return len(members)
    marks = header["parallel"].get("parameters")
    sequences = any(isinstance(mark, Mapping) and mark.get("sequence_parallel") for mark in (marks if isinstance(marks, list) else ()))
    return sorted((axis, size) for axis, size in said[1].items() if size > 1), sequences


def _header(path: Path) -> Mapping[str, Any]:
    """Of a file that cannot be read nothing: reading it whole will say why."""
    try:
        with open_records(path) as records:
            return records.header
    except DumpFormatError:
        return {}
