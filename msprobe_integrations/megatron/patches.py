"""Where Megatron's functions are wrapped, and how: after their module is imported, and in every module that has taken the name.

Wrapped functions look up the current observer when they are called: without one they call through.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msprobe_integrations.autoload.imports import after_import

if TYPE_CHECKING:
    from msprobe_integrations.megatron.observer import TrainingObserver

_MARK = "__msprobe_wraps__"
_observer: TrainingObserver | None = None
_make: Callable[[], TrainingObserver | None] | None = None
flag_value: str | None = None
"""What ``--msprobe-config`` was given, once the launcher has taken it off the command line."""


def current() -> TrainingObserver | None:
    """The observer that events go to; it is made at the first event, when the script has imported torch in its own way."""
    global _observer, _make
    if _observer is None and _make is not None:
        make, _make = _make, None
        _observer = make()
    return _observer


def made() -> TrainingObserver | None:
    """The observer if there has been an event."""
    return _observer


def observe(make: Callable[[], TrainingObserver | None] | None, *, whole_loop: bool = True) -> None:
    """Send the events of this process's training to an observer (None: to nobody).

    Args:
        make: makes the observer.
        whole_loop: also find models, optimizers and steps (the launcher); False: only what happens within a step (a callback).
    """
    global _observer, _make
    _observer, _make = None, make
    if make is None:
        return
    hooks = {"megatron.core.pipeline_parallel.schedules": _schedules, "megatron.core.rerun_state_machine": _rerun_machine}
    if whole_loop:
        hooks["megatron.core.optimizer"] = _optimizer
        hooks["megatron.training.arguments"] = _arguments
        hooks["megatron.training.training"] = _training
    for name, hook in hooks.items():
        after_import(name, hook)


def wrap(module: ModuleType, name: str, around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Replace ``module.name`` by a call of ``around(original, args, kwargs)``, also where it was imported by name earlier.

    Does nothing when the name does not exist (another version) or is wrapped already.
    """
    original = getattr(module, name, None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, args, kwargs)

    setattr(wrapper, _MARK, original)
    setattr(module, name, wrapper)
    for other in list(sys.modules.values()):
        names = getattr(other, "__dict__", None)
        if names is None or other is module:
            continue
        for key, value in list(names.items()):
            if value is original and not key.startswith("__"):
                setattr(other, key, wrapper)


# megatron.core


def _schedules(module: ModuleType) -> None:
    wrap(module, "get_forward_backward_func", _get_forward_backward)
    wrap(module, "forward_step", _forward_step)


def _rerun_machine(module: ModuleType) -> None:
    machine: Any = getattr(module, "RerunStateMachine", None)
    if machine is not None:
        wrap(machine, "should_run_forward_backward", _should_run)


def _should_run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = made()
    if observer is None:
        return original(*args, **kwargs)
    with observer.evaluation():  # what the machine says to other ranks belongs to no run
        run = original(*args, **kwargs)
    observer.turn(args[0], bool(run))
    return run


def _get_forward_backward(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function = original(*args, **kwargs)

    @functools.wraps(function)
    def forward_backward(*a: Any, **k: Any) -> Any:
        observer = current()
        return function(*a, **k) if observer is None else observer.forward_backward(function, a, k)

    return forward_backward


def _forward_step(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = current()
    if observer is not None:
        observer.micro_batch(kwargs.get("current_microbatch"))
    return original(*args, **kwargs)


def _optimizer(module: ModuleType) -> None:
    for name in ("get_megatron_optimizer", "get_megatron_muon_optimizer"):
        wrap(module, name, _get_optimizer)


def _get_optimizer(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    optimizer = original(*args, **kwargs)
    chunks = argument(original, args, kwargs, "model_chunks")
    observer = current()
    if observer is not None and chunks is not None:
        observer.setup(chunks, optimizer)
    return optimizer


# megatron.training


def _arguments(module: ModuleType) -> None:
    wrap(module, "parse_args", _parse_args)


def _parse_args(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = argument(original, args, kwargs, "extra_args_provider")

    def provider(parser: Any) -> Any:
        parser = given(parser) if given is not None else parser
        if "--msprobe-config" not in parser._option_string_actions:
            group = parser.add_argument_group("msprobe")
            group.add_argument("--msprobe-config", default=flag_value, help="settings file of the probe")
        return parser

    if args:
        return original(provider, *args[1:], **kwargs)
    return original(**{**kwargs, "extra_args_provider": provider})


def _training(module: ModuleType) -> None:
    wrap(module, "setup_model_and_optimizer", _setup_model_and_optimizer)
    wrap(module, "train_step", _train_step)
    wrap(module, "evaluate", _evaluate)
    for name in ("save_checkpoint", "save_checkpoint_and_time"):
        wrap(module, name, _evaluate)  # nothing a checkpoint does belongs to a step


def _setup_model_and_optimizer(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = original(*args, **kwargs)
    observer = current()
    if observer is not None and isinstance(result, tuple) and len(result) >= 2 and result[1] is not None:
        observer.setup(result[0], result[1])
    return result


def _train_step(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = current()
    if observer is None:
        return original(*args, **kwargs)
    with observer.driven(_iteration(original, args, kwargs)) as scalars:
        result = original(*args, **kwargs)
        scalars.update(step_scalars(result))
    return result


def _evaluate(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = current()
    if observer is None:
        return original(*args, **kwargs)
    with observer.evaluation():
        return original(*args, **kwargs)


def _iteration(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Iterations done before this one (what Megatron logs is one more)."""
    found = argument(original, args, kwargs, "iteration")
    if isinstance(found, int):
        return found
    try:
        from megatron.training.global_vars import get_args

        found = getattr(get_args(), "curr_iteration", None)
    except Exception:
        return None
    return found if isinstance(found, int) else None


def step_scalars(result: Any) -> dict[str, Any]:
    """Loss and gradient norm from what `train_step` returns: (loss dict, skipped, ..., grad_norm, zeros ...), where grad_norm is
    the third of four values in 0.8 and 0.9 and the sixth of seven or more since 0.10."""
    from msprobe_integrations.megatron.observer import losses

    if not isinstance(result, tuple) or len(result) < 4:
        return {}
    found = losses(result[0])
    found["skipped"] = 1.0 if result[1] else 0.0
    norm = result[2] if len(result) < 7 else result[5]
    if isinstance(norm, (int, float)) or hasattr(norm, "detach"):
        found["grad_norm"] = norm
    return found


def argument(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The value given for parameter `name`, wherever it stands in this version's signature; None when not given."""
    if name in kwargs:
        return kwargs[name]
    names = list(inspect.signature(function).parameters)
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else None
