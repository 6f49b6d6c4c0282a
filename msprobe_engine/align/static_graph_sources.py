"""Which directories of two static-graph dumps of MindSpore belong together: those of one rank, iteration and graph, or of one path.

The existing tool is told by keys of its json what a dump is (``rank_id`` and ``step_id`` of kernels, ``common`` and ``map_dict`` of single
points); here the files say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msprobe_engine.align.tasks import Sources, Task
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.static_graph import ANY, points_of
from msprobe_engine.formats.tensors.kernel_files import STATISTIC, kernel_directories, kernel_files, rank_and_step

KERNELS, POINTS = "kernels", "points"


class _Place(NamedTuple):
    """What directories of kernels are of; -1 where the path does not say it. The graph is "" when all are together."""

    step: int
    rank: int
    graph: str


def kind_of(root: Path) -> str | None:
    """`KERNELS` or `POINTS` when the directory is a static-graph dump, else None."""
    for directory in kernel_directories(root):
        if (directory / STATISTIC).is_file() or kernel_files(directory)[0]:
            return KERNELS
        if points_of(directory):
            return POINTS
    return None


def pair_graphs(found: Sources, kind: str, one: Path, two: Path, steps: frozenset[int], ranks: frozenset[int]) -> None:
    """Add the pairs of directories of two dumps of one kind to `found`; what has no partner is said there.

    Raises:
        UsageError: they are of two kinds.
    """

    other = kind_of(two)
    if other != kind:
        words = {KERNELS: "a kernel dump of a static graph", POINTS: "single points of a static graph", None: "neither"}
        raise UsageError(f"{one} is {words[kind]}, {two} is {words[other]}; give two dumps of one kind")
    if kind == POINTS:
        first, second = ({str(path.relative_to(root)): path for path in kernel_directories(root)} for root in (one, two))
        for name in sorted(first.keys() & second.keys()):
            found.tasks.append(Task(first[name], second[name], folder=name, stem="result", stamped=False))
        if not found.tasks and len(first) == len(second) == 1:
            found.tasks.append(Task(next(iter(first.values())), next(iter(second.values())), stem="result", stamped=False))
        _say_alone(found, {k: k for k in first}, {k: k for k in second}, one, two)
        return
    places, partners = _places(one), _places(two)
    if len(places) == len(partners) == 1:  # whatever they are called
        partners = dict(zip(places, partners.values()))
    for place in sorted(places.keys() & partners.keys()):
        if (steps and place.step not in steps) or (ranks and place.rank not in ranks):
            continue
        stem = f"compare_result_{max(place.rank, 0)}_{max(place.step, 0)}" + (f"_graph{place.graph}" if place.graph else "")
        step, rank = (place.step if place.step >= 0 else None), (place.rank if place.rank >= 0 else None)
        found.tasks.append(Task(places[place], partners[place], step, rank, ".", stem))
    _say_alone(found, {place: _words(place) for place in places}, {place: _words(place) for place in partners}, one, two)


def renamed_points(map_dict: Mapping[str, str], root: Path) -> dict[str, str]:
    """``map_dict`` (name of a single point of the target -> that of the golden run) as a data mapping of rows."""
    most: dict[str, int] = {}
    for directory in kernel_directories(root):
        counts: dict[str, int] = {}
        for point in points_of(directory):
            counts[point.name] = counts.get(point.name, 0) + 1
        most |= {name: max(count, most.get(name, 0)) for name, count in counts.items()}
    return {f"{name}.{n}.debug": f"{other}.{n}.debug" for name, other in map_dict.items() for n in range(most.get(name, 0))}


def _places(root: Path) -> dict[_Place, Path]:
    """Graphs that lie side by side are one place; those that do not, each its own."""
    found: dict[tuple[int, int], dict[str, Path]] = {}
    for directory in kernel_directories(root):
        rank, step, graph = rank_and_step(directory, root)
        found.setdefault((-1 if step is None else step, -1 if rank is None else rank), {})[graph] = directory
    places = {}
    for (step, rank), graphs in found.items():
        paths = list(graphs.values())
        together = {(path.parent.parent, path.name) for path in paths}
        if len(paths) > 1 and len(together) == 1 and all(path.parent.name == graph for graph, path in graphs.items()):
            places[_Place(step, rank, "")] = paths[0].parent.parent / ANY / paths[0].name
        else:
            places |= {_Place(step, rank, graph if len(paths) > 1 else ""): path for graph, path in graphs.items()}
    return places


def _words(place: _Place) -> str:
    said = [f"rank {place.rank}"] if place.rank >= 0 else []
    said += [f"step {place.step}"] if place.step >= 0 else []
    return ", ".join([*said, f"graph {place.graph}"] if place.graph else said) or "the directory itself"


def _say_alone(found: Sources, first: Mapping[object, str], second: Mapping[object, str], one: Path, two: Path) -> None:
    for mine, others, root in ((first, second, one), (second, first, two)):
        alone = [words for key, words in mine.items() if key not in others]
        if alone and found.tasks:
            said = "; ".join(sorted(alone)[:5]) + ("; ..." if len(alone) > 5 else "")
            found.notes.append(f"Only in {root}: {said}.")
