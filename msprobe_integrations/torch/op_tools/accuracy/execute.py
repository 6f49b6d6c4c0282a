"""One call on one side: forward, what it wrote into its arguments, and the gradients of its inputs.

A side is a device and a mapping of floating types: the target runs in the recorded types (or another one), the bench in wider ones.
Arguments come as values on the CPU and are copied for each side, so that no run sees what another has written. Random state is forked
and seeded: both sides of a call draw the same numbers where they draw the same way.

What round-off inside of an operator makes of its result: every intermediate result is changed by about one unit, up or down by chance.

Changed inputs do not tell everything of an operator's condition. A gradient that is exactly zero, because two equal terms cancel, stays
zero for all inputs, and every kernel that computes the terms one after the other has their round-off there. So operators are taken apart
into the steps of their definition (torch's own decompositions), and the result of each step is changed (Monte Carlo arithmetic). How far is
drawn too, half a unit to one and a half: of four whole units, up or down, every third sum is none at all, and a gradient that is the
difference of two equal numbers (a softmax whose probability is 1) would seem to have no round-off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_engine.core.operator_traits import UNINITIALISED
from msprobe_integrations.common.capture import nested
from msprobe_integrations.torch.op_tools.accuracy.arguments import Place
from msprobe_integrations.torch.op_tools.accuracy.types import FLOAT8, Types, move, nudge_tensor


class Nudge(NamedTuple):
    """Inputs, or intermediate results (`roundoff`), are changed by one unit of round-off.

    Attributes:
        unit: at least of this type.
    """

    unit: torch.dtype
    seed: int


class ExecutionOptions(NamedTuple):
    """Where and in which types a call runs.

    Attributes:
        device: of all its tensors.
        types: a floating (or complex) type to the one that takes its place; others stay.
        autocast: low precision type of an autocast region around the call; None: no region.
        compiled: the function goes through ``torch.compile``.
        nudge: change of the inputs; None: none.
        inside: change of every intermediate result (`roundoff`); None: none.
    """

    device: torch.device
    types: Types = {}
    autocast: torch.dtype | None = None
    compiled: bool = False
    nudge: Nudge | None = None
    inside: Nudge | None = None


class Call(NamedTuple):
    """What is to be run.

    Attributes:
        args, kwargs: values on the CPU in the recorded types.
        wanted: places of the tensors whose gradients are asked for; empty: forward only.
        gradients: what comes into the backward, one for each differentiable output, None where nothing does; on the CPU. Empty: ones.
        seed: of the random state.
        silent: places of tensors that the kernel may write to without a new version (running statistics).
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    wanted: tuple[Place, ...]
    gradients: Sequence[torch.Tensor | None]
    seed: int
    silent: tuple[Place, ...] = ()


class Outcome(NamedTuple):
    """What came of it, detached, on the side's device.

    Attributes:
        outputs: leaves of the result, in order: tensors, numbers, None.
        written: arguments that the call changed and did not return.
        gradients: by place; None where the call does not depend on the tensor.
        problem: why there are no gradients though they were asked for; empty else.
        drew: the forward has drawn random numbers.
    """

    outputs: list[Any]
    written: dict[Place, torch.Tensor]
    gradients: dict[Place, torch.Tensor | None]
    problem: str
    drew: bool = False


def run(function: Callable[..., Any], call: Call, side: ExecutionOptions) -> Outcome:
    """Run a call once.

    Raises:
        Exception: whatever the function says of arguments that it does not take.
    """
    try:
        return _run(function, call, side, _Arguments(call, side, copy=False))
    except RuntimeError as error:
        if not call.wanted or "in-place operation" not in str(error):
            raise
    return _run(function, call, side, _Arguments(call, side, copy=True))  # leaves are not to be written to


def _run(function: Callable[..., Any], call: Call, side: ExecutionOptions, arguments: _Arguments) -> Outcome:
    # as the default type is that of what an operation makes of integers, or of nothing
    wide, device = side.types.get(torch.get_default_dtype()), side.device.type
    with warnings.catch_warnings(), _seed_random_state(call.seed, side.device) as drawn:
        warnings.simplefilter("ignore")
        args = [arguments.of(value, (n,)) for n, value in enumerate(call.args)]
        kwargs = {key: arguments.of(value, (key,)) for key, value in call.kwargs.items()}
        versions = {place: tensor._version for place, tensor in arguments.copies.items()}
        before_call = {place: arguments.copies[place].clone() for place in call.silent if place in arguments.copies}
        before = torch.get_default_dtype()
        try:
            if wide is not None:
                torch.set_default_dtype(wide)
            with _inside(side), torch.set_grad_enabled(bool(arguments.leaves)), torch.autocast(device, side.autocast, bool(side.autocast)):
                result = _prepare_function(function, side)(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
        drew = drawn()
        outputs = list(leaves_of(result))
        returned = {id(value) for value in outputs}
        left = {place: t for place, t in arguments.copies.items() if id(t) not in returned}
        written = {place: t for place, t in left.items() if t._version != versions[place]}
        written |= {place: left[place] for place, old in before_call.items() if place in left and not torch.equal(old, left[place])}
        with _inside(side):
            gradients, problem = _backward([*outputs, *written.values()], arguments, call) if arguments.leaves else ({}, "")
    return Outcome([_detach_tensor(v) for v in outputs], {place: t.detach() for place, t in written.items()}, gradients, problem, drew)


def _inside(side: ExecutionOptions) -> AbstractContextManager[None]:
    return nullcontext() if side.inside is None else add_round_off(side.inside.unit, side.inside.seed)


@contextmanager
def _seed_random_state(seed: int, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Random numbers of the host and of `device` from this seed; afterwards as if none had been drawn. Gives what says whether some were.

    `torch.manual_seed` and `torch.random.fork_rng` ask every kind of device there is, which costs more than most operations."""
    generator = torch.default_generator
    state = generator.get_state()
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    device_state = module.get_rng_state(device) if module is not None and hasattr(module, "get_rng_state") else None
    try:
        generator.manual_seed(seed)
        if module is not None and device_state is not None:
            with module.device(device):
                module.manual_seed(seed)
        readers: list[Callable[[], torch.Tensor]] = [generator.get_state]
        if module is not None and device_state is not None:
            readers.append(partial(module.get_rng_state, device))
        states = [read() for read in readers]
        yield lambda: any(not torch.equal(before, read()) for before, read in zip(states, readers))
    finally:
        generator.set_state(state)
        if module is not None and device_state is not None:
            module.set_rng_state(device_state, device)


class _Arguments:
    """Copies of arguments for one side. What is one tensor at several places stays one: its gradient, at the first, is that of all.

    Attributes:
        leaves: tensors whose gradients are asked for.
        copies: what the function gets; with `copy` never a leaf, so that it may be written to.
    """

    def __init__(self, call: Call, side: ExecutionOptions, copy: bool) -> None:
        self._wanted, self._side, self._copy = set(call.wanted), side, copy
        self._signs = None if side.nudge is None else torch.Generator().manual_seed(side.nudge.seed)
        self.leaves: dict[Place, torch.Tensor] = {}
        self.copies: dict[Place, torch.Tensor] = {}
        self._made: dict[object, torch.Tensor] = {}

    def of(self, value: Any, place: Place) -> Any:
        side = self._side
        if isinstance(value, torch.Tensor):
            memory = memory_of(value)
            tensor = self._made.get(memory) if memory is not None else None
            if tensor is None:
                tensor = self.tensor(value)
                if place in self._wanted:
                    self.leaves[place] = tensor.requires_grad_()
                    if self._copy:
                        with torch.enable_grad():
                            tensor = tensor.clone()
                if memory is not None:
                    self._made[memory] = tensor
            self.copies[place] = tensor
            return tensor
        if isinstance(value, torch.device):
            return side.device
        if isinstance(value, torch.dtype):
            return value if value in FLOAT8 else side.types.get(value, value)  # what is rounded to 8 bits has to be rounded
        if type(value) is dict:
            return {key: self.of(child, (*place, key)) for key, child in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(child, (*place, n)) for n, child in enumerate(value))
        return value

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        moved = self._nudge_value(value)
        return moved.to(self._side.device, self._side.types.get(value.dtype, value.dtype), copy=moved is value)

    def _nudge_value(self, value: torch.Tensor) -> torch.Tensor:
        nudge, generator = self._side.nudge, self._signs
        if nudge is None or not (value.dtype.is_floating_point or value.dtype.is_complex):
            return value
        return nudge_tensor(value, nudge.unit, lambda shape: torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1)


def memory_of(tensor: torch.Tensor) -> object:
    """Equal for what is one tensor at several places; None for tensors without elements."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else None


def _prepare_function(function: Callable[..., Any], side: ExecutionOptions) -> Callable[..., Any]:
    if not side.compiled:
        return function
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(lambda *args, **kwargs: function(*args, **kwargs), dynamic=False)
    return compiled


def _backward(outputs: Sequence[Any], arguments: _Arguments, call: Call) -> tuple[dict[Place, torch.Tensor | None], str]:
    tensors = [out for out in outputs if isinstance(out, torch.Tensor)]
    roots = [out for out in tensors if out.requires_grad]
    if not roots:
        return {}, "no output depends on an input that has a gradient"
    incoming = list(call.gradients)
    if len(incoming) != len(roots) and len(incoming) == len(tensors):
        incoming = [gradient for gradient, out in zip(incoming, tensors) if out.requires_grad]
    if not incoming:
        incoming = [torch.ones((), dtype=root.dtype).expand(root.shape) for root in roots]
    if len(incoming) < len(roots):  # a formula need not have all results, an operator may have more that differentiate
        roots = roots[: len(incoming)]
    pairs = [(root, gradient) for root, gradient in zip(roots, incoming) if gradient is not None]
    if wrong := [(list(g.shape), list(root.shape)) for root, g in pairs if g.shape != root.shape]:
        return {}, f"the dump has a gradient of shape {wrong[0][0]} for an output of shape {wrong[0][1]}"
    if not pairs:
        return {}, "the dump has no gradient for it"
    heads = [root for root, _ in pairs]
    given = [arguments.tensor(g).to(root.dtype) for root, g in pairs]
    try:
        gradients = torch.autograd.grad(heads, list(arguments.leaves.values()), given, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        return {}, f"backward: {(str(error).splitlines() or [''])[0][:200]}"
    return dict(zip(arguments.leaves, gradients)), ""


def leaves_of(value: Any) -> Iterator[Any]:
    """Leaves of nested lists, tuples and dicts, in order; a ``torch.Size`` is one."""
    return nested.leaves_of(value, (torch.Size,))


def places_of(value: Any, place: Place = ()) -> Iterator[tuple[Place, torch.Tensor]]:
    """Tensors of nested arguments with their places, in order."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from places_of(child, (*place, key))
    elif isinstance(value, (list, tuple)):
        for n, child in enumerate(value):
            yield from places_of(child, (*place, n))


def _detach_tensor(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


_EXACT = frozenset([
    *UNINITIALISED, "_to_copy", "abs", "amax", "amin", "arange", "bitwise_not", "cat", "ceil", "clamp", "clamp_max", "clamp_min",
    "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "detach", "embedding", "eye", "fill", "fill_", "flip", "floor",
    "full", "full_like", "gather", "index", "index_select", "kthvalue", "lift_fresh", "lift_fresh_copy", "masked_fill",
    "masked_fill_", "masked_select", "max", "maximum", "median", "min", "minimum", "mode", "neg", "new_full", "new_zeros", "ones",
    "ones_like", "relu", "repeat", "roll", "round", "scalar_tensor", "scatter", "select_scatter", "sgn", "sign", "slice_scatter",
    "sort", "stack", "threshold", "threshold_backward", "topk", "tril", "triu", "trunc", "where", "zero_", "zeros", "zeros_like",
])  # fmt: skip
"""Operators that move values or choose among them."""
_WHOLE = frozenset(("cumsum", "cumprod"))
"""Operators whose definition there takes the square of their size in memory."""


@lru_cache(maxsize=1)
def _decompositions() -> Any:
    from torch._decomp import decomposition_table  # takes a moment, and most calls never need it

    return decomposition_table


class _RoundOff(TorchDispatchMode):
    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit = unit
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        steps: Callable[..., Any] | None = None if name in _EXACT or name in _WHOLE or func.is_view else _decompositions().get(func)
        if steps is not None and not func._schema.is_mutable:
            with self:
                result = steps(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not func.is_view and name not in _EXACT:
            for out in result if isinstance(result, (list, tuple)) else (result,):
                self._change(out)
        return result

    def _change(self, out: Any) -> None:
        if not isinstance(out, torch.Tensor) or out.dtype not in (torch.float64, torch.complex128):
            return
        with torch.no_grad():
            parts = torch.view_as_real(out) if out.is_complex() else out
            move(parts, lambda shape: self._changes(shape).to(out.device), self._unit)

    def _changes(self, shape: torch.Size) -> torch.Tensor:
        """In units, 0.5 to 1.5 in size; float32, also while another type is the default."""
        drawn = torch.rand(shape, generator=self._generator, dtype=torch.float32).mul_(2).sub_(1)
        return drawn.add_(drawn.sign().mul_(0.5))


@contextmanager
def add_round_off(unit: torch.dtype, seed: int) -> Iterator[None]:
    """Within, every step in float64 (complex128) is changed by about one unit of round-off of `unit`, forward and backward."""
    with sdpa_kernel(SDPBackend.MATH), _RoundOff(torch.finfo(unit).eps / 2, seed):
        yield
