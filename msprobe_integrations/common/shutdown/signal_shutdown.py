"""A job that is asked to end (SIGTERM, SIGHUP) finishes the probe's files first, and dies by that signal all the same.

With their default action these signals end Python at once, without `atexit`. While a probe exists they have a handler that finishes the
files, puts the default action back and sends the signal again, so the exit code is what it was. Python runs handlers in the main thread
and only between two instructions of its own, so a thread listens as well (`signal.set_wakeup_fd`): when the main thread is held in a
collective whose peer has died, that thread finishes the files, and when the patience is over the process dies whatever is left undone.

Nothing of this is done where anybody else has a handler or listens already, nor in other threads than the main one. A handler that comes
later wins. What can still outlast the patience: native code that never lets the interpreter's lock go.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from msprobe_engine.core.guard import OURS
from msprobe_engine.core.log import get_logger

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
SILENCE = 1.0
"""Seconds without an instruction of the main thread after which it counts as held in native code."""
AGAIN = 0.005
"""Seconds between two tries to stop the main thread outside of the probe's own code."""
_STOP = b"\0"
_THROUGH = frozenset({*sys.stdlib_module_names, "torch", "mindspore"})
"""What our code calls: below a frame of these it is still our code that runs."""
_log = get_logger()
Finish = Callable[[], None]


class SignalShutdown:
    """One per process: what is to be finished, and the handlers. Use `at_signal`, `forget` and `check_wakeup_fd`."""

    def __init__(self) -> None:
        self._finishers: list[Finish] = []
        self._handler = self._handle_signal
        self._signals: list[signal.Signals] = []
        self._pipe: tuple[int, int] | None = None
        self._patience = 0.0
        self._first = 0.0
        self._heard = 0.0
        self._claim = threading.Lock()
        self._finisher = 0
        self._finished = threading.Event()
        self._masks: dict[int, set[int]] = {}

    def add(self, finish: Finish, patience: float) -> None:
        """As `at_signal`."""
        self._finishers.append(finish)
        self._patience = max(self._patience, patience)
        if self._pipe is None and patience > 0 and threading.current_thread() is threading.main_thread():
            self._install()

    def remove(self, finish: Finish) -> None:
        """As `forget`."""
        if finish in self._finishers:
            self._finishers.remove(finish)
        if not self._finishers and not self._first:
            self._uninstall()

    def get_seconds_left(self) -> float:
        return self._first + self._patience - time.monotonic() if self._first else math.inf

    def check_wakeup_fd(self) -> None:
        if self._pipe is None or self._first:
            return
        try:
            before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        except ValueError:  # another thread
            return
        if before not in (-1, self._pipe[1]):
            signal.set_wakeup_fd(before)
            self._uninstall()

    def _install(self) -> None:
        wanted = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        if not wanted:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._pipe, self._signals = (read, write), wanted
        threading.Thread(target=self._wait_for_signals, args=(read,), name="msprobe-signals", daemon=True).start()
        for number in wanted:
            signal.signal(number, self._handler)

    def _uninstall(self) -> None:
        """Where the main thread is not the one that asks, handlers stay; with nothing to finish they act like the default action."""
        if self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        for number in self._signals:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL)
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._pipe[1]):
            signal.set_wakeup_fd(before)
        os.write(self._pipe[1], _STOP)
        os.close(self._pipe[1])
        self._pipe, self._signals, self._patience = None, [], 0.0

    # a signal

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread."""
        if signal.getsignal(number) is not self._handler:
            return  # a handler of somebody else calls the one it found: the default action would not have been called
        if self._finisher == _thread.get_ident():
            return  # once more while the files are being finished
        if self._pipe is not None:
            self._heard = time.monotonic()
            if not self._first:
                self._first = self._heard
                with contextlib.suppress(OSError):
                    os.write(self._pipe[1], bytes([number]))  # also when the interpreter tells somebody else by now
            if not self._claim.locked() and _inside(frame) and self._heard - self._first < self._patience / 2:
                return  # half done work of ours; the listener asks again
        self._finish()
        _die(number)

    def _wait_for_signals(self, read: int) -> None:
        """The thread: waits for a signal, sees to it that the process ends in time."""
        while True:
            numbers = os.read(read, 64)
            if not numbers or _STOP in numbers:
                os.close(read)
                return
            for number in numbers:
                if number in self._signals and signal.getsignal(number) is self._handler:
                    self._count_down(signal.Signals(number))

    def _count_down(self, number: signal.Signals) -> None:
        began = time.monotonic()
        self._first = self._first or began
        self._heard = max(self._heard, began)
        silence = min(SILENCE, self._patience / 3)
        while (left := began + self._patience - time.monotonic()) > 0 and not self._finished.is_set():
            if self._claim.locked():
                self._finished.wait(left)
            elif time.monotonic() - self._heard > silence:
                threading.Thread(target=self._finish, name="msprobe-exit", daemon=True).start()
                self._finished.wait(left)
            else:
                _thread.interrupt_main(number)
                self._finished.wait(min(AGAIN, left))
        _die(number)

    def _finish(self) -> None:
        """Call everything once, the newest first; who comes second waits for the first."""
        if not self._claim.acquire(blocking=False):
            self._finished.wait(self._patience)
            return
        self._first = self._first or time.monotonic()
        self._finisher = _thread.get_ident()
        for finish in reversed(list(self._finishers)):
            try:
                finish()
            except BaseException as error:
                _log.error("not finished when the process was asked to end: %s: %s", type(error).__name__, error)
        self._finished.set()

    # forks

    def before_fork(self) -> None:
        """A signal that reaches the child before it has forgotten this would be heard by our thread here."""
        if self._signals:
            self._masks[_thread.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def after_in_parent(self) -> None:
        """As before the fork."""
        mask = self._masks.pop(_thread.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def after_in_child(self) -> None:
        """The child finishes nothing: the default action, and no part in the parent's pipe."""
        mask = self._masks.get(_thread.get_ident())
        pipe, signals, handler = self._pipe, self._signals, self._handler
        SignalShutdown.__init__(self)
        if pipe is not None:
            with contextlib.suppress(ValueError, OSError):
                for number in signals:
                    if signal.getsignal(number) is handler:
                        signal.signal(number, signal.SIG_DFL)
                before = signal.set_wakeup_fd(-1)
                if before not in (-1, pipe[1]):
                    signal.set_wakeup_fd(before)
            for end in pipe:
                with contextlib.suppress(OSError):
                    os.close(end)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_exits = SignalShutdown()
os.register_at_fork(before=_exits.before_fork, after_in_parent=_exits.after_in_parent, after_in_child=_exits.after_in_child)


def at_signal(finish: Finish, patience: float) -> None:
    """Call `finish` before the process dies of SIGTERM or SIGHUP, the newest first.

    Args:
        finish: as for `atexit.register`; may be called from another thread than the main one, when that is held in native code.
        patience: seconds from the signal until the process dies in any case; the longest of all counts. 0: signals are left alone.
    """
    _exits.add(finish, patience)


def forget(finish: Finish) -> None:
    """`finish` has been done. After the last one signals have their default action again, if nobody has changed it since."""
    _exits.remove(finish)


def check_wakeup_fd() -> None:
    """Once per step, in about a microsecond: does somebody else listen to signals by now? Then the default action is put back, for
    nobody would end a process that is held in native code."""
    _exits.check_wakeup_fd()


def get_seconds_left() -> float:
    """Seconds until the process dies of a signal that has arrived; infinite when none has."""
    return _exits.get_seconds_left()


def _inside(frame: FrameType | None) -> bool:
    """Is the interrupted code ours, or called by ours? Code of the training that runs below a wrapper of ours is not."""
    while frame is not None:
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if root in OURS:
            return True
        if root not in _THROUGH:
            return False
        frame = frame.f_back
    return False


def _die(number: int) -> None:
    """By the default action of the signal, from any thread (`signal.signal` works in the main thread only)."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(int(number), None)
    os.kill(os.getpid(), number)
