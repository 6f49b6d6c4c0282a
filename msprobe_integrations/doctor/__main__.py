"""``python -m msprobe_integrations.doctor``: the same as ``msprobe doctor``, also from a source tree that is not installed. With
``check KEY`` in front it runs one check and writes its lines to a pipe; that is how the program starts its checks."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from msprobe_engine.workflow.check_process import READY
from msprobe_engine.workflow.doctor import MACHINE
from msprobe_integrations.doctor.checks import CHECKS

_PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>."""


def main(argv: Sequence[str]) -> int:
    """Run the program, or one check of it."""
    if argv[:1] == ["check"]:
        return run_check(argv[1:])
    from msprobe_engine.cli.main import main as command_line

    return command_line(["doctor", *argv])


def run_check(argv: Sequence[str]) -> int:
    """Run one check and write its lines, each as soon as it is known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("key")
    parser.add_argument("--lines", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", default="")
    parser.add_argument("--peer", default="")
    args = parser.parse_args(argv)
    _end_with_parent()
    os.set_inheritable(args.lines, False)
    with os.fdopen(args.lines, "w", encoding="utf-8") as pipe:

        def write(answer: Any) -> None:
            pipe.write(json.dumps(answer) + "\n")
            pipe.flush()

        if args.key == MACHINE:
            from msprobe_integrations.doctor.machine import describe

            write(describe(args.device))
            return 0
        from msprobe_integrations.doctor.device import Device, find_device

        check = next(check for check in CHECKS if check.key == args.key)
        module, kind = importlib.import_module(check.module), find_device(args.device)
        write({READY: True})
        for line in module.run(Device(kind, args.peer, time.monotonic() + args.seconds)):
            write(asdict(line))
    return 0


def _end_with_parent() -> None:
    """The kernel (of Linux) ends this process when the program that started it is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
