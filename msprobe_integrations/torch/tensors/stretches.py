"""Parts of a tensor of any strides, flat, without a copy of the whole."""

from __future__ import annotations

from itertools import pairwise

import torch


def distinct(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """For what does not depend on the order of the elements: a view that has each element of an expanded dimension once, in the order of
    memory where that is dense; and how often each of its elements is in the tensor."""
    data, times = tensor.detach(), 1
    if data.is_contiguous():
        return data, times
    for dim, (size, stride) in enumerate(zip(data.shape, data.stride())):
        if size > 1 and stride == 0:
            data, times = data.narrow(dim, 0, 1), times * size
    if not data.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense.default(data):
        data = data.as_strided((data.numel(),), (1,))
    return data, times


def stretch(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements `start` to `stop` (at least one) in C order, flat and contiguous; a view where memory allows, else a copy of these
    elements."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    inner = tensor.numel() // tensor.shape[0]
    first, last = start // inner, -(-stop // inner)
    if last - first == 1 and stop - start < inner:
        return stretch(tensor[first], start - first * inner, stop - first * inner)
    if start == first * inner and stop == last * inner:
        return tensor[first:last].contiguous().view(-1)
    cuts = [start, *range((first + 1) * inner, last * inner, max(1, last - first - 2) * inner), stop]
    return torch.cat([stretch(tensor, begin, end) for begin, end in pairwise(cuts)])
