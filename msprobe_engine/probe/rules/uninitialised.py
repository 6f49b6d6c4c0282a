"""Which tensors of a frame were computed, as against memory that was handed out or moved around.

Uninitialised memory (``torch.empty``, Megatron's global buffers) may hold any bits, NaN too, and its views and copies do. That is no
fault until an operation computes with it, and then the operation's output shows it. The same holds for a value that the caller
filled in (``torch.full(n, inf)`` as the start of a running minimum). So of API calls only outputs count, and only those of calls
that compute; module calls, backward calls and collectives count in full.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.operator_traits import MOVES
from msprobe_engine.probe.rules.layout import Layout

API_CALL = re.compile(r"(?!Module\.|Cell\.|Distributed\.|MintDistributed\.)[^.]+\..*?([^.]+)\.[0-9]+\.forward\.(.*)", re.DOTALL)


def mask_computed(layout: Layout) -> npt.NDArray[np.bool_]:
    """True for every tensor of the layout in which a NaN would be a fault, [n]."""
    return np.fromiter((_counts(name) for name in layout.names), np.bool_, len(layout.names))


class Computed:
    """`mask_computed` of the last layout, kept: layouts hardly ever change."""

    def __init__(self) -> None:
        self._number = -1
        self._mask: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def of(self, layout: Layout) -> npt.NDArray[np.bool_]:
        """The mask of `layout`, [n]."""
        if self._number != layout.number:
            self._number, self._mask = layout.number, mask_computed(layout)
        return self._mask


def _counts(name: str) -> bool:
    match = API_CALL.fullmatch(name)
    return match is None or (match[2].startswith("output") and match[1] not in MOVES)
