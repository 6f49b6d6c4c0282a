"""Two monitored runs that cut the batch in other ways (ranks, micro batches): what each pass sees cannot be compared, what they make of the
whole batch can."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Set
from functools import reduce

import numpy as np

from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.monitor.number_pairs import Number, Table, is_compared, order_in_step
from msprobe_engine.find.monitor.shapes_and_dtypes import are_of_one_layout, world_size
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key

_MOST = 0.5
"""Part of the activations with another shape from which on the batch is cut in another way; a module alone is a fault."""


def not_comparable(target: Run, golden: Run) -> tuple[frozenset[str], list[str]]:
    """Families of which the runs have numbers of other parts of the batch, and what is to be said of them; none where most activations have
    the same shapes, or where parameters have other ones. Of several ranks the loss is one of these, too: each has that of its own part,
    unless activations of the same shapes say that all ranks see the whole batch."""
    families = sorted({family for run in (target, golden) for rank in run.ranks for family in run.families(rank)})
    of_passes = [family for family in families if family.startswith("actv") or "unreduced" in family]
    if any(other for other, _, _ in (_shapes(target, golden, family) for family in families if family.startswith("param"))):
        return frozenset(), []
    micros, sizes = [_micro_batches(run) for run in (target, golden)], [world_size(run) for run in (target, golden)]
    if min(micros) > 0 and micros[0] != micros[1] and not are_of_one_layout(target, golden):  # a pass of one is no pass of the other
        template = (
            "the runs cut the batch in other ways, so that {0} cannot be compared: {1} micro batches in a step, in the golden run {2}"
        )
        return frozenset((*of_passes, "loss")), [Sentence(template, ", ".join((*of_passes, "loss")), *micros)]
    counts = [_shapes(target, golden, family) for family in of_passes if family.startswith("actv")]
    other, both = sum(count[0] for count in counts), sum(count[1] for count in counts)
    if not both and all(sizes) and sizes[0] != sizes[1]:
        template = "the runs have {0} and {1} ranks and no activations, so that loss cannot be compared: each rank has that of its own part"
        return frozenset(("loss",)), [Sentence(template, *sizes)]
    if not other or other < _MOST * both:
        return frozenset(), []
    not_compared = [*of_passes, *(["loss"] if max(len(target.ranks), len(golden.ranks)) > 1 else [])]
    first = next(count[2] for count in counts if count[2])
    template = "the runs cut the batch in other ways, so that {0} cannot be compared: {1} of {2} activations have another shape ({3})"
    return frozenset(not_compared), [Sentence(template, ", ".join(not_compared), f"{other:,}", f"{both:,}", first)]


def without_call(name: str) -> str:
    """The name of an activation without the number of the call (``act.input #2``)."""
    return name.partition(" #")[0]


def calls_cut_otherwise(target: Run, golden: Run) -> tuple[set[tuple[int, str]], list[str]]:
    """(rank, activation) of modules that one run calls once and the other one part by part (experts: all tokens at once, or those of each
    expert), and what is to be said of them: another number of calls in a step, with tensors of other shapes."""
    cut: set[tuple[int, str]] = set()
    for rank in set(target.ranks) & set(golden.ranks):
        if "actv" not in target.families(rank) or "actv" not in golden.families(rank):
            continue
        counts = [Counter(without_call(key.name) for key in _keys(run, rank)) for run in (target, golden)]
        shapes: list[dict[str, set[str]]] = [{}, {}]
        for of_run, run in zip(shapes, (target, golden)):
            for key, kinds in run.kinds(rank, "actv").items():
                of_run.setdefault(key.name, set()).update(kind.shape for kind in kinds)
        for name in counts[0].keys() & counts[1].keys():
            if counts[0][name] != counts[1][name] and not shapes[0].get(name, set()) & shapes[1].get(name, set()):
                cut.add((rank, name))
    if not cut:
        return cut, []
    template = "{0} activations are of calls that the runs cut in other ways, so that they cannot be compared, the first is {1}"
    return cut, [Sentence(template, f"{len(cut):,}", f"actv/{min(name for _, name in cut)}")]


def _keys(run: Run, rank: int) -> set[Key]:
    return next((set(run.series(rank, "actv", op)) for op in run.ops(rank, "actv")[:1]), set())


def losses_over_ranks(target: Run, golden: Run) -> list[Number]:
    """The losses of both runs, each the mean over its ranks, which have that of their own parts of the batch; none where ranks are missing.
    Where these means agree the losses are the same; where they do not, the parts may count for more or less (their numbers of tokens)."""
    if any(len(run.ranks) != world_size(run) for run in (target, golden)):
        return []
    ranks = [[run.scalars(rank) for rank in run.ranks] for run in (target, golden)]
    known = (set(of_rank) for of_run in ranks for of_rank in of_run)
    losses = []
    for name in sorted(name for name in reduce(set.intersection, known) if "loss" in name and is_compared(name)):
        steps = reduce(np.intersect1d, (of_rank[name].steps for of_run in ranks for of_rank in of_run))
        means = [np.mean([of_rank[name].values[np.isin(of_rank[name].steps, steps)] for of_rank in of_run], axis=0) for of_run in ranks]
        place = 0, "loss", Key(0, name)
        for step, *numbers in zip(steps.tolist(), *(mean.tolist() for mean in means)):
            losses.append(Number(step, order_in_step("loss", place[2], 0), *place, "value", *numbers))
    return losses


def leave_out_unequal(limits: dict[Number, float], means: Set[Number]) -> bool:
    """Take out numbers that differ by more than their limits and are means over ranks; returns True where there are none."""
    unequal = [item for item, limit in limits.items() if item in means and item.distance > limit]
    for item in unequal:
        del limits[item]
    return not unequal


def ranks_of_one_side(target: Run, golden: Run, apart: Set[str]) -> list[Sentence]:
    """That ranks which one run has alone were not compared, but for those that the other training does not have, with the same numbers as
    one that was.

    Args:
        apart: families that are not compared, or (loss) as means over the ranks.
    """
    both = sorted(set(target.ranks) & set(golden.ranks))
    unpaired: list[int] = []
    for run, other_run in ((target, golden), (golden, target)):
        alone = [rank for rank in run.ranks if rank not in other_run.ranks]
        absent = {rank for rank in alone if rank >= world_size(other_run) > 0}
        compared = {_digest_of_numbers(run, rank, apart) for rank in both} if absent else set()
        unpaired += [rank for rank in alone if rank not in absent or _digest_of_numbers(run, rank, apart) not in compared]
    if len(unpaired) == 1:
        return [Sentence("{0} is on one side only and was not compared", ranks_text(unpaired))]
    return [Sentence("{0} are on one side only and were not compared", ranks_text(sorted(unpaired)))] if unpaired else []


def _digest_of_numbers(run: Run, rank: int, apart: Set[str]) -> bytes:
    """The same for ranks of a run that have the same numbers, to the last digit."""
    digest = hashlib.sha256()
    families = sorted(set(run.families(rank)) - apart)
    columns = [(family, op) for family in families for op in run.ops(rank, family)]
    tables: list[Table] = [run.scalars(rank), *(run.series(rank, *column) for column in columns)]
    for column, table in zip(["", *columns], tables):
        for name in sorted(table, key=repr):
            digest.update(repr((column, name)).encode())
            if isinstance(name, str) and (not is_compared(name) or ("loss" in name and "loss" in apart)):
                continue
            steps, values = table[name]
            digest.update(steps.tobytes() + np.where(np.isnan(values), np.nan, values + 0.0).tobytes())  # one NaN, one zero
    return digest.digest()


def _micro_batches(run: Run) -> int:
    """Micro batches of a step, as activations and unreduced gradients have them; 0 where none are there."""
    families = ((rank, family) for rank in run.ranks for family in run.families(rank) if family.startswith("actv") or "unreduced" in family)
    return 1 + max((key.micro_step for rank, family in families for key in run.kinds(rank, family)), default=-1)


def _shapes(target: Run, golden: Run, family: str) -> tuple[int, int, str]:
    """How many tensors of a family have another shape of as many dimensions, how many both have, and the first of these."""
    other, both, first = 0, 0, ""
    for rank in sorted(set(target.ranks) & set(golden.ranks)):
        if family not in target.families(rank) or family not in golden.families(rank):
            continue
        golden_kinds = golden.kinds(rank, family)
        for key, kinds in target.kinds(rank, family).items():
            target_shapes, golden_shapes = ({kind.shape for kind in some if kind.shape} for some in (kinds, golden_kinds.get(key, ())))
            if not target_shapes or not golden_shapes:
                continue
            both += 1
            if not target_shapes & golden_shapes:
                other += 1
                first = first or f"{family}/{key.name} {min(target_shapes)}, {min(golden_shapes)}"
    return other, both, first
