"""Headers of ``.npy`` files are read in several threads, of which CPython counts the nesting of Python text in one place."""

from __future__ import annotations

import pytest

from msprobe_engine.core.io.npy_file import read_header

MISMATCH = "AST constructor recursion depth mismatch (before=45, after=42)"


def test_a_count_that_another_thread_has_changed_says_nothing_of_the_file() -> None:
    """CPython's own error of that is no damage: the header is read again. Any other error is the file's, and comes at once."""
    raised: list[Exception] = [SystemError(MISMATCH), SystemError(MISMATCH)]

    def read() -> str:
        if raised:
            raise raised.pop()
        return "header"

    assert read_header(read) == "header"
    raised[:] = [ValueError("cut off"), ValueError("cut off")]
    with pytest.raises(ValueError, match="cut off"):
        read_header(read)
    assert len(raised) == 1


def test_an_error_that_stays_is_raised() -> None:
    """A SystemError of another cause is no endless loop."""

    def read() -> str:
        raise SystemError("another cause")

    with pytest.raises(SystemError, match="another cause"):
        read_header(read)
