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

from msprobe_engine.rules.layout import Layout

_API = re.compile(r"(?!Module\.|Cell\.|Distributed\.|MintDistributed\.)[^.]+\..*?([^.]+)\.[0-9]+\.forward\.(.*)", re.DOTALL)
MOVES = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "__getitem__",
        "__setitem__",
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "expand",
        "expand_as",
        "broadcast_to",
        "permute",
        "transpose",
        "transpose_",
        "t",
        "t_",
        "T",
        "mT",
        "adjoint",
        "contiguous",
        "clone",
        "detach",
        "detach_",
        "squeeze",
        "squeeze_",
        "unsqueeze",
        "unsqueeze_",
        "flatten",
        "ravel",
        "unflatten",
        "narrow",
        "select",
        "slice",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "cat",
        "concat",
        "concatenate",
        "stack",
        "hstack",
        "vstack",
        "dstack",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "copy_",
        "cpu",
        "cuda",
        "repeat",
        "repeat_interleave",
        "tile",
        "roll",
        "flip",
        "index_select",
        "gather",
        "take",
        "as_strided",
        "diagonal",
        "unfold",
        "alias",
        "data",
        "requires_grad_",
        "index_copy",
        "index_copy_",
        "index_put",
        "index_put_",
        "scatter",
        "scatter_",
        "slice_scatter",
        "select_scatter",
        "masked_select",
        "view_as_real",
        "view_as_complex",
        "real",
        "imag",
        "untyped_storage",
        "full",
        "full_like",
        "new_full",
        "fill_",
        "tensor",
        "as_tensor",
        "scalar_tensor",
        "new_tensor",
    ]
)

FILLS = frozenset(
    (
        *("maskedfill", "where", "full", "fulllike", "newfull", "fill", "triu", "tril", "maskedscatter", "indexfill", "setitem"),
        *("tensor", "scalartensor", "astensor", "constantpadnd", "pad"),
    )
)
"""Operations that write an infinity because the caller asked for it, in the spelling of `normal_op`."""


def normal_op(op: str) -> str:
    """``all_reduce``, ``allreduce_`` and ``_allgather_base_`` style names in one spelling: lower case, no underscores, without the
    prefix of calls that did not come through a public function."""
    return op.removeprefix("c10d_").removeprefix("functional_").replace("_", "").lower()


def computed(layout: Layout) -> npt.NDArray[np.bool_]:
    """True for every tensor of the layout in which a NaN would be a fault, [n]."""
    return np.fromiter((_counts(name) for name in layout.names), np.bool_, len(layout.names))


class Computed:
    """`computed` of the last layout, kept: layouts hardly ever change."""

    def __init__(self) -> None:
        self._number = -1
        self._mask: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def of(self, layout: Layout) -> npt.NDArray[np.bool_]:
        """The mask of `layout`, [n]."""
        if self._number != layout.number:
            self._number, self._mask = layout.number, computed(layout)
        return self._mask


def _counts(name: str) -> bool:
    found = _API.fullmatch(name)
    return found is None or (found[2].startswith("output") and found[1] not in MOVES)
