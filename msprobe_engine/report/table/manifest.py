"""What of a comparison is done, in a file of the output directory, so that an interrupted comparison goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.align.tasks import Task
from msprobe_engine.core.errors import DumpFormatError, SinkError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import FILE_MODE, NEW_FILE, open_regular
from msprobe_engine.formats.dump.rank_files import parse_json, read_bytes
from msprobe_engine.formats.dump.ring_file import holder_of
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.rank_table import Result
from msprobe_engine.report.table_files.tablefile import unwritable

_STAMP = "%Y%m%d%H%M%S"
_MOST_AT_ONCE = 1000


class Manifest:
    """What of a comparison is done, in ``.compare_{key}.json`` of the output directory; gone when the comparison is complete.

    A task counts as done while its dump files and its results are the ones that were noted. The first line of the file has the time; a
    line is added for each task, so that thousands of them cost no more than a line each. A line that is cut off is left out.

    Attributes:
        stamp: time in the names of the files; that of the earlier try, if there was one. No other comparison in the directory has it.
    """

    def __init__(self, output: Path, key: str) -> None:
        self._path = output / f".compare_{key}.json"
        self.stamp = time.strftime(_STAMP)
        self._done: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, DumpFormatError):
            self._continue([line for line in read_bytes(self._path).split(b"\n") if line])
        self._lock = output / f".compare_{self.stamp}.lock"
        if not self._done:
            self._reserve(output)

    def _continue(self, lines: Sequence[bytes]) -> None:
        """What an earlier try has noted, if its time is one."""
        documents: list[Any] = []
        for line in lines:
            with contextlib.suppress(DumpFormatError):
                documents.append(parse_json(line, self._path))
        stamp = documents[0].get("stamp") if documents and isinstance(documents[0], dict) else None
        if isinstance(stamp, str) and re.fullmatch("[0-9]{14}", stamp, re.ASCII):
            noted = [one for one in documents[1:] if isinstance(one, dict) and isinstance(one.get("task"), str)]
            self._done = {one["task"]: one for one in noted}
            self.stamp = stamp if self._done else self.stamp

    def _reserve(self, output: Path) -> None:
        """Two comparisons that begin in one second must not write the same files: the later one takes the next second's name."""
        moment = time.mktime(time.strptime(self.stamp, _STAMP))
        for later in range(_MOST_AT_ONCE):
            stamp = time.strftime(_STAMP, time.localtime(moment + later))
            lock = output / f".compare_{stamp}.lock"
            try:
                os.close(os.open(lock, NEW_FILE, FILE_MODE))
            except FileExistsError:
                continue
            except OSError as error:
                raise unwritable(lock, error) from error
            if (output / f"compare_summary_{stamp}.json").exists():
                lock.unlink(missing_ok=True)
                continue
            self.stamp, self._lock = stamp, lock
            return
        raise SinkError(f"{output}: {_MOST_AT_ONCE} comparisons write here at once; name another output directory")

    def release(self) -> None:
        """The results have their names now, or there will be none."""
        with contextlib.suppress(OSError):
            self._lock.unlink()

    def find_result(self, task: Task) -> Result | None:
        """The result of an earlier try, if it still holds."""
        entry = self._done.get(task.key)
        if not isinstance(entry, Mapping) or entry.get("inputs") != _inputs(task):
            return None
        try:
            result = Result.from_json(entry["result"])
        except (AttributeError, KeyError, TypeError):
            return None
        return result if all(os.path.isfile(file) for file in result.files) else None

    def add_result(self, task: Task, result: Result) -> None:
        """Remember a result without problems; those with problems are tried again."""
        if result.problems:
            return
        entry = {"task": task.key, "inputs": _inputs(task), "result": result.as_json() | {"begins": result.begins}}
        head = b"" if self._done else json.dumps({"stamp": self.stamp}).encode() + b"\n"
        self._done[task.key] = entry
        with contextlib.suppress(OSError):  # then nothing can be continued, and nothing else is lost
            if head:
                write_file(self._path, [head])
            descriptor = open_regular(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, b"\n" + json.dumps(entry).encode() + b"\n")
            finally:
                os.close(descriptor)

    def remove(self) -> None:
        """The comparison is complete."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def absolute_task(task: Task) -> Task:
    """A task for a process that may run in another directory."""
    paths: dict[str, Any] = {
        name: Path(os.path.abspath(path)) for name in ("target", "golden", "stack") if (path := getattr(task, name)) is not None
    }
    return replace(task, **paths, calibration=_absolute(task.calibration))


def absolute_options(options: CompareOptions) -> CompareOptions:
    """Options for a process that may run in another directory: what is the name of a file is an absolute one."""
    files = ("data_mapping", "cell_mapping", "api_mapping", "layer_mapping", "postprocess")
    named: dict[str, Any] = {
        name: os.path.abspath(given) for name in files if isinstance(given := getattr(options, name), (str, os.PathLike))
    }
    return replace(options, **named, calibration=_absolute(options.calibration), metrics=_absolute(options.metrics))


def _absolute(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(Path(os.path.abspath(path)) for path in paths)


def _inputs(task: Task) -> list[list[Any]]:
    """Size and time of change of both files."""
    found = []
    for path in (task.target, task.golden):
        try:
            status = holder_of(path).stat()
            found.append([os.fspath(path), status.st_size, status.st_mtime_ns])
        except OSError:
            found.append([os.fspath(path), -1, 0])
    return found
