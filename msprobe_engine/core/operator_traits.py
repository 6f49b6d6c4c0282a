"""What operators do to memory and to numbers: which hand out memory that nobody has written, which only move elements, which fill
memory with a value of the caller's, which are products of matrices.

Names are those of torch's functions and methods.
"""

from __future__ import annotations

UNINITIALISED = frozenset((
    "empty", "empty_like", "empty_strided", "empty_permuted", "empty_quantized", "_empty_affine_quantized", "empty_with_format",
    "new_empty", "new_empty_strided",
))  # fmt: skip
"""Operators whose result is memory that nobody has written."""

MOVES = UNINITIALISED | frozenset((
    "resize_", "__getitem__", "__setitem__", "view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "broadcast_to",
    "permute", "transpose", "transpose_", "t", "t_", "T", "mT", "adjoint", "contiguous", "clone", "detach", "detach_", "squeeze",
    "squeeze_", "unsqueeze", "unsqueeze_", "flatten", "ravel", "unflatten", "narrow", "select", "slice", "chunk", "split",
    "split_with_sizes", "tensor_split", "unbind", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "movedim",
    "moveaxis", "swapaxes", "swapdims", "copy_", "cpu", "cuda", "repeat", "repeat_interleave", "tile", "roll", "flip", "index_select",
    "gather", "take", "as_strided", "diagonal", "unfold", "alias", "data", "requires_grad_", "index_copy", "index_copy_", "index_put",
    "index_put_", "scatter", "scatter_", "slice_scatter", "select_scatter", "masked_select", "view_as_real", "view_as_complex", "real",
    "imag", "untyped_storage", "full", "full_like", "new_full", "fill_", "tensor", "as_tensor", "scalar_tensor", "new_tensor",
))  # fmt: skip
"""Operators that hand out memory or move elements, and compute nothing."""

PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm")
"""Products of matrices."""

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
