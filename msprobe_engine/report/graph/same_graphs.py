"""Of many ranks those that hold the same have one graph: the page names the others, and shows where all stand in the job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.replicas.reader import StepTables
from msprobe_engine.formats.dump.world import parallel_of
from msprobe_engine.report.graph.global_suspect import Key, Suspects
from msprobe_engine.report.graph.job import Job
from msprobe_engine.report.graph.nodes.links import Call, Linked, calls_as, link
from msprobe_engine.report.graph.options import HTML, GraphOptions
from msprobe_engine.report.graph.work import Part
from msprobe_engine.report.table import same_ranks

Calls = Mapping[Key, tuple[Sequence[Call], ...]]
"""Step and rank -> its communication calls, of each side."""
_AXES = "pp", "dp", "cp", "tp"


@dataclass(frozen=True)
class Alike:
    """Ranks without a graph of their own.

    Attributes:
        same: step and rank of a graph -> the ranks that hold the same.
        axes: names of coordinates that tell the ranks apart; empty where none are known.
        places: rank -> its coordinates, in the order of `axes`; of all ranks.
    """

    same: Mapping[Key, Sequence[int]] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    places: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def without(self, keys: Iterable[Key]) -> Alike:
        """Some of them have graphs of their own."""
        out = set(keys)
        same = {key: [rank for rank in ranks if (key[0], rank) not in out] for key, ranks in self.same.items()}
        return replace(self, same={key: ranks for key, ranks in same.items() if ranks})


def leaders(jobs: Sequence[Job], options: GraphOptions, tables: StepTables) -> dict[Key, Key]:
    """Key of a job -> key of the one before it whose files differ from its own only in the ranks that they name. The files of other tools
    have all ranks."""
    many = sum(len(job.ranks) for job in jobs) > same_ranks.MANY
    if not many or options.formats != (HTML,) or options.file_type == "json" or options.layouts:
        return {}
    return same_ranks.leaders(jobs, lambda job: job.key, _files, partial(_places, tables=tables), tables)


def _files(job: Job) -> same_ranks.Files:
    return same_ranks.Files(job.step, tuple(path for _, path in (*job.ranks, *job.golden_ranks)))


def _places(job: Job, tables: StepTables) -> str:
    """Of ranks that are put together each stands where that of the other copy of the model does."""
    return str([sorted({**_coordinates(path, job.step, tables), "dp": 0}.items()) for _, path in (*job.members, *job.golden_members)])


def calls(parts: Mapping[Key, Part], followed: Sequence[Job], led: Mapping[Key, Key], tables: StepTables) -> Calls:
    """Those of all ranks; those of the ranks that follow are the calls of the graph, with the ranks that their own dumps name. What calls
    ranks make that are put together is known of those with a graph only."""
    found: dict[Key, tuple[Sequence[Call], ...]] = {key: part.calls for key, part in parts.items()}
    for job in (job for job in followed if not job.members):
        sides = [tables.of(job.step).read(path) for _, path in (*job.ranks, *job.golden_ranks)]
        found[job.key] = tuple(calls_as(some, side) for some, side in zip(found[led[job.key]], sides))
    return found


def links(drawn: Sequence[Part], made: Calls) -> dict[Key, tuple[Linked, ...]]:
    """Step and rank of each graph -> links of the target's nodes and, with two sides, of the golden ones."""
    linked: dict[Key, tuple[Linked, ...]] = {}
    for step in sorted({part.job.step for part in drawn}):
        ranks = {rank: some for (key_step, rank), some in made.items() if key_step == step and some}
        if len(ranks) < 2:
            continue
        drawn_ranks = [part.job.rank for part in drawn if part.job.step == step and part.job.rank in ranks]
        sides = [
            link({rank: some[side] for rank, some in ranks.items()}, set(drawn_ranks)) for side in range(len(next(iter(ranks.values()))))
        ]
        for rank in drawn_ranks:
            linked[step, rank] = tuple(of_ranks.get(rank, {}) for of_ranks in sides)
    return linked


def apart(followed: Sequence[Job], led: Mapping[Key, Key], found: Suspects) -> list[Job]:
    """Followers that the diagnosis of all ranks says something else of than of the rank that they follow."""

    def names(key: Key) -> Sequence[str]:
        place = found.places.get(key)
        return () if place is None else place.names

    return [job for job in followed if names(job.key) and names(job.key) != names(led[job.key])]


def alike(jobs: Sequence[Job], followed: Sequence[Job], led: Mapping[Key, Key], tables: StepTables) -> Alike:
    """Who follows whom, and where the ranks of the first step stand, as their dumps say."""
    if not followed:
        return Alike()
    same: dict[Key, list[int]] = {}
    for job in followed:
        same.setdefault(led[job.key], []).append(job.rank)
    coordinates = {job.rank: _coordinates(job.target, job.step, tables) for job in jobs if job.step == jobs[0].step}
    axes = _telling_apart(coordinates.values())
    return Alike(same, axes, {rank: tuple(own.get(name, 0) for name in axes) for rank, own in coordinates.items()})


def _coordinates(path: Path, step: int, tables: StepTables) -> dict[str, int]:
    reader = tables.of(step)
    if reader.template(path) is None:
        return {}
    return parallel_of(reader.read(path).header, "rank")


def _telling_apart(coordinates: Collection[Mapping[str, int]]) -> tuple[str, ...]:
    """The first axes that are enough: the place among experts follows from those of a dense model, say."""
    telling: tuple[str, ...] = ()
    different = 1
    for name in dict.fromkeys((*_AXES, *(name for own in coordinates for name in own))):
        now = len({tuple(own.get(axis, 0) for axis in (*telling, name)) for own in coordinates})
        if now > different:
            telling, different = (*telling, name), now
    return telling if different == len(coordinates) else ()


def describe_same_graphs(number: int) -> str:
    """That graphs are not drawn."""
    one = "1 rank has no graph of its own: its dumps differ from another rank's only in the ranks that they name; the page says whose"
    many = (
        "{0} ranks have no graph of their own: their dumps differ from another rank's only in the ranks that they name; the page says"
        " whose (--rank N draws it)"
    )
    return Sentence(one) if number == 1 else Sentence(many, f"{number:,}")
