"""A fault inside the probe disables the part it happened in, says so once, and the training goes on."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import signal
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from msprobe_engine.core.errors import ProbeError

_log = logging.getLogger("msprobe")  # `core.log`, which imports this, gives it its handler
_MARK = "_msprobe_of_training"
OURS = frozenset({"msprobe", "msprobe_engine", "msprobe_integrations"})
_LIBRARIES = frozenset({*sys.stdlib_module_names, *OURS, "torch", "mindspore", "numpy"} - {"__main__"})


def of_training(error: Exception) -> Exception:
    """Mark an error that is the training's own and came to light while the probe waited (frameworks whose operators run asynchronously
    report a failure to whoever waits next). It is no fault of the probe: `Faults` raises it, or the training would go on without it."""
    setattr(error, _MARK, True)
    return error


def is_of_training(error: BaseException) -> bool:
    """Was the error marked by `of_training`, or raised by a signal handler of the program, which may run in the midst of the probe?"""
    if getattr(error, _MARK, False) is True:
        return True
    return not isinstance(error, RecursionError) and _is_of_handler(error)  # at the limit of calls none is left to look


def raise_of_training(error: BaseException) -> None:
    """Raise `error` again if it is the training's (`is_of_training`). Called first by whoever catches more than its own errors in code
    that may run on the training's thread."""
    if is_of_training(error):
        raise error


def raised_at(error: BaseException) -> str:
    """File, line and function of the innermost frame of the training; "" without a frame. A Ctrl-C may come in the midst of the probe."""
    frames = list(traceback.walk_tb(error.__traceback__))
    innermost = [(frame, line) for frame, line in frames if _package(frame) not in OURS] or frames
    return f"{innermost[-1][0].f_code.co_filename}:{innermost[-1][1]} {innermost[-1][0].f_code.co_name}" if innermost else ""


class suppress_faults:  # named like contextlib.suppress, in whose place it is
    """Context manager: an exception inside has no effect, unless it is the training's (`is_of_training`)."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        return isinstance(error, Exception) and not is_of_training(error)


def _is_of_handler(error: BaseException) -> bool:
    """Has a frame of a signal handler raised it? Also of one that has left its place to another before it raised: its arguments tell."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if _package(frame) not in OURS)
    return any(_is_called_for_signal(frame) or frame.f_code in _handlers() for frame in frames)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _handlers() -> set[Any]:
    """Code of all signal handlers of this process. Asked late: it takes a tenth of a millisecond."""
    return {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}


def _code(handler: Any) -> Any:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler if hasattr(handler, "__code__") else vars(type(handler)).get("__call__"), "__code__", None)


def _is_called_for_signal(frame: FrameType) -> bool:
    """Are the number of a signal and the calling frame two arguments, one after the other? Asked of the program's functions alone: who
    looks at the variables of a frame makes a copy that lives as long as the frame does, and keeps tensors alive."""
    caller, code = frame.f_back, frame.f_code
    varargs = bool(code.co_flags & inspect.CO_VARARGS)
    of_program = _package(frame) not in _LIBRARIES
    if caller is None or not of_program or code.co_argcount + 2 * varargs < 2:
        return False
    given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    if varargs:
        given += frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    return any(after is caller and isinstance(value, int) for value, after in itertools.pairwise(given))


class Faults:
    """What failed in this process. One instance per probe.

    Args:
        strict: raise instead of disabling (``strict: true`` in the settings; for tests).
        whose: put behind the names of parts in messages, for a second instance in the process.

    Attributes:
        disabled: part -> what was raised.
        off: part -> its type alone, for files: what was raised may hold data of the training.
    """

    def __init__(self, strict: bool = False, whose: str = "") -> None:
        self.strict = strict
        self._whose = f" ({whose})" if whose else ""
        self.disabled: dict[str, str] = {}
        self.off: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def is_enabled(self, part: str) -> bool:
        """False once `part` has failed."""
        return part not in self.disabled

    def guard(self, part: str) -> Guard:
        """Context manager around one part of the probe; swallows and records exceptions unless strict."""
        return Guard(self, part)

    def outward(self, part: str) -> Guard:
        """The same around what the user calls: what tells of a mistake in the call (`ProbeError`) is raised."""
        return _Outward(self, part)

    def fail(self, part: str, error: BaseException, *, disable: bool = True, hint: str = "") -> None:
        """Record a failure of `part`; the first one is said aloud. Never raises, except the error itself when strict or when it is one
        of the training (`of_training`)."""
        if is_of_training(error):
            raise error
        self.counts[part] = self.counts.get(part, 0) + 1
        if self.strict:
            raise error
        if part in self.disabled:
            return
        if disable:
            self.disabled[part] = f"{type(error).__name__}: {error}"
            self.off[part] = type(error).__name__
        elif self.counts[part] > 1:
            return
        what = "is switched off" if disable else "lost data"
        advice = hint or "set strict: true to stop here with the full traceback"
        name = part if part in self._whose else f"{part}{self._whose}"
        try:
            self._log_fault(name, what, error, advice)
        except RecursionError:  # too deep in calls of the training to say anything: the part is off, and `disabled` has the reason
            return

    def _log_fault(self, name: str, what: str, error: BaseException, advice: str) -> None:
        text = str(error).partition("\nException raised from ")[0]  # what follows is the trace of torch's own C++ code
        _log.error("%s %s, training goes on: %s: %s (%s)", name, what, type(error).__name__, text, advice)
        _log.debug("%s", "".join(traceback.format_exception(type(error), error, error.__traceback__)))


class Guard:
    """See `Faults.guard`."""

    __slots__ = ("_faults", "_part")

    def __init__(self, faults: Faults, part: str) -> None:
        self._faults = faults
        self._part = part

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None or not isinstance(error, Exception) or is_of_training(error):
            return False  # KeyboardInterrupt and SystemExit are the user's
        self._faults.fail(self._part, error)
        return True


class _Outward(Guard):
    """See `Faults.outward`."""

    __slots__ = ()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        return False if isinstance(error, ProbeError) else super().__exit__(kind, error, trace)
