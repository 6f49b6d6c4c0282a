"""One call on one side: forward, what it wrote into its arguments, and the gradients of its inputs.

A side is a device and a mapping of floating types: the target runs in the recorded types (or another one), the bench in wider ones.
Arguments come as values on the CPU and are copied for each side, so that no run sees what another has written. Random state is forked
and seeded: both sides of a call draw the same numbers where they draw the same way.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Types = Mapping[torch.dtype, torch.dtype]
Path = tuple[int | str, ...]
"""Where a value stands in the arguments: ``(0,)``, ``(1, 2)``, ``("out",)``."""


class Side(NamedTuple):
    """Where and in which types a call runs.

    Attributes:
        device: of all its tensors.
        types: a floating (or complex) type to the one that takes its place; others stay.
        autocast: low precision type of an autocast region around the call; None: no region.
        compiled: the function goes through ``torch.compile``.
    """

    device: torch.device
    types: Types = {}
    autocast: torch.dtype | None = None
    compiled: bool = False


class Call(NamedTuple):
    """What is to be run.

    Attributes:
        function: takes `args` and `kwargs`.
        args, kwargs: values on the CPU in the recorded types.
        wanted: places of the tensors whose gradients are asked for; empty: forward only.
        gradients: what comes into the backward, one for each differentiable output, None where nothing does; on the CPU. Empty: ones.
        seed: of the random state.
        stir: relative change, up or down by chance, of what autograd saves between forward and backward; 0: none. The forward's result
            and intermediate values are rounded there, and some gradients (of tanh, of softmax) hang on them more than on the inputs.
        turn: of the chance.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    wanted: tuple[Path, ...]
    gradients: Sequence[torch.Tensor | None]
    seed: int
    stir: float = 0.0
    turn: int = 0


class Outcome(NamedTuple):
    """What came of it, detached, on the side's device.

    Attributes:
        outputs: leaves of the result, in order: tensors, numbers, None.
        written: arguments that the call changed and did not return.
        gradients: by place; None where the call does not depend on the tensor.
        backward_error: why there are no gradients though they were asked for; empty else.
    """

    outputs: list[Any]
    written: dict[Path, torch.Tensor]
    gradients: dict[Path, torch.Tensor | None]
    backward_error: str


def run(call: Call, side: Side) -> Outcome:
    """Run a call once.

    Raises:
        Exception: whatever the function says of arguments that it does not take.
    """
    places: dict[int, Path] = {}
    leaves: dict[Path, torch.Tensor] = {}
    copies: dict[Path, torch.Tensor] = {}

    def moved(value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = value.to(side.device, side.types.get(value.dtype, value.dtype), copy=True)
            if path in call.wanted:
                leaves[path] = tensor.requires_grad_()
                with torch.enable_grad():
                    tensor = tensor.clone()  # no leaf: operations may write to it
            copies[path] = tensor
            places[id(tensor)] = path
            return tensor
        if isinstance(value, torch.device):
            return side.device
        if isinstance(value, torch.dtype):
            return side.types.get(value, value)
        if type(value) is dict:
            return {key: moved(child, (*path, key)) for key, child in value.items()}
        if type(value) in (list, tuple):
            return type(value)(moved(child, (*path, n)) for n, child in enumerate(value))
        return value

    devices = [] if side.device.type == "cpu" else [side.device]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices, device_type=side.device.type if devices else "cuda"):
        warnings.simplefilter("ignore")
        args = [moved(value, (n,)) for n, value in enumerate(call.args)]
        kwargs = {key: moved(value, (key,)) for key, value in call.kwargs.items()}
        versions = {path: tensor._version for path, tensor in copies.items()}
        torch.manual_seed(call.seed)
        region = torch.autocast(side.device.type, side.autocast, enabled=side.autocast is not None)
        saving = _stirred(call) if call.stir and leaves else contextlib.nullcontext()
        with torch.set_grad_enabled(bool(leaves)), region, saving:
            result = _function(call, side)(*args, **kwargs)
        outputs = list(leaves_of(result))
        returned = {id(value) for value in outputs}
        written = {path: t for path, t in copies.items() if t._version != versions[path] and id(t) not in returned}
        gradients, problem = _backward([*outputs, *written.values()], leaves, call) if leaves else ({}, "")
    return Outcome([_detached(v) for v in outputs], {path: t.detach() for path, t in written.items()}, gradients, problem)


def _stirred(call: Call) -> contextlib.AbstractContextManager[Any]:
    generator = torch.Generator().manual_seed(call.seed + 1000 + call.turn)

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        return stirred(saved, call.stir, generator) if saved.is_floating_point() or saved.is_complex() else saved

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack)


def stirred(values: torch.Tensor, unit: float, generator: torch.Generator) -> torch.Tensor:
    """Every element changed by `unit` of itself, up or down by chance; of the type it has, which must be wide enough to show it."""
    signs = torch.randint(0, 2, values.shape, generator=generator).to(values.device, torch.float64) * 2 - 1
    return (values * (1 + signs * unit)).to(values.dtype)


def _function(call: Call, side: Side) -> Callable[..., Any]:
    if not side.compiled:
        return call.function
    function = call.function
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(lambda *args, **kwargs: function(*args, **kwargs), dynamic=False)
    return compiled


def _backward(outputs: Sequence[Any], leaves: dict[Path, torch.Tensor], call: Call) -> tuple[dict[Path, torch.Tensor | None], str]:
    tensors = [out for out in outputs if isinstance(out, torch.Tensor)]
    roots = [out for out in tensors if out.requires_grad]
    if not roots:
        return {}, "no output depends on an input that has a gradient"
    incoming = list(call.gradients)
    if len(incoming) != len(roots) and len(incoming) == len(tensors):
        incoming = [gradient for gradient, out in zip(incoming, tensors) if out.requires_grad]
    if not incoming:
        incoming = [torch.ones((), dtype=root.dtype).expand(root.shape) for root in roots]
    if len(incoming) != len(roots):
        return {}, f"the dump has {len(incoming)} gradients for {len(roots)} differentiable outputs"
    pairs = [(root, gradient) for root, gradient in zip(roots, incoming) if gradient is not None]
    if wrong := [(list(g.shape), list(root.shape)) for root, g in pairs if g.shape != root.shape]:
        return {}, f"the dump has a gradient of shape {wrong[0][0]} for an output of shape {wrong[0][1]}"
    if not pairs:
        return {}, "the dump has no gradient for it"
    heads = [root for root, _ in pairs]
    found = torch.autograd.grad(heads, list(leaves.values()), [g.to(r.device, r.dtype) for r, g in pairs], allow_unused=True)
    return dict(zip(leaves, found)), ""


def leaves_of(value: Any) -> Iterator[Any]:
    """Leaves of nested lists, tuples and dicts, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for child in value:
            yield from leaves_of(child)
    else:
        yield value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
