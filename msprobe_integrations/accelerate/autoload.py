"""What Accelerate knows of a loop of one's own that is followed already.

Whoever follows an optimizer of torch or an engine of DeepSpeed follows it inside of an `Accelerator` too: `AcceleratedOptimizer.step` calls
the optimizer once per update, `Accelerator.backward` calls backward, the wrapped models are those that the loop calls. What they cannot
know is added here: the gradient norm over all shards that `clip_grad_norm_` returns, and which calls are not part of the training.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.autoload.imports import after_import

if TYPE_CHECKING:
    from msprobe_integrations.torch.training.loop import LoopObserver

NOT_TRAINING = ("save_state", "load_state", "save_model", "get_state_dict", "gather", "gather_for_metrics")
"""Methods of an Accelerator inside of which nothing is seen."""


def arm() -> None:
    """Accelerate is about to be imported and a probe was asked for."""
    after_import("accelerate.accelerator", _patch)


def _patch(module: ModuleType) -> None:
    from msprobe_integrations.accelerate.reliance import NAME, PACKAGE, TABLE
    from msprobe_integrations.requirements import check

    check(NAME, PACKAGE, TABLE)
    patch(module)


def patch(module: ModuleType) -> list[Callable[[], None]]:
    """Look through the methods of `Accelerator`; returns what puts them back. Without an observer they only call through."""
    from msprobe_integrations.patching import replace

    accelerator = module.Accelerator
    return [replace(accelerator, name, _outside) for name in NOT_TRAINING] + [replace(accelerator, "clip_grad_norm_", _clip)]


def _outside(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from msprobe_integrations.torch.training.trainer_loop import shielded

    observer = _observer()
    if observer is None:
        return original(*args, **kwargs)
    with shielded("Accelerate", observer.evaluation, observer):
        return original(*args, **kwargs)


def _clip(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from msprobe_integrations.torch.training.trainer_loop import report_fault

    norm = original(*args, **kwargs)
    observer = _observer()
    try:
        if observer is not None and observer.in_step:
            observer.add_scalars(_read_grad_norm(norm))
    except Exception as error:
        raise_of_training(error)
        report_fault(observer, "the gradient norm", error)
    return norm


def _observer() -> LoopObserver | None:
    """Whoever follows now; None also when that cannot be told, which is said."""
    from msprobe_integrations.torch.training import owner
    from msprobe_integrations.torch.training.loop import LoopObserver
    from msprobe_integrations.torch.training.trainer_loop import report_fault

    try:
        observer = owner.current()
        return observer if isinstance(observer, LoopObserver) else None
    except Exception as error:
        raise_of_training(error)
        report_fault(None, "Accelerate", error)
        return None


def _read_grad_norm(norm: Any) -> dict[str, Any]:
    import torch

    from msprobe_integrations.torch.training.trainer_loop import number

    value = number(norm) if isinstance(norm, torch.Tensor) else norm
    return {} if value is None else {"grad_norm": value}
