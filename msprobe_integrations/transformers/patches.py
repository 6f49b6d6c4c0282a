"""`Trainer.train` looked through: the one place where a callback can get hold of the Trainer it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any

from msprobe_integrations.autoload.imports import after_import

Following = Callable[[Any], AbstractContextManager[None]]
"""Of a Trainer: what is around its ``train``."""
_undo: list[Callable[[], None]] = []
_wanted: list[Any] = []


def patch_trainer(who: Any, following: Following) -> None:
    """Put `following` around `Trainer.train` from now on, or from the import of its module on, until `who` no longer wants it. Trainers
    that nobody follows only call through."""
    _wanted.append(who)
    after_import("transformers.trainer", partial(_patch, following))


def unpatch_trainer(who: Any) -> None:
    """When nobody is left who wants it, put `Trainer.train` back."""
    if who in _wanted:
        _wanted.remove(who)
    while _undo and not _wanted:
        _undo.pop()()


def _patch(following: Following, module: ModuleType) -> None:
    from msprobe_integrations.patching import replace

    if not _undo and _wanted:
        _undo.append(replace(module.Trainer, "train", partial(_train, following)))


def _train(following: Following, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from msprobe_integrations.torch.training.trainer_loop import shielded

    with shielded("a Trainer", lambda: following(args[0])):
        return original(*args, **kwargs)
