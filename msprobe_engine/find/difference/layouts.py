"""The difference between two runs of different parallel layouts: the wholes are compared, and the first suspect has its rank back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msprobe_engine.align.calls.call_tree import ROOT, Tree
from msprobe_engine.align.parallel import expected_differences, merge_statistics
from msprobe_engine.align.parallel.merge_statistics import AGREES
from msprobe_engine.align.parallel.micro_batches import cut_into_micro_batches, last_backward
from msprobe_engine.align.parallel.unshard.global_tensors import GlobalTensors
from msprobe_engine.align.parallel.unshard.layout_pair import OF_BUFFERS
from msprobe_engine.align.parallel.unshard.plan import PART
from msprobe_engine.align.parallel.unshard.planner import Unsharder
from msprobe_engine.align.parameters.prefixes import bare
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference.divergence import Divergence, settle_origins
from msprobe_engine.find.difference.noise.calibration import Floats
from msprobe_engine.find.difference.walk import DifferenceWalk, Walk
from msprobe_engine.find.origin import EXTRA, RESULT, TAKEN, UNSUMMED, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import INPUT, PARAMETERS, DumpTable
from msprobe_engine.formats.dump.rank_files import was_cut_off
from msprobe_engine.formats.dump.world import parallel_of
from msprobe_engine.measure import distances
from msprobe_engine.measure.propagation import Noise

_LEAST = 3
"""Of so many calls of a run, up to its update, at least one has a partner in the same run of another layout."""


def differ(target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable]) -> bool:
    """The runs are cut differently: most tensors of other sizes, or more micro batches in a step. A step that was cut off has fewer of them
    and fewer ranks, and that says nothing where both sides say that they are of one layout."""
    sides = (*target.values(), *golden.values())
    if any(was_cut_off(side.path, side.header, side.recovered) for side in sides) and _say_one_layout(target, golden):
        return False
    target_table, golden_table = target[min(target)], golden[min(golden)]
    if len(cut_into_micro_batches({0: target_table}, golden)) > 1 or len(cut_into_micro_batches({0: golden_table}, target)) > 1:
        return True
    places = {_bare(name): shape for name, shape in zip(golden_table.name, golden_table.shape) if isinstance(shape, list) and shape}
    target_rows = [
        (_bare(name), shape, role)
        for name, shape, role in zip(target_table.name, target_table.shape, target_table.role)
        if isinstance(shape, list) and shape
    ]
    if any(role == PARAMETERS and merge_statistics.fills_up(shape, places.get(name)) for name, shape, role in target_rows):
        return True
    if len(target) == len(golden) == 1 and not any(side.collectives or "parallel" in side.header for side in (target_table, golden_table)):
        return False  # two processes that work alone: models of other sizes, not pieces
    tree = Tree(target_table)
    if len(target) > 1 and expected_differences.shares_out(tree) != expected_differences.shares_out(Tree(golden_table)):
        return True
    many = min(len(target), len(golden)) > 1  # two parallel layouts may differ in few places: of sequence parallelism only the norms do
    if many and any(role == PARAMETERS for *_, role in target_rows):  # one more call of a function gives all behind it other numbers
        moved = _moved_gradients(tree)
        shared = [(shape, places[name]) for name, shape, _ in target_rows if name in places and (_is_of_module(name) or name in moved)]
    else:
        shared = [(shape, places[name]) for name, shape, _ in target_rows if name in places and not _is_flat(name, shape, places[name])]
    cut = sum(
        target_shape != golden_shape and merge_statistics.whole_shape(target_shape, golden_shape) is not None
        for target_shape, golden_shape in shared
    )
    if many:  # a single tensor is of another shape by a fault
        return 50 * cut > len(shared) and cut > 1
    return 5 * cut > len(shared)


def _moved_gradients(tree: Tree) -> set[str]:
    """Names of rows of calls that move gradients between parameters and buffers: behind the first backward call, in no module. Vectors are
    left out, see `_is_flat`."""
    side = tree.side
    behind = range(tree.first_backward, len(side.ops))
    ops = [op for op in behind if len(tree.kinds[op]) == 3 and tree.kinds[op][-1] in OF_BUFFERS and tree.parents[op] == ROOT]
    return {side.name[row] for op in ops for row in side.rows(op) if len(side.shape[row] or ()) > 1}


def _is_flat(name: str, shape: list[Any], other: list[Any]) -> bool:
    """A vector of calls of functions: a buffer of gradients, which is as long as a bucket."""
    return len(shape) == len(other) == 1 and not _is_of_module(name)


def _is_of_module(name: str) -> bool:
    return name.startswith(("Module.", "Cell."))


def _bare(name: str) -> str:
    """Name of a row without what wrappers around the model add."""
    return f"Module.{bare(name[len('Module.') :])}" if name.startswith("Module.") else name


def _say_one_layout(target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable]) -> bool:
    """All ranks of both runs tell the same sizes of the layout."""
    sizes = [parallel_of(side.header, "size") for side in (*target.values(), *golden.values())]
    return bool(sizes[0]) and all(size == sizes[0] for size in sizes)


def has_pieces(divergence: Divergence) -> bool:
    """Something was put together, of runs that make most of their calls both; else they are not of two layouts, and one of them only lacks
    calls. Those of the update do not count: one call may update all parameters."""

    def calls(side: DumpTable) -> int:
        return min(last_backward(Tree(side)) + 1, len(side.ops))

    return any(
        whole.plan.made_of and _LEAST * len(whole.structure.pairs) >= max(calls(whole.target), calls(whole.golden))
        for whole in divergence.wholes.values()
    )


class PieceWalker(DifferenceWalk):
    """Walks the wholes; knows of which pieces they are."""

    one_layout = False

    def __init__(self, whole: GlobalTensors) -> None:
        self.whole, self.by_mean = whole, whole.plan.by_mean
        tree = Tree(whole.target)
        tree.producers = whole.producers
        super().__init__(tree, Tree(whole.golden), whole.structure)
        self.one_program = False

    def walk(self, floor: float = 0.0, start: Noise | None = None) -> Walk:
        walked = super().walk(floor, start)
        for origin in walked.origins:
            self._blame_part(origin)
        if not walked.origins:  # round-off does not part the ranks
            walked.origins = [self._of_ranks(row) for row in sorted(self.whole.plan.apart) if self.pair_of(row) >= 0]
        return walked

    def _of_ranks(self, row: int) -> DifferenceOrigin:
        """An update that each rank makes of all of a parameter, and with other numbers than the other ranks."""
        op, pair = self.side.op[row], self.pair_of(row)
        origin = self._origin(op, self.structure.pairs[self.position(op)][1], UNSUMMED, pair, 0.0)
        origin.op = self.whole.plan.source.get(row, op)
        return origin

    def blame_unmatched(self, origin: DifferenceOrigin) -> None:
        """Collectives that only this layout has, and what stands around them, are not to blame for what goes through them."""
        before = (origin.op, origin.partner, origin.kind)
        super().blame_unmatched(origin)
        between = (self.side.ops[op] for op in range(origin.op, before[0]) if op in self.extra)
        if origin.kind == EXTRA and any(name.startswith("Distributed.") for name in between):
            origin.op, origin.partner, origin.kind = before

    def _blame_part(self, origin: DifferenceOrigin) -> None:
        """A part that goes into something else than a sum over ranks: what gave it out is the origin."""
        if origin.kind not in (RESULT, TAKEN):
            return
        for row in self.side.rows(origin.op):
            part = self.whole.plan.skipped.get(row) == PART or (row == origin.row and row in self.whole.plan.unsummed)
            if self.side.role[row] == INPUT and part and row in self.whole.plan.source:
                origin.op, origin.kind = self.whole.plan.source[row], UNSUMMED
                return


def diverge_layouts(
    target: Mapping[int, DumpTable],
    golden: Mapping[int, DumpTable],
    before: Divergence | None = None,
    moved: Mapping[int, Floats] | None = None,
) -> Divergence:
    """As `diverge`, of runs cut differently; the one walk bears the lowest rank of the target. `moved` counts when the golden side is
    of one piece."""
    target_pieces, golden_pieces = cut_into_micro_batches(target, golden), cut_into_micro_batches(golden, target)
    unsharder = Unsharder(target_pieces, golden_pieces)
    units = (moved or {}).get(min(golden)) if len(golden_pieces) == 1 else None
    divergence = diverge_whole(unsharder.join(), min(target), before, units)
    whole = divergence.wholes[min(target)]
    if whole.plan.factor != 1.0 and _updates_with_the_factor(divergence):
        divergence = diverge_whole(unsharder.join(factors=False), min(target), before, units)
    return divergence


def diverge_whole(whole: GlobalTensors, rank: int, before: Divergence | None = None, units: Floats | None = None) -> Divergence:
    """Walk what was put together; the walk bears the number `rank`."""
    divergence = Divergence(noise=before.noise if before else 0.0)
    divergence.structures[rank], divergence.walkers[rank], divergence.wholes[rank] = whole.structure, PieceWalker(whole), whole
    if units is not None:
        divergence.walkers[rank].moved = units
    return settle_origins(divergence, before)


def _updates_with_the_factor(divergence: Divergence) -> bool:
    """More of the gradients that the update takes in are off by the factor of the backward pass than are right: nobody took it out."""
    summed = averaged = 0
    for rank, walker in divergence.walkers.items():
        last, whole = last_backward(walker.target), divergence.wholes[rank]
        for row, golden_row in walker.rows:
            target_norm, golden_norm = whole.target.stats[row][3], whole.golden.stats[golden_row][3]
            taken = walker.side.op[row] > last and walker.side.role[row] == INPUT and row not in walker.target.producers
            if taken and golden_norm > 0 and distances.elements(walker.side.shape[row]) > 1 and not walker.is_parameter(row):
                summed += abs(target_norm / golden_norm / whole.plan.factor - 1) < AGREES
                averaged += abs(target_norm / golden_norm - 1) < AGREES
    return summed > averaged


def rank_of(divergence: Divergence, rank: int, origin: DifferenceOrigin) -> int:
    """The rank an origin is on: the one replica that is off, else the rank of the walk."""
    whole = divergence.wholes.get(rank)
    return whole.plan.rank.get(origin.row, rank) if whole is not None else rank


def factor_of_gradients(divergence: Divergence) -> float | None:
    """How many times the golden run's gradients are those that ranks sum up, where no call of an update shows the sums."""
    whole = next(iter(divergence.wholes.values()), None)
    walkers = divergence.walkers.values()
    if whole is None or not whole.plan.sure or any(len(kind) == 3 for walker in walkers for kind in walker.target.kinds):
        return None
    return whole.plan.factor


def describe_layouts(divergence: Divergence) -> list[str]:
    """Sentences about what was put together, what could not be compared, and the factor that was taken out."""
    lines: list[str] = []
    for whole in divergence.wholes.values():
        sizes = sorted(set(whole.plan.made_of.values()))
        each = Sentence(" ({0} each)", " or ".join(map(str, sizes))) if sizes else ""
        template = "The runs are of different layouts: {0} tensors were put together from pieces{1}."
        nothing = Sentence("The runs are of different layouts; no tensor that is compared had to be put together from pieces.")
        lines.append(Sentence(template, f"{len(whole.plan.made_of):,}", each) if whole.plan.made_of else nothing)
        if whole.plan.factor != 1.0:
            template = "The gradients are {0} times the golden run's until they are averaged; that was taken out."
            lines.append(Sentence(template, f"{whole.plan.factor:g}"))
        if whole.plan.by_mean:
            template = "Of {0} gradients, of which each rank or micro batch has its share, the mean alone was compared."
            lines.append(Sentence(template, f"{len(whole.plan.by_mean):,}"))
        reasons = ", ".join(f"{n:,} {why}" for why, n in sorted(whole.plan.reasons().items()))
        if reasons:
            lines.append(Sentence("Not compared: {0}.", reasons))
    return lines
