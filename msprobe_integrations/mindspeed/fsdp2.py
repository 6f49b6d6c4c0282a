"""Backends without Megatron and without features, with loops of their own: the Trainer of MindSpeed-LLM (``train_fsdp2.py``), the
`TrainEngine` of MindSpeed-MM (``mindspeed_mm/fsdp``).

A step begins with the Trainer's first `training_step` (one micro batch each), or with the engine's `train_step` (all of them), ends with
the step of the optimizer, and has their number. Logging and checkpoints come after that; the Trainer's ranks tell each other losses
after it, those of the engine within.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.patching import Patches

if TYPE_CHECKING:
    from msprobe_engine.core.settings.schema import ProbeSettings
    from msprobe_integrations.mindspeed.fsdp2_observer import Fsdp2Observer

_patches = Patches()


def patch_trainer(module: ModuleType) -> None:
    """The Trainer's module has been imported. What its version lacks is not wrapped."""
    _patches.around(getattr(module, "Trainer", None), "training_step", _training_step)
    _patches.around(getattr(module, "Trainer", None), "train", _train)
    _patches.around(module, "clip_grad_norm", _clip_grad_norm)


def patch_engine(module: ModuleType) -> None:
    """The engine's module has been imported."""
    engine = getattr(module, "TrainEngine", None)
    _patches.around(engine, "train_step", _train_step)
    _patches.around(engine, "get_batch", _get_batch)
    _patches.around(engine, "evaluate", _evaluate)
    _patches.around(engine, "train", _train)
    _patches.around(module, "clip_grad_norm", _clip_grad_norm)


def put_back() -> None:
    """Take back `patch_trainer`: the Trainer's functions are its own again."""
    _patches.undo()


def _training_step(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _begin_step(args[0])
    quietly(observer, "micro batches", "pass_begins")
    if observer is None:
        return original(*args, **kwargs)
    try:
        result = original(*args, **kwargs)
    except Exception:
        observer.interrupted()
        raise
    observer.pass_ends(result[0] if isinstance(result, tuple) and result else result)  # losses: all, lm, mtp, aux
    return result


def _train_step(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _begin_step(args[0])
    if observer is None:
        return original(*args, **kwargs)
    try:
        result = original(*args, **kwargs)
    except Exception:
        observer.interrupted()
        raise
    with observer.safely("loss"):
        observer.add_scalars({str(name).replace(" ", "_"): value for name, value in result.items()})
    return result


def _get_batch(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _current()
    if observer is not None and observer.in_step:
        quietly(observer, "micro batches", "pass_begins")
    return original(*args, **kwargs)


def _evaluate(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _current()
    if observer is None:
        return original(*args, **kwargs)
    with observer.evaluation():
        return original(*args, **kwargs)


def _train(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return original(*args, **kwargs)
    finally:
        quietly(_current(), "the end of the training", "flush")


def _clip_grad_norm(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = original(*args, **kwargs)
    observer = _current()
    if observer is not None:
        from msprobe_integrations.torch.training.trainer_loop import number

        with observer.safely("gradient norm"):
            observer.add_scalars({"grad_norm": number(result)})
    return result


def quietly(observer: Fsdp2Observer | None, what: str, method: str) -> None:
    """Call a method of the observer; nothing that it raises comes out."""
    from msprobe_integrations.torch.training import trainer_loop

    trainer_loop.quietly(observer, what, method)


def _begin_step(trainer: Any) -> Fsdp2Observer | None:
    """The observer, with a step open for what is about to run; None when there is nobody to follow."""
    from msprobe_integrations.torch.training import owner

    try:
        observer = owner.claim("mindspeed", _make_observer)
        if observer is not None:
            observer.follow_trainer(trainer)
            if not observer.in_step:
                observer.begin(observer.count_updates(trainer))
        return observer
    except Exception as error:
        raise_of_training(error)
        from msprobe_integrations.torch.training.trainer_loop import report_fault

        report_fault(_current(), f"the {type(trainer).__name__} of MindSpeed", error)
        return None


def _current() -> Fsdp2Observer | None:
    from msprobe_integrations.torch.training import owner

    observer = owner.current()
    return observer if getattr(observer, "trainer", None) is not None else None  # type: ignore[return-value]


def _make_observer(settings: ProbeSettings, file: Path) -> Fsdp2Observer:
    from msprobe_integrations.mindspeed.fsdp2_observer import Fsdp2Observer

    return Fsdp2Observer(settings, file=file)
