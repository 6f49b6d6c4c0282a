"""What the sinks of a rank have lost and why, and that a process still writes, said where nothing more can be written.

A full disk has no room for a line that says so. Beside its files each sink therefore has a small file from the start, which is written
over in place; that needs no block more, except on file systems that never write in place (btrfs, ZFS). It tells of all sinks, so one file
is enough::

    {"version": 1, "alerts": 3, "process": "host:machine:71:4711",
     "lost": {"csv": {"steps": 40, "first": 5, "last": 44, "alerts": 2, "why": "ENOSPC"}}}

``why`` names the causes (`msprobe_engine.formats.loss_causes`), ``+`` between two. ``alerts`` are those that are in the files of the
sink, counted so that a file of which some were taken away is told. ``process`` is who writes; it is there from the start and goes when
the sink is closed, so that a run that was killed is told from one that ended.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core.errors import TextError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.regular_files import open_regular
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.process.processes import this_process
from msprobe_engine.core.text.sentences import Sentence, join_sentences
from msprobe_engine.formats.loss_causes import both, parse_causes, sentences

FILE, ENDING = "losses.json", ".losses.json"
"""Its name in a directory of one rank, and the ending beside a file of one rank."""
BYTES = 2048
_VERSION = 1
_log = get_logger()


class Loss(NamedTuple):
    """Steps that one sink has not written, or not all of.

    Attributes:
        steps: how many. first, last: the lowest and the highest.
        alerts: raised in these steps.
        why: causes, see `msprobe_engine.formats.loss_causes`; empty: nobody says.
    """

    steps: int
    first: int
    last: int
    alerts: int
    why: str = ""

    def plus(self, other: Loss | None) -> Loss:
        """Both together."""
        if other is None:
            return self
        steps, alerts = self.steps + other.steps, self.alerts + other.alerts
        return Loss(steps, min(self.first, other.first), max(self.last, other.last), alerts, both(other.why, self.why))


class Kept(NamedTuple):
    """Content of a file.

    Attributes:
        alerts: written by the sink beside whose files it lies; 0 where the sink does not count them.
        lost: sink to what it has lost.
        process: who has not closed the sink, see `msprobe_engine.core.process.processes`; empty: it was closed, or nobody says.
    """

    alerts: int
    lost: dict[str, Loss]
    process: str = ""


def read_losses(path: Path) -> Kept | None:
    """What a file says; nothing lost where there is none, None where it cannot be read."""
    try:
        document = parse_json(read_input(path, BYTES, follow=False))
        lost = {str(name): _loss(one) for name, one in document["lost"].items()}
        return Kept(int(document["alerts"]), lost, str(document.get("process", "")))
    except FileNotFoundError:
        return Kept(0, {})
    except (OSError, TextError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def _loss(one: Mapping[str, Any]) -> Loss:
    steps, first, last, alerts = (int(one[key]) for key in Loss._fields[:-1])
    return Loss(steps, first, last, alerts, parse_causes(one.get("why")))


def describe_loss(run: object, name: str, whose: str, loss: Loss) -> Sentence:
    """What a sink has lost, of ranks or of a directory, in words."""
    template = "{0}: sink {1} of {2} has lost {3} steps, or parts of them (from step {4} to step {5}), with {6} alerts{7}"
    if loss.steps == 1 and loss.alerts == 1:
        template = "{0}: sink {1} of {2} has lost {3} step, or parts of it (step {4}), with {6} alert{7}"
    elif loss.steps == 1:
        template = "{0}: sink {1} of {2} has lost {3} step, or parts of it (step {4}), with {6} alerts{7}"
    why = Sentence(": {0}", join_sentences("; ", causes)) if (causes := sentences(loss.why)) else ""
    return Sentence(template, run, name, whose, f"{loss.steps:,}", loss.first, loss.last, f"{loss.alerts:,}", why)


def lost_in(path: Path) -> list[str]:
    """What a file says that was lost, in sentences."""
    kept = read_losses(path)
    if kept is None:
        return [Sentence("{0}: cannot be read; it would tell what the run could not write", path)]
    return [describe_loss(path, name, Sentence("this rank"), loss) for name, loss in kept.lost.items()]


class LossFile:
    """One such file. What it held when it was opened counts on. Never raises: where it cannot be written the log alone tells.

    Only the process that has the file says that it was closed: a child that ends is not the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        before = read_losses(path) or Kept(0, {})
        self._alerts, self._before = before.alerts, before.lost
        self._process, self._pid = str(this_process()), os.getpid()
        self._lost: Mapping[str, Loss] = {}
        self._fd = -1
        self._closed = False
        self._lock = threading.Lock()
        self._write()

    def count_alerts(self, count: int) -> None:
        """So many more alerts are in the files of the sink."""
        if count:
            self._alerts += count
            self._write()

    def write_losses(self, lost: Mapping[str, Loss]) -> None:
        """All that was lost since the file was opened."""
        self._lost = lost
        self._write()

    def take_over(self) -> None:
        """This process writes from now on, a child of the one that did."""
        self._lock = threading.Lock()  # whoever held it stayed in the parent
        self._process, self._pid = str(this_process()), os.getpid()
        self._write()

    def make_again(self) -> None:
        """The file was deleted, with what lay beside it: another one takes up what it said."""
        with self._lock:
            self._shut()
        self._write()

    def close(self) -> None:
        """Say that the sink was closed, and close the file; a second call does nothing."""
        if not self._closed and self._pid == os.getpid():
            self._process = ""
            self._write()
        with self._lock:
            self._closed = True
            self._shut()

    def _shut(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _write(self) -> None:
        lost = {name: loss.plus(self._before.get(name)) for name, loss in self._lost.items()}
        losses = {n: one._asdict() for n, one in (self._before | lost).items()}
        document: dict[str, Any] = {"version": _VERSION, "alerts": self._alerts, "lost": losses}
        if self._process:
            document["process"] = self._process
        with self._lock:
            if self._closed:
                return
            try:
                if self._fd < 0:
                    self._fd = open_regular(self.path, os.O_RDWR | os.O_CREAT)
                os.pwrite(self._fd, json.dumps(document).encode().ljust(BYTES - 1) + b"\n", 0)
            except OSError as error:
                _log.debug("%s cannot be written: %s", self.path, error)


class Losses:
    """What the sinks of a process have lost. Steps are noted on any thread, and told on those of the queues.

    Args:
        files: those that tell of it; there are more of them when a sink is added.
    """

    def __init__(self, files: Callable[[], Iterable[LossFile]]) -> None:
        self._files = files
        self._lost: dict[str, Loss] = {}
        self._lock = threading.Lock()
        self._told = True

    def take_over(self) -> None:
        """This process is a child of the one that had it."""
        self._lock = threading.Lock()  # as of `LossFile`
        for file in self._files():
            file.take_over()

    def add_loss(self, name: str, loss: Loss) -> None:
        """A sink has not written some steps, or what it had written is gone."""
        with self._lock:
            self._lost[name] = loss.plus(self._lost.get(name))
            self._told = False

    def write_losses(self) -> None:
        """Put what is new into the files."""
        with self._lock:
            if self._told:
                return
            self._told = True
            for file in self._files():
                file.write_losses(dict(self._lost))
