"""Modules whose calls are replayed by a CUDA graph.

Torch, Transformer Engine and Megatron refuse to capture modules that bear hooks, Megatron also to replay them; and a replay runs no
Python, so hooks inside see nothing. Such a module is watched at its boundary, where Python calls the replay. Hooks are off while
``make_graphed_callables`` runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_engine.core.log import warn_once
from msprobe_integrations.autoload.imports import after_import, forget
from msprobe_integrations.patching import FunctionPatches

_MANAGER = "cudagraph_manager"
"""Attribute of Megatron's modules that are replayed (``--cuda-graph-impl local``)."""
_GRAPHS = "cuda_graphs"
"""Attribute with the graphs of Megatron's modules that Transformer Engine replays (``--cuda-graph-impl transformer_engine``); a list."""
_MAKERS = (
    "transformer_engine.pytorch.graph",
    "transformer_engine.pytorch",
    "megatron.core.transformer.cuda_graphs",
    "megatron.core.transformer.module",
)
_MAKE = "make_graphed_callables"
_graphed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Hooks(Protocol):
    """What is taken off while graphs are made: the module hooks of a dump or of the monitor."""

    def hide(self) -> None: ...

    def show(self) -> None: ...

    def seal(self, module: nn.Module) -> None: ...


def is_graphed(module: nn.Module) -> bool:
    """Are calls of the module replays of a graph, or will they be?"""
    own = module.__dict__
    if _MANAGER in module._modules or _MANAGER in own or own.get(_GRAPHS) or module in _graphed:
        return True
    return _MAKE in getattr(own.get("forward"), "__qualname__", "")  # what torch and Transformer Engine have put there


class GraphedModules:
    """Keeps hooks away from where graphs are made. One for the process, while at least one capture is there (`join`, `leave`); a capture
    that was dropped without an end is none."""

    def __init__(self) -> None:
        self._users: weakref.WeakSet[Hooks] = weakref.WeakSet()
        self._patches = FunctionPatches()

    def join(self, hooks: Hooks) -> None:
        """`hooks` are on modules from now on."""
        self._users.add(hooks)
        if not self._patches:
            for owner in (torch.cuda, torch.cuda.graphs):
                self._patches.add(owner, _MAKE, self._make_graphed)
            for name in _MAKERS:
                after_import(name, self._patch_module)

    def leave(self, hooks: Hooks) -> None:
        """`hooks` are on modules no more."""
        self._users.discard(hooks)
        if not self._users:
            for name in _MAKERS:
                forget(name, self._patch_module)
            self._patches.close()

    def _patch_module(self, module: ModuleType) -> None:
        if callable(vars(module).get(_MAKE)):
            self._patches.add(module, _MAKE, self._make_graphed)
        for name, handler in (("CudaGraphManager", _replay), ("GraphableMegatronModule", _replay_te)):
            caller = vars(module).get(name)
            if caller is not None and caller.__module__ == module.__name__ and "__call__" in vars(caller):
                self._patches.add(caller, "__call__", handler)

    def _make_graphed(self, make: Callable[..., Any], callables: Any, *args: Any, **kwargs: Any) -> Any:
        users = list(self._users)
        for hooks in users:
            hooks.hide()
        try:
            result = make(callables, *args, **kwargs)
            modules = [each for each in (callables if isinstance(callables, (list, tuple)) else [callables]) if isinstance(each, nn.Module)]
            _graphed.update(modules)
            for hooks in users:
                for module in modules:
                    hooks.seal(module)
            say_silent(modules)
            return result
        finally:
            for hooks in users:
                hooks.show()


def _replay(call: Callable[..., Any], manager: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Megatron's manager runs or replays a module; the module's own call is not passed."""
    return _at_boundary(module, lambda: call(manager, module, args, kwargs), args, kwargs)


def _replay_te(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Megatron's module calls a graph of Transformer Engine, once it has some and only while it trains; else its own call follows."""
    if not module.__dict__.get(_GRAPHS) or not module.training:
        return call(module, *args, **kwargs)
    return _at_boundary(module, lambda: call(module, *args, **kwargs), args, kwargs)


def _at_boundary(module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    around = getattr(module.__dict__.get("_compiled_call_impl"), "around", None)
    return run() if around is None else around(run, args, kwargs)


def say_silent(modules: Iterable[nn.Module]) -> None:
    """Say once that what is inside graphed modules is not seen."""
    kinds = sorted({type(module).__name__ for module in modules})
    if kinds:
        warn_once(
            "CUDA graphs",
            f"calls of {', '.join(kinds[:5])} are replayed by CUDA graphs: they have records and statistics at their inputs and outputs, "
            "what is inside them has none (records of modules and calls, activations and their gradients, layer features), because a "
            "replay runs no Python. Run without CUDA graphs to see it",
        )


graphed_modules = GraphedModules()
