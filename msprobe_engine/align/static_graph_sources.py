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


def pair_graphs(sources: Sources, kind: str, target: Path, golden: Path, steps: frozenset[int], ranks: frozenset[int]) -> None:
    """Add the pairs of directories of two dumps of one kind to `sources`; what has no partner is said there.

    Raises:
        UsageError: they are of two kinds.
    """

    golden_kind = kind_of(golden)
    if golden_kind != kind:
        words = {KERNELS: "a kernel dump of a static graph", POINTS: "single points of a static graph", None: "neither"}
        raise UsageError(f"{target} is {words[kind]}, {golden} is {words[golden_kind]}; give two dumps of one kind")
    if kind == POINTS:
        target_points, golden_points = (
            {str(path.relative_to(root)): path for path in kernel_directories(root)} for root in (target, golden)
        )
        for name in sorted(target_points.keys() & golden_points.keys()):
            sources.tasks.append(Task(target_points[name], golden_points[name], folder=name, stem="result", stamped=False))
        if not sources.tasks and len(target_points) == len(golden_points) == 1:
            sources.tasks.append(Task(next(iter(target_points.values())), next(iter(golden_points.values())), stem="result", stamped=False))
        _say_alone(sources, {k: k for k in target_points}, {k: k for k in golden_points}, target, golden)
        return
    places, partners = _places(target), _places(golden)
    if len(places) == len(partners) == 1:  # whatever they are called
        partners = dict(zip(places, partners.values()))
    for place in sorted(places.keys() & partners.keys()):
        if (steps and place.step not in steps) or (ranks and place.rank not in ranks):
            continue
        stem = f"compare_result_{max(place.rank, 0)}_{max(place.step, 0)}" + (f"_graph{place.graph}" if place.graph else "")
        step, rank = (place.step if place.step >= 0 else None), (place.rank if place.rank >= 0 else None)
        sources.tasks.append(Task(places[place], partners[place], step, rank, ".", stem))
    _say_alone(sources, {place: _words(place) for place in places}, {place: _words(place) for place in partners}, target, golden)


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
    graphs_by_step: dict[tuple[int, int], dict[str, Path]] = {}
    for directory in kernel_directories(root):
        rank, step, graph = rank_and_step(directory, root)
        graphs_by_step.setdefault((-1 if step is None else step, -1 if rank is None else rank), {})[graph] = directory
    places = {}
    for (step, rank), graphs in graphs_by_step.items():
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


def _say_alone(
    sources: Sources, target_names: Mapping[object, str], golden_names: Mapping[object, str], target: Path, golden: Path
) -> None:
    for names, others, root in ((target_names, golden_names, target), (golden_names, target_names, golden)):
        alone = [words for key, words in names.items() if key not in others]
        if alone and sources.tasks:
            said = "; ".join(sorted(alone)[:5]) + ("; ..." if len(alone) > 5 else "")
            sources.notes.append(f"Only in {root}: {said}.")
