"""Signs of a gradient in two bits per element: zero, positive, negative, NaN.

Element i of a tensor (C order) lies in bits 2 * (i % 4) and up of byte i // 4; the last byte is filled up with zeros. The existing
tool keeps one byte per element, ``gradient > 0``, where zero, negative and NaN are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ZERO, POSITIVE, NEGATIVE, NAN = 0, 1, 2, 3

Bytes = npt.NDArray[np.uint8]
_PIECE = 1 << 20
_ALL = np.arange(256, dtype=np.uint8)
_CODES = np.stack([(_ALL >> shift) & 3 for shift in (0, 2, 4, 6)], 1)
_POSITIVE = np.ascontiguousarray(_CODES == POSITIVE)
_NANS = (_CODES == NAN).sum(1).astype(np.int64)


def packed_size(numel: int) -> int:
    """Bytes of so many signs."""
    return -(-numel // 4)


def positive(packed: Bytes, numel: int) -> npt.NDArray[np.bool_]:
    """``gradient > 0`` of the first `numel` elements, [numel] bool."""
    flat: npt.NDArray[np.bool_] = _POSITIVE[packed].reshape(-1)[:numel]
    return flat


def pack(codes: npt.ArrayLike) -> Bytes:
    """The codes of all elements ([n], each 0 to 3) packed."""
    flat = np.asarray(codes, np.uint8).reshape(-1)
    padded = np.zeros(packed_size(flat.size) * 4, np.uint8)
    padded[: flat.size] = flat
    packed: Bytes = (padded.reshape(-1, 4) << np.array([0, 2, 4, 6], np.uint8)).sum(1, dtype=np.uint8)
    return packed


class Agreement(NamedTuple):
    """How the signs of one gradient agree in two runs."""

    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody needs here
    """Elements."""
    same: int
    """Elements with the same sign: both positive, both negative or both zero. NaN has no sign and agrees with nothing."""
    nans: tuple[int, int]
    """NaN elements in each."""

    @property
    def similarity(self) -> float:
        """`same` / `count`; 0.0 for no elements, as the existing tool has it."""
        return self.same / self.count if self.count else 0.0


def _same_table() -> npt.NDArray[np.int64]:
    """[256 * 256]: how many of the four pairs of two bytes agree; index is first * 256 + second."""
    equal = (_CODES[:, None, :] == _CODES[None, :, :]) & (_CODES != NAN)[:, None, :]
    counts: npt.NDArray[np.int64] = equal.sum(2).astype(np.int64).reshape(-1)
    return counts


_SAME: npt.NDArray[np.int64] | None = None


def compare(target: Bytes, golden: Bytes, numel: int) -> Agreement:
    """Compare the signs of `numel` elements, packed; one pass, in pieces.

    Counts byte pairs that differ from each other by a table; the filling of the last byte is zero in both and is taken off again.
    """
    global _SAME
    if _SAME is None:
        _SAME = _same_table()
    same = nans1 = nans2 = 0
    for start in range(0, len(target), _PIECE):
        target_piece, golden_piece = target[start : start + _PIECE], golden[start : start + _PIECE]
        same += int(_SAME[target_piece.astype(np.uint16) << 8 | golden_piece].sum())
        nans1 += int(_NANS[target_piece].sum())
        nans2 += int(_NANS[golden_piece].sum())
    return Agreement(numel, same - (4 * packed_size(numel) - numel), (nans1, nans2))


def compare_bool(target: npt.NDArray[np.bool_], golden: npt.NDArray[np.bool_]) -> Agreement:
    """Compare two ``gradient > 0``; what is not positive is one class, NaN included."""
    same = sum(
        int(np.count_nonzero(target.reshape(-1)[start : start + _PIECE] == golden.reshape(-1)[start : start + _PIECE]))
        for start in range(0, target.size, _PIECE)
    )
    return Agreement(target.size, same, (0, 0))
