"""A journal of a comparison: results as they come, so that a run that was killed goes on where it was.

A line of JSON per pair is appended when it is done. The first line says what is compared and how; a journal of anything else (another
file, another time of a change, another tolerance) is not gone on with. The line that a killed run did not finish is passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from msprobe_engine.align.parameters.align_names import Pair
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import guard_writing
from msprobe_engine.core.io.regular_files import open_regular
from msprobe_engine.core.log import one_line, warning
from msprobe_engine.find.checkpoint.tensor_result import TensorResult

FILE = "ckpt_diff.progress.jsonl"
_VERSION = 2


Stamp = tuple[int, int, int, int]
"""Size, times of the last change of the content and of the file (which no program can set back), number of the file."""


def stamps(files: Iterable[Path]) -> dict[str, Stamp]:
    """`Stamp` by path; a size of -1 of a file that is not there."""
    stamp_of_file = {}
    for path in sorted(set(files)):
        try:
            state = os.stat(path)
            stamp_of_file[str(path)] = (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
        except OSError:
            stamp_of_file[str(path)] = (-1, 0, 0, 0)
    return stamp_of_file


def fingerprint(files: Mapping[str, Stamp], pairs: Sequence[Pair], options: Mapping[str, Any]) -> str:
    """Of what is compared and how."""
    hashed = hashlib.sha256(json.dumps([_VERSION, sorted(files.items()), sorted(options.items())]).encode())
    for pair in pairs:
        hashed.update(f"{pair.name}\0{pair.a.origin}\0{pair.b.origin}\0{pair.a.shape}\0{pair.b.shape}\n".encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()


def forget(directory: Path) -> None:
    """The reports are written: there is nothing to go on with."""
    (directory / FILE).unlink(missing_ok=True)


def _lock(fd: int, path: Path) -> None:
    """Two comparisons do not write one journal. Where a file system has no locks, nothing is held."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(f"{path} is being written by another comparison; wait for it, or name another directory with -o") from None
    except (ImportError, OSError):
        return


class Journal:
    """The file in an output directory; to be used in a ``with`` statement.

    Args:
        directory: of the reports; it is there.
        mark: `fingerprint` of the comparison.
        go_on: take over what an earlier run of the same comparison found.
    """

    def __init__(self, directory: Path, mark: str, go_on: bool = True) -> None:
        self.path = directory / FILE
        self._mark = mark
        self._ended = False
        self.known: dict[int, TensorResult] = {}
        with guard_writing(self.path, "name another directory with -o"):
            self._fd = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(self._fd, self.path)
            end = self._load() if go_on else 0
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, 0, os.SEEK_END)
            if end == 0:
                self._append({"comparison": mark})
        except OSError as error:
            self._stop_writing(error)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)

    def add(self, number: int, result: TensorResult) -> None:
        """Take a result in; once the disk is full no more are: the comparison itself needs no journal."""
        if self._ended:
            return
        try:
            self._append({"pair": number, "result": result.to_json()})
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        self._ended = True
        warning(
            f"{one_line(str(self.path))} cannot be written ({error.strerror or error}); the comparison goes on without it, and begins "
            "anew if it is interrupted"
        )

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = memoryview(json.dumps(entry, ensure_ascii=True).encode() + b"\n")
        while line:
            line = line[os.write(self._fd, line) :]

    def _load(self) -> int:
        """Read what is there; returns the byte up to which it can be used."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return 0
        end = 0
        for line in data.split(b"\n")[:-1]:
            try:
                entry = parse_json(line)
                if end == 0:
                    if entry != {"comparison": self._mark}:
                        return 0
                else:
                    self.known[int(entry["pair"])] = TensorResult.from_json(entry["result"])
            except (ValueError, TypeError, KeyError):
                break
            end += len(line) + 1
        return end
