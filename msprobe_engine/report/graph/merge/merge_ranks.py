"""All ranks of a model copy as one side: tensor and context parallel ranks by rows, stages behind each other, experts side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.align.parallel import experts, stages
from msprobe_engine.align.parallel.merge_records import origin_of
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.report.graph.merge import device_mesh, rows


@dataclass
class MergedRanks:
    """Attributes:
    side: of the whole model.
    notes: record of the side -> sentences on how it was made of several ranks.
    said: sentences about what was left out, or differs between ranks that should agree.
    ranks: that were put together.
    """

    side: DumpTable
    notes: dict[int, list[str]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


_SHOWN = 3
"""Names in a sentence about many records."""


def merge_ranks(sides: Mapping[int, DumpTable]) -> MergedRanks:
    """Put the ranks of one model copy together.

    Args:
        sides: by rank; their headers say where each stands (`device_mesh.add_mesh_to_header`). One rank alone is a whole.

    Raises:
        UsageError: they are stages of a pipeline, and the records do not tell what belongs to which micro batch; or have no statistics.
    """
    merged = MergedRanks(next(iter(sides.values())), ranks=sorted(sides))
    notes: dict[int, dict[str, list[str]]] = {}
    remaining = dict(sides)
    for axis in ("tp", "cp"):
        for group in device_mesh.groups(remaining, axis):
            if device_mesh.share_experts({rank: remaining[rank] for rank in group}):
                remaining |= _all_experts({rank: remaining[rank] for rank in group}, axis)
        remaining = {
            group[0]: _merge_along_axis({rank: remaining[rank] for rank in group}, axis, merged, notes)
            for group in device_mesh.groups(remaining, axis)
        }
    if len(remaining) > 1:
        remaining = _join_stages(remaining, merged)
    if len(remaining) > 1 and experts.groups(remaining):
        remaining = experts.gather_experts(remaining)
        others = sorted(remaining)[1:]
        merged.said.append(
            f"ranks {', '.join(map(str, others))}: hold other experts of the same layers, which are shown; their own batch around "
            "the experts is not"
        )
    first = min(remaining)
    if len(remaining) > 1 and not merged.said:
        others = [rank for rank in sorted(remaining) if rank != first]
        merged.said.append(
            f"ranks {', '.join(map(str, others))}: the dump does not say how they belong together with rank {first}; not shown"
        )
    side = in_order(remaining[first])
    merged.side = side
    for op in range(len(side.ops)):
        rank, name = origin_of(side, op) or (first, side.ops[op])
        sentences = list(notes.get(rank, {}).get(name, ()))
        if name != side.ops[op]:
            sentences.insert(0, Sentence("is {0} of rank {1}", name, rank))
        elif rank != first:
            sentences.insert(0, Sentence("is of rank {0}", rank))
        if sentences:
            merged.notes[op] = sentences
    return merged


def _all_experts(sides: Mapping[int, DumpTable], axis: str) -> dict[int, DumpTable]:
    """Ranks along an axis that hold different experts: the first ones of them with the experts of all, the others without any."""
    headers: dict[int, dict[str, Any]] = {}
    beside: dict[int, DumpTable] = {}
    for rank, side in sides.items():
        parallel = side.header["parallel"]
        headers[rank] = {**side.header, "parallel": {**parallel, "rank": {**parallel["rank"], "ep": 0}}}
        beside[rank] = side.with_header({**side.header, "parallel": {**parallel, "rank": {**parallel["rank"], axis: 0}}})
    return {rank: side.with_header(headers[rank]) for rank, side in experts.gather_experts(beside).items()}


def _merge_along_axis(sides: dict[int, DumpTable], axis: str, found: MergedRanks, notes: dict[int, dict[str, list[str]]]) -> DumpTable:
    if len(sides) == 1:
        return next(iter(sides.values()))
    made = rows.merge_sides(sides)
    first = min(sides)
    known = notes.setdefault(first, {})
    for op, sentences in made.notes.items():
        known.setdefault(made.side.ops[op], []).extend(sentences)
    _report_differences(made, first, found)
    return device_mesh.merged_along(made.side, axis)


def _report_differences(made: rows.Merged, first: int, found: MergedRanks) -> None:
    """What of merged ranks differs that should not, and what of them is not shown."""
    if made.unlike:
        found.said.append(f"{len(made.unlike):,} tensors differ between ranks that should agree; the first is {made.unlike[0]}")
    for rank, names in made.lost.items():
        shown = ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
        found.said.append(f"rank {rank}: {len(names):,} records have no counterpart on rank {first} and are not shown: {shown}")


def _join_stages(sides: Mapping[int, DumpTable], merged: MergedRanks) -> dict[int, DumpTable]:
    """Stages of a pipeline as one."""
    told = [place[1] for side in sides.values() if (place := device_mesh.mesh_of_header(side.header)) is not None]
    interleaved = any(sizes.get("vpp", 1) > 1 for sizes in told)
    # without virtual stages a number that begins the paths of modules is a name
    other: Mapping[int, DumpTable] = {0: DumpTable(Path())} if interleaved else sides
    problems: list[str] = []
    made = stages.merge_pipelines(sides, other, problems, merged.said)
    if problems:
        raise UsageError("; ".join(problems))
    return made


def in_order(side: DumpTable) -> DumpTable:
    """construct.json names the records in the order in which they stand: graphs are drawn in its order, and where several ranks were woven
    into one it has those of one rank after the other."""
    if not side.ops or origin_of(side, 0) is None:
        return side
    construct: dict[str, Any] = {name: side.construct[name] for name in side.ops if name in side.construct}
    construct.update((name, value) for name, value in side.construct.items() if name not in construct)
    side.construct = construct
    return side
