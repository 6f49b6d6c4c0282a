"""Tables of a comparison as files: csv, xlsx with colours, parquet, one html page. A file is there whole or not at all (mode 0640), and
no cell is ever run as a formula or shown as markup."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.output_files import guard_writing
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.measure.options import FORMATS
from msprobe_engine.report.table_files.tablefile import Block, unwritable


class Table(Protocol):
    """A table that is being written.

    Attributes:
        files: what is there after `close`; more than one where a format has a limit of rows.
    """

    files: list[Path]

    def write(self, block: Block) -> None:
        """Append rows."""

    def close(self) -> None:
        """Finish; the files are under their names now.

        Raises:
            SinkError: it cannot be written.
        """

    def abort(self) -> None:
        """Leave nothing behind."""


def open_table(path: Path, columns: Sequence[str], mode: str, compat: bool = False, title: str = "") -> Table:
    """Begin a table.

    Args:
        path: the file; its suffix is replaced by that of the format.
        columns: names of the columns, in order. A block may have more, which are left out.
        mode: one of `FORMATS`.
        compat: cells as version 26.2.0 has them in csv: no text for NaN, infinities with a blank in front; on a page its names of columns.
        title: of the html page.

    Raises:
        MissingExtraError: the package for the format is not installed.
        SinkError: the directory cannot be written.
        UsageError: no such format.
    """
    if mode not in FORMATS:
        raise UsageError(f"format {mode!r} is not known; allowed are {', '.join(FORMATS)}")
    check_format(mode)
    path = path.with_name(f"{path.name.removesuffix(path.suffix) if path.suffix[1:] in FORMATS else path.name}.{mode}")
    with guard_writing(path):
        make_directories(os.fspath(path.parent))
        if mode == "csv":
            from msprobe_engine.report.table_files.csvtext import CsvTable

            return CsvTable(path, columns, compat)
        if mode == "xlsx":
            from msprobe_engine.report.table_files.xlsx import XlsxTable

            return XlsxTable(path, columns)
        if mode == "parquet":
            from msprobe_engine.report.table_files.parquet import ParquetTable

            return ParquetTable(path, columns)
        from msprobe_engine.report.table_files.html import HtmlTable

        return HtmlTable(path, columns, title or path.stem, compat=compat)


def check_format(mode: str) -> None:
    """Say before the work what would fail after it.

    Raises:
        MissingExtraError: the package for the format is not installed.
    """
    from importlib.util import find_spec

    from msprobe_engine.core.errors import MissingExtraError

    package = {"xlsx": "xlsxwriter", "parquet": "pyarrow"}.get(mode)
    if package and find_spec(package) is None:
        raise MissingExtraError(package, mode, f"a table as {mode} (csv needs nothing)")


def workbook_or_csv() -> str:
    """The format of the tables of 8.1.1 where none was asked for: xlsx; csv where xlsxwriter is not installed, which is said."""
    import sys
    from importlib.util import find_spec

    from msprobe_engine.core.distribution import install_command

    if find_spec("xlsxwriter") is not None:
        return "xlsx"
    print(f"note: the tables are written as csv: xlsx needs xlsxwriter ({install_command('xlsx')})", file=sys.stderr)
    return "csv"


def output_directory(path: str | Path) -> Path:
    """The directory that files go to; it is made when it is not there.

    Raises:
        SinkError: it cannot be made.
        UsageError: no directory can be called so.
    """
    directory = Path(path)
    try:
        make_directories(os.fspath(directory))
    except OSError as error:
        raise unwritable(directory, error) from error
    except ValueError as error:
        raise UsageError(f"output {str(directory)!r}: {error}; name another directory") from None
    return directory
