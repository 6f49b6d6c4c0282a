"""A `Channel` over a directory that all ranks see: for frameworks without a second way between ranks that cannot hold up the training.

Per check every rank writes one file, 9 bytes per tensor and 8 more, and the lowest rank reads them all and takes them away, which is how
the others know. Nothing waits: a rank that never answers costs a message after `patience` seconds. Only the lowest rank lists the
directory, and the more ranks there are the longer each of them pauses between two looks (`pause_of`): the looks of a group have a bound.

A run must not read what an earlier one has left: the lowest rank draws a token and puts it into ``leader``, and the names of all other
files begin with it. A rank that was earlier, and has seen an old token, writes again under the new one.

Files, below a directory of their own per group::

    leader                       the token, 32 hexadecimal digits
    {token}.{step}.rank{R}       fingerprint of the contents, digests [n] int64, known [n] bool
    {token}.left.rank{R}         why this rank takes part no longer
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from msprobe_engine.core.io.input_files import open_input, read_input
from msprobe_engine.core.io.output_files import make_directory, write_file
from msprobe_integrations.common.ranks.replica_channel import SILENT, Difference, Done, Mask, Words, fingerprint

DETAILED = 64
"""Tensors of which a check says who has what; the others that differ are only counted."""
PATIENCE = 1800.0
"""Seconds after which a check counts as failed; a rank that writes a checkpoint for minutes is no fault."""
LIMIT = 16
"""Checks that may wait in line."""
PAUSE = 0.05
"""Seconds between two looks of a rank at the directory while something is under way, in a group of up to `PAUSED` ranks."""
PAUSED = 16
LONGEST_AT_END = 0.5
"""Seconds between two looks when the end of the run waits."""
ABSENT_AT_END = 2.0
"""Seconds that the end of the run waits for a rank that has never answered."""
CLOSED = "its probe was closed"
_LONGEST_REASON = 200
_LEADER = "leader"
_TOKEN = re.compile(r"[0-9a-f]{32}")


class _Check(NamedTuple):
    step: int
    digests: Words
    known: Mask
    done: Done
    deadline: float

    def data(self, contents: int) -> bytes:
        words = np.concatenate([np.array([contents], np.int64), self.digests.astype(np.int64)])
        return words.tobytes() + self.known.astype(np.bool_).tobytes()


class DirectoryChannel:
    """Compares numbers among some ranks, in the background.

    Args:
        directory: the same on all ranks; made here.
        ranks: global ranks, ascending, this one among them.
        contents: what is compared, in order, the same on all ranks.
        patience: see `PATIENCE`.

    Attributes:
        leader: this is the lowest rank, the one that learns who has what.
        failed: why nothing is compared any more; empty as long as it is.

    Raises:
        SinkError: the directory cannot be made.
    """

    def __init__(self, directory: Path, rank: int, ranks: Sequence[int], contents: Sequence[str], *, patience: float = PATIENCE) -> None:
        self.ranks = list(ranks)
        self.contents = tuple(contents)
        self.leader = rank == self.ranks[0]
        self.failed = ""
        self._rank = rank
        self._patience = patience
        self._fingerprint = fingerprint(*contents)
        self._directory = directory / f"group{fingerprint(*map(str, self.ranks)):014x}"
        make_directory(self._directory, "replica check")
        self._token = ""
        self._written: set[int] = set()
        self._waiting: deque[_Check] = deque()
        self._results: deque[tuple[Done, list[Difference]]] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._why = CLOSED
        self._left_out: dict[str, int] = {}
        self._heard: set[int] = set()
        self._absent_at = 0.0
        if self.leader:
            self._take_over()
        self._thread = threading.Thread(target=self._work, name="msprobe-replicas", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> int:
        with self._lock:
            return 0 if self.failed else len(self._waiting) + len(self._results)

    @property
    def idle(self) -> bool:
        return not self.under_way

    def submit(self, step: int, digests: Words, known: Mask, done: Done) -> None:
        """Compare; `done` is called by a later `poll` with what differs, on the lowest rank only.

        Args:
            step: the same on all ranks.
            digests, known: one for each of the contents, [n]; what is not known is not compared.
        """
        if self.failed:
            return
        with self._lock:
            if len(self._waiting) < LIMIT:
                self._waiting.append(_Check(step, digests.copy(), known.copy(), done, time.monotonic() + self._patience))
                self._wake.set()
                return
        self._fail(f"ranks {self.ranks} did not all answer in {LIMIT} checks: {self._where()}")

    def poll(self) -> None:
        """Hand on what has arrived. Never waits."""
        while self._results:
            done, differences = self._results[0]
            done(differences)
            with self._lock:
                self._results.popleft()

    def left_out(self) -> dict[str, int]:
        with self._lock:
            left, self._left_out = self._left_out, {}
        return left

    def hurry(self) -> None:
        """The end of the run waits: ranks that have never answered are waited for a little only."""
        if not self._absent_at:
            self._absent_at = time.monotonic() + ABSENT_AT_END
            self._wake.set()  # from a pause that may be longer than the end of the run waits

    def close(self, why: str = CLOSED) -> None:
        """Take it apart; does not wait for ranks that do not answer.

        Args:
            why: what the other ranks say of this one.
        """
        self._why = why
        self._closed = True
        self._fail("closed")
        self._wake.set()
        self._thread.join(timeout=1.0)
        if self.leader:
            with contextlib.suppress(OSError):
                (self._directory / _LEADER).unlink()  # first: who writes after this sees that it is alone, and takes its own away
            with contextlib.suppress(OSError):
                for name in os.listdir(self._directory):
                    (self._directory / name).unlink()
            self._remove_directory()

    def _remove_directory(self) -> None:
        with contextlib.suppress(OSError):  # if nobody else's file is in it, and no other group
            self._directory.rmdir()
            self._directory.parent.rmdir()

    def _where(self) -> str:
        return f"is the probe off on one of them, or {self._directory} not the same directory on all?"

    def _fail(self, why: str) -> None:
        with self._lock:
            self.failed = self.failed or why
            self._waiting.clear()

    # the thread

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait(self._pause() if self._waiting else None)
            self._wake.clear()
            try:
                while self._waiting and self._advance():
                    pass
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")
        if self._token and not self.leader:
            with contextlib.suppress(OSError):
                if self._read_token() == self._token:
                    write_file(self._left_file(self._rank), [self._why.encode()[:_LONGEST_REASON]])
                    if self._read_token() != self._token:  # the leader has closed meanwhile
                        self._left_file(self._rank).unlink()
                        self._remove_directory()

    def _pause(self) -> float:
        pause = pause_of(len(self.ranks))
        return min(pause, LONGEST_AT_END) if self._absent_at else pause

    def _left_file(self, rank: int) -> Path:
        return self._directory / f"{self._token}.left.rank{rank}"

    def _advance(self) -> bool:
        """Go on with the oldest check (the leader) or with all (the others); True when the oldest is over."""
        with self._lock:
            checks = list(self._waiting)
        if not checks:
            return False
        if time.monotonic() > checks[0].deadline:
            self._fail(f"ranks {self.ranks} did not all answer in {self._patience:.0f} s: {self._where()}")
            return False
        return self._lead(checks[0]) if self.leader else self._follow_leader(checks)

    def _why_missing(self, ranks: Sequence[int], names: Collection[str]) -> str:
        """Why these ranks will not answer; empty when they may.

        Args:
            names: of the files in the directory.
        """
        for rank in ranks:
            if self._left_file(rank).name in names:
                with contextlib.suppress(OSError):
                    why = read_input(self._left_file(rank), _LONGEST_REASON + 1, follow=False).decode("utf-8", "replace")
                    return f"rank {rank}: {why}"
            if rank not in self._heard and self._absent_at and time.monotonic() > self._absent_at:
                return f"rank {rank}: {SILENT}"
        return ""

    def _over(self, check: _Check, differences: list[Difference] | None, why: str = "") -> bool:
        """Take a check out of the line; `why` is the reason if it was not made."""
        with self._lock:
            if not self._waiting or self._waiting[0] is not check:
                return False
            self._waiting.popleft()
            if why:
                self._left_out[why] = self._left_out.get(why, 0) + 1
            if self.leader and differences is not None:
                self._results.append((check.done, differences))
        return True

    def _follow_leader(self, checks: list[_Check]) -> bool:
        token = self._read_token()
        if not token and self._token and not (self._directory / _LEADER).exists():
            return self._over(checks[0], [])  # the lowest rank has closed and asks nobody any more
        if token != self._token:
            self._token = token
            self._written.clear()
            if token:
                with contextlib.suppress(OSError):
                    self._left_file(self._rank).unlink()  # of a probe that this process had before
        if not token:
            return False
        for check in checks:
            path = self._directory / f"{token}.{check.step}.rank{self._rank}"
            if check.step not in self._written:
                write_file(path, [check.data(self._fingerprint)])
                self._written.add(check.step)
            elif check is checks[0] and not path.exists() and self._read_token() == token:
                self._written.discard(check.step)
                return self._over(check, [])
        return False

    def _lead(self, check: _Check) -> bool:
        names = set(os.listdir(self._directory))
        others = [self._directory / f"{self._token}.{check.step}.rank{rank}" for rank in self.ranks[1:]]
        missing = [rank for rank, path in zip(self.ranks[1:], others) if path.name not in names]
        self._heard.update(set(self.ranks[1:]) - set(missing))
        if missing:
            why = self._why_missing(missing, names)
            if why and self._over(check, None, why):
                for path in others:
                    with contextlib.suppress(OSError):
                        path.unlink()
                return True
            return False
        n = len(check.digests)
        digests, known = np.empty((len(self.ranks), n), np.int64), np.empty((len(self.ranks), n), np.bool_)
        digests[0], known[0] = check.digests, check.known
        for i, path in enumerate(others, 1):
            with open_input(path, follow=False) as file:
                data = file.read(8 + 9 * n + 1)
            if len(data) != 8 + 9 * n or int(np.frombuffer(data, np.int64, 1)[0]) != self._fingerprint:
                self._fail(
                    f"ranks {self.ranks[0]} and {self.ranks[i]} do not hold copies of the same parameters; network, optimizer and monitor "
                    "settings have to be the same on all ranks"
                )
                return False
            digests[i] = np.frombuffer(data, np.int64, n, 8)
            known[i] = np.frombuffer(data, np.bool_, n, 8 + 8 * n)
        differences = find_differences(digests, known)
        over = self._over(check, differences)
        for path in others:
            path.unlink()
        return over

    def _take_over(self) -> None:
        """What is here is of an earlier run, or was written under its token. The new token comes first: a file that is gone while the token
        stays was read."""
        self._token = uuid.uuid4().hex
        write_file(self._directory / _LEADER, [self._token.encode()])
        for name in os.listdir(self._directory):
            if not name.startswith((".", _LEADER, self._token)):
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()

    def _read_token(self) -> str:
        try:
            text = read_input(self._directory / _LEADER, 64, follow=False).decode("ascii", "replace")
        except OSError:
            return ""
        return text if _TOKEN.fullmatch(text) else ""


def pause_of(ranks: int) -> float:
    """Seconds between two looks of a rank of so many: together they look no more often than `PAUSED` ranks do."""
    return PAUSE * max(1.0, ranks / PAUSED)


def find_differences(digests: Words, known: Mask) -> list[Difference]:
    """What is not the same on all ranks that have it, [ranks, n] each."""
    first = np.where(known.any(0), digests[known.argmax(0), np.arange(digests.shape[1])], 0)
    places = np.flatnonzero((known & (digests != first)).any(0))
    detailed = [Difference(int(p), digests[:, p].copy(), known[:, p].copy()) for p in places[:DETAILED]]
    return detailed + [Difference(int(p)) for p in places[DETAILED:]]
