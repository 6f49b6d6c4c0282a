"""Calls of torch that are made again: which can be, on what, and what must be as it was afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from msprobe_integrations.torch.op_tools.free_benchmark.values import tensors_of
from msprobe_integrations.torch.tensors.devices import is_capturing

_WRITES = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__", "__ipow__")
)
_WRITES_BITS = frozenset(("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"))
_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
"""Functions that write into an argument (running statistics) when this argument is true."""
_MAKES_TENSORS = ("from_", "empty", "new_", "full", "ones", "zeros", "eye", "arange", "linspace", "logspace", "rand", "as_tensor", "tensor")
_KINDS = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_interpreter: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def left_out(prefix: str, api: str, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why a call is not made again, None when it may be."""
    if api.startswith(_MAKES_TENSORS):
        return "makes tensors"
    if torch._C._get_tracing_state() is not None or _interpreter() is not None:
        return "inside of a transformation"
    for tensor in tensors_of((args, kwargs)):
        if type(tensor) not in _KINDS:
            return f"a tensor of class {type(tensor).__name__}"
        if tensor.layout != torch.strided or tensor.is_nested:
            return "a sparse or nested tensor"
        if tensor.is_meta:
            return "tensors without values"
        if not tensor.is_cpu and is_capturing(tensor.device.type):
            return "in a graph of the device"
    if kwargs.get("generator") is not None:
        return "random"
    if prefix == "Tensor" and api in ("apply_", "map_", "map2_"):
        return "calls a function of the program"
    return None


def writes(func: Any, api: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Is a call known to write into its arguments? Custom operators say so in their schema; what else does is found out by
    `Versions`, afterwards."""
    if (api.endswith("_") and not api.endswith("__")) or api in _WRITES or api in _WRITES_BITS:
        return True
    if kwargs.get("out") is not None or kwargs.get("inplace") or _inplace(func, args):
        return True
    when = _STATISTICS.get(api)
    if when is not None and _argument(func, when, args, kwargs, True):
        return True
    if api in ("embedding", "embedding_bag") and _argument(func, "max_norm", args, kwargs, None) is not None:
        return True
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) and _schema_writes(func)


def _schema_writes(func: Any) -> bool:
    overloads = [func] if isinstance(func, torch._ops.OpOverload) else [getattr(func, name) for name in func.overloads()]
    return any(overload._schema.is_mutable for overload in overloads)


@lru_cache(maxsize=4096)
def _positions(func: Any) -> Mapping[str, int]:
    """Positions of the parameters of a function that is written in Python."""
    try:
        return {name: at for at, name in enumerate(inspect.signature(func).parameters)}
    except (TypeError, ValueError):
        return {}


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], otherwise: Any) -> Any:
    if name in kwargs:
        return kwargs[name]
    at = _positions(func).get(name)
    return args[at] if at is not None and at < len(args) else otherwise


def _inplace(func: Any, args: Sequence[Any]) -> bool:
    at = _positions(func).get("inplace") if inspect.isfunction(func) else None
    return at is not None and at < len(args) and bool(args[at])


class Versions:
    """Which of the tensors have been written to since."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._seen = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def find_written(self) -> list[torch.Tensor]:
        """Those with another version now."""
        return [tensor for tensor, version in self._seen if tensor._version != version]


class RandomState:
    """State of the generators that a call may draw from."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._states = [(generator, generator.get_state()) for generator in _generators({tensor.device for tensor in tensors})]

    def has_drawn(self) -> bool:
        """Have numbers been drawn since?"""
        return any(not torch.equal(state, generator.get_state()) for generator, state in self._states)

    def restore(self) -> None:
        """As if none had been drawn."""
        for generator, state in self._states:
            generator.set_state(state)


def _generators(devices: set[torch.device]) -> Iterator[torch.Generator]:
    yield torch.default_generator
    for device in devices:
        module = None if device.type == "cpu" else getattr(torch, device.type, None)
        found = getattr(module, "default_generators", None)
        if module is not None and found:
            yield found[device.index if device.index is not None else module.current_device()]


Autocast = Mapping[str, tuple[bool, torch.dtype]]
"""Type of device -> is autocast on, and its type."""


def autocast_of(tensors: Sequence[torch.Tensor]) -> Autocast:
    """How autocast stands now, for the devices of these tensors."""
    kinds = {tensor.device.type for tensor in tensors}
    return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


@contextmanager
def apart(tensors: Sequence[torch.Tensor], autocast: Autocast, gradients: bool = False, training: bool = False) -> Iterator[None]:
    """A second run inside of this leaves nothing behind: no random numbers drawn, no graph of the training, nothing in the cache of
    autocast or in the hooks of saved tensors, and nobody who looks at calls (function modes, dispatch modes such as those of
    checkpointing) sees it.

    Args:
        tensors: what the call works on; their devices' random numbers are looked after.
        autocast: how autocast is to stand.
        gradients: record a graph of its own.
        training: the run takes the place of the training's: its graph is the training's.
    """
    random = RandomState(tensors)
    cached = torch.is_autocast_cache_enabled()
    with ExitStack() as around:
        around.enter_context(torch._C.DisableTorchFunction())
        if _dispatch_modes() and not training:
            around.enter_context(_disable_current_modes())
        if gradients:
            around.enter_context(torch.inference_mode(False))
            around.enter_context(torch.enable_grad())
            around.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        elif not training:
            around.enter_context(torch.no_grad())
        torch.set_autocast_cache_enabled(False)
        try:
            for kind, (enabled, dtype) in autocast.items():
                if enabled != torch.is_autocast_enabled(kind) or (enabled and dtype != torch.get_autocast_dtype(kind)):
                    around.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield
        finally:
            around.close()  # autocast sets the cache as it was when it began
            torch.set_autocast_cache_enabled(cached)
            if random.has_drawn():
                random.restore()
