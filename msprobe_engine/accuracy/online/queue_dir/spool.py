"""What the benchmark host has received and not checked yet: a directory that is a dump (task ``tensor``, format ``packed``).

``{spool}/step{N}/rank{R}/`` holds what a dump has there, and until all of its calls are checked

    .session              which training it is of
    .calls-{number}.json  records as they came, see `messages`; shard ``pack-{number}.safetensors`` came with them
    .results              the file with the results of its calls

A message is safe when its files are there, so a process that was killed finds everything again. ``{spool}/.sessions/{session}.json`` says
of each training its rank and whether it has ended, ``{session}.last`` the number of its last message that is safe, and
``results`` lists the result files of all steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.online import messages
from msprobe_engine.accuracy.online.events import Peer
from msprobe_engine.accuracy.online.queue_dir.files import read_document, read_file
from msprobe_engine.accuracy.online.queue_dir.step import SpoolCall, SpoolStep
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import write_all, write_file
from msprobe_engine.core.io.regular_files import make_directories, open_regular
from msprobe_engine.core.log import get_logger
from msprobe_engine.formats.dump import layout

SESSIONS = ".sessions"
_SESSION = re.compile(r"[0-9a-f]{8,64}")
_NUMBER_BYTES = 20
_RESULTS = "results"
_log = get_logger()


@dataclass
class Training:
    """One start of one training process.

    Attributes:
        session: its random name.
        world: processes of the training, 0 while that is not known.
        last: number of the last message that is safe.
        over: nothing more comes.
    """

    session: str
    rank: int
    world: int = 0
    last: int = 0
    over: bool = False


class Spool:
    """All methods may be called from any thread.

    Args:
        root: the directory; made if it is not there.
        keep: what was checked stays.

    Raises:
        UsageError: it cannot be written, or holds something else.
    """

    def __init__(self, root: Path, keep: bool = False) -> None:
        self.root = root
        self._keep = keep
        self._lock = threading.RLock()
        self.trainings: dict[str, Training] = {}
        self._steps: dict[tuple[int, int], SpoolStep] = {}
        self._numbers: dict[str, int] = {}
        self.bytes = 0
        """Of the files of unchecked calls."""
        self.finished: deque[SpoolStep] = deque()
        """Steps of which everything is checked; for whoever holds their result files."""
        self.alone = 0
        """Backward records without a forward record."""
        self.replaced = 0
        """Calls that were not checked when another training sent their step again."""
        try:
            if root.is_dir() and any(root.iterdir()) and not (root / SESSIONS).is_dir():
                raise UsageError(f"{root}: is not empty and no spool; give an empty directory (spool_path)")
            make_directories(os.fspath(root))
            make_directories(os.fspath(root / SESSIONS))
        except OSError as error:
            raise UsageError(f"{root}: cannot be written ({error.strerror}); give another directory (spool_path)") from None

    # ---- after a start ----

    def recover(self, written_calls: Callable[[SpoolStep], Iterable[str]] = lambda _step: ()) -> list[SpoolCall]:
        """What an earlier process has left here: calls that can be checked now.

        Args:
            written_calls: names of the calls of a step whose results are written.

        Raises:
            UsageError: the directory cannot be read.
        """
        ready: list[SpoolCall] = []
        with self._lock:
            for path in sorted((self.root / SESSIONS).glob("*.json")):
                self._load_training(path)
            for step_path in sorted(self.root.glob("step*")):
                for rank_path in sorted(step_path.glob("rank*")):
                    step, rank = layout.step_of(step_path.name), layout.rank_of(rank_path.name)
                    if step is None or rank is None:
                        continue
                    training = self.trainings.get(_text(rank_path / SpoolStep.SESSION))
                    if training is None:
                        continue  # all of it is checked, and it was kept
                    try:
                        recovered = SpoolStep.recover(rank_path, training.session, step, rank)
                    except DumpFormatError as error:
                        _log.error("%s: what an earlier run has left cannot be used: %s", rank_path, error)
                        continue
                    for name in written_calls(recovered):
                        recovered.mark_checked(name)
                    self._steps[step, rank] = recovered
                    self.bytes += recovered.bytes
                    ready += recovered.ready()
                    self._finish_step(recovered)
        return ready

    def _load_training(self, path: Path) -> None:
        try:
            said = read_document(path)
            training = Training(path.stem, int(said["rank"]), int(said["world"]), over=said["over"] is True)
        except (OSError, ValueError, KeyError, TypeError):
            _log.warning("%s: is damaged; a training that goes on begins anew", path)
            return
        number = _text(path.with_suffix(".last"))
        training.last = int(number) if number.isdecimal() else 0
        self.trainings[training.session] = training

    # ---- messages ----

    def last(self, peer: Peer) -> int:
        """Number of the last message of this training that is safe, 0 for none."""
        with self._lock:
            training = self.trainings.get(peer.session)
            return 0 if training is None else training.last

    def add(self, peer: Peer, header: Mapping[str, Any], payload: memoryview) -> list[SpoolCall]:
        """Make a message safe. Returns the calls that can be checked now.

        Raises:
            DumpFormatError: it cannot be used.
            OSError: it cannot be written now.
        """
        message = messages.parse_message(header, payload)
        if message.rank != peer.rank:
            raise DumpFormatError(f"a message of rank {message.rank} comes from rank {peer.rank}")
        training = self._get_or_add_training(peer, message.world if isinstance(message, messages.Run) else 0)
        ready: list[SpoolCall] = []
        if not isinstance(message, messages.Run):
            step, ready = self._step(training, message.step, message.open if isinstance(message, messages.Calls) else message.step)
            before = step.bytes
            ready += step.add(message) if isinstance(message, messages.Calls) else step.end_step(message)
            with self._lock:
                self.bytes += step.bytes - before
            self._finish_step(step)
        self._save_sequence(training, peer.sequence)
        return ready

    def end_session(self, session: str) -> list[SpoolCall]:
        """A training has ended, or is given up: what of it waits for more can be checked now."""
        with self._lock:
            training = self.trainings.get(session)
            if training is None or training.over:
                return []
            training.over = True
            steps = [step for step in self._steps.values() if step.session == session]
        ready = [call for step in steps for call in step.abandon()]
        for step in steps:
            self._finish_step(step)
        self._save(training)
        return ready

    def _get_or_add_training(self, peer: Peer, world: int) -> Training:
        with self._lock:
            training = self.trainings.get(peer.session)
            if training is None:
                if not _SESSION.fullmatch(peer.session):
                    raise DumpFormatError(f"a training calls itself {peer.session[:80]!r}; allowed: hexadecimal digits")
                training = self.trainings[peer.session] = Training(peer.session, peer.rank, world)
                self._save(training)
            elif training.over or (world and world != training.world):
                training.over, training.world = False, world or training.world
                self._save(training)
            return training

    def _step(self, training: Training, number: int, oldest: int) -> tuple[SpoolStep, list[SpoolCall]]:
        """The step of this number, made if it is not there. The same training's steps before number `oldest` are over."""
        with self._lock:
            of_rank = [(n, s) for (n, r), s in self._steps.items() if r == training.rank and s.session == training.session]
            earlier = [s for n, s in of_rank if n < oldest and not s.over]
        ready = [call for step in earlier for call in step.abandon()]
        for step in earlier:
            self._finish_step(step)
        return self._get_or_add_step(training, number), ready

    def _get_or_add_step(self, training: Training, number: int) -> SpoolStep:
        with self._lock:
            known = self._steps.get((number, training.rank))
            if known is not None and known.session == training.session:
                return known
            if known is not None:
                self.replaced += known.left
                self.bytes -= known.bytes
                known.replace()
            made = SpoolStep(self.root / f"step{number}" / layout.rank_directory(training.rank), training.session, number, training.rank)
            made.create_directory()
            self._steps[number, training.rank] = made
            return made

    def _save(self, training: Training) -> None:
        said = {"rank": training.rank, "world": training.world, "over": training.over}
        write_file(self.root / SESSIONS / f"{training.session}.json", [json.dumps(said).encode()])

    def _save_sequence(self, training: Training, sequence: int) -> None:
        """Written in place: the file is of one length for ever, and a kill leaves the old number or the new one."""
        with self._lock:
            training.last = max(training.last, sequence)
            handle = self._numbers.get(training.session)
            if handle is None:
                path = self.root / SESSIONS / f"{training.session}.last"
                handle = self._numbers[training.session] = open_regular(path, os.O_RDWR | os.O_CREAT)
            os.pwrite(handle, b"%0*d" % (_NUMBER_BYTES, training.last), 0)

    # ---- results ----

    def result_files(self) -> list[tuple[int, Path]]:
        """Rank and result file of every step so far, also of an earlier process."""
        found = []
        for line in _text(self.root / SESSIONS / _RESULTS).splitlines():
            with contextlib.suppress(ValueError, TypeError):
                rank, path = parse_json(line)
                found.append((int(rank), Path(path)))
        return found

    def note_results(self, step: SpoolStep, path: Path) -> None:
        """From now on this is the result file of this step.

        Raises:
            OSError: that cannot be written down.
        """
        step.note_results(path)
        with self._lock:
            handle = open_regular(self.root / SESSIONS / _RESULTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                write_all(handle, [json.dumps([step.rank, str(path)]).encode() + b"\n"])
            finally:
                os.close(handle)

    def mark_checked(self, call: SpoolCall) -> None:
        """The results of this call are written."""
        call.step.mark_checked(call.name)
        self._finish_step(call.step)

    def _finish_step(self, step: SpoolStep) -> None:
        """A step of which everything is checked goes, or stays as a dump."""
        with self._lock:
            if not step.done or self._steps.get((step.number, step.rank)) is not step:
                return
            del self._steps[step.number, step.rank]
            self.bytes -= step.bytes
        self.alone += step.alone
        self.finished.append(step)
        step.finish()
        if not self._keep:
            shutil.rmtree(step.directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                step.directory.parent.rmdir()

    @property
    def waiting(self) -> int:
        """Calls that are not checked yet."""
        with self._lock:
            return sum(step.left for step in self._steps.values())

    def press(self) -> list[SpoolCall]:
        """The spool is too large, and what is in it waits for gradients that may not come while it is: calls that can be checked
        forward alone now."""
        with self._lock:
            steps = list(self._steps.values())
        return [call for step in steps for call in step.without_backward()]

    def close(self) -> None:
        """Close files; trainings that are over and have nothing left are forgotten."""
        with self._lock:
            for handle in self._numbers.values():
                os.close(handle)
            self._numbers.clear()
            waits = {step.session for step in self._steps.values()}
            for training in self.trainings.values():
                if training.over and training.session not in waits:
                    _remove(self.root / SESSIONS, (f"{training.session}.json", f"{training.session}.last"))
            if all(training.over for training in self.trainings.values()) and not waits:
                _remove(self.root / SESSIONS, (_RESULTS,))
            if not self._keep:
                for path in (self.root / SESSIONS, self.root):
                    with contextlib.suppress(OSError):
                        path.rmdir()


def _text(path: Path) -> str:
    try:
        return read_file(path).decode().strip()
    except (OSError, ValueError):
        return ""


def _remove(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(directory / name)
