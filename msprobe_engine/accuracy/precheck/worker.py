"""A process that checks calls: it reads one JSON object a line and answers with one.

    -> the work (`options.Work`)              <- {"ready": `options.About`, or true}, or {"failed": "why"} and the end
    -> {"name", "record", "backward"}         <- {"result": ...}, likewise; once per call. Calls of a training that runs have more:
                                                 "directory", "tensors" (where they are), or only "name" and "skip" (why not)

What kernels and libraries print goes to the standard error; the answers have a descriptor of their own. The process ends when its input
does, and with the one that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.precheck.options import Check, Work
from msprobe_engine.accuracy.results import build_skipped_result
from msprobe_engine.core.backend import load_backend
from msprobe_engine.core.errors import ProbeError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_BACKENDS = {"mindspore": "mindspore"}
"""Framework of a dump to the backend that checks it; torch where nothing else is said (``mindtorch`` is torch by MindSpore)."""


def main() -> None:
    """Serve the process at the other end of the pipes."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    _end_with_parent()
    # When memory runs out, Linux ends this process and no training or other program: the call gets a row with the reason
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    faulthandler.enable()
    lines = sys.stdin
    try:
        check = make_check(Work.from_json(json.loads(lines.readline())))
    except ProbeError as error:
        _send_message(answers, {"failed": str(error)})
        return
    except ImportError as error:
        _send_message(answers, {"failed": f"the framework of the dump cannot be imported here: {error}"})
        return
    _send_message(answers, {"ready": True if check.about is None else asdict(check.about)})
    for line in lines:
        call = json.loads(line)
        try:
            result = build_skipped_result(call["name"], call["skip"]) if "skip" in call else check(**call)
        except ProbeError as error:  # its files cannot be written
            _send_message(answers, {"failed": str(error)})
            return
        _send_message(answers, {"result": result.to_json()})


def make_check(work: Work) -> Check:
    """What checks the calls of this dump, of the backend of its framework.

    Raises:
        ProbeError: the work cannot be done here (no such device, ...).
        ImportError: the framework is not installed.
    """
    backend: Any = load_backend(_BACKENDS.get(work.framework, "torch"))
    check: Check = backend.precheck(work)
    return check


def _send_message(answers: Any, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _end_with_parent() -> None:
    """On Linux the kernel ends this process with its parent, even in the middle of a call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends us
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # elsewhere the end of the input does it, after the call


if __name__ == "__main__":
    main()
