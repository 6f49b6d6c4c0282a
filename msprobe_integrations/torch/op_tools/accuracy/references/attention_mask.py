"""Which scores of `npu_fusion_attention` do not count: ``sparse_mode``, ``atten_mask``, ``pre_tokens``, ``next_tokens``, ``prefix``.

Definition: documentation of ``torch_npu.npu_fusion_attention``. Where mask and window contradict each other the operator's result is not
defined, so such a call is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from msprobe_integrations.torch.op_tools.accuracy.references.formula import NotChecked, require

DEFAULT, ALL, LEFT_UP, RIGHT_DOWN, BAND, PREFIX, PREFIX_COMPRESSED, RIGHT_DOWN_OUTSIDE, LEFT_UP_OUTSIDE = range(9)
"""Values of ``sparse_mode``. The last two are those of packed sequences that were cut apart for several devices."""
_PACKED_ONLY = (RIGHT_DOWN_OUTSIDE, LEFT_UP_OUTSIDE)
_HALF = 1024
"""Rows of the rectangle below the triangle in the mask of `PREFIX_COMPRESSED`; half of its columns are masked."""


class MaskArguments(NamedTuple):
    """What a call says of its mask.

    Attributes:
        mask: True or 1: does not count. Of modes 2, 3, 4, 7 and 8 a triangle as a sample, usually 2048 x 2048.
        mode: ``sparse_mode``.
        before, behind: ``pre_tokens`` and ``next_tokens``: how far a query sees.
        prefix: for each batch, how many of the first keys all queries see.
    """

    mask: Tensor | None
    mode: int
    before: int
    behind: int
    prefix: Sequence[int] | None

    def check(self, packed: bool) -> None:
        """Raise `NotChecked` for what has no formula, or no defined result."""
        if self.mask is None or not self.mask.dim():
            return
        require(0 <= self.mode <= LEFT_UP_OUTSIDE, f"sparse_mode {self.mode} is not known to the formula")
        require(packed or self.mode not in _PACKED_ONLY, f"sparse_mode {self.mode} is for layout TND alone")
        require(not packed or self.mode != PREFIX, f"sparse_mode {self.mode} is not for layout TND")
        if self.mode in (PREFIX, PREFIX_COMPRESSED):
            require(self.prefix is not None, f"sparse_mode {self.mode} without prefix")
        if self.mode not in (DEFAULT, ALL, PREFIX):
            self._check_sample(self.mask.bool())

    def _check_sample(self, sample: Tensor) -> None:
        rows, columns = sample.shape[-2:]
        expected = torch.ones(min(rows, columns), columns, dtype=torch.bool, device=sample.device).triu(1)
        if self.mode == PREFIX_COMPRESSED:
            below = torch.arange(columns, device=sample.device) >= columns // 2
            expected = torch.cat((expected, below.expand(_HALF, columns)))
        right = sample.shape[-2:] == expected.shape and bool((sample == expected).all())
        require(right, f"atten_mask is not the compressed one that sparse_mode {self.mode} needs; the result is not defined")

    def build_drop_mask(self, rows: int, columns: int, number: int, count: int, packed: bool) -> Tensor | None:
        """True for scores that do not count, of a shape that broadcasts to [batch, heads, rows, columns]; None: all count.

        Args:
            rows, columns: queries and keys of a sequence.
            number, count: of the sequence among the packed ones.
            packed: layout TND; else all batches are one sequence.
        """
        mask = self.mask
        if mask is None or not mask.dim():  # without a mask, mode and window have no effect
            return None
        row = torch.arange(rows, device=mask.device)[:, None]
        column = torch.arange(columns, device=mask.device)[None]
        corner = row + columns - rows
        band = (column > corner + self.behind) | (column < corner - self.before)
        if self.mode in (RIGHT_DOWN, RIGHT_DOWN_OUTSIDE):
            return band if self.mode == RIGHT_DOWN_OUTSIDE and number == count - 1 else column > corner
        if self.mode in (LEFT_UP, LEFT_UP_OUTSIDE):
            return band if self.mode == LEFT_UP_OUTSIDE and number == 0 else column > row
        if self.mode == BAND:
            return band
        if self.mode == PREFIX_COMPRESSED:
            return self._behind_prefix(column, corner, number if packed else None)
        explicit = self._explicit(mask.bool(), rows, columns, packed)
        if self.mode == PREFIX:
            expected = self._behind_prefix(column, corner, None)
            require(bool((explicit == expected).all()), "atten_mask is not that of its prefix; the result is not defined")
        if self.mode == DEFAULT:
            outside = (column > row + self.behind) | (column < row - self.before)
            fits = not bool((outside & ~explicit).any())
            require(fits, "atten_mask keeps scores outside of pre_tokens and next_tokens; the result is not defined")
        return explicit

    def _explicit(self, mask: Tensor, rows: int, columns: int, packed: bool) -> Tensor:
        if packed:  # one mask for the longest of the sequences
            mask = mask[..., :rows, :columns]
        require(mask.shape[-2:] == (rows, columns), f"atten_mask of shape {list(mask.shape)} for {rows} queries and {columns} keys")
        return mask

    def _behind_prefix(self, column: Tensor, corner: Tensor, number: int | None) -> Tensor:
        """Neither before the diagonal to the right lower corner, nor among the first keys of the batch."""
        if self.prefix is None:
            raise NotChecked("prefix is missing")
        seen = self.prefix if number is None else [self.prefix[number]]
        first = torch.as_tensor([int(n) for n in seen], device=column.device)[:, None, None, None]
        return (column > corner) & (column >= first)

    @property
    def is_compressed(self) -> bool:
        """Is the mask made by the operator? Then it also finds rows in which nothing counts, and their results are 0."""
        return self.mask is not None and bool(self.mask.dim()) and self.mode not in (DEFAULT, ALL, PREFIX)
