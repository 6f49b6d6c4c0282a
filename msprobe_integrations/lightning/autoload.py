"""How the probe gets into a program that trains with Lightning and knows nothing of the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from msprobe_integrations.autoload.imports import after_import

_MODULES = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


def arm() -> None:
    """One of the two packages is about to be imported and a probe was asked for."""
    for name in _MODULES:
        after_import(name, _patch)


def _patch(module: ModuleType) -> None:
    from msprobe_integrations.patching import replace

    replace(module.Trainer, "fit", _fit)


def _fit(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from msprobe_integrations.torch.training.trainer_loop import shielded

    with shielded("a Lightning Trainer", lambda: _attach_callback(args[0])):
        return original(*args, **kwargs)


@contextmanager
def _attach_callback(trainer: Any) -> Iterator[None]:
    """With the Trainer's own `MsprobeCallback`, or one that is there as long as this call. Ranks that the call spawns get a copy."""
    from msprobe_integrations.lightning.callback import MsprobeCallback

    if any(isinstance(each, MsprobeCallback) for each in trainer.callbacks):
        yield
        return
    callback = MsprobeCallback()
    trainer.callbacks.insert(0, callback)  # checkpoint callbacks have to stay last
    try:
        yield
    finally:
        if callback in trainer.callbacks:
            trainer.callbacks.remove(callback)
