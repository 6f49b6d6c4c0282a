"""How the probe gets into torchtitan: its `train_step` is a step of the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from msprobe_integrations.autoload.imports import after_import

_MODULES = ("torchtitan.trainer", "torchtitan.train")
"""Where the Trainer is defined, since 0.3 and before."""


def arm() -> None:
    """torchtitan is about to be imported and a probe was asked for."""
    for name in _MODULES:
        after_import(name, _patch)


def _patch(module: ModuleType) -> None:
    from msprobe_integrations.patching import replace

    trainer = getattr(module, "Trainer", None)
    if trainer is not None and trainer.__module__ == module.__name__:
        replace(trainer, "train_step", _train_step)
        replace(trainer, "close", _close)


def _train_step(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from msprobe_integrations.torch.training.trainer_loop import shielded

    with shielded("torchtitan", lambda: _follow_training(args[0])):
        return original(*args, **kwargs)


@contextmanager
def _follow_training(trainer: Any) -> Iterator[None]:
    from msprobe_integrations.torch.training import owner
    from msprobe_integrations.torchtitan.observer import TitanObserver

    observer = owner.claim("torchtitan", lambda settings, file: TitanObserver(settings, file=file))
    if observer is None:
        yield
        return
    observer.follow_trainer(trainer)
    with observer.driven(trainer.step - 1):
        yield


def _close(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before process groups are taken down: what was seen is written."""
    from msprobe_integrations.torch.training import owner
    from msprobe_integrations.torch.training.trainer_loop import quietly
    from msprobe_integrations.torchtitan.observer import TitanObserver

    observer = owner.current()
    if isinstance(observer, TitanObserver):
        quietly(observer, "the end of torchtitan", "close")
        with observer.safely("closing"):
            owner.release(observer)
    return original(*args, **kwargs)
