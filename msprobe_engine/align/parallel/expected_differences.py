"""What differs between layouts without being a difference: collectives, sizes of pieces, states of random numbers, shared-out updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from msprobe_engine.align.calls.call_tree import Kind, Tree
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.parallel import parameter_owner
from msprobe_engine.align.parallel.merge_statistics import AGREES
from msprobe_engine.align.parallel.micro_batches import last_backward
from msprobe_engine.measure import distances


def without_collectives(structure: Structure, target: Tree, golden: Tree, owned: Mapping[int, parameter_owner.Owner]) -> Structure:
    """Collectives of one layout have no counterpart in another one, even where there are some. Of the calls of an update the kinds that
    the runs do not make equally often may be about other parameters."""
    target_last, golden_last = last_backward(target), last_backward(golden)
    target_counts = Counter((kind, owned.get(op)) for op, kind in enumerate(target.kinds) if op > target_last)
    golden_owners = parameter_owner.owners(golden)
    golden_counts = Counter((kind, golden_owners.get(op)) for op, kind in enumerate(golden.kinds) if op > golden_last)
    gone = {}
    for op, partner in structure.pairs:
        key = (target.kinds[op], owned.get(op))
        if target.side.ops[op].startswith("Distributed.") or (
            op > target_last and len(key[0]) != 4 and target_counts[key] != golden_counts[key]
        ):
            gone[op] = partner
    structure.pairs = [pair for pair in structure.pairs if pair[0] not in gone]
    structure.only_target = sorted((*structure.only_target, *gone))
    structure.only_golden = sorted((*structure.only_golden, *gone.values()))
    return structure


def shares_out(tree: Tree) -> bool:
    """The update is shared out over ranks (distributed optimizer, ZeRO): flat pieces, without regard to where a parameter ends."""
    behind = (kind[2] for kind in tree.kinds[last_backward(tree) + 1 :] if kind[1:2] == ("Distributed",))
    return any("reduce_scatter" in api or "all_gather_into" in api for api in behind)


def sizes(target: Any, golden: Any, most: int) -> bool:
    """Two whole numbers, or lists of some, that are equal or up to `most` times each other."""
    if isinstance(target, list) and isinstance(golden, list):
        return len(target) == len(golden) and all(
            target_size == golden_size or sizes(target_size, golden_size, most) for target_size, golden_size in zip(target, golden)
        )
    if type(target) is not int or type(golden) is not int or target <= 0 or golden <= 0:
        return False
    large, small = max(target, golden), min(target, golden)
    return large % small == 0 and large // small <= most


def inverse(target: Any, golden: Any, factor: float) -> bool:
    """Two numbers that take a factor of the gradients out."""
    are_numbers = isinstance(target, float) and isinstance(golden, float) and golden != 0.0
    return are_numbers and min(abs(target / golden * factor - 1), abs(target / golden / factor - 1)) < AGREES


def whole_share(target: Any, golden: Any, most: int) -> bool:
    """Two numbers that take a mean over as many pieces, at most `most` (a loss times one part of the micro batches)."""
    if not isinstance(target, float) or not isinstance(golden, float) or not min(abs(target), abs(golden)):
        return False
    times = max(abs(target / golden), abs(golden / target))
    return abs(times - round(times)) < AGREES and 1 < round(times) <= most


def random_state(dtype: str | None, shape: list[int]) -> bool:
    """The state of torch's generator on the CPU, or on a device."""
    return str(dtype).endswith("uint8") and shape in ([5056], [16])


def long(shape: list[int]) -> bool:
    """All elements lie along one dimension, as one number of each parameter that a rank holds."""
    return bool(max(shape, default=1) == distances.elements(shape))


def unequally_owned(target: Tree, golden: Tree) -> set[Kind]:
    """Kinds of calls of the update of which one side shows the parameter more often: what is left over cannot be paired."""
    counts = []
    for tree in (target, golden):
        last = last_backward(tree)
        counts.append(Counter(tree.kinds[op] for op in parameter_owner.owners(tree) if op > last))
    return {kind for kind in counts[0].keys() | counts[1].keys() if counts[0][kind] != counts[1][kind]}
