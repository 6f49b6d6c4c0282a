"""The difference between two runs in one step: all ranks walked, noise told from faults, the first origin over all ranks.

Walks of ranks that run one program hold the same pairs and the same trees: they are kept once, whatever the number of ranks.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msprobe_engine.align.calls.alignment import align_sides
from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.frameworks.common_terms import in_common
from msprobe_engine.align.parallel.unshard.global_tensors import GlobalTensors
from msprobe_engine.find.collectives.links import Links
from msprobe_engine.find.difference import cross_rank
from msprobe_engine.find.difference.harmless import accumulated_gradients
from msprobe_engine.find.difference.noise.calibration import Floats
from msprobe_engine.find.difference.optimizer.common_factor import other_factors_first
from msprobe_engine.find.difference.rank_walk import RankWalk, reuse_walk
from msprobe_engine.find.difference.walk import DifferenceWalk, Walk
from msprobe_engine.find.origin import GRADIENT, RESULT, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import OUTPUT, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import roundoff
from msprobe_engine.measure.propagation import Noise

T = TypeVar("T")


@dataclass
class Divergence:
    """What one step shows.

    Attributes:
        origins: (rank, origin), the most likely first.
        walks: rank -> its walk; ranks of which the tables say the same have one walk together.
        structures: rank -> which records belong together.
        wholes: what the sides of a walk were put together from, of runs of different layouts.
        noise: distances up to this one are accepted as fewer bits in products; 0 when there is no such noise.
        links: collectives of the target.
    """

    origins: list[tuple[int, DifferenceOrigin]] = field(default_factory=list)
    walks: dict[int, Walk] = field(default_factory=dict)
    structures: dict[int, Structure] = field(default_factory=dict)
    walkers: dict[int, DifferenceWalk] = field(default_factory=dict)
    wholes: dict[int, GlobalTensors] = field(default_factory=dict)
    noise: float = 0.0
    links: Links = field(default_factory=Links)

    def different(self) -> Divergence:
        """The same with the first of the ranks that are walked together: for what all of them say alike."""
        first_ranks: dict[int, int] = {}
        for rank, walker in self.walkers.items():
            first_ranks.setdefault(id(walker), rank)
        if len(first_ranks) == len(self.walkers):
            return self
        ranks = first_ranks.values()

        def select_ranks(column: Mapping[int, T]) -> dict[int, T]:
            return {rank: column[rank] for rank in ranks if rank in column}

        whole, alike = select_ranks(self.wholes), select_ranks(self.structures)
        return dataclasses.replace(self, walks=select_ranks(self.walks), structures=alike, walkers=select_ranks(self.walkers), wholes=whole)

    def of_each(self, look: Callable[[DifferenceWalk], T]) -> dict[int, T]:
        """Rank -> what `look` says of its walk, asked once where ranks are walked together."""
        known: dict[int, T] = {}
        for walker in self.walkers.values():
            if id(walker) not in known:
                known[id(walker)] = look(walker)
        return {rank: known[id(walker)] for rank, walker in self.walkers.items()}


def diverge(
    target: Mapping[int, DumpTable],
    golden: Mapping[int, DumpTable],
    before: Divergence | None = None,
    moved: Mapping[int, Floats] | None = None,
    begun: Mapping[int, RankWalk] | None = None,
) -> Divergence:
    """Compare the ranks that both sides have.

    Args:
        target, golden: the ranks of one step.
        before: what the step before came to.
        moved: rank -> what each row of the golden side moves by round-off (`find.difference.noise.calibration`); absent: dtypes tell.
        begun: rank -> what has been done of it.
    """
    divergence = Divergence(noise=before.noise if before else 0.0)
    walked: dict[int, Walk] = {}
    shared = SharedWalks()
    together = ReplicaWalks({} if before is None else before.walkers)
    for rank in sorted(target.keys() & golden.keys()):
        known = reuse_walk(begun or {}, rank, target[rank], golden[rank])
        walker = None if moved else together.find_equal_walk(rank, target[rank], golden[rank])
        if known is not None:
            divergence.walkers[rank], walked[rank] = known.walker, known.walk
        elif walker is not None:
            divergence.walkers[rank] = walker
        else:
            pair = align_sides(target[rank], golden[rank])
            divergence.walkers[rank] = DifferenceWalk(pair.target, pair.golden, pair.structure)
            shared.share(divergence.walkers[rank])
            together.add(rank, target[rank], golden[rank], divergence.walkers[rank])
        divergence.structures[rank] = divergence.walkers[rank].structure
        if moved and rank in moved:
            divergence.walkers[rank].moved = in_common(moved[rank], divergence.walkers[rank].golden.side)
    divergence.links = cross_rank.match_links({rank: walker.side for rank, walker in divergence.walkers.items()})
    give_foreign(divergence.walkers, cross_rank.peer_distance(divergence.walkers, divergence.links))
    return settle_origins(divergence, before, walked)


def settle_origins(divergence: Divergence, before: Divergence | None, walked: Mapping[int, Walk] | None = None) -> Divergence:
    """Walk all walkers until the level of noise stays as it is; `walked` has the walks of those that nothing from outside has touched."""
    for rank, walker in divergence.different().walkers.items():
        if before is not None and rank in before.walkers:
            walker.carry_over_step(before.walkers[rank])
    for _ in range(6):
        divergence.walks = {}
        of_walker: dict[int, Walk] = {}
        for rank, walker in divergence.walkers.items():
            if id(walker) in of_walker:
                divergence.walks[rank] = of_walker[id(walker)]
                continue
            known = (walked or {}).get(rank)
            cancelled = walker.cancelled.parameters or walker.cancelled.vectors
            untouched = not (divergence.noise or before or walker.calibrated or cancelled or any(walker.foreign.values()))
            divergence.walks[rank] = known if known is not None and untouched else walker.walk(divergence.noise, _start(before, rank))
            of_walker[id(walker)] = divergence.walks[rank]
            walker.forget()
        accumulated_gradients.leave_out_early_sums(divergence.walkers, divergence.walks)
        ordered = {rank: other_factors_first(divergence.walkers[rank], walk.origins) for rank, walk in divergence.walks.items()}
        divergence.origins = cross_rank.first_in_time(ordered, divergence.links)
        level = _noise(divergence)
        if level <= divergence.noise:
            break
        divergence.noise = level
    if not divergence.origins:  # a number that differs is a finding, whatever comes of it
        divergence.origins = cross_rank.first_in_time({rank: walk.aside for rank, walk in divergence.walks.items()}, divergence.links)
    return divergence


def _start(before: Divergence | None, rank: int) -> Noise | None:
    """Noise at the end of the step before, of the same rank where it has one."""
    if before is None or not before.walks:
        return None
    walks = before.walks
    return walks[rank].end if rank in walks else max((walk.end for walk in walks.values()), key=lambda end: end.element)


def _noise(divergence: Divergence) -> float:
    """The level that products of fewer bits would explain, when the first origin looks like one."""
    if not divergence.origins:
        return divergence.noise
    rank, origin = divergence.origins[0]
    side = divergence.walkers[rank].side
    if not origin.noise or origin.kind not in (RESULT, GRADIENT):
        return divergence.noise
    noise = roundoff.product_noise(side.ops[origin.op], side.dtype[origin.row], origin.distance)
    return divergence.noise if not noise or all(divergence.of_each(_few_products_off).values()) else noise


def _few_products_off(walker: DifferenceWalk) -> bool:
    """At most half of the records with float32 products are off by more than float32 rounds: a device with fewer bits of mantissa computes
    all of them with fewer."""
    side = walker.side
    off: dict[int, bool] = {}
    for (row, _), distance, known in zip(walker.rows, walker.measured.distance.tolist(), walker.measured.known.tolist()):
        op = side.op[row]
        if known and side.role[row] in (OUTPUT, PARAMETERS_GRAD) and roundoff.is_wide_product(side.ops[op], side.dtype[row]):
            off[op] = off.get(op, False) or distance > roundoff.FLOOR
    return 2 * sum(off.values()) <= len(off)


class SharedWalks:
    """What has been seen of the walks of one step, whose tables share their columns (`formats.dump.shared_columns`)."""

    def __init__(self) -> None:
        self._trees: dict[Hashable, tuple[Any, dict[str, Any]]] = {}
        self._pairs: dict[Hashable, list[Any]] = {}

    def share(self, walker: DifferenceWalk) -> None:
        """Put what an earlier walk has in the place of what is the same. Nothing of it is changed in place."""
        for tree in (walker.target, walker.golden):
            self._share_tree(tree)
        program = id(walker.side.name), id(walker.golden.side.name)
        walker.rows = self._same(program, walker.rows)
        walker.structure.pairs = self._same(program, walker.structure.pairs)
        walker.back = self._same(program, walker.back)

    def _share_tree(self, tree: Tree) -> None:
        side = tree.side
        if tree.names is not side.ops:  # a mapping takes its records for others
            return
        side.share_construct(self._same(("construct", id(side.ops)), side.construct))
        columns = (side.ops, side.construct, side.role, side.offsets)
        _, known = self._trees.setdefault(tuple(map(id, columns)), (columns, {}))
        tree.share_structure(known)

    def _same(self, program: Hashable, value: Any) -> Any:
        """One that is equal; of the ranks of one program few have other pairs."""
        known = self._pairs.setdefault((program, type(value)), [])
        for known_value in known:
            if known_value == value:
                return known_value
        known.append(value)
        return value


Key = tuple[int, ...]


class ReplicaWalks:
    """The walks of one step.

    Args:
        before: of the step before, by rank: ranks that parted then are not walked together.
    """

    def __init__(self, before: Mapping[int, DifferenceWalk]) -> None:
        self._before = before
        self._known: dict[Key, DifferenceWalk] = {}

    def find_equal_walk(self, rank: int, target: DumpTable, golden: DumpTable) -> DifferenceWalk | None:
        """The walk of an earlier rank that says the same, on both sides."""
        key = self._key(rank, target, golden)
        return None if key is None else self._known.get(key)

    def add(self, rank: int, target: DumpTable, golden: DumpTable, walker: DifferenceWalk) -> None:
        """The walk of a rank, for later ones."""
        key = self._key(rank, target, golden)
        if key is not None:
            self._known[key] = walker

    def _key(self, rank: int, target: DumpTable, golden: DumpTable) -> Key | None:
        if target.template is None or golden.template is None or target.named_ranks is not golden.named_ranks:
            return None  # other groups may be the difference
        return id(target.template), id(golden.template), id(self._before.get(rank))


def give_foreign(walkers: dict[int, DifferenceWalk], distances: Mapping[int, Mapping[int, float]]) -> None:
    """What other ranks put into the collectives of each; ranks that were walked together part where that is not the same."""
    known: dict[tuple[int, frozenset[tuple[int, float]]], DifferenceWalk] = {}
    taken: set[int] = set()
    for rank, walker in walkers.items():
        key = id(walker), frozenset((op, distance) for op, distance in distances[rank].items() if distance)
        if key not in known:
            known[key] = _part(walker) if id(walker) in taken else walker
            known[key].foreign = dict(distances[rank])
            taken.add(id(walker))
        walkers[rank] = known[key]


def _part(walker: DifferenceWalk) -> DifferenceWalk:
    """Another one of the same sides, with numbers of its own."""
    made = copy.copy(walker)
    made.measured, made.cancelled = copy.deepcopy((walker.measured, walker.cancelled))
    return made
