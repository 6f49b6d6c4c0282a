"""Where Megatron's functions are wrapped, and what each of them says to the observer: after their module is imported, and in every module
that has taken the name.

Wrapped functions look up the current observer when they are called: without one they call through. They call the original once, with the
caller's arguments, whatever becomes of the observer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger, warn_once
from msprobe_integrations.autoload import request
from msprobe_integrations.autoload.imports import after_import, forget
from msprobe_integrations.megatron import flags, graphs
from msprobe_integrations.patching import Around, Patches
from msprobe_integrations.requirements import MissingNameError, need

if TYPE_CHECKING:
    from msprobe_integrations.megatron.observer import TrainingObserver

_log = get_logger()
_observer: TrainingObserver | None = None
_make: Callable[[], TrainingObserver | None] | None = None
_whole_loop = True
_built: tuple[list[weakref.ref[Any]], weakref.ref[Any] | None] | None = None
_others: list[weakref.ref[Any]] = []
"""Model chunks of other trainings of this process: those that were built before."""
_marks: dict[str, float] = {}
_failed: set[str] = set()
_patches = Patches()


def wrap(place: Any, names: Mapping[str, Around]) -> None:
    """Replace functions of a module or class, the former also where they were imported by name earlier."""
    for name, around in names.items():
        _patches.around(place, name, around)
    if not isinstance(place, type):
        _patches.early_imports()


def unwrap() -> None:
    """All functions are Megatron's own again, also where they were imported to since."""
    _patches.late_imports()
    _patches.undo()


def current() -> TrainingObserver | None:
    """The observer that events go to; it is made at the first event, when the script has imported torch in its own way."""
    global _observer, _make
    if _observer is None and _make is not None:
        make, _make = _make, None
        with _quietly("training"):
            _observer = make()
    return _observer


def get_observer() -> TrainingObserver | None:
    """The observer if there has been an event."""
    return _observer


def observe(make: Callable[[], TrainingObserver | None] | None, *, whole_loop: bool = True) -> None:
    """Send the events of this process's training to an observer (None: to nobody, and all functions are Megatron's own again).

    Args:
        make: makes the observer when the training begins.
        whole_loop: also find models, optimizers and steps (a launch argument); False: only what happens within a step (a callback).
    """
    global _observer, _make, _whole_loop, _built
    _observer, _make, _whole_loop, _built = None, make, whole_loop, None
    _others.clear()
    _marks.clear()
    for name, hook in hooks():
        after_import(name, hook)
    if make is None:
        for name, hook in (*_WITHIN_A_STEP.items(), *_WHOLE_LOOP.items()):
            forget(name, hook)
        unwrap()


def hooks() -> Iterator[tuple[str, Callable[[ModuleType], None]]]:
    """(name of a module of Megatron, what wraps its functions once it is imported), as far as somebody observes; else nothing."""
    if _make is None and _observer is None:
        return
    yield from _WITHIN_A_STEP.items()
    if _whole_loop:
        yield from _WHOLE_LOOP.items()


def _training_now() -> TrainingObserver | None:
    """The observer of a pass that is about to run; it hears now of the models and the optimizer that were built."""
    observer = None
    with _quietly("training"):
        observer = current()
    if observer is not None and _whole_loop and _built is not None:
        with observer.safely("setting up"):
            chunks = [chunk() for chunk in _built[0]]
            optimizer = None if _built[1] is None else _built[1]()
            if chunks and None not in chunks:
                observer.setup(chunks, optimizer)
            for name in list(_marks):
                observer.mark(name, _marks.pop(name))
    return observer


def _were_built(chunks: Any, optimizer: Any) -> None:
    """Models are not followed before they train: a job that only evaluates has no probe."""
    global _built
    if chunks is None or optimizer is None:
        return
    chunks = list(chunks) if isinstance(chunks, (list, tuple)) else [chunks]
    for old in _built[0] if _built is not None else ():
        if not any(old() is chunk for chunk in chunks):
            _others.append(old)
    _built = [weakref.ref(chunk) for chunk in chunks], weakref.ref(optimizer)


# megatron.core


def _should_run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = get_observer()
    if observer is None:
        return original(*args, **kwargs)
    with observer.evaluation():  # what the machine says to other ranks belongs to no run
        run = original(*args, **kwargs)
    observer.handle_rerun(args[0], bool(run))
    return run


def _get_forward_backward(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function = original(*args, **kwargs)

    @functools.wraps(function)
    def forward_backward(*a: Any, **k: Any) -> Any:
        if graphs.is_recording():
            return function(*a, **k)
        observer = get_observer() if k.get("forward_only") else _training_now()
        if observer is None:
            return function(*a, **k)
        if not k.get("forward_only") and _is_other(k.get("model")):
            with observer.evaluation():
                return function(*a, **k)
        return observer.forward_backward(function, a, k)

    return forward_backward


def _passes(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stage = "validation" if kwargs.get("forward_only") else "training"
    observer = _training_now() if stage == "training" else get_observer()
    if observer is None or not graphs.is_graph(args[0], stage):
        return original(*args, **kwargs)
    run = functools.partial(original, *args, **kwargs)
    if stage == "validation" or _is_other(kwargs.get("model")):
        return graphs.run_unseen(observer, run)
    return graphs.run_passes(observer, run, kwargs)


def _update(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = get_observer()
    if observer is None or not graphs.is_graph(args[0], None):
        return original(*args, **kwargs)
    return graphs.run_update(observer, functools.partial(original, *args, **kwargs))


def _is_other(model: Any) -> bool:
    """Does a pass train another model than the one that is followed? Then it belongs to none of its steps."""
    if not _others or not _whole_loop:
        return False
    chunks = model if isinstance(model, (list, tuple)) else [model]
    other = any(old() is chunk for old in _others for chunk in chunks if chunk is not None)
    if other:
        text = "several models are trained in this process: the one that was built last is followed, the others are left alone"
        warn_once("several models of Megatron", text)
    return other


def _forward_step(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = get_observer()
    if observer is not None:
        observer.micro_batch(kwargs.get("current_microbatch"))
    return original(*args, **kwargs)


def _get_optimizer(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    optimizer = original(*args, **kwargs)
    with _quietly("optimizer"):
        _were_built(argument(original, args, kwargs, "model_chunks"), optimizer)
    return optimizer


# megatron.training


def _parse_args(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Megatron's parser learns the arguments of the probe, if anybody has asked for one; a mistake in them ends the launch here."""
    asked = request.current()
    if asked is None and not request.has_probe_argument():
        return original(*args, **kwargs)
    given = argument(original, args, kwargs, "extra_args_provider")

    def provider(parser: Any) -> Any:
        return flags.add(given(parser) if given is not None else parser, default=None if asked is None else asked.config)

    parsed = original(provider, *args[1:], **kwargs) if args else original(**{**kwargs, "extra_args_provider": provider})
    flags.asked_or_exit()
    return parsed


def _setup_model_and_optimizer(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = original(*args, **kwargs)
    with _quietly("model"):
        if isinstance(result, tuple) and len(result) >= 2:
            _were_built(result[0], result[1])
    return result


def _train_step(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _training_now()
    if observer is None:
        return original(*args, **kwargs)
    with observer.iteration(_iteration(original, args, kwargs)) as scalars:
        result = original(*args, **kwargs)
        with observer.safely("loss"):
            from msprobe_integrations.megatron.observer import step_scalars

            scalars.update(step_scalars(result))
    return result


def _training_log(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Megatron writes its log line. The step ends here, with the numbers that Megatron has computed for it."""
    observer = get_observer()
    if observer is None:
        return original(*args, **kwargs)
    try:
        return original(*args, **kwargs)
    finally:
        with observer.safely("log"):
            scalars = {name: argument(original, args, kwargs, given) for name, given in _LOGGED.items()}
            if isinstance(scalars["max_attention_logit"], (int, float)) and not scalars["max_attention_logit"]:
                del scalars["max_attention_logit"]  # Megatron's way to say that nobody has asked for it
            observer.add_logged_scalars(scalars)


_LOGGED = {"params_norm": "params_norm", "num_zeros": "num_zeros_in_grad", "max_attention_logit": "max_attention_logit"}


def _metrics(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Megatron adds up auxiliary losses of the step, over layers and ranks, in a dictionary that its log line divides and clears."""
    observer = get_observer()
    if observer is None:
        return original(*args, **kwargs)
    before: dict[str, Any] = {}
    sums: Any = None
    with observer.safely("log"):
        sums = argument(original, args, kwargs, "total_loss_dict")
        before = {name: value.clone() for name, value in (sums or {}).items() if hasattr(value, "clone")}
    result = original(*args, **kwargs)
    with observer.safely("log"):
        observer.auxiliary(sums, before)
    return result


def _evaluate(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = get_observer()
    if observer is None:
        return original(*args, **kwargs)
    with observer.evaluation():
        return original(*args, **kwargs)


def _save_checkpoint(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _evaluate(original, args, kwargs)
    with _quietly("checkpoint"):
        _mark("checkpoint_saved", "saved", argument(original, args, kwargs, "iteration"))
    return result


def _load_checkpoint(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _evaluate(original, args, kwargs)
    with _quietly("checkpoint"):
        if isinstance(result, tuple) and result and result[0]:  # 0: there was no checkpoint
            _mark("checkpoint_loaded", "loaded", result[0])
    return result


def _mark(name: str, what: str, iteration: Any) -> None:
    """A checkpoint lies between two steps: the later one has a scalar that says so."""
    if _make is None and _observer is None:
        return
    _log.info("checkpoint %s at iteration %s", what, iteration)
    _marks[name] = 1.0


def _iteration(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Iterations done before this one (what Megatron logs is one more)."""
    try:
        iteration = argument(original, args, kwargs, "iteration")
        if isinstance(iteration, int):
            return iteration
        from megatron.training.global_vars import get_args

        iteration = getattr(get_args(), "curr_iteration", None)
    except Exception as error:
        raise_of_training(error)
        return None
    return iteration if isinstance(iteration, int) else None


@functools.lru_cache(maxsize=64)
def _names(function: Callable[..., Any]) -> Mapping[str, int]:
    return {name: position for position, name in enumerate(inspect.signature(function).parameters)}


def argument(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The value given for parameter `name`, wherever it stands in this version's signature; None when not given."""
    if name in kwargs:
        return kwargs[name]
    position = _names(function).get(name, len(args))
    return args[position] if position < len(args) else None


@contextlib.contextmanager
def _quietly(what: str) -> Iterator[None]:
    """What goes wrong inside is said once and forgotten: there is no observer yet that it could switch off."""
    try:
        yield
    except Exception as error:
        raise_of_training(error)
        if what not in _failed:
            _failed.add(what)
            _log.error("Megatron's %s is not followed, training goes on: %s: %s", what, type(error).__name__, error)


def _hook(functions: Mapping[str, Around], owner: str = "", part: str = "", check: str = "") -> Callable[[ModuleType], None]:
    """What wraps functions of a module once it is imported, or methods of its class `owner`, without which `part` is off; `check`: of
    `reliance`, made before."""

    def hook(module: ModuleType) -> None:
        if check:
            from msprobe_integrations.megatron import reliance

            getattr(reliance, check)()
        if not owner:
            wrap(module, functions)
            return
        with contextlib.suppress(MissingNameError):
            place = need(module, owner, for_=part)
            for name in functions:
                need(place, name, for_=part)
            wrap(place, functions)

    return hook


_WITHIN_A_STEP = {
    "megatron.core.pipeline_parallel.schedules": _hook(
        {"get_forward_backward_func": _get_forward_backward, "forward_step": _forward_step}, check="check_schedules"
    ),
    "megatron.core.rerun_state_machine": _hook(
        {"should_run_forward_backward": _should_run}, "RerunStateMachine", "capture of the second run of the rerun machine"
    ),
    "megatron.core.full_cuda_graph": _hook({"__call__": _passes}, "FullCudaGraphWrapper", "steps of a CUDA graph of the whole pass"),
    "megatron.core.optimizer.optimizer_cuda_graph": _hook({"__call__": _update}, "OptimizerCudaGraphWrapper", "updates in a CUDA graph"),
}
_STEP: Mapping[str, Around] = {"train_step": _train_step, "training_log": _training_log}
_WHOLE_LOOP = {
    "megatron.core.optimizer": _hook(dict.fromkeys(("get_megatron_optimizer", "get_megatron_muon_optimizer"), _get_optimizer)),
    "megatron.core.transformer.moe.moe_logging": _hook(
        {"report": _metrics}, "MoEMetricsTracker", "auxiliary losses of a mixture of experts"
    ),
    "megatron.training.arguments": _hook({"parse_args": _parse_args}),
    "megatron.training.training": _hook(
        {
            **_STEP,
            "setup_model_and_optimizer": _setup_model_and_optimizer,
            "track_moe_metrics": _metrics,
            "evaluate": _evaluate,
            "save_checkpoint": _save_checkpoint,
            "save_checkpoint_and_time": _evaluate,  # nothing a checkpoint does belongs to a step
            "load_checkpoint": _load_checkpoint,
        }
    ),
    # a step and a log line of its own, between Megatron's functions for the rest; its step may take the schedule from elsewhere
    # (--hetero-parallel) and have no optimizer
    "mindspeed_mm.training": _hook(_STEP, check="check_loop_of_mindspeed_mm"),
}
