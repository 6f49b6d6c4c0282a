"""Sentences with numbers about a step: how much differs, by how much what agrees does, and where."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.core.dtypes import plain_name
from msprobe_engine.core.text.ranges import in_short
from msprobe_engine.core.text.sentences import Sentence, join_sentences
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.measure import coarse_values, factorize
from msprobe_engine.measure.distances import of_other_precision

_WIDE = "float32"
_TWICE = 1.0
"""What a factor of 2 adds."""
_BLIND = 0.25
"""Part of the modules of a step whose noise may be as large as they are, at which nothing is said of the step: what they are made of was
not recorded."""


class Precision(NamedTuple):
    """That the runs are of different precision as a whole; of the rank where most tensors are.

    Attributes:
        other, of: how many tensors have another type.
        target, golden: the types of the first.
        rank, at: the first, a pair of rows.
        rounded: the tensors have one type, and the numbers in them two.
    """

    other: int
    of: int
    target: str
    golden: str
    rank: int
    at: int
    rounded: bool = False

    def sentence(self) -> Sentence:
        if self.rounded:
            template = "The runs are of different precision: {0} of {1} tensors in float32 hold numbers of {2} in one run alone."
            short = next(kind for kind in (self.target, self.golden) if kind != _WIDE)
            return Sentence(template, f"{self.other:,}", f"{self.of:,}", short)
        template = "The runs are of different precision: {0} of {1} tensors have another type, the first {2} against {3}."
        return Sentence(template, f"{self.other:,}", f"{self.of:,}", self.target, self.golden)


def precision(divergence: Divergence) -> Precision | None:
    """None where they are of the same, or of several in both runs."""
    largest: Precision | None = None
    for rank, walker in divergence.different().walkers.items():
        m = walker.measured
        differ = m.dtype & ~m.argument
        differing = int(differ.sum())
        if differing > (largest.other if largest else 0) and of_other_precision(m.dtype, m.argument):
            pair = int(np.argmax(differ))
            row, partner = walker.rows[pair]
            types = str(walker.side.dtype[row]), str(walker.golden.side.dtype[partner])
            largest = Precision(differing, int((~m.argument).sum()), *types, rank, pair)
    return largest or _find_rounded_side(divergence)


def _find_rounded_side(divergence: Divergence) -> Precision | None:
    """Of runs that make the same calls of the same batches: another layout, and other micro batches, sum up what one pass has rounded.
    Of runs that make other calls only what an optimizer keeps from step to step, which other kernels do not round."""
    for rank, walker in divergence.different().walkers.items():
        side, golden = walker.side, walker.golden.side
        if rank in divergence.wholes:
            continue
        every = side.ops == golden.ops
        groups: dict[tuple[str, ...], list[int]] = {}
        for pair, (row, golden_row) in enumerate(walker.rows):
            kind = walker.target.kinds[side.op[row]]
            if _is_wide(side.dtype[row]) and _is_wide(golden.dtype[golden_row]) and (every or _is_state(walker.target, row)):
                groups.setdefault((kind[0], *(() if walker.target.gradients[side.op[row]] else kind[-1:])), []).append(pair)
        for group in groups.values():
            target_rows, golden_rows = (column[group] for column in factorize.columns(walker.rows))
            rounding = coarse_values.rounded_on_one_side(side.stats[target_rows, :2], golden.stats[golden_rows, :2])
            if rounding is not None:
                types = (rounding[0], _WIDE) if rounding[1] else (_WIDE, rounding[0])
                return Precision(len(group), sum(map(len, groups.values())), *types, rank, group[0], rounded=True)
    return None


def _is_state(tree: Tree, row: int) -> bool:
    """What a call of an update changes in place."""
    op = tree.side.op[row]
    return op > tree.last_backward and tree.kinds[op][-1].endswith("_") and ".input.0" in tree.side.name[row]


def _is_wide(dtype: str | None) -> bool:
    return plain_name(str(dtype)) == _WIDE


def amount(distance: float) -> str:
    return Sentence("{0} of a tensor's size", f"{distance:.1e}")


class LargestAccepted:
    """The largest difference of all steps and ranks that was taken for round-off, and how many records nothing can be said of."""

    def __init__(self) -> None:
        self.distance = 0.0
        self._where: str = ""
        self._unjudged = 0
        self._blind: str | None = None
        self._seen: list[str] = []

    def add(self, step: int, divergence: Divergence) -> None:
        """Another step."""
        self._seen = self._seen or _would_be_seen(step, divergence)
        for rank, walk in divergence.walks.items():
            self._unjudged += walk.unjudged
            calls = any(len(kind) == 3 for kind in divergence.walkers[rank].target.kinds)
            blind = walk.unjudged - walk.cancelled if calls or walk.blurred <= _BLIND * walk.compared else walk.blurred
            if self._blind is None and blind:
                template = (
                    "from step {0} on no fault can be told from round-off: {1} of {2} records of rank {3} may differ by as much as they are"
                    " large; compare an earlier step, or runs in float32"
                )
                self._blind = Sentence(template, step, f"{blind:,}", f"{walk.compared:,}", rank)
            if walk.largest > self.distance and walk.largest_at >= 0:
                self.distance, self._where = walk.largest, _where(divergence.walkers[rank], walk.largest_at, step, rank)

    @property
    def blind(self) -> list[str]:
        """That in a step nothing can be said of some records, for a result to be that there is no difference."""
        return [] if self._blind is None else [self._blind]

    def sentences(self) -> list[str]:
        """None where all numbers are the same."""
        lines: list[str] = []
        if self.distance:
            lines.append(Sentence("The largest difference is {0}: {1}.", amount(self.distance), self._where))
        if self._unjudged:
            template = "{0} records cannot be judged: their terms cancel, and round-off is as large as what is left."
            lines.append(Sentence(template, f"{self._unjudged:,}"))
        return [*lines, *self._seen] if self.distance else lines


def _would_be_seen(step: int, divergence: Divergence) -> list[str]:
    """Which factors on the results of a step are told from round-off; nothing where it moves none, for every bit tells there."""
    least = np.sort(np.concatenate([walk.least for walk in divergence.different().walks.values()] or [np.zeros(0)]))
    visible = least[least <= _TWICE]
    if not len(visible):
        return []
    most = f"{1 + visible[-1]:.{_digits(visible[-1])}f}"
    half = f"{1 + visible[len(visible) // 2]:.{_digits(visible[len(visible) // 2])}f}"
    head = Sentence("Of {0} results that round-off moves in step {1}", f"{len(least):,}", step)
    if len(visible) == len(least):
        template = "{0}, half show a wrong factor of {1} on one of them and all show one of {2}; a smaller one passes for round-off."
        return [Sentence(template, head, half, most)]
    template = (
        "{0}, {1} show no wrong factor below 2 (of sums the mean alone is known, or terms cancel); of the others half show one of"
        " {2} and all show one of {3}; a smaller one passes for round-off."
    )
    return [Sentence(template, head, f"{len(least) - len(visible):,}", half, most)]


def _digits(number: float) -> int:
    """So many digits behind the point show two figures of a number."""
    return max(1, 1 - math.floor(math.log10(number))) if 0 < number < 1 else 1


_STATISTICS = ("Max", "Min", "Mean", "Norm")


def _where(walker: DifferenceWalk, pair: int, step: int, rank: int) -> str:
    """The place of a pair of rows, and the statistic that differs most."""
    row, golden_row = walker.rows[pair]
    target_stats, golden_stats = walker.side.stats[row], walker.golden.side.stats[golden_row]
    with np.errstate(all="ignore"):
        most = int(
            np.nanargmax(np.nan_to_num(np.abs(target_stats - golden_stats) / np.maximum(np.abs(target_stats), np.abs(golden_stats))))
        )
    template = "step {0}, rank {1}, {2}, {3} {4} against {5}"
    return Sentence(
        template, step, rank, walker.side.name[row], _STATISTICS[most], f"{target_stats[most]:.7g}", f"{golden_stats[most]:.7g}"
    )


def of_step(step: int, divergence: Divergence) -> list[str]:
    compared = sum(walk.compared for walk in divergence.walks.values())
    differing = sum(walk.differing for walk in divergence.walks.values())
    template = "{0} of {1} records differ by more than round-off; those after the first may follow from it."
    lines: list[str] = []
    if differing:  # else it came in and went no further
        lines.append(Sentence(template, f"{differing:,}", f"{compared:,}"))
        rank, walk = max(divergence.walks.items(), key=lambda item: item[1].largest)
        if walk.largest_at >= 0:
            where = _where(divergence.walkers[rank], walk.largest_at, step, rank)
            template = "Round-off, or what goes in, explains all others, which differ by at most {0}: {1}."
            lines.append(Sentence(template, amount(walk.largest), where))
        else:
            template = "Round-off, or what goes in, explains all others, which differ by at most {0}."
            lines.append(Sentence(template, amount(walk.largest)))
    if len(divergence.walks) > 1:
        counts: dict[int, list[int]] = {}
        for rank, walk in sorted(divergence.walks.items()):
            if walk.origins:
                counts.setdefault(len(walk.origins), []).append(rank)
        if sum(map(len, counts.values())) == 1:
            lines.append(Sentence("A difference begins on rank {0} alone.", *counts.popitem()[1]))
        else:
            by_rank = join_sentences(", ", (_on_ranks(ranks, number) for number, ranks in counts.items()))
            lines.append(Sentence("Places where a difference begins, by rank: {0}", by_rank))
    return lines


def _on_ranks(ranks: list[int], number: int) -> Sentence:
    if len(ranks) == 1:
        return Sentence("rank {0}: {1}", ranks[0], number)
    return Sentence("ranks {0}: {1} each", in_short(ranks), number)
