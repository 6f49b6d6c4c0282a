"""Threads of ours that wait for a device while the training captures a graph.

In the default mode of a capture ("global") the device's library refuses calls that wait, on every thread of the process, and such a call
ends the capture with an error. A thread can say that its calls belong to no capture (mode "relaxed"); then both go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path

from msprobe_engine.core.guard import suppress_faults

_RELAXED = 2  # in all three libraries
_FUNCTIONS = {
    "libcudart": "cudaThreadExchangeStreamCaptureMode",
    "libamdhip64": "hipThreadExchangeStreamCaptureMode",
    "libascendcl": "aclmdlRICaptureThreadExchangeMode",
}
"""Libraries of CUDA, HIP and CANN, and the function that sets the calling thread's mode and gives the former one: ``(int *mode)``."""
_OURS = "msprobe"
_local = threading.local()


def relax_capture_mode() -> None:
    """The calling thread's calls may wait while another thread captures. Once per thread; for threads of ours only: the training's own
    modes are not touched. Does nothing without a device's library, and never raises."""
    if getattr(_local, "relaxed", False):
        return
    _local.relaxed = True
    if not threading.current_thread().name.startswith(_OURS):
        return
    with suppress_faults():
        for path in _loaded_libraries():
            for library, function in _FUNCTIONS.items():
                if Path(path).name.startswith(library):
                    with contextlib.suppress(OSError, AttributeError):  # an older version may not have it
                        getattr(ctypes.CDLL(path), function)(ctypes.byref(ctypes.c_int(_RELAXED)))


def _loaded_libraries() -> set[str]:
    """Files of the shared libraries of this process: one that is there already is used, none is loaded."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    return {parts[5] for parts in (line.split(maxsplit=5) for line in lines) if len(parts) == 6 and ".so" in parts[5]}
