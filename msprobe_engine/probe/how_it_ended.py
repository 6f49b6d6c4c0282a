"""What ended a training, as far as the process that it ran in can see when the probe is closed."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from msprobe_engine.core.log import one_line

_LONGEST = 300


def describe_end(*, signalled: bool, redact: bool) -> dict[str, Any]:
    """JSON-ready: ``how`` is ``closed``, ``exception`` or ``signal``; of an exception also its type, message and where it was raised.

    Args:
        signalled: a signal ends the process.
        redact: texts of the training must not be written: the message is left out.
    """
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return {"how": "signal" if signalled else "closed"}
    found: dict[str, Any] = {"how": "signal" if signalled else "exception", "error": type(error).__name__}
    if not redact and (message := one_line(str(error))):
        found["message"] = message[:_LONGEST]
    if frames := traceback.extract_tb(error.__traceback__, limit=-1):
        found["where"] = f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].name}"
    return found
