"""The second run of a call: its arguments changed, in pieces where the call is large, and what its results are measured to be.

Large calls in pieces: a second run of an operator whose rows do not know of each other takes one piece of its tensors after another.

Only where that is sure by the name of the operator and the shapes; other calls run as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from msprobe_engine.accuracy.free_benchmark import perturb
from msprobe_engine.accuracy.free_benchmark.perturb import Unperturbed
from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.torch.op_tools.free_benchmark.calls import Autocast, RandomState, Versions, apart, autocast_of
from msprobe_integrations.torch.op_tools.free_benchmark.values import (
    FLOATS,
    HIGHER,
    change_of,
    copy_tensor,
    kind,
    mapped,
    perturb_tensor,
    tensors_of,
)

_WIDER = {**HIGHER, torch.float32: torch.float64}
"""What the CPU computes in."""


Pairs = list[tuple[int, torch.Tensor, torch.Tensor]]


class Seen(NamedTuple):
    """A call of the training, before and after it was made.

    Attributes:
        base, name: API, and its call.
        func: what to call.
        arguments: (args, kwargs); copies when the call `writes`.
        writes: it changes its arguments.
        tensors: those of the arguments of the training.
        random: random numbers before the call.
        versions: of `tensors`.
        autocast: how it stood.
    """

    base: str
    name: str
    func: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    writes: bool
    tensors: list[torch.Tensor]
    random: RandomState
    versions: Versions
    autocast: Autocast

    @property
    def api(self) -> str:
        """Name without what kind of API it is."""
        return self.base.rpartition(".")[2]

    @staticmethod
    def before(base: str, name: str, func: Callable[..., Any], arguments: Any, writes: bool) -> Seen:
        """Note a call that is about to be made."""
        tensors = tensors_of(arguments)
        kept = mapped(arguments, _once(copy_tensor)) if writes else arguments
        return Seen(base, name, func, kept, writes, tensors, RandomState(tensors), Versions(tensors), autocast_of(tensors))


def _once(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same copy for a tensor that stands in several places."""
    made: dict[int, torch.Tensor] = {}

    def change_once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = change(tensor)
        return made[id(tensor)]

    return change_once


def outputs_of(result: Any, arguments: Any) -> list[torch.Tensor]:
    """Tensors that a call has given; of one without a result (``x[0] = 1``) the first argument."""
    return tensors_of(result) if result is not None else tensors_of(arguments)[:1]


def low(arguments: Any, autocast: Autocast) -> bool:
    """Would a call be more precise if it was made in a higher precision?"""
    tensors = tensors_of(arguments)
    cast = any(enabled and dtype in HIGHER for enabled, dtype in autocast.values())
    return any(tensor.dtype in HIGHER for tensor in tensors) or (cast and any(tensor.dtype in FLOATS for tensor in tensors))


def precision(mode: str, autocast: Autocast) -> Autocast:
    """How autocast stands in the second run: off where precision is what is changed."""
    if mode not in (perturb.IMPROVE, perturb.TO_CPU):
        return autocast
    return {kind: (False, dtype) for kind, (_, dtype) in autocast.items()}


def find_autocast_type(autocast: Autocast, results: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The type that autocast has rounded the inputs to, of a call with these results. The second run starts from the same numbers: how
    an operator computes is looked at, not what it was given."""
    types = {result.dtype for result in results if result.dtype in FLOATS}
    return next((dtype for enabled, dtype in autocast.values() if enabled and types == {dtype}), None)


def raise_precision(tensor: torch.Tensor) -> torch.Tensor:
    """In the higher precision, where there is one; follows autograd."""
    return tensor.to(HIGHER.get(tensor.dtype, tensor.dtype))


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU in a wider type; follows autograd."""
    return tensor.to("cpu", _WIDER.get(tensor.dtype, tensor.dtype))


def replace_devices(arguments: Any, device: str) -> Any:
    if isinstance(arguments, torch.device):
        return torch.device(device)
    if type(arguments) is dict:
        return {key: replace_devices(value, device) for key, value in arguments.items()}
    return type(arguments)(replace_devices(value, device) for value in arguments) if type(arguments) in (list, tuple) else arguments


class Change:
    """Changes arguments in one way.

    Args:
        rounded: what autocast rounds inputs to; see `find_autocast_type`.

    Attributes:
        how_much: numbers of `judge.norm_of`, by piece.
    """

    def __init__(self, mode: str, rounded: torch.dtype | None = None) -> None:
        self._mode, self._rounded = mode, rounded
        self._whole: dict[int, torch.Tensor] = {}
        self.how_much: list[torch.Tensor] = []

    def __call__(self, arguments: Any, cut: Sequence[bool] = (), own: bool = False) -> Any:
        """Changed arguments. They share no memory with tensors of the training when `own`.

        Args:
            arguments: of the call or of a piece.
            cut: which tensors are pieces; the others are the same in every piece.
            own: the call is going to write into them.

        Raises:
            Unperturbed: there is nothing to change.
        """
        if self._mode == perturb.TO_CPU:
            return replace_devices(mapped(arguments, _once(lambda tensor: _apart(on_cpu(self._round_input(tensor)), tensor, own))), "cpu")
        if self._mode == perturb.IMPROVE:
            return mapped(
                arguments, _once(lambda tensor: self._same(tensor, lambda t: _apart(raise_precision(self._round_input(t)), t, own)))
            )
        if self._mode == perturb.NO_CHANGE:
            return mapped(arguments, _once(copy_tensor)) if own else arguments
        chosen = next((tensor for tensor in tensors_of(arguments) if kind(tensor) is not None), None)
        if chosen is None:
            raise Unperturbed("no float input")
        is_piece = next((piece for tensor, piece in zip(tensors_of(arguments), cut) if tensor is chosen), True)

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is not chosen:
                return copy_tensor(tensor) if own else tensor
            if not is_piece and id(tensor) in self._whole:
                return self._whole[id(tensor)]
            made = perturb_tensor(tensor, self._mode)
            if self._mode != perturb.NO_CHANGE:
                self.how_much += change_of(tensor, made)
            if not is_piece:
                self._whole[id(tensor)] = made
            return made

        return mapped(arguments, _once(change))

    def _round_input(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return tensor.to(self._rounded) if self._rounded is not None and tensor.dtype == torch.float32 else tensor

    def _same(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What is whole in every piece is converted once; pieces are objects of their own."""
        if tensor._is_view():
            return make(tensor)
        if id(tensor) not in self._whole:
            self._whole[id(tensor)] = make(tensor)
        return self._whole[id(tensor)]


def _apart(made: torch.Tensor, tensor: torch.Tensor, own: bool) -> torch.Tensor:
    return made.clone() if own and made.data_ptr() == tensor.data_ptr() else made


def runs(seen: Seen, mode: str, results: Sequence[torch.Tensor], change: Change) -> Generator[Pairs, None, None]:
    """Make the call again, piece by piece: (number of the result, original, the other one), of results that are compared.

    Args:
        seen: the call.
        results: all its tensors.

    Raises:
        Unperturbed: it cannot be made again, or gives something else.
    """
    exact = mode == perturb.NO_CHANGE
    floats = [result for result in results if kind(result) is not None]
    plan = None
    if not exact and mode != perturb.CHANGE_VALUE and not seen.writes and len(floats) == len(results):
        plan = pieces(seen.api, *seen.arguments, results)
    spans = [(0, 0)] if plan is None else list(plan.spans())
    with apart(seen.tensors, precision(mode, seen.autocast)):
        for start, length in spans:
            arguments = seen.arguments if plan is None else plan.arguments(seen.arguments, start, length)
            again = _run_again(seen.func, change(arguments, () if plan is None else plan.cut, seen.writes))
            cut = results if plan is None else [plan.result(result, start, length) for result in results]
            if [tuple(tensor.shape) for tensor in again] != [tuple(tensor.shape) for tensor in cut]:
                raise Unperturbed("results of other shapes")
            yield [
                (position, old, new)
                for position, (old, new) in enumerate(zip(cut, again))
                if (kind(old) and kind(new)) or (exact and _plain(old))
            ]


def _plain(tensor: torch.Tensor) -> bool:
    """Is it a tensor whose values can be compared, though no float?"""
    return (
        tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not (tensor.is_floating_point() or tensor.is_complex())
    )


def _run_again(func: Callable[..., Any], arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[torch.Tensor]:
    args, kwargs = arguments
    try:
        return outputs_of(func(*args, **kwargs), arguments)
    except Exception as error:  # whatever an operator has against a second call: no kernel of this type, no memory
        raise_of_training(error)
        raise Unperturbed(f"no second run ({type(error).__name__})") from None


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
    division = _along(api.strip("_"), args, kwargs, tensors, shape)
    if division is None:
        return None
    dim, cut = division
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
    return tensor.dim() <= len(shape) and all(
        length in (1, result_length) for length, result_length in zip(reversed(tensor.shape), reversed(shape))
    )


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
