"""Experts that lie on several ranks, on one rank with the numbers of the whole model.

Under expert parallelism each rank counts its experts from 0, and gets the tokens of all ranks of its group. Here the records of all
experts are moved to the first rank of the group: it is then a rank that has them all. What stands around the experts (router, exchange
of tokens) stays with its rank, and its tokens are put together like pieces of a batch, whatever their number: `tokens`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.parallel import micro_batches, parameter_owner, stages
from msprobe_engine.align.parallel.merge_records import RecordMerger, Source
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.core import names
from msprobe_engine.formats.dump.dump_table import OUTPUT, DumpTable
from msprobe_engine.formats.dump.world import parallel_of

EXPERT = re.compile(r"(?P<before>(?:^|.*\.)(?:local_experts|deepspeed_experts|experts))\.(?P<number>\d+)(?=\.|$)")
"""Paths of experts and of what is inside of them, as Megatron, DeepSpeed and most models name them."""

LISTED = "listed"
"""Key among the facts of a row: one of a list of groups of tokens, which another layout groups otherwise."""

_CUTS = frozenset(("split", "chunk", "tensor_split", "split_with_sizes", "unbind"))
_LISTS = _CUTS | {"cat", "concat", "stack"}

Place = tuple[str, str, int]
"""(path around the experts, direction, number of the call), or the update."""
_UPDATE: Place = ("", "update", 0)


def experts_of(side: DumpTable) -> int:
    """How many experts the layers of a rank have at most; 0 without any."""
    numbers: dict[str, set[int]] = {}
    for name in side.ops:
        match = EXPERT.match(_path(name))
        if match:
            numbers.setdefault(match["before"], set()).add(int(match["number"]))
    return max(map(len, numbers.values()), default=0)


def groups(sides: Mapping[int, DumpTable]) -> list[list[int]]:
    """Ranks that hold the experts of one model together, by their place among them; empty without such groups."""
    if not all(experts_of(side) for side in sides.values()):
        return []
    places = {rank: _place(side) for rank, side in sides.items()}
    ranks_by_group: dict[Any, list[int]] = {}
    if all(place is not None for place in places.values()):
        seen: dict[Any, int] = {}
        for rank in sorted(sides):
            expert, other_places = places[rank] or (0, ())
            turn = seen[other_places, expert] = seen.get((other_places, expert), -1) + 1
            ranks_by_group.setdefault((other_places, turn), []).append(rank)
        return sorted(some for some in ranks_by_group.values() if len(some) > 1)
    for side in sides.values():
        members = _exchange(side)
        ranks_by_group[members] = [rank for rank in members if rank in sides]
    return sorted(some for some in ranks_by_group.values() if len(some) > 1)


def _place(side: DumpTable) -> tuple[int, tuple[Any, ...]] | None:
    """(place among the experts, place in the dimensions that cut an expert or the layers) as the header says. Where experts have a tensor
    parallel size of their own, they lie on ranks that share the rest of a layer by tensor or context parallelism, too."""
    rank = parallel_of(side.header, "rank")
    axes = ("pp", "etp") if "etp" in rank else ("cp", "pp", "tp")
    return (rank["ep"], tuple((axis, rank[axis]) for axis in axes if axis in rank)) if "ep" in rank else None


def _exchange(side: DumpTable) -> tuple[int, ...]:
    """The ranks of the largest group that tokens are exchanged in: of collectives around experts."""
    around = {match["before"] for name in side.ops if (match := EXPERT.match(_path(name)))}
    tree = Tree(side)
    best: tuple[int, ...] = ()
    for op in side.collectives:
        inside = {tree.kinds[above][2] for above in tree.above(op) if len(tree.kinds[above]) == 4}
        if any(before.startswith(f"{path}.") for before in around for path in inside):
            for row in side.rows(op):
                ranks = side.extra.get(row, {}).get("group_ranks")
                if isinstance(ranks, list) and len(ranks) > len(best):
                    best = tuple(ranks)
    return best


def gather_experts(sides: Mapping[int, DumpTable]) -> dict[int, DumpTable]:
    """The ranks of a run, with the records of all experts of a group on its first rank."""
    gathered = dict(sides)
    for group in groups(sides):
        trees = [Tree(sides[rank]) for rank in group]
        moves = [_moves(tree) for tree in trees]
        counts = [experts_of(tree.side) for tree in trees]
        gathered[group[0]] = _merge_expert_records(group, trees, moves, [sum(counts[:position]) for position in range(len(counts))])
        for rank, tree, moved in zip(group[1:], trees[1:], moves[1:]):
            moved_records = {op for ops in moved.values() for op in ops}
            gathered[rank] = micro_batches.subset(tree.side, [op for op in range(len(tree.side.ops)) if op not in moved_records])
    for side in gathered.values():
        _note_lists(side)
    return gathered


def _moves(tree: Tree) -> dict[Place, list[int]]:
    """Records of experts, by the call they are made in."""
    owned = parameter_owner.owners(tree)
    moves: dict[Place, list[int]] = {}
    last: Place | None = None
    for op, name in enumerate(tree.side.ops):
        place = next((call for call in map(_call, (name, *(tree.side.ops[above] for above in tree.above(op)))) if call), None)
        if place is not None:
            last = place
        elif tree.is_gradients(op) and EXPERT.match(_path(name)):
            place = last if last and last[1] == "backward" else _UPDATE
        elif op in owned and EXPERT.match(owned[op][0]):
            place = _UPDATE
        if place is not None:
            moves.setdefault(place, []).append(op)
    return moves


def _call(name: str) -> Place | None:
    parsed = names.parse(name)
    match = EXPERT.match(parsed.path) if isinstance(parsed, names.ModuleName) else None
    return (match["before"], parsed.direction, parsed.number) if match and isinstance(parsed, names.ModuleName) else None


def _path(name: str) -> str:
    parsed = names.parse(name) if name.startswith(("Module.", "Cell.")) else None
    return parsed.path if isinstance(parsed, (names.ModuleName, names.ParametersGradName)) else ""


def _merge_expert_records(
    group: Sequence[int], trees: Sequence[Tree], moves: Sequence[Mapping[Place, list[int]]], starts: Sequence[int]
) -> DumpTable:
    """The first rank of a group with the experts of the others behind its own; in the backward pass before them."""

    def renumber_expert(start: int, path: str) -> str:
        match = EXPERT.match(path)
        return path if match is None else f"{match['before']}.{int(match['number']) + start}{path[match.end() :]}"

    sources = [
        Source(rank, rank, tree.side, lambda path, start=start: renumber_expert(start, path))  # type: ignore[misc]
        for rank, tree, start in zip(group, trees, starts)
    ]
    weaver = RecordMerger(sources, _Others())
    before: dict[int, list[tuple[int, int]]] = {}  # record of the first rank -> (source, record) to stand before it
    for place in {place for some in moves for place in some}:
        own = moves[0].get(place, [])
        records_of_others = [(source, op) for source, some in enumerate(moves) if source for op in some.get(place, [])]
        if not own or place == _UPDATE:
            spot = len(trees[0].side.ops)
        elif place[1] == "backward":
            spot = own[0]
            records_of_others = [(source, op) for source, some in reversed(list(enumerate(moves))) if source for op in some.get(place, [])]
        else:
            spot = own[-1] + 1
        before.setdefault(spot, []).extend(records_of_others)
    for op in range(len(trees[0].side.ops) + 1):
        for source, record in before.get(op, ()):
            weaver.append_record(source, record, weaver.rename_record(source, trees[source].side.ops[record]))
        if op < len(trees[0].side.ops):
            weaver.append_record(0, op, weaver.rename_record(0, trees[0].side.ops[op]))
    gone = [{trees[source].side.ops[op] for ops in some.values() for op in ops} for source, some in enumerate(moves)]
    return weaver.finish_table(lambda source, name: source == 0 or name in gone[source])


class _Others:
    """All paths but those of experts: what is around the experts is one call on all ranks."""

    def __contains__(self, path: object) -> bool:
        return EXPERT.match(str(path)) is None


def around(tree: Tree) -> dict[int, str]:
    """Calls of functions right inside of a module that holds experts -> its path: they bring tokens to experts and back."""
    holders: set[str] = set()
    for name in tree.side.ops:
        if found := EXPERT.match(_path(name)):  # the list of experts, the module that has it, the layer around that
            holders.update(found["before"].rsplit(".", n)[0] for n in range(3))
    calls: dict[int, str] = {}
    for op, kind in enumerate(tree.kinds):
        if len(kind) != 4:
            above = next((tree.kinds[enclosing][2] for enclosing in tree.above(op) if len(tree.kinds[enclosing]) == 4), None)
            if above in holders:
                calls[op] = above
    return calls


def _note_lists(side: DumpTable) -> None:
    """Lists of groups of tokens in the calls around experts."""
    tree = Tree(side)
    for op in around(tree):
        direction, call = tree.kinds[op][0], tree.kinds[op][-1]
        if call in _LISTS:
            gives = (direction == "forward") == (call in _CUTS)  # a list; else it takes one in
            for row in side.rows(op):
                if isinstance(side.shape[row], list) and side.shape[row] and (side.role[row] == OUTPUT) == gives:
                    side.extra[row] = {**side.extra.get(row, {}), LISTED: True}


@dataclass(frozen=True)
class Tokens:
    """Tensors with a row per token, of all ranks and micro batches.

    Attributes:
        target, golden: float64 (4,), Max, Min, Mean, Norm of all; None when the numbers of tokens differ.
        shape: of all.
        pieces: of the target.
    """

    target: Floats | None
    golden: Floats | None
    shape: list[int]
    pieces: int


def tokens(target: Sequence[tuple[list[int], Floats]], golden: Sequence[tuple[list[int], Floats]]) -> Tokens | None:
    """Put tensors together that differ in the size of one dimension; None when they are none such, or all of one size on each side.

    Args:
        target, golden: (shape, float64 (4,) of Max, Min, Mean, Norm) of each piece.
    """
    shapes = [tuple(shape) for shape, _ in (*target, *golden)]
    if not target or not golden or len({len(shape) for shape in shapes}) > 1:
        return None
    if all(len({tuple(shape) for shape, _ in some}) == 1 for some in (target, golden)):
        return None
    unequal_dimensions = [dimension for dimension in range(len(shapes[0])) if len({shape[dimension] for shape in shapes}) > 1]
    if len(unequal_dimensions) != 1:
        return None
    dimension = unequal_dimensions[0]
    totals = [sum(shape[dimension] for shape, _ in some) for some in (target, golden)]
    whole = [max(totals) if n == dimension else size for n, size in enumerate(shapes[0])]
    if totals[0] != totals[1]:
        return Tokens(None, None, whole, len(target))
    return Tokens(merge_weighted(target), merge_weighted(golden), whole, len(target))


def merge_weighted(some: Sequence[tuple[list[int], Floats]]) -> Floats:
    """Max, Min, Mean, Norm, float64 (4,), of pieces of different sizes; of those that have elements."""
    sizes = np.array([math.prod(shape) for shape, _ in some], np.float64)
    stats = np.array([four for _, four in some])[sizes > 0]
    sizes = sizes[sizes > 0]
    if not len(stats):
        return np.full(4, np.nan)
    with np.errstate(all="ignore"):
        mean = (stats[:, 2] * sizes).sum() / sizes.sum()
        return np.array((stats[:, 0].max(), stats[:, 1].min(), mean, np.sqrt(np.square(stats[:, 3]).sum())))


def together(
    target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable], problems: list[str], notes: list[str]
) -> tuple[Mapping[int, DumpTable], Mapping[int, DumpTable], bool]:
    """Both runs with one rank per pipeline, where they are not cut into the same stages. The last item: something was put together.

    Args:
        problems: sentences about what cannot be put together are added.
        notes: sentences about what was left out on purpose are added.
    """
    merged = False
    if stages.signature(target, golden) != stages.signature(golden, target):
        target, golden = stages.merge_pipelines(target, golden, problems, notes), stages.merge_pipelines(golden, target, problems, notes)
        merged = True
    elif min(len(target), len(golden)) > 1:
        target, golden = (stages.without_passes_for_shapes(*sides, notes) for sides in ((target, golden), (golden, target)))
    held = [experts_of(side[min(side)]) for side in (target, golden)]
    if all(held) and held[0] != held[1]:
        target, golden, merged = gather_experts(target), gather_experts(golden), True
    return target, golden, merged
