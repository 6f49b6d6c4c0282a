"""Processes that check calls, one call each at a time: one that hangs or dies costs one call and is replaced."""

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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

from msprobe_engine.accuracy.precheck.options import About, Work
from msprobe_engine.accuracy.results import CallResult, build_skipped_result
from msprobe_engine.core.errors import ProbeError, UsageError

START_SECONDS = 600.0
"""That a process may take to import its framework; on a busy file server this is long."""
_READ = 1 << 20
_TAIL = 2000


class Answer(NamedTuple):
    """What came of a call.

    Attributes:
        broken: the process did not live through it, or took too long; the result says so.
    """

    call: Item
    result: CallResult
    broken: bool


class Item(Protocol):
    """What is checked: a `Call`, or one that waits on the disk."""

    @property
    def name(self) -> str: ...

    def message(self) -> dict[str, Any]:
        """What the process is told, see `worker`."""
        ...


class Feed(deque[Item]):
    """Calls that come while others are checked. `put` and `close` may be called from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.open = True
        """More may come."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def put(self, calls: Iterable[Item]) -> None:
        self.extend(calls)
        self._wake()

    def close(self) -> None:
        """No more come."""
        self.open = False
        self._wake()

    def fileno(self) -> int:
        """Is readable after `put` and `close`."""
        return self._read

    def calm(self) -> None:
        """Make it unreadable."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, _READ):
                pass

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is readable
            os.write(self._write, b"!")


class CannotBegin(UsageError):
    """A process says that the work cannot be done here: no such device, operators that cannot be loaded."""


class Pool:
    """Checks calls in other processes.

    Args:
        works: what each process has to know; its length is how many there are.
        timeout: seconds that a call may take.
        told: gets what each process says of itself when it is ready.
    """

    def __init__(self, works: Sequence[Work], timeout: float, told: Callable[[About], None] | None = None) -> None:
        self._told = told
        self._works = works
        self._timeout = timeout

    def check(self, calls: Sequence[Item] | Feed) -> Generator[Answer, None, None]:
        """Answers as they come; of a `Feed` until it has ended. Whatever ends the iteration ends the processes.

        Raises:
            ProbeError: no process can begin (no such device, the framework is not there).
        """
        waiting, alone = calls if isinstance(calls, Feed) else deque(calls), deque[Item]()
        workers: list[_Worker] = []
        with selectors.DefaultSelector() as selector:
            try:
                for work in self._works if isinstance(waiting, Feed) else self._works[: len(waiting)]:
                    workers.append(_Worker(work, selector))
                yield from self._serve(workers, selector, waiting, alone)
                if alone:  # what the system killed may have been too much beside the others
                    for worker in workers:
                        worker.kill()
                    workers[0].start()
                    yield from self._serve(workers[:1], selector, alone, None)
            finally:
                for worker in workers:
                    worker.kill()

    def _serve(
        self, workers: list[_Worker], selector: selectors.BaseSelector, waiting: deque[Item], alone: deque[Item] | None
    ) -> Iterator[Answer]:
        """Work `waiting` off; calls whose process the system killed go to `alone`, if it is given."""
        feed = waiting if isinstance(waiting, Feed) else None
        if feed is not None:
            selector.register(feed, selectors.EVENT_READ, feed)
        for worker in workers:
            worker.give(waiting)
        while waiting or any(worker.call for worker in workers) or (feed is not None and feed.open):
            for key, _ in selector.select(timeout=min((w.remaining_seconds(self._timeout) for w in workers), default=0.0)):
                if key.data is not feed:
                    yield from self._hear(key.data, waiting, alone)
            if feed is not None:
                feed.calm()
                for worker in workers:
                    if worker.closed and feed:
                        worker.start()
                    worker.give(feed)
            for worker in workers:
                if worker.remaining_seconds(self._timeout) <= 0:
                    yield from self._late(worker, waiting)

    def _hear(self, worker: _Worker, waiting: deque[Item], alone: deque[Item] | None) -> Iterator[Answer]:
        for message in worker.read_messages():
            if "failed" in message:
                raise (UsageError if worker.ready else CannotBegin)(str(message["failed"]))
            if self._told is not None and isinstance(message.get("ready"), dict):
                self._told(About(**{**message["ready"], "operators": tuple(message["ready"]["operators"])}))
            worker.ready = True
            worker.since = time.monotonic()
            if "result" in message and worker.call is not None:
                done, worker.call = worker.call, None
                yield Answer(done, CallResult.from_json(message["result"]), False)
            worker.give(waiting)
        if not worker.closed:
            return
        code, call = worker.kill(), worker.call
        if not worker.ready:
            raise ProbeError(f"the process that was to check calls ended before it began ({_how(code)}): {worker.tail()}")
        if call is None:
            if waiting:
                worker.start()
            return
        worker.call = None
        if code == -signal.SIGKILL and alone is not None:
            alone.append(call)
        else:
            yield Answer(call, build_skipped_result(call.name, f"the process that ran it ended ({_how(code)}); nothing was compared"), True)
        if waiting:
            worker.start()

    def _late(self, worker: _Worker, waiting: deque[Item]) -> Iterator[Answer]:
        if not worker.ready:
            raise ProbeError(f"a process that was to check calls did not begin within {START_SECONDS:g} s: {worker.tail()}")
        worker.kill()
        if worker.call is not None:
            call, worker.call = worker.call, None
            yield Answer(call, build_skipped_result(call.name, f"took longer than {self._timeout:g} s (--timeout) and was ended"), True)
        if waiting:
            worker.start()


class _Worker:
    """One process at a time; `start` takes a new one in its place."""

    def __init__(self, work: Work, selector: selectors.BaseSelector) -> None:
        self.work, self._selector = work, selector
        self.call: Item | None = None
        self.ready = self.closed = False
        self.since = 0.0
        self._errors: Any = None
        self.start()

    def start(self) -> None:
        """A new process; it gets calls when it is ready."""
        # The path is that of this process and stands in the code: nothing of the working directory is imported on the way.
        code = f"import sys; sys.path[:] = {sys.path!r}; from msprobe_engine.accuracy.precheck.worker import main; main()"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        self.ready = self.closed = False
        self.since = time.monotonic()
        self._rest = b""
        self._tail = ""
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ, self)
        self._send(asdict(self.work))

    def give(self, waiting: deque[Item]) -> None:
        """The next call, when this process is free."""
        if self.ready and not self.closed and self.call is None and waiting:
            self.call = call = waiting.popleft()
            self.since = time.monotonic()
            self._send(call.message())

    def remaining_seconds(self, timeout: float) -> float:
        """Seconds until this process is late; far away when it has nothing to do."""
        if self.closed or (self.ready and self.call is None):
            return START_SECONDS
        return max(0.0, self.since + (timeout if self.ready else START_SECONDS) - time.monotonic())

    def read_messages(self) -> list[dict[str, Any]]:
        """What it has said since the last look; `closed` when it will say nothing more."""
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), _READ)
        if not data:
            self.closed = True
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> int:
        """Kill the process if it lives; its exit code."""
        if self._errors is None:
            return 0
        process = self._process
        assert process.stdout is not None
        assert process.stdin is not None
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.stdout)
        if self.closed:  # it is on its way out: how it ends is worth knowing
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        process.kill()
        code = process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _TAIL))
        self._tail = self._errors.read().decode(errors="replace").strip()
        self._errors.close()
        self._errors = None
        self.closed = True
        return code

    def tail(self) -> str:
        """The last lines that the process wrote to the standard error."""
        self.kill()
        return self._tail or "it wrote nothing"

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead; `read_messages` will find that out
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hints = {"SIGSEGV": ": a fault in native code", "SIGKILL": ": out of memory?", "SIGABRT": ": an assertion in native code"}
    return name + hints.get(name, "")
