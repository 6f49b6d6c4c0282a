"""MindSpeed-LLM's second backend (``train_fsdp2.py``), which has neither Megatron nor features: a Trainer with a loop of its own.

A step begins with its first `training_step` (one micro batch each), ends with the step of the optimizer, and has the Trainer's number.
Logging, checkpoints and what the ranks tell each other about losses come after that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_engine.settings.schema import ProbeSettings
    from msprobe_integrations.mindspeed.fsdp2_observer import Fsdp2Observer

_OURS = "__msprobe_trainer__"
_around_what: list[tuple[Any, str, Any]] = []
"""What `follow` has replaced: a class or module, a name, what was there."""


def follow(module: ModuleType) -> None:
    """The Trainer's module has been imported. What its version lacks is not wrapped."""
    _around(getattr(module, "Trainer", None), "training_step", _training_step)
    _around(getattr(module, "Trainer", None), "train", _train)
    _around(module, "clip_grad_norm", _clip_grad_norm)


def _around(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None or hasattr(original, _OURS):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, args, kwargs)

    setattr(call, _OURS, True)
    setattr(owner, name, call)
    _around_what.append((owner, name, original))


def put_back() -> None:
    """Take back `follow`: the Trainer's functions are its own again."""
    for owner, name, original in _around_what:
        if hasattr(getattr(owner, name, None), _OURS):
            setattr(owner, name, original)
    _around_what.clear()


def _training_step(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _begun(args[0])
    if observer is None:
        return original(*args, **kwargs)
    try:
        result = original(*args, **kwargs)
    except Exception:
        observer.interrupted()
        raise
    observer.pass_ends(result[0] if isinstance(result, tuple) and result else result)  # losses: all, lm, mtp, aux
    return result


def _train(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from msprobe_integrations.torch.trainer_loop import quietly

    try:
        return original(*args, **kwargs)
    finally:
        quietly(_current(), "the end of the training", "flush")


def _clip_grad_norm(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = original(*args, **kwargs)
    observer = _current()
    if observer is not None:
        from msprobe_integrations.torch.trainer_loop import number

        with observer.safely("gradient norm"):
            observer.note({"grad_norm": number(result)})
    return result


def _begun(trainer: Any) -> Fsdp2Observer | None:
    """The observer, with a step open for a micro batch that is about to run; None when there is nobody to follow."""
    from msprobe_integrations.torch import owner

    try:
        observer = owner.claim("mindspeed", _make)
        if observer is not None:
            observer.follow(trainer)
            if not observer.in_step:
                observer.begin(trainer.global_step)
            observer.pass_begins()
        return observer
    except Exception as error:
        from msprobe_integrations.torch.trainer_loop import failed

        failed(_current(), "the Trainer of MindSpeed-LLM", error)
        return None


def _current() -> Fsdp2Observer | None:
    from msprobe_integrations.torch import owner

    observer = owner.current()
    return observer if getattr(observer, "trainer", None) is not None else None  # type: ignore[return-value]


def _make(settings: ProbeSettings, file: Path) -> Fsdp2Observer:
    from msprobe_integrations.mindspeed.fsdp2_observer import Fsdp2Observer

    return Fsdp2Observer(settings, file=file)
