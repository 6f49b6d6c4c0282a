"""Single numbers of which each piece has its share: tokens counted, a loss over a part of the batch."""

from __future__ import annotations

from msprobe_engine.align.parallel import merge_statistics
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.align.parallel.unshard.layout_pair import LayoutPair
from msprobe_engine.align.parallel.unshard.partial_sums import Call
from msprobe_engine.core import operator_traits as traits
from msprobe_engine.formats.dump.dump_table import OUTPUT


class NumberShares:
    """Follows such numbers from the records that give them out to those that take them in."""

    def __init__(self, pair: LayoutPair) -> None:
        self._pair = pair
        self._known: dict[tuple[tuple[str, int], bytes, bytes], tuple[int, int]] = {}

    def of_number(self, call: Call, i: int, j: int, pieces: Floats, golden_pieces: Floats) -> tuple[int, int] | None:
        """How many of the pieces' numbers make that of the whole, on each side. None: all pieces of a side say the same, and nothing that
        was cut goes in."""
        pair, number = self._pair, self._number(i, pieces, golden_pieces)
        alike = all(merge_statistics.merge_replicas(side, 1) is not None for side in (pieces, golden_pieces))
        if pair.side.role[i] != OUTPUT and not call.backward:
            if number not in self._known and not alike and not pair.is_made_by_both(i, j):
                self._known[number] = merge_statistics.shares(pieces, golden_pieces, pair.agrees)
            shares = self._known.get(number, None if alike else (1, 1))
            call.shared |= shares is not None
            call.scaled |= shares not in (None, (1, 1))
            return shares
        if alike and not (call.cut or call.shared or call.parts or call.backward):
            return None
        shares = merge_statistics.shares(pieces, golden_pieces, pair.agrees)
        self._known[number] = shares
        return None if alike and shares == (1, 1) else shares

    def are_in(self, call: Call, i: int, pieces: Floats, golden_pieces: Floats) -> bool:
        """A tensor with such numbers in it, as a loss and the tokens it is a sum over, side by side."""
        number = self._number(i, pieces, golden_pieces)
        if self._pair.side.role[i] != OUTPUT:
            return number in self._known
        if not call.scaled or (shares := merge_statistics.shares(pieces, golden_pieces, self._pair.agrees)) == (1, 1):
            return False
        self._known[number] = shares
        return True

    def is_unequal_mean(self, call: Call, i: int, pieces: Floats, golden_pieces: Floats) -> bool:
        """A number made of shares, or a mean over the labels that count, that is neither the sum nor the mean of the pieces' numbers, and
        may be a mean with unlike weights."""
        pair = self._pair
        counted = call.cut and pair.side.ops[call.op].split(".")[1] in traits.LOSSES_OF_LABELS
        if pair.side.role[i] != OUTPUT or not (counted or call.scaled or call.parts) or min(len(pieces), len(golden_pieces)) < 1:
            return False
        near = merge_statistics.SAME if counted else pair.near
        means = merge_statistics.distance(merge_statistics.mean_of(pieces), merge_statistics.mean_of(golden_pieces))
        fits = means <= near or merge_statistics.shares(pieces, golden_pieces, near) != (1, 1)
        return not fits and merge_statistics.may_be_means(pieces, golden_pieces)

    def _number(self, i: int, pieces: Floats, golden_pieces: Floats) -> tuple[tuple[str, int], bytes, bytes]:
        return self._pair.kind(i), pieces.tobytes(), golden_pieces.tobytes()
