"""The file of a table, with errors that name it."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.io.output_files import WholeFile
from msprobe_engine.report.table_files import unwritable

_BUFFER = 4 << 20


class TableFile(WholeFile):
    """A `WholeFile` that is written block by block."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, buffering=_BUFFER)

    def write(self, data: bytes) -> None:
        """Raises:
        SinkError: the disk is full, or the like.
        """
        try:
            self.file.write(data)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        """Give the file its name.

        Raises:
            SinkError: it cannot be written.
        """
        try:
            self.commit()
        except OSError as error:
            raise unwritable(self.path, error) from error
