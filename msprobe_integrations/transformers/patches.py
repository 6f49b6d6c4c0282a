"""`Trainer.train` looked through: the one place where a callback can get hold of the Trainer it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from msprobe_integrations.autoload.imports import after_import

_undo: list[Callable[[], None]] = []
_wanted: list[Any] = []


def follow(who: Any) -> None:
    """Look through `Trainer.train` from now on, or from the import of its module on, until `who` no longer wants it. Trainers that nobody
    follows only call through."""
    _wanted.append(who)
    after_import("transformers.trainer", _patch)


def unfollow(who: Any) -> None:
    """When nobody is left who wants it, put `Trainer.train` back."""
    if who in _wanted:
        _wanted.remove(who)
    while _undo and not _wanted:
        _undo.pop()()


def _patch(module: ModuleType) -> None:
    from msprobe_integrations.patching import replace

    if not _undo and _wanted:
        _undo.append(replace(module.Trainer, "train", _train))


def _train(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from msprobe_integrations.torch.training.trainer_loop import shielded

    with shielded("a Trainer", lambda: _following(args[0])):
        return original(*args, **kwargs)


@contextmanager
def _following(trainer: Any) -> Iterator[None]:
    """With the Trainer's own `MsprobeCallback`, or one that is there as long as this training."""
    from msprobe_integrations.transformers.callback import MsprobeCallback

    handler = trainer.callback_handler
    callback = next((each for each in handler.callbacks if isinstance(each, MsprobeCallback)), None)
    added = callback is None
    if callback is None:
        callback = MsprobeCallback()
        handler.add_callback(callback)
    try:
        with callback.training(trainer):
            yield
    finally:
        if added and callback in handler.callbacks:
            handler.remove_callback(callback)
