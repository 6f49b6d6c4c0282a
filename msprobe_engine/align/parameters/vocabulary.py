"""Tables of a vocabulary of which one side has more rows: which rows only fill up, and may be left out of a comparison."""

from __future__ import annotations

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.cuts import width_of
from msprobe_engine.formats.checkpoint.model import StoredTensor, rows
from msprobe_engine.measure.stored.contents import Contents

TABLES = ("embedding.weight", "output.weight", "output.bias")
"""Slots with a row for each entry of the vocabulary."""
_BUDGET = 1 << 30
"""Bytes of surplus rows that are looked at; rows beyond count as what they are in the file, a difference."""


def other_rows(target: StoredTensor, golden: StoredTensor) -> bool:
    """Whether two tensors have the same rows, but not as many."""
    return len(target.shape) == len(golden.shape) > 0 and target.shape[0] != golden.shape[0] and target.shape[1:] == golden.shape[1:]


class Vocabulary:
    """What is known of the size of the vocabulary.

    Args:
        given: rows that are used, as the user or a mapping file says; 0: not said.
        of_a, of_b: as the settings in each checkpoint say; 0: they do not.
    """

    def __init__(self, given: int, of_a: int, of_b: int) -> None:
        self._given, self._of_target, self._of_golden = given, of_a, of_b
        self._contents = Contents(_BUDGET)

    def common(self, target: StoredTensor, golden: StoredTensor) -> tuple[StoredTensor, StoredTensor, str]:
        """Two tables without the rows that only fill up, and what was left out; as they are and "" where more rows are a difference.

        Rows fill up when the size of the vocabulary is known and they lie behind it. Where it is not known, they must also look it: all
        zeros or all the same, as converters write them.
        """
        known = max(self._given or used or t.padding or 0 for used, t in ((self._of_target, target), (self._of_golden, golden)))
        fewest = min(target.shape[0], golden.shape[0])
        if known > fewest:
            return target, golden, ""  # rows that are used are missing
        used = known or fewest
        surplus = [t for t in (target, golden) if t.shape[0] > used]
        if not known and not all(self._alike(t, used) for t in surplus):
            return target, golden, ""
        sides = " and ".join(
            f"{t.shape[0] - used} of {side}" for t, side in ((target, "the run"), (golden, "the golden run")) if t.shape[0] > used
        )
        why = "" if known else "; all of them are the same"
        try:
            return (
                _first(target, used),
                _first(golden, used),
                f"rows from {used} on fill up the vocabulary and were not compared ({sides}{why})",
            )
        except DumpFormatError:
            return target, golden, ""

    def _alike(self, tensor: StoredTensor, used: int) -> bool:
        """Whether all rows from `used` on hold the same; one row alone says so only of zeros."""
        try:
            rest = rows(tensor, used, tensor.shape[0] - used, width_of(tensor))
            if len(set(self._contents.row_digests(rest))) != 1:
                return False
            return rest.shape[0] > 1 or not self._contents.sample(rest, 1 << 20).any()
        except DumpFormatError:
            return False


def _first(tensor: StoredTensor, n: int) -> StoredTensor:
    return tensor if tensor.shape[0] == n else rows(tensor, 0, n, width_of(tensor))
