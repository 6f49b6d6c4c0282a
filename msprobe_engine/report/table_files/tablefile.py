"""The file of a table, with errors that name it."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.io.output_files import WholeFile, guard_writing

_BUFFER = 4 << 20


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
