"""How a forked program ends: as an interpreter ends, but what its parent has imported is not taken down, which is a second of each."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def freeze() -> None:
    """In the parent: what is there now is no program's, and no collection looks through it."""
    gc.collect()
    gc.freeze()


def fork(program: Callable[[], object]) -> int:
    """Run this in a child that has what is imported here; its exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if not child:
        run(program)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(program: Callable[[], object]) -> NoReturn:
    """Run this and end: an exception goes through ``sys.excepthook``, threads are waited for, exit handlers run, what ``__main__`` holds is
    collected."""
    ended, interrupted = 0, False
    try:
        program()
    except SystemExit as end:
        ended = end.code if isinstance(end.code, int) else int(end.code is not None)
        if ended and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as fault:
        sys.excepthook(*sys.exc_info())
        ended, interrupted = 1, isinstance(fault, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does it for its processes
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # a program may have closed it
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(ended & 0xFF)
