"""Where each rank of a parallel job stands: as the sizes of the groups give it, or as the dumps say it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.settings.rank_choice import AXES
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.report.graph.options import Layout

_MOST_RANKS = 1_000_000


def check(layout: Layout, ranks: Mapping[int, object] | None = None) -> None:
    """Do the sizes make sense, and are all ranks there?

    Raises:
        UsageError: they do not, or a rank is missing.
    """
    for name in ("rank_size", "tp", "pp", "vpp"):
        if getattr(layout, name) < 1:
            raise UsageError(f"--{name} is {getattr(layout, name)}; must be at least 1")
    if layout.rank_size > _MOST_RANKS:
        raise UsageError(f"--rank_size {layout.rank_size}: more than {_MOST_RANKS} ranks; no job has as many")
    if layout.rank_size % (layout.tp * layout.pp):
        raise UsageError(
            f"--rank_size {layout.rank_size} is no multiple of --tp {layout.tp} times --pp {layout.pp}: no whole number of models"
        )
    if layout.vpp > 1 and layout.pp == 1:
        raise UsageError(f"--vpp {layout.vpp} with --pp 1: virtual stages need a pipeline; give --vpp 1 or the size of the pipeline")
    axes(layout)
    if ranks is not None:
        missing = sorted(set(range(layout.rank_size)) - set(ranks))
        other = sorted(set(ranks) - set(range(layout.rank_size)))
        if missing or other:
            said = [f"no dump of ranks {some(missing, 16)}"] * bool(missing) + [f"dumps of ranks {some(other, 16)} besides"] * bool(other)
            raise UsageError(
                f"--rank_size {layout.rank_size}: {', '.join(said)}; to put ranks together all of them are needed, and no others"
            )


def axes(layout: Layout) -> list[str]:
    """The axes of ``--order``, the fastest first.

    Raises:
        UsageError: it is no order of them.
    """
    names = layout.order.lower().split("-")
    unknown = [axis for axis in names if axis not in AXES]
    if unknown or len(set(names)) != len(names):
        raise UsageError(f"--order {layout.order!r}: must have each of {', '.join(AXES)} at most once, joined by '-', the fastest first")
    needed = [axis for axis, size in _sizes(layout).items() if size > 1 and axis not in names]
    if needed:
        raise UsageError(f"--order {layout.order!r}: lacks {', '.join(needed)}, which has more than one rank")
    return names


def _sizes(layout: Layout) -> dict[str, int]:
    return {"tp": layout.tp, "cp": 1, "ep": 1, "dp": layout.rank_size // (layout.tp * layout.pp), "pp": layout.pp}


def mesh_of_layout(layout: Layout) -> dict[int, dict[str, int]]:
    """The place of every rank, when the groups follow each other in the order that was given."""
    sizes, places = _sizes(layout), {}
    for rank in range(layout.rank_size):
        rest, place = rank, dict.fromkeys(AXES, 0)
        for axis in axes(layout):
            rest, place[axis] = divmod(rest, sizes[axis])
        places[rank] = place
    return places


def mesh_of_header(header: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]] | None:
    """(place, sizes) as the header of a dump has them; None when it has none."""
    parallel = header.get("parallel")
    if not isinstance(parallel, Mapping):
        return None
    place, sizes = parallel.get("rank"), parallel.get("size")
    if not isinstance(place, Mapping) or not isinstance(sizes, Mapping):
        return None
    numbers = {axis: value for axis, value in place.items() if type(value) is int and value >= 0}
    return numbers, {axis: value for axis, value in sizes.items() if type(value) is int and value > 0}


def agree(layout: Layout, rank: int, side: DumpTable) -> None:
    """Does what was given contradict the dump?

    Raises:
        UsageError: it does.
    """
    mesh = mesh_of_header(side.header)
    if mesh is None:
        return
    place, sizes = mesh
    for axis, value in {**_sizes(layout), "vpp": layout.vpp}.items():
        if axis in ("tp", "pp", "vpp") and sizes.get(axis, 1) != value:
            raise UsageError(
                f"--{axis} {value}: the dump of rank {rank} was made with {sizes.get(axis, 1)} ({side.path}); give that, or --merge auto"
            )
    for axis, value in mesh_of_layout(layout)[rank].items():
        if axis in ("tp", "pp") and place.get(axis, 0) != value:
            raise UsageError(
                f"--order {layout.order}: puts rank {rank} at place {value} of {axis}; its dump says {place.get(axis, 0)} ({side.path}). "
                "Give the order of the training, or --merge auto"
            )


def add_mesh_to_header(layout: Layout, rank: int, side: DumpTable) -> DumpTable:
    """The side, with its place in the header as a dump that says it has it."""
    if mesh_of_header(side.header) is not None:
        agree(layout, rank, side)
        return side
    sizes = _sizes(layout) | ({"vpp": layout.vpp} if layout.vpp > 1 else {})
    return side.with_header({**side.header, "parallel": {"rank": mesh_of_layout(layout)[rank], "size": sizes}})


def infer_meshes(sides: Mapping[int, DumpTable]) -> dict[int, DumpTable]:
    """Sides that run one model together on the same batch, and do not say how: they hold pieces of the same tensors."""
    if len(sides) == 1 or any(mesh_of_header(side.header) is not None for side in sides.values()):
        return dict(sides)
    size = {"tp": len(sides), "pp": 1}
    return {
        rank: side.with_header({**side.header, "parallel": {"rank": {"tp": place, "pp": 0}, "size": size}})
        for place, (rank, side) in enumerate(sorted(sides.items()))
    }


def merged_along(side: DumpTable, axis: str) -> DumpTable:
    """The side of what ranks along an axis have together: it has one rank along it."""
    mesh = mesh_of_header(side.header)
    if mesh is None:
        return side
    place, sizes = mesh
    gone = ("tp", "etp") if axis == "tp" else (axis,)
    parallel = {
        **side.header["parallel"],
        "rank": place | {axis_name: 0 for axis_name in gone if axis_name in place},
        "size": sizes | {axis_name: 1 for axis_name in gone if axis_name in sizes},
    }
    return side.with_header({**side.header, "parallel": parallel})


def groups(sides: Mapping[int, DumpTable], axis: str) -> list[list[int]]:
    """Ranks that differ in their place along an axis alone, by that place; ranks without one are alone. Experts may be dealt out along any
    axis, so that ranks of a group hold different ones: where a rank is without that tells them apart already."""
    for left_out in ((axis, "ep"), (axis,)):
        members_of: dict[object, list[int]] = {}
        for rank, side in sorted(sides.items()):
            said = mesh_of_header(side.header)
            if said is None or said[1].get(axis, 1) == 1:
                members_of["alone", rank] = [rank]
            else:
                others = tuple(sorted((name, value) for name, value in said[0].items() if name in AXES and name not in left_out))
                members_of.setdefault(others, []).append(rank)
        if all(_one_each(sides, some, axis) for some in members_of.values()):
            break
    return sorted(members_of.values())


def _one_each(sides: Mapping[int, DumpTable], ranks: list[int], axis: str) -> bool:
    places = [said[0].get(axis, 0) for rank in ranks if (said := mesh_of_header(sides[rank].header)) is not None]
    return len(places) == len(set(places))


def share_experts(sides: Mapping[int, DumpTable]) -> bool:
    """The ranks, which differ in one other axis alone, hold different experts."""
    return len({said[0].get("ep", 0) for side in sides.values() if (said := mesh_of_header(side.header)) is not None}) > 1


def models(headers: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """The ranks of each model copy; where copies share their experts, all of them are one."""
    places = {rank: mesh_of_header(header) for rank, header in headers.items()}
    if any(place is None for place in places.values()):
        return [[rank] for rank in sorted(headers)]
    copies: dict[int, list[int]] = {}
    experts: dict[int, set[int]] = {}
    for rank, place in sorted(places.items()):
        assert place is not None
        copies.setdefault(place[0].get("dp", 0), []).append(rank)
        experts.setdefault(place[0].get("dp", 0), set()).add(place[0].get("ep", 0))
    most = max((place[1].get("ep", 1) for place in places.values() if place is not None), default=1)
    return sorted(copies.values()) if all(len(held) >= most for held in experts.values()) else [sorted(headers)]


def whole_size(headers: Mapping[int, Mapping[str, Any]]) -> int:
    """How many ranks the dumps say there are; 0 when they do not."""
    found = next((place for header in headers.values() if (place := mesh_of_header(header)) is not None), None)
    return 0 if found is None else math.prod(found[1].get(axis, 1) for axis in ("tp", "cp", "dp", "pp"))
