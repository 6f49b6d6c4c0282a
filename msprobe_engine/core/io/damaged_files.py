"""What no reader has thought of is the file's fault: a file may hold anything anywhere. The command says which file it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msprobe_engine.core.errors import DumpFormatError, ProbeError, UnreadableFileError
from msprobe_engine.core.io.regular_files import AnyPath, OddFileError

DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError)
"""What code that trusts the type of a value raises when a file has another."""


@contextmanager
def guard_reading(path: object, kind: str = "") -> Iterator[None]:
    """Names the file when reading it raises what is no error of ours; only for code that reads, not for what is done with the content.

    Args:
        kind: what it should be, ``a dump``.

    Raises:
        UnreadableFileError: in place of one of `DAMAGED`; the error itself is its cause, which ``--debug`` shows.
    """
    try:
        yield
    except ProbeError:
        raise
    except DAMAGED as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise UnreadableFileError(
            f"{path}: cannot be read{f' as {kind}' if kind else ''} ({reason}); it is damaged, or of a version that is not known. "
            "--debug shows where it was noticed"
        ) from error


@contextmanager
def guard_opening(path: AnyPath) -> Iterator[None]:
    """Names the file when the system cannot open or read it.

    Raises:
        DumpFormatError: in place of an `OSError`.
    """
    try:
        yield
    except OddFileError as error:
        raise DumpFormatError(f"{path!s}: is no regular file ({error.strerror})") from None
    except FileNotFoundError:
        raise DumpFormatError(f"{path!s}: is not there; it was removed or never written (disk full, killed run)") from None
    except OSError as error:
        raise DumpFormatError(f"{path!s}: cannot be read ({error.strerror or error}); check owner and mode") from None
