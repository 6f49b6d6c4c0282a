"""The file of a table, with errors that name it, and what is written into it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import WholeFile, guard_writing
from msprobe_engine.core.io.regular_files import explain

_BUFFER = 4 << 20
Block = Mapping[str, Any]
"""Rows of a table, see `msprobe_engine.measure.columns.Block`: a cell is a text, a number, a truth value or None (empty)."""


class TableFile(WholeFile):
    """A `WholeFile` that is written block by block."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, buffering=_BUFFER)

    def write(self, data: bytes) -> None:
        """Raises:
        SinkError: the disk is full, or the like.
        """
        with guard_writing(self.path):
            self.file.write(data)

    def close(self) -> None:
        """Give the file its name.

        Raises:
            SinkError: it cannot be written.
        """
        with guard_writing(self.path):
            self.commit()


def unwritable(path: Path, error: OSError) -> SinkError:
    """The error of a file that cannot be written."""
    return SinkError(f"cannot write {path}: {explain(error, 'name another output directory', path=path)}")
