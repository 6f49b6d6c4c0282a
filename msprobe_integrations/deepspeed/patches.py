"""Where DeepSpeed's engines are wrapped: methods of their classes, once their modules are imported.

A wrapped method looks up the current observer when it is called: without one it calls through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.autoload.imports import after_import, forget
from msprobe_integrations.deepspeed import key
from msprobe_integrations.patching import Patches

if TYPE_CHECKING:
    from msprobe_integrations.deepspeed.engine import EngineObserver

_METHODS: dict[str, tuple[str, dict[str, str]]] = {
    "deepspeed.runtime.engine": (
        "DeepSpeedEngine",
        {
            "forward": "forward",
            "backward": "backward",
            "step": "step",
            "save_checkpoint": "quiet",
            "save_16bit_model": "quiet",
            "load_checkpoint": "quiet",
            "destroy": "destroy",
        },
    ),
    "deepspeed.runtime.pipe.engine": ("PipelineEngine", {"train_batch": "train_batch", "eval_batch": "quiet"}),
    "deepspeed.runtime.hybrid_engine": ("DeepSpeedHybridEngine", {"generate": "quiet"}),
}
"""Module, class, and per method the kind of event that `EngineObserver.call` knows."""
_find: Callable[[], EngineObserver | None] | None = None
_patches = Patches()


def observe(find: Callable[[], EngineObserver | None]) -> None:
    """Send the events of this process's engines to the observer that `find` makes at the first pass that trains."""
    global _find
    _find = find
    for name, hook in _HOOKS.items():
        after_import(name, hook)


def restore() -> None:
    """Put every method back that was replaced, by identity; nothing is observed any more."""
    global _find
    _find = None
    key.choose(None)
    for name, hook in _HOOKS.items():
        forget(name, hook)
    _patches.undo()


def _current(kind: str, engine: Any) -> EngineObserver | None:
    """Whoever follows this process's engines. A pass that trains may make the observer; an evaluation or a checkpoint before the first
    one does not. What goes wrong in the question leaves the engine alone."""
    if _find is None:
        return None
    try:
        import torch

        from msprobe_integrations.torch.training import owner

        observer = owner.current()
        if observer is not None:  # until then that module may be half imported: an engine that is collected meanwhile is asked about, too
            from msprobe_integrations.deepspeed.engine import EngineObserver

            if isinstance(observer, EngineObserver):
                return observer
        trains = kind == "train_batch" or (kind in ("forward", "backward") and torch.is_grad_enabled() and engine.module.training)
        return _find() if trains else None
    except Exception as error:
        raise_of_training(error)
        from msprobe_engine.core.log import get_logger

        restore()
        get_logger().error("DeepSpeed is not followed, training goes on: %s: %s", type(error).__name__, error)
        return None


def _wrap(module_name: str, module: ModuleType) -> None:
    class_name, methods = _METHODS[module_name]
    for name, kind in methods.items():
        _patches.around(getattr(module, class_name, None), name, functools.partial(_call, kind))


def _call(kind: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _current(kind, args[0]) if args else None
    return original(*args, **kwargs) if observer is None else observer.call(kind, original, args, kwargs)


_HOOKS: dict[str, Callable[[ModuleType], None]] = {name: functools.partial(_wrap, name) for name in _METHODS}
