"""What is to be done at the end of a process, also of one that `multiprocessing` has made (``mp.spawn``, Lightning's ``ddp_spawn`` and
``ddp_fork``): these end without `atexit`.
"""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Callable
from multiprocessing.util import Finalize

_finalizers: dict[Callable[[], None], Finalize] = {}


def register(finish: Callable[[], None]) -> None:
    """Call ``finish()`` when this process ends of itself."""
    atexit.register(finish)
    if multiprocessing.parent_process() is not None:
        _finalizers[finish] = Finalize(None, finish, exitpriority=100)  # before queues and pools of the program go


def unregister(finish: Callable[[], None]) -> None:
    """Take back `register`."""
    atexit.unregister(finish)
    finalizer = _finalizers.pop(finish, None)
    if finalizer is not None:
        finalizer.cancel()
