"""How a program is forked, and how it ends: as an interpreter ends, but what its parent has imported is not taken down, which is a second
of each."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25
"""Of Linux 6.1 and later; an older one refuses it, and nothing is lost."""


def freeze() -> None:
    """In the parent: what is there now is no program's, and no collection looks through it. It is put into huge pages: a fork copies an
    entry for each page that the parent has, which with pages of 4 KiB is most of what a short program costs."""
    gc.collect()
    gc.freeze()
    if not (maps := Path("/proc/self/maps")).exists():  # another system than Linux
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in maps.read_text().splitlines():
        place, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            first, last = (int(address, 16) for address in place.split("-"))
            first = -(-first // HUGE_PAGE) * HUGE_PAGE
            if last - first >= HUGE_PAGE:
                advise(first, (last - first) // HUGE_PAGE * HUGE_PAGE, _MADV_COLLAPSE)


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
