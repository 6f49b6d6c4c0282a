"""Faults planted in functions by module and name: what is called there raises, the training has to be what it is without the probe.

A job is a training with a probe. `reached` runs it once and says which functions of this project it called, with the number of calls;
`planted` runs it with one of them broken. So new functions are found by themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import os
import pickle
import select
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

PACKAGES = ("msprobe_integrations", "msprobe_engine")


class Planted(RuntimeError):
    """The fault."""


class Plant(NamedTuple):
    """A function of this project.

    Attributes:
        module: where it is.
        owner: its class, ``""`` for a function of the module.
        name: its name.
    """

    module: str
    owner: str
    name: str

    def __str__(self) -> str:
        return ".".join(part for part in self if part)

    def holder(self) -> Any:
        """The module or class that has it."""
        found: Any = importlib.import_module(self.module)
        for part in self.owner.split(".") if self.owner else ():
            found = getattr(found, part)
        return found


def loaded(packages: tuple[str, ...] = PACKAGES) -> Iterator[Plant]:
    """All functions of modules of this project that are imported, once each, where they are defined."""
    for name, module in sorted(sys.modules.items()):
        if module is None or not any(name == p or name.startswith(f"{p}.") for p in packages):
            continue
        for key, value in list(vars(module).items()):
            if inspect.isfunction(value) and value.__module__ == name and value.__name__ == key:
                yield Plant(name, "", key)
            elif inspect.isclass(value) and value.__module__ == name and not issubclass(value, BaseException):
                for method, function in list(vars(value).items()):
                    if inspect.isfunction(function) and not (method.startswith("__") and method != "__init__" and method != "__call__"):
                        yield Plant(name, value.__name__, method)


_unarmed: list[bool] = []


@contextlib.contextmanager
def unarmed() -> Iterator[None]:
    """Inside, planted faults wait: the user builds something, and there is no training yet."""
    _unarmed.append(True)
    try:
        yield
    finally:
        _unarmed.pop()


@contextlib.contextmanager
def planted(plant: Plant, error: BaseException | None = None, after: int = 0) -> Iterator[list[int]]:
    """The function raises from its call number `after` on; the list has one item per call that raised."""
    holder = plant.holder()
    found = inspect.getattr_static(holder, plant.name)
    guarded = _inside(found)
    original = found if guarded is None else guarded.cell_contents
    raised: list[int] = []
    calls = 0

    @functools.wraps(original)
    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if _unarmed:
            return original(*args, **kwargs)
        calls += 1
        if calls <= after:
            return original(*args, **kwargs)
        raised.append(calls)
        raise error if error is not None else Planted(f"planted in {plant}")

    if guarded is not None:
        guarded.cell_contents = broken
        yield raised
        guarded.cell_contents = original
        return
    with _replaced(holder, plant.name, original, broken):
        yield raised


def _inside(function: Any) -> Any:
    """Where a decorator that guards a method of a callback (``isolated``) keeps the method itself; None for other functions."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None or function.__code__.co_name != "call":
        return None
    return next((cell for cell in function.__closure__ or () if cell.cell_contents is inner), None)


@contextlib.contextmanager
def counted(plants: list[Plant]) -> Iterator[dict[Plant, int]]:
    """How often each function is called inside."""
    found: dict[Plant, int] = {}
    names = _names()
    with contextlib.ExitStack() as stack:
        for plant in plants:
            holder = plant.holder()
            original = inspect.getattr_static(holder, plant.name)
            stack.enter_context(_replaced(holder, plant.name, original, _counting(plant, original, found), names))
        yield found


def _counting(plant: Plant, original: Any, found: dict[Plant, int]) -> Any:
    @functools.wraps(original)
    def count(*args: Any, **kwargs: Any) -> Any:
        if not _unarmed:
            found[plant] = found.get(plant, 0) + 1
        return original(*args, **kwargs)

    return count


def _names() -> dict[int, list[tuple[types.ModuleType, str]]]:
    """Under which names modules of this project have a function, by its identity."""
    found: dict[int, list[tuple[types.ModuleType, str]]] = {}
    for other, module in list(sys.modules.items()):
        if module is not None and other.startswith("msprobe"):
            for key, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType):
                    found.setdefault(id(value), []).append((module, key))
    return found


@contextlib.contextmanager
def _replaced(
    holder: Any, name: str, original: Any, new: Any, names: dict[int, list[tuple[types.ModuleType, str]]] | None = None
) -> Iterator[None]:
    """`new` for `original` everywhere: also in modules that imported the function by name, as `names` has them."""
    places: list[tuple[Any, str]] = [(holder, name)]
    if isinstance(holder, types.ModuleType):
        names = _names() if names is None else names
        places += [(module, key) for module, key in names.get(id(original), []) if module is not holder]
    for place, key in places:
        setattr(place, key, new)
    try:
        yield
    finally:
        for place, key in places:
            setattr(place, key, original)


def is_wrapper(plant: Plant) -> bool:
    """Does this function stand in for one of the training and call it, or hold the guard itself? Then a fault in its place is the
    training's own, or the guard's."""
    function = inspect.getattr_static(plant.holder(), plant.name)
    if plant.name in _ENTRIES or f"{plant.owner}.{plant.name}" in _ENTRIES:
        return True
    return bool(_ORIGINALS & set(inspect.signature(function).parameters))


_ENTRIES = (
    *("guard", "safely", "_safely", "__call__", "_run_job", "_submit_job"),
    *(
        "TrainingDetector._enters",
        "TrainingDetector._leaves",
        "TrainingDetector.within",
        "TrainingDetector._update_begins",
        "TrainingDetector._update_ends",
    ),
    *("Capture._before_optimizer", "Capture._after_optimizer", "PlainSource._before", "PlainSource._after"),
    *(
        "Handles._notify_observers",
        "SinkQueue._run",
        "StalledRule._watch",
        "SignalShutdown._wait_for_signals",
        "_guard_observer",
        "before_import",
    ),
    *("LoopObserver.close", "PlainObserver.close", "EngineObserver.close", "TorchProbe.close"),
    *("._training_now", "._quietly", ".get_observer", ".quietly", "._observer", ".shielded"),
    *("._leave", ".ours_off", "._with_ours", ".__getattr__"),
    *("TrainingObserver.forward_backward", "TrainingObserver.iteration", "DeepSpeedCallback.on_setup", "DeepSpeedCallback.close"),
)
"""What gives the guard, and what torch or a thread of a pool calls itself: the guard is in there, not around it."""
_ORIGINALS = {"following", "engine", "apply", "original", "run", "op", "func", "call"}
"""Names of parameters that hold what is wrapped."""


def apart(function: Callable[[], Any], timeout: float = 90.0) -> Any:
    """``function()`` in a forked child, which keeps what a fault has broken. A child that dies or hangs is an error."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        os.setsid()  # its ranks end with it
        atexit._clear()
        try:
            answer: tuple[bool, Any] = True, function()
        except BaseException as error:  # the parent says it
            lines = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-6:]]
            answer = False, f"{type(error).__name__}: {error} {lines}"
        with os.fdopen(sending, "wb") as file:
            file.write(pickle.dumps(answer))
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as file:
        data = file.read() if select.select([file], [], [], timeout)[0] else b""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    done, value = pickle.loads(data) if data else (False, f"died, or did not end in {timeout:.0f} s")
    if not done:
        raise AssertionError(value)
    return value


def ended() -> list[str]:
    """What the interpreter does at its end: threads that are waited for, handlers of `atexit`. Returns what was raised there."""
    raised: list[str] = []
    sys.unraisablehook = lambda told: raised.append(f"{type(told.exc_value).__name__}: {told.exc_value}")
    threading._shutdown()
    atexit._run_exitfuncs()
    return raised
