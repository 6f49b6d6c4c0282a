"""Gradients of parameters of which each rank or micro batch has a share: how the shares make those of the whole."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import product
from typing import NamedTuple

from msprobe_engine.align.parallel import experts, merge_statistics
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.align.parallel.unshard.layout_pair import LayoutPair
from msprobe_engine.formats.dump.dump_table import PARAMETERS_GRAD
from msprobe_engine.measure import distances, roundoff


class _Means(NamedTuple):
    """Of a parameter's gradient.

    Attributes:
        target, golden: sum of the means of all pieces, of the last micro batch of each rank, and of all pieces in this record and those
            before it: one run shows the gradient of each micro batch, another one what they have added up to.
        size: root mean square of the elements; `elements`: how many.
    """

    target: list[float]
    golden: list[float]
    size: float
    elements: int


class GradientShares:
    """Args:
    factor: of all gradients of the pieces.
    """

    def __init__(self, pair: LayoutPair, factor: float) -> None:
        self._pair, self._factor = pair, factor
        self._rows = [(i, j) for i, j in pair.rows if pair.side.role[i] == PARAMETERS_GRAD]

    def of_all_micro_batches(self, i: int, j: int) -> tuple[Floats, Floats] | None:
        """Statistics of both sides' gradients of a parameter, by all micro batches, side by side; None where gradients are not those of
        each micro batch by itself, or the sides do not make as many."""
        return self._beside(i, j) if self._are_local else None

    def means_of_shares(self, i: int, j: int) -> tuple[Floats, Floats] | None:
        """Statistics of a parameter's gradient whose pieces are shares of a sum: their means add up, and nothing is known of the rest. None
        where they are no shares."""
        pair = self._pair
        target_pieces, golden_pieces = pair.target.members(i, True)[0], pair.golden.members(j, True)[0]
        wholes = merge_statistics.merge_replicas(target_pieces, 1), merge_statistics.merge_replicas(golden_pieces, 1)
        if wholes[0] is not None and wholes[1] is not None and merge_statistics.distance(wholes[0], wholes[1]) <= pair.agrees:
            return None
        if self._are_whole or self._way is None or (means := self._means(i, j)) is None:
            return None
        target_choice, golden_choice, n = self._way
        golden = merge_statistics.merge_pieces(golden_pieces)
        target = golden.copy()
        target[2], golden[2] = means.target[target_choice] / n, means.golden[golden_choice]
        return target, golden

    def is_unsummed(self, i: int, j: int) -> bool:
        """A gradient of a parameter that each rank has all of, and that is another one on each, where those of parameters that are cut
        were summed over ranks before they were recorded."""
        pair = self._pair
        pieces, _ = pair.target.members(i, True)
        shape, expert = pair.side.shape[i], experts.EXPERT.match(pair.kinds[pair.side.op[i]][2])
        whole = shape == pair.golden_side.shape[j] and distances.elements(shape) > 1 and len(pieces) > 1 and not expert
        return whole and merge_statistics.merge_replicas(pieces, 1) is None and self._are_summed

    @cached_property
    def _are_summed(self) -> bool:
        """Each rank reads rows of its own, and gradients of the parameters of which it has a piece (FSDP) make that of the whole: what most
        of them say. Where ranks read the same rows (tensor parallel), such gradients need no sum, and those of whole parameters may wait
        for theirs."""
        pair, cut, alike = self._pair, 0, 0
        if pair.several or not pair.reads_apart or len(pair.golden.pieces) > 1:
            return False
        for i, j in self._rows:
            shape = pair.golden_side.shape[j]
            pieces, golden = pair.target.members(i, True)[0], pair.golden.members(j, True)[0]
            if pair.side.shape[i] == shape or len(golden) != 1 or merge_statistics.count_pieces(pair.side.shape[i], shape) != len(pieces):
                continue
            cut += 1
            alike += merge_statistics.distance(merge_statistics.merge_pieces(pieces), golden[0]) <= pair.agrees
        return 2 * alike > cut

    def is_share(self, i: int, j: int, shape: list[int], golden: Floats) -> bool:
        """A gradient of what has no part of the batch (a parameter, what is looked up by positions), of each piece by itself: their means
        add up to that of the whole, which is all there is to see."""
        pair = self._pair
        if not pair.cuts_batch or (pair.side.role[i] == PARAMETERS_GRAD and (not pair.several or self._are_whole)):
            return False
        means = []
        for run, row in ((pair.target, i), (pair.golden, j)):
            pieces, _ = run.members(row, False)
            last, _ = run.members(row, True)
            need = merge_statistics.count_pieces(run.first.shape[row], shape)
            if len(pieces) % need or len(last) % need:
                return False
            means.append([pieces[:, 2].sum() / need, last[:, 2].sum() / need])
        count = max(distances.elements(shape), 1)
        near = pair.agrees * golden[3] / count**0.5 * min(1.0, count**-0.5 + roundoff.BIAS)
        factors = self._divisors()
        if experts.EXPERT.match(pair.kinds[pair.side.op[i]][2]):
            factors = {self._factor}  # of an expert no other rank has any part
        return any(abs(target_mean / n - golden_mean) <= near for target_mean in means[0] for golden_mean in means[1] for n in factors)

    def _means(self, i: int, j: int) -> _Means | None:
        """Of a parameter's gradient that both sides have in one shape; None of experts, of which no other rank has any part, and of few
        elements."""
        pair = self._pair
        shape = pair.side.shape[i]
        count = distances.elements(shape)
        expert = experts.EXPERT.match(pair.kinds[pair.side.op[i]][2])
        if shape != pair.golden_side.shape[j] or count < roundoff.MANY or expert:
            return None
        sums = [(run.members(row, False)[0], run.members(row, True)[0]) for run, row in ((pair.target, i), (pair.golden, j))]
        golden = sums[1][1]
        target_means, golden_means = ([float(statistics[:, 2].sum()) for statistics in of_run] for of_run in sums)
        for means, run, row in ((target_means, pair.target, i), (golden_means, pair.golden, j)):
            before = [float(run.members(earlier, False)[0][:, 2].sum()) for earlier in run.before(row)]
            means.append(means[0] + sum(before))
        return _Means(target_means, golden_means, float(golden[:, 3].max()) / count**0.5, count) if len(golden) else None

    @cached_property
    def _are_local(self) -> bool:
        """Gradients of parameters are those of each micro batch by itself, and both sides make as many of them: what most of them say."""
        pairs = [both for i, j in self._rows if (both := self._beside(i, j)) is not None]
        return 2 * sum(merge_statistics.distance(*both) <= self._pair.agrees for both in pairs) > len(pairs) > 0

    def _beside(self, i: int, j: int) -> tuple[Floats, Floats] | None:
        pair = self._pair
        pieces, golden_pieces = pair.target.members(i, False)[0], pair.golden.members(j, False)[0]
        alike = pair.side.shape[i] == pair.golden_side.shape[j] and isinstance(pair.side.shape[i], list)
        if not pair.several or not alike or len(pieces) != len(golden_pieces) or len(pieces) < 2:
            return None
        return merge_statistics.merge_pieces(pieces / self._factor), merge_statistics.merge_pieces(golden_pieces)

    @cached_property
    def _way(self) -> tuple[int, int, float] | None:
        """How gradients of parameters, of the pieces, make those of the whole: of either side the sum of all (0) or of the last micro
        batches (1), and what that of the target is divided by; what most parameters say, of several ways the nearest: means of gradients
        behind a layer norm are next to nothing, whatever they are divided by. None: most say nothing."""
        votes: Counter[tuple[int, int, float]] = Counter()
        apart: Counter[tuple[int, int, float]] = Counter()
        asked = 0
        for i, j in self._rows:
            if (means := self._means(i, j)) is None:
                continue
            asked += 1
            near = self._pair.agrees * means.size * (means.elements**-0.5 + roundoff.BIAS)
            for (target_choice, target_mean), (golden_choice, golden_mean), n in product(
                enumerate(means.target), enumerate(means.golden), self._divisors()
            ):
                if (distance := abs(target_mean / n - golden_mean)) <= near:
                    votes[target_choice, golden_choice, n] += 1
                    apart[target_choice, golden_choice, n] += distance / near
        best = max(votes, key=lambda way: (votes[way], -apart[way]), default=None)
        return best if best is not None and 2 * votes[best] > asked else None

    def _divisors(self) -> set[float]:
        """What a sum over pieces may be divided by."""
        most = max(len(self._pair.target.pieces), len(self._pair.golden.pieces))
        return {1.0, self._factor, *(f for n in range(2, most + 1) for f in (float(n), 1 / n))}

    @cached_property
    def _are_whole(self) -> bool:
        """Gradients of parameters are those of the whole step, once its last micro batch has added its part: what most of them say."""
        pair, alike = self._pair, 0
        for i, j in self._rows:
            target_whole, golden_whole = (
                merge_statistics.merge_replicas(run.members(row, True)[0], 1) for run, row in ((pair.target, i), (pair.golden, j))
            )
            if target_whole is not None and golden_whole is not None and pair.side.shape[i] == pair.golden_side.shape[j]:
                alike += merge_statistics.distance(target_whole / self._factor, golden_whole) <= pair.agrees
        return 2 * alike > len(self._rows)
