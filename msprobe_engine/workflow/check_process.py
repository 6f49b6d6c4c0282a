"""A process that runs one check and answers with one JSON object per line on a pipe, at once when something is known: a check that is ended
because its time is up has reported what it found until then."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

_PAUSE = 0.2
"""Seconds between two looks at a process that says nothing."""


READY = "ready"
"""Key of the object that says: everything is imported, the time of the check begins."""
_START = 120.0
"""Seconds until then at most."""


class CheckEnded(Exception):
    """The process died; the message says of what."""


class TimeUp(Exception):
    """The process was ended because its time was up."""


@dataclass(frozen=True)
class CheckCommand:
    """How a process for a check is started.

    Attributes:
        module: run with ``python -m``; takes ``check KEY --lines FD --seconds N`` and `options`.
        path: directories in front of PYTHONPATH.
    """

    module: str
    options: tuple[str, ...] = ()
    path: tuple[str, ...] = ()

    def arguments(self, key: str, pipe: int, seconds: float) -> list[str]:
        own = ["check", key, "--lines", str(pipe), "--seconds", f"{seconds:.1f}"]
        return [sys.executable, "-m", self.module, *own, *self.options]

    def environment(self) -> dict[str, str]:
        """Without what would make the probe watch the checks by itself."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MSPROBE_")}
        before = [*self.path, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**kept, "MSPROBE_AUTOLOAD": "0", **({"PYTHONPATH": os.pathsep.join(before)} if before else {})}


def answers(command: CheckCommand, key: str, seconds: float) -> Iterator[Any]:
    """The objects that the process of a check writes, `READY` among them.

    Args:
        seconds: its time, which begins with `READY`.

    Raises:
        CheckEnded, TimeUp: behind the last object.
    """
    read, write = os.pipe()
    with tempfile.TemporaryFile() as output, os.fdopen(read, "rb", buffering=0) as pipe:
        try:
            process = subprocess.Popen(
                command.arguments(key, write, seconds),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write,),
                env=command.environment(),
                start_new_session=True,
            )
        finally:
            os.close(write)
        try:
            ended = yield from _read_answers(process, pipe.fileno(), seconds)
        finally:
            _kill_group(process)
        if not ended:
            raise TimeUp(f"time box of {seconds:.0f} s ended")
        if process.returncode:
            output.seek(0)
            raise CheckEnded(_last_line(output.read(), process.returncode))


def _read_answers(process: subprocess.Popen[bytes], pipe: int, seconds: float) -> Generator[Any, None, bool]:
    """Objects until the process has ended (returns True) or its time is up (False)."""
    kept, end = b"", time.monotonic() + _START
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ended = process.poll() is not None
            readable = selector.select(0 if ended else min(_PAUSE, max(0.0, end - time.monotonic())))
            data = os.read(pipe, 1 << 16) if readable else b""
            *lines, kept = (kept + data).split(b"\n")
            for answer in map(json.loads, lines):
                if READY in answer:
                    end = time.monotonic() + seconds
                yield answer
            if not data and ended:  # a process that it started may still have the pipe open
                return True
            if time.monotonic() > end:
                return False
            if readable and not data:
                time.sleep(_PAUSE)  # the pipe is closed, the process is about to end


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and those it has started: they are one group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(output: bytes, code: int) -> str:
    said = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    how = f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"exit code {code}"
    return f"the check ended with {how}" + (f": {said[-1][:300]}" if said else "")
