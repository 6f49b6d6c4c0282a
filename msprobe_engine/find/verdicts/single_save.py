"""Do two arrays of `SingleSave` belong together? Shapes, masks and padding first, then every element against a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy.typing as npt

from msprobe_engine.core.errors import UsageError
from msprobe_engine.measure.tensors.arrays import Difference, beyond, difference

Array = npt.NDArray[Any]

SAME, CLOSE, DIFFERS, MISSING, UNREADABLE = "same", "close", "differs", "missing", "unreadable"
"""Verdicts, of which the first two are fine."""


class Rule(NamedTuple):
    """How arrays are compared.

    Attributes:
        rtol, atol: an element is close up to ``atol + rtol * max(|a|, |b|)``.
        masks: key -> key of the mask that says which elements of it count.
        align: ``start`` or ``end``: which ends of sequences of different lengths (padded on the right or on the left) belong together.
    """

    rtol: float = 1e-3
    atol: float = 0.0
    masks: Mapping[str, str] = {}
    align: str = "start"

    def check(self) -> None:
        """Raises:
        UsageError: a value is wrong.
        """
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise UsageError(f"SingleComparator: {name} is {value!r}; allowed: a number >= 0")
        if self.align not in ("start", "end"):
            raise UsageError(f"SingleComparator: align is {self.align!r}; allowed: 'start', 'end'")
        if not isinstance(self.masks, Mapping) or not all(isinstance(text, str) for pair in self.masks.items() for text in pair):
            raise UsageError(f"SingleComparator: masks is {self.masks!r}; allowed: a dict from a key to the key of its mask")


class Compared(NamedTuple):
    """A pair of arrays: figures of the elements that count, how many these are, the verdict, and why (None: it is fine)."""

    figures: Difference
    elements: int
    verdict: str
    note: str | None


def compare(target: Array, golden: Array, masks: tuple[Array | None, Array | None], rule: Rule) -> Compared:
    """Compare two arrays.

    Args:
        target, golden: numbers of any shapes.
        masks: of both; None: all elements count. A mask has the shape of its array, or of its leading dimensions.
        rule: tolerance and alignment.
    """
    notes = []
    lost = 0
    shapes = target.shape, golden.shape
    if masks[0] is not None and masks[1] is not None:
        fits = all(mask.shape == array.shape[: mask.ndim] for mask, array in zip(masks, (target, golden)) if mask is not None)
        if not fits or masks[0].ndim != masks[1].ndim or target.ndim != golden.ndim:
            return Compared(
                difference(target, golden), 0, DIFFERS, f"masks of shapes {list(masks[0].shape)}, {list(masks[1].shape)} do not fit"
            )
        target_mask, golden_mask = _common(masks[0] != 0, masks[1] != 0, rule.align)
        lost = int((masks[0] != 0).sum() - target_mask.sum() + (masks[1] != 0).sum() - golden_mask.sum())
        target, golden = _common(target, golden, rule.align)
        differ = int((target_mask != golden_mask).sum()) + lost
        if differ:
            notes.append(f"masks differ in {differ} elements")
        chosen = target_mask & golden_mask
        target, golden = target[chosen], golden[chosen]
    elif masks[0] is not None or masks[1] is not None:
        notes.append("a mask is in one directory only")
    elif shapes[0] != shapes[1]:
        notes.append("shapes differ")
        target, golden = _common(target, golden, rule.align) if target.ndim == golden.ndim else (target, golden)
    figures = difference(target, golden)
    off = beyond(target, golden, rule.rtol, rule.atol)
    if off:
        notes.append(f"{off} elements beyond the tolerance")
    same = figures.same is None or figures.same == 100.0
    return Compared(figures, min(target.size, golden.size), DIFFERS if notes else SAME if same else CLOSE, "; ".join(notes) or None)


def _common(target: Array, golden: Array, align: str) -> tuple[Array, Array]:
    """The part of two arrays of as many dimensions that both have; `align` is of the second dimension on, the first is the batch."""
    if target.shape == golden.shape:
        return target, golden

    sizes = [min(n, m) for n, m in zip(target.shape, golden.shape)]

    def crop(array: Array) -> Array:
        starts = [0 if align == "start" or not dim else array.shape[dim] - n for dim, n in enumerate(sizes)]
        return array[tuple(slice(start, start + n) for start, n in zip(starts, sizes))]

    return crop(target), crop(golden)
