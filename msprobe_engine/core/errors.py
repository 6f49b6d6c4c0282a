"""Every error of this project derives from `ProbeError`.

ProbeError
|- SettingsError      a settings file or argument (file, key, value, what is allowed)
|- UsageError         the API was called in a way that cannot work
|- DumpFormatError    a dump directory or file cannot be read
|  '- UnreadableFileError  a file holds what no reader expects; commands end with 3
|- TextError          JSON or YAML text that is none, or too much; also a ValueError. Whoever reads the file adds its name
|- ArchiveError       a zip archive that is damaged, or made to do harm; also a ValueError. Whoever reads the file adds its name
|- TransportError     the other end of the online path cannot be reached, refuses, or sends what is no message
|- SinkError          a sink cannot write (disk full, port taken); training goes on unless strict
|- MissingExtraError  an optional package is not installed; the message holds the pip command
|- NothingCapturedError  a job finished and there is nothing to show
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msprobe_engine.core.distribution import install_command


class ProbeError(Exception):
    """Base of all errors. The message names what, where, the value seen, what is allowed and what to do."""


class SettingsError(ProbeError):
    """A setting is unknown, of the wrong type or out of range."""


class UnreadableSettingsError(SettingsError):
    """There is a settings file, and this machine cannot read it; another one may."""


class UsageError(ProbeError):
    """A call that cannot work: wrong argument, wrong order."""


class DumpFormatError(ProbeError):
    """A dump directory or one of its files cannot be read."""


class UnreadableFileError(DumpFormatError):
    """A file holds something that its reader did not expect; see `core.io.damaged_files`."""


class TextError(ProbeError, ValueError):
    """Text that is no JSON or YAML, or is beyond the limits of `core.io`.

    Args:
        problem: what is wrong, without the file and the place.
        line, column: where, from 1; None where nobody knows.
        at_end: the text ends too early.
    """

    def __init__(self, problem: str, line: int | None = None, column: int | None = None, at_end: bool = False) -> None:
        super().__init__(problem if line is None else f"{problem} (line {line}, column {column})")
        self.problem = problem
        self.line = line
        self.column = column
        self.at_end = at_end


class ArchiveError(ProbeError, ValueError):
    """A zip archive that is none, is damaged, or holds what no tool writes. The message has no subject."""


class SinkError(ProbeError):
    """A sink cannot write."""


class TransportError(ProbeError):
    """The other end of the online path cannot be reached, refuses, or sends what is no message."""


class NothingCapturedError(ProbeError):
    """A job finished and nothing was captured."""


class MissingExtraError(ProbeError):
    """An optional package is missing.

    Args:
        package: what to import, for example ``"tensorboard"``.
        extra: the extra of this project that brings it.
        purpose: what it is needed for, one noun phrase.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}': {install_command(extra)}")
        self.package = package
        self.extra = extra


@contextmanager
def needs_extra(package: str, extra: str, purpose: str) -> Iterator[None]:
    """For the import of a package that an extra installs.

    Raises:
        MissingExtraError: in place of an `ImportError`.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra, purpose) from error
