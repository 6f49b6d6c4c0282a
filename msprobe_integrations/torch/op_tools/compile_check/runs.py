"""One call of a module that can be made again: what it was given, and the random state, buffers and autocast it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from msprobe_integrations.torch.ranks.job import Job

_job = Job()
streams, put_streams = _job.random_state, _job.set_random_state
"""States of every random stream a module may draw from."""


@contextmanager
def same_streams(state: Any = None) -> Iterator[None]:
    """Random streams are afterwards as they were before; inside they start from `state` (`streams`)."""
    before = streams()
    if state is not None:
        put_streams(state)
    try:
        yield
    finally:
        put_streams(before)


@contextmanager
def same_buffers(module: nn.Module, values: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
    """Buffers are afterwards as they were before; inside they start from `values`."""
    buffers = list(module.buffers())
    before = [buffer.detach().clone() for buffer in buffers]
    with torch.no_grad():
        for buffer, value in zip(buffers, values or ()):
            buffer.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before):
                buffer.copy_(value)


class Call(NamedTuple):
    """A call of a module, to be made again.

    Attributes:
        leaves, structure: of (args, kwargs); tensors are copies.
        wanted: which leaves had ``requires_grad``.
        streams, buffers: as the call found them.
        autocast: (device type, type) of the region it was made in; None: in none.
        grad: gradients were recorded.
    """

    leaves: list[Any]
    structure: Any
    wanted: list[bool]
    streams: Any
    buffers: list[torch.Tensor]
    autocast: tuple[str, torch.dtype] | None
    grad: bool

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cast: torch.dtype | None) -> Call:
        """Keep a call that is about to be made.

        Args:
            cast: type of an autocast region around it; None: the one it is in.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        wanted = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        device = device_of(module, leaves)
        autocast = (device, cast) if cast is not None else None
        if cast is None and torch.is_autocast_enabled(device):
            autocast = (device, torch.get_autocast_dtype(device))
        buffers = [buffer.detach().clone() for buffer in module.buffers()]
        return cls(copies, structure, wanted, streams(), buffers, autocast, torch.is_grad_enabled())

    def unit(self, parameters: Sequence[torch.Tensor]) -> torch.dtype | None:
        """The coarsest type that it computes in."""
        kinds = [t.dtype for t in (*self.leaves, *parameters) if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
        if self.autocast is not None:
            kinds.append(self.autocast[1])
        return max((kind for kind in kinds if kind.itemsize > 1), key=lambda kind: torch.finfo(kind).eps, default=None)

    def region(self) -> AbstractContextManager[Any]:
        """The autocast region it was made in."""
        return nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], dtype=self.autocast[1])


class Outcome(NamedTuple):
    """What a run gave; detached.

    Attributes:
        outputs: leaves of the result.
        given: leaves of the arguments, as the call has left them.
        inputs, parameters: gradients, None where there is none.
        problem: why there are no gradients though they were asked for.
    """

    outputs: list[Any]
    given: list[Any]
    inputs: list[torch.Tensor | None]
    parameters: list[torch.Tensor | None]
    problem: str = ""


def device_of(module: nn.Module, leaves: Sequence[Any]) -> str:
    """Type of the device that a call runs on."""
    tensor = next((t for t in (*module.parameters(), *leaves) if isinstance(t, torch.Tensor)), None)
    return "cpu" if tensor is None else tensor.device.type


def run(
    function: Callable[..., Any],
    module: nn.Module,
    call: Call,
    gradients: Sequence[torch.Tensor | None] | None,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    exact: bool = False,
) -> Outcome:
    """Make a call again. Neither buffers, nor random streams, nor gradients of parameters are different afterwards.

    Args:
        function: the module, or compiled code of it.
        module: whose parameters and buffers they are.
        gradients: what came into the backward of each output leaf; None: forward only.
        change: made with every tensor that is given, gradients too.
        exact: outside of autocast.

    Raises:
        Exception: whatever the module raises.
    """
    change = change or (lambda tensor: tensor)
    starts: list[torch.Tensor | None] = []  # a place for every leaf
    given: list[Any] = []
    with_gradients = gradients is not None and any(g is not None for g in gradients)
    for leaf, wanted in zip(call.leaves, call.wanted):
        if isinstance(leaf, torch.Tensor):
            leaf = change(leaf.clone())
            leaf = leaf.requires_grad_() if wanted and with_gradients else leaf
            starts.append(leaf if wanted and with_gradients else None)
            leaf = leaf.clone() if wanted and with_gradients else leaf  # a module may write into what it is given, not into a leaf
        else:
            starts.append(None)
        given.append(leaf)
    parameters = list(module.parameters())
    with same_streams(call.streams), same_buffers(module, call.buffers), torch.set_grad_enabled(with_gradients):
        args, kwargs = pytree.tree_unflatten(given, call.structure)
        with nullcontext() if exact else call.region():
            result = function(*args, **kwargs)
        outputs = pytree.tree_leaves(result)
        all_gradients, problem = _gradients(outputs, gradients or (), [*starts, *parameters], change) if with_gradients else ([], "")
    n = len(starts)
    return Outcome(
        _detach_tensors(outputs),
        _detach_tensors(given),
        all_gradients[:n] or [None] * n,
        all_gradients[n:] or [None] * len(parameters),
        problem,
    )


def _detach_tensors(values: Sequence[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in values]


def _gradients(
    outputs: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
    wanted: Sequence[torch.Tensor | None],
    change: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[list[torch.Tensor | None], str]:
    if len(outputs) != len(gradients):
        return [], f"{len(outputs)} outputs, {len(gradients)} before"
    pairs = [(out, g) for out, g in zip(outputs, gradients) if isinstance(out, torch.Tensor) and g is not None]
    if wrong := [n for n, (out, g) in enumerate(pairs) if not out.requires_grad or out.shape != g.shape]:
        return [], f"output {wrong[0]} has no gradient in this run"
    places = [n for n, t in enumerate(wanted) if t is not None and t.requires_grad]
    if not pairs or not places:
        return [], ""
    roots = [out for out, _ in pairs]
    computed = torch.autograd.grad(roots, [wanted[n] for n in places], [change(g).to(r.dtype) for r, g in pairs], allow_unused=True)  # type: ignore[arg-type]
    by_place = dict(zip(places, computed))
    return [by_place.get(n) for n in range(len(wanted))], ""
