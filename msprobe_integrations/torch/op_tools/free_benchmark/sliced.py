"""Large calls in pieces: a second run of an operator whose rows do not know of each other takes one piece of its tensors after another.

Only where that is sure by the name of the operator and the shapes; other calls run as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from msprobe_integrations.torch.op_tools.free_benchmark.values import mapped, tensors_of

LARGE = 1 << 23
"""Elements of a result or an input from which on a call is taken in pieces."""
_PIECE = 1 << 21


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _names(
    "add sub rsub mul div truediv true_divide pow exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh "
    "sigmoid silu gelu relu relu6 leaky_relu elu selu celu softplus softsign mish hardtanh hardswish hardsigmoid logsigmoid tanhshrink "
    "threshold erf erfc erfinv abs absolute neg negative positive square reciprocal clamp clip where masked_fill maximum minimum fmax fmin "
    "lerp addcmul addcdiv fmod remainder round floor ceil trunc sign nan_to_num copysign hypot atan2 logaddexp xlogy "
    "float half bfloat16 double to type_as clone contiguous"
)
_OVER_DIMENSIONS = _names(
    "softmax log_softmax softmin logsumexp sum mean prod cumsum cumprod logcumsumexp amax amin var std nansum nanmean"
)
_PRODUCTS = frozenset(("matmul", "mm", "bmm"))


class Pieces(NamedTuple):
    """How a call is cut.

    Attributes:
        dim: of the result and of what is cut.
        cut: for every tensor of the arguments, in order, whether it is cut.
        length: along `dim`.
    """

    dim: int
    cut: tuple[bool, ...]
    length: int
    size: int

    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and length of each piece."""
        return ((start, min(self.size, self.length - start)) for start in range(0, self.length, self.size))

    def arguments(self, value: Any, start: int, length: int) -> Any:
        cut = iter(self.cut)
        return mapped(value, lambda tensor: tensor.narrow(self.dim, start, length) if next(cut) else tensor)

    def result(self, tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
        return tensor.narrow(self.dim, start, length)


def pieces(api: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]) -> Pieces | None:
    """How to cut a call; None: it is small, or has to stay whole.

    Args:
        api: name of the operator, as in records.
        args, kwargs: of the call.
    """
    tensors = tensors_of((tuple(args), dict(kwargs)))
    if not tensors or not results or max(t.numel() for t in (*tensors, *results)) < LARGE:
        return None
    shape = results[0].shape
    if any(result.shape != shape for result in results) or not shape:
        return None
    found = _along(api.strip("_"), args, kwargs, tensors, shape)
    if found is None:
        return None
    dim, cut = found
    if not any(cut):
        return None
    elements = max(t.numel() for t, taken in zip((*tensors, results[0]), (*cut, True)) if taken)
    return Pieces(dim, cut, shape[dim], max(1, _PIECE * shape[dim] // elements))


def _along(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor], shape: torch.Size
) -> tuple[int, tuple[bool, ...]] | None:
    first = tensors[0]
    if name in _ELEMENTWISE:
        dim = _longer_than_one(shape, len(shape))
        whole = all(_broadcasts(tensor, shape) for tensor in tensors)
        return (
            (dim, tuple(tensor.dim() == len(shape) and tensor.shape[dim] == shape[dim] for tensor in tensors))
            if whole and dim >= 0
            else None
        )
    if first.dim() == 0 or not args or args[0] is not first:
        return None
    inner: int | None = None
    if name in _OVER_DIMENSIONS and len(tensors) == 1:
        inner = _first_dimension(args, kwargs, first.dim())
    elif name in ("layer_norm", "rms_norm"):
        normalized = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        inner = first.dim() - len(normalized)
    elif name == "linear":
        inner = first.dim() - 1
    elif name in _PRODUCTS and len(tensors) == 2:
        return _product(first, tensors[1], shape)
    dim = -1 if inner is None else _longer_than_one(shape[:inner], inner)
    if dim < 0 or shape[dim] != first.shape[dim]:
        return None
    return dim, (True, *(False for _ in tensors[1:]))


def _longer_than_one(shape: Sequence[int], before: int) -> int:
    return next((dim for dim in range(min(before, len(shape))) if shape[dim] > 1), -1)


def _broadcasts(tensor: torch.Tensor, shape: torch.Size) -> bool:
    return tensor.dim() <= len(shape) and all(a in (1, b) for a, b in zip(reversed(tensor.shape), reversed(shape)))


def _first_dimension(args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> int | None:
    """The first of the dimensions that an operator works over; None when it is all of them."""
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    if not dims or not all(type(dim) is int and -count <= dim < count for dim in dims):
        return None
    first: int = min(dim % count for dim in dims)
    return first


def _product(a: torch.Tensor, b: torch.Tensor, shape: torch.Size) -> tuple[int, tuple[bool, ...]] | None:
    if a.dim() < 2 or b.dim() > a.dim() or len(shape) != a.dim() - (b.dim() == 1):
        return None
    if b.dim() <= 2:
        dim = _longer_than_one(shape, a.dim() - 1)
        return (dim, (True, False)) if dim >= 0 else None
    if b.dim() != a.dim():
        return None
    dim = _longer_than_one(shape, a.dim() - 2)
    if dim >= 0 and a.shape[dim] == b.shape[dim] == shape[dim]:
        return dim, (True, True)
    rows = a.dim() - 2
    return (rows, (True, False)) if dim < 0 and shape[rows] > 1 else None
