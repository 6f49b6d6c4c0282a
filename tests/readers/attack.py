"""Runs a command on damaged files, in this process, and says what it did that no command may do."""

from __future__ import annotations

import base64
import contextlib
import gc
import io
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mutate import mutate
from targets import Target

SECONDS = 30
"""Longest time of a core for one input: files are small, so what takes longer does not end. What waits is ended after ten times as long:
the machine may be busy with other things."""
ALLOWED = (0, 1, 2, 3)
_BUG = re.compile(r"This is a bug|unexpected [A-Za-z]+Error")
CORPUS = Path(__file__).parent / "corpus"


class Hang(BaseException):
    """The time is over; no `Exception`, so that nobody takes it for one of his own."""


class Attack:
    """A sample on disk, whose files are changed and put back.

    Args:
        root: an empty directory.
    """

    def __init__(self, target: Target, root: Path) -> None:
        self.target = target
        self.source, self.out, self.cwd = root / "in", root / "out", root / "cwd"
        for place in (self.source, self.out, self.cwd):
            place.mkdir(parents=True)
        target.make(self.source)
        self.files = {
            path.relative_to(self.source).as_posix(): path.read_bytes()
            for path in sorted(self.source.rglob("*"))
            if path.is_file() and any(fnmatch(f"/{path.relative_to(self.source).as_posix()}", f"*{p}") for p in target.attacked)
        }
        assert self.files, f"{target.name}: the sample has none of the files {target.attacked}"
        self.code: Any = None
        self.said = ""

    def damaged(self, rng: random.Random) -> dict[str, bytes]:
        """Some files with other content."""
        names = rng.sample(sorted(self.files), min(len(self.files), rng.choice((1, 1, 1, 2))))
        return {name: mutate(name, self.files[name], rng) for name in names}

    def fault(self, files: Mapping[str, bytes]) -> str:
        """What is wrong with how the command takes these files, "" if nothing is."""
        for name, content in files.items():
            (self.source / name).write_bytes(content)
        before = self._listing()
        try:
            said = self._run()
            left = [name for name in self._listing() if name not in before and not name.endswith((".db-shm", ".db-wal"))] or sorted(
                os.listdir(self.cwd)
            )
            return said or (f"wrote outside of the output directory: {left}" if left else "")
        finally:
            for name in files:
                (self.source / name).write_bytes(self.files[name])
            shutil.rmtree(self.out, ignore_errors=True)
            self.out.mkdir()

    def _run(self) -> str:
        argv = [word.replace("{in}", str(self.source)).replace("{out}", str(self.out)) for word in self.target.argv]
        text = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        began, used = time.monotonic(), time.process_time()
        try:
            with _limit(SECONDS), _chdir(self.cwd), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                self.code = self.target.enter(argv)
        except SystemExit as ended:
            self.code = ended.code
        except Hang:
            return f"had not ended after {time.monotonic() - began:.0f} s, {time.process_time() - used:.0f} s of a core"
        except Exception as error:
            return f"{type(error).__name__} got out of it: {error}"
        text.flush()
        said = text.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
        if found := next((line for line in said.splitlines() if _BUG.search(line)), ""):
            return found
        self.said = said
        return "" if self.code in ALLOWED else f"exit code {self.code}: {said[-300:]}"

    def _listing(self) -> list[str]:
        return sorted(path.as_posix() for path in self.source.rglob("*"))


@contextlib.contextmanager
def _chdir(path: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang

    before = {number: signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        gc.enable()


def kept(name: str) -> list[dict[str, bytes]]:
    """Inputs that a command once took badly."""
    found = [json.loads(path.read_text()) for path in sorted((CORPUS / name).glob("*.json"))]
    return [{file: base64.b85decode(text) for file, text in document.items()} for document in found]


def keep(place: Path, files: Mapping[str, bytes], seed: int) -> Path:
    """Store an input for `kept`."""
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{seed}.json"
    path.write_text(json.dumps({file: base64.b85encode(content).decode() for file, content in files.items()}, indent=0))
    return path
