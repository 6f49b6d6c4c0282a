"""The difference between two runs in one step: all ranks walked, noise told from faults, the first origin over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from msprobe_engine.align.calls.alignment import align_sides
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.frameworks.common_terms import in_common
from msprobe_engine.align.parallel.outcome import GlobalTensors
from msprobe_engine.find.collectives.links import Links
from msprobe_engine.find.difference import cross_rank
from msprobe_engine.find.difference.harmless import accumulated_gradients
from msprobe_engine.find.difference.noise.calibration import Floats
from msprobe_engine.find.difference.origin import GRADIENT, RESULT, DifferenceOrigin
from msprobe_engine.find.difference.rank_walk import RankWalk, reuse_walk
from msprobe_engine.find.difference.replica_walks import ReplicaWalks, give_foreign
from msprobe_engine.find.difference.shared_walks import SharedWalks
from msprobe_engine.find.difference.walk import DifferenceWalk, Walk
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
        first: dict[int, int] = {}
        for rank, walker in self.walkers.items():
            first.setdefault(id(walker), rank)
        if len(first) == len(self.walkers):
            return self
        ranks = first.values()

        def chosen(column: Mapping[int, T]) -> dict[int, T]:
            return {rank: column[rank] for rank in ranks if rank in column}

        whole, alike = chosen(self.wholes), chosen(self.structures)
        return dataclasses.replace(self, walks=chosen(self.walks), structures=alike, walkers=chosen(self.walkers), wholes=whole)

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
    found = Divergence(noise=before.noise if before else 0.0)
    walked: dict[int, Walk] = {}
    shared = SharedWalks()
    together = ReplicaWalks({} if before is None else before.walkers)
    for rank in sorted(target.keys() & golden.keys()):
        known = reuse_walk(begun or {}, rank, target[rank], golden[rank])
        walker = None if moved else together.known(rank, target[rank], golden[rank])
        if known is not None:
            found.walkers[rank], walked[rank] = known.walker, known.walk
        elif walker is not None:
            found.walkers[rank] = walker
        else:
            pair = align_sides(target[rank], golden[rank])
            found.walkers[rank] = DifferenceWalk(pair.target, pair.golden, pair.structure)
            shared.share(found.walkers[rank])
            together.add(rank, target[rank], golden[rank], found.walkers[rank])
        found.structures[rank] = found.walkers[rank].structure
        if moved and rank in moved:
            found.walkers[rank].calibrate(in_common(moved[rank], found.walkers[rank].golden.side))
    found.links = cross_rank.linked({rank: walker.side for rank, walker in found.walkers.items()})
    give_foreign(found.walkers, cross_rank.peer_distance(found.walkers, found.links))
    return settle_origins(found, before, walked)


def settle_origins(found: Divergence, before: Divergence | None, walked: Mapping[int, Walk] | None = None) -> Divergence:
    """Walk all walkers until the level of noise stays as it is; `walked` has the walks of those that nothing from outside has touched."""
    for rank, walker in found.different().walkers.items():
        if before is not None and rank in before.walkers:
            walker.inherit(before.walkers[rank].cancelled)
            walker.follow(before.walkers[rank])
    for _ in range(6):
        found.walks = {}
        of_walker: dict[int, Walk] = {}
        for rank, walker in found.walkers.items():
            if id(walker) in of_walker:
                found.walks[rank] = of_walker[id(walker)]
                continue
            known = (walked or {}).get(rank)
            cancelled = walker.cancelled.parameters or walker.cancelled.vectors
            untouched = not (found.noise or before or walker.calibrated or cancelled or any(walker.foreign.values()))
            found.walks[rank] = known if known is not None and untouched else walker.walk(found.noise, _start(before, rank))
            of_walker[id(walker)] = found.walks[rank]
            walker.forget()
        accumulated_gradients.leave_out_early_sums(found.walkers, found.walks)
        found.origins = cross_rank.first_in_time({rank: walk.origins for rank, walk in found.walks.items()}, found.links)
        level = _noise(found)
        if level <= found.noise:
            break
        found.noise = level
    if not found.origins:  # a number that differs is a finding, whatever comes of it
        found.origins = cross_rank.first_in_time({rank: walk.aside for rank, walk in found.walks.items()}, found.links)
    return found


def _start(before: Divergence | None, rank: int) -> Noise | None:
    """Noise at the end of the step before, of the same rank where it has one."""
    if before is None or not before.walks:
        return None
    walks = before.walks
    return walks[rank].end if rank in walks else max((walk.end for walk in walks.values()), key=lambda end: end.element)


def _noise(found: Divergence) -> float:
    """The level that products of fewer bits would explain, when the first origin looks like one."""
    if not found.origins:
        return found.noise
    rank, origin = found.origins[0]
    side = found.walkers[rank].side
    if not origin.noise or origin.kind not in (RESULT, GRADIENT):
        return found.noise
    noise = roundoff.product_noise(side.ops[origin.op], side.dtype[origin.row], origin.distance)
    return found.noise if not noise or all(found.of_each(_one_product_off).values()) else noise


def _one_product_off(walker: DifferenceWalk) -> bool:
    """At most one record with float32 products is off, and others are equal to the last bit: a device with fewer bits of mantissa computes
    all of them with fewer."""
    side = walker.side
    off: dict[int, bool] = {}
    for (row, _), distance, known in zip(walker.rows, walker.measured.distance.tolist(), walker.measured.known.tolist()):
        op = side.op[row]
        if known and side.role[row] in (OUTPUT, PARAMETERS_GRAD) and roundoff.is_wide_product(side.ops[op], side.dtype[row]):
            off[op] = off.get(op, False) or distance > 0
    return sum(off.values()) < min(2, len(off))
