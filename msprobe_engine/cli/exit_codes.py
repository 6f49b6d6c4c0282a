"""How a command ends: its exit code, and one message in place of a traceback.

An OSError that no reader or writer has put into words is about a file that the user named, or a bug of ours. Only what the user named in
this call, or what lies below a directory that the user named, is the user's: a path that is computed wrongly, a directory of our own that
is gone, or a file of the system are bugs, and are reported as such.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple, TextIO, cast

from msprobe_engine.core.errors import ProbeError, UnreadableFileError
from msprobe_engine.core.io.input_files import OddInputError
from msprobe_engine.core.io.regular_files import explain
from msprobe_engine.core.log import printable

DONE, FOUND, WRONG, UNREADABLE, INTERNAL, INTERRUPTED, SIGPIPE = 0, 1, 2, 3, 4, 130, 141

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""EFBIG is also an input that is larger than any of its kind (`core.io.input_files`)."""
_OUTPUTS = ("output", "output_path", "output_dir", "output_dirpath", "out_path", "api_output_path", "db", "json", "csv", "html", "markdown")
"""Options that name what is written, by where `argparse` keeps their values."""


def run_command(name: str, command: Callable[[], int], options: argparse.Namespace) -> int:
    """Run a command and return its exit code; what it raises becomes one message, with ``--debug`` a traceback.

    Args:
        name: of the command, in front of messages.
        options: of this call; `command` may fill them in. They name the user's files.
    """
    try:
        with _answer_without_reader():
            code = command()
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # not through `sys.stdout.write`: what was found is not known
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGPIPE
    except Exception as error:
        text, code = explain_error(error, options)
        if options.debug:
            traceback.print_exc()
        else:
            print(printable(f"{name}: {text}"), file=sys.stderr)
        if code != INTERNAL and isinstance(error, OSError) and error.filename is None:  # what Python would flush at exit goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code


def explain_error(error: Exception, options: argparse.Namespace) -> tuple[str, int]:
    """What is said of it, and the exit code."""
    if isinstance(error, ProbeError):
        return str(error), UNREADABLE if isinstance(error, UnreadableFileError) or _names_odd_input(error) else WRONG
    if (said := describe(error, options)) is not None:
        return said.text, WRONG if said.wrote else UNREADABLE
    return f"unexpected {type(error).__name__}: {error}. This is a bug; run again with --debug for the traceback", INTERNAL


def _names_odd_input(error: BaseException | None) -> bool:
    """Was a pipe, a device or a directory named, or met, where a file should be read? It is no reader's business to tell exit codes."""
    while error is not None:
        if isinstance(error, OddInputError):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Output:
    """Standard output that goes nowhere once its reader has gone: the command comes to its end, and its exit code says what was found."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _answer_without_reader() -> Iterator[None]:
    """A reader of the output that goes away (head, less) changes no exit code."""
    if sys.stdout is not sys.__stdout__ or sys.stdout is None:  # a test's
        yield
        return
    with redirect_stdout(cast(TextIO, _Output(sys.stdout))):
        yield


class FileError(NamedTuple):
    """What is said.

    Attributes:
        text: with the file.
        wrote: it is about an output.
    """

    text: str
    wrote: bool


def describe(error: BaseException, options: argparse.Namespace) -> FileError | None:
    """What is said of an error; None: it is no file of the user's.

    Args:
        options: of this call.
    """
    if not isinstance(error, OSError):
        return None
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes, os.PathLike)) else None
    options_of_path = [(place, name in _OUTPUTS) for name, value in vars(options).items() for place in _places(value)]
    named = [each for each in options_of_path if path is not None and _is_below(path, each[0])]
    wrote = max(named, key=lambda each: len(each[0]))[1] if named else None  # of an output within an input the output counts
    if error.errno in _FULL and (wrote is not False or error.errno != errno.EFBIG):  # also of the standard output, which may be a file
        where = f": {path[:1000]}" if path else ""
        return FileError(f"cannot write all of the output{where}: {explain(error)}", wrote=True)
    is_ours = wrote is None and error.errno != errno.ENAMETOOLONG  # no name of ours is too long; one that stands in a file may be
    if path is None or is_ours:
        return None
    if wrote:
        return FileError(f"cannot write {path[:1000]}: {explain(error)}", wrote=True)
    return FileError(f"{path[:1000]}: {error.strerror}; check the name, owner and mode", wrote=False)


def _places(value: Any) -> Iterator[str]:
    """Paths in the value of an option: as it is, or behind a ``=``."""
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, os.PathLike):
            yield os.path.realpath(each)
        elif isinstance(each, str) and each and "\0" not in each:
            yield os.path.realpath(each)
            if "=" in each:
                yield os.path.realpath(each.partition("=")[2])


def _is_below(path: str, place: str) -> bool:
    real = os.path.realpath(path)
    return real == place or real.startswith(place.rstrip(os.sep) + os.sep)
