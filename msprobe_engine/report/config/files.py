"""Where the results of a comparison go: ``result.xlsx``, ``result.json`` and ``result.html`` in one directory.

Nothing of the user's is deleted. What an earlier comparison left under these names is replaced; where one cannot be written this time,
the old one gets another name, so that it is not taken for this result.
"""

from __future__ import annotations

import os
from pathlib import Path

from msprobe_engine.core.distribution import install_command
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import write_named
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config.comparison import Comparison
from msprobe_engine.find.findings import finite_json
from msprobe_engine.report.config import page, tables, xlsx

XLSX, JSON, HTML = "result.xlsx", "result.json", "result.html"
NO_XLSX = Sentence("result.xlsx is not written: it needs xlsxwriter ({0})", install_command("xlsx"))


def write_results(found: Comparison, directory: str | Path, old: bool = False) -> list[Path]:
    """Write all forms of a result.

    Args:
        directory: made when it is not there.
        old: ``pass_check`` as version 8.1.1 has it.

    Returns:
        the files; a note in `found` says what is not there.

    Raises:
        SinkError: the directory or a file cannot be written.
    """
    place = Path(directory)
    try:
        make_directories(os.fspath(place))
    except OSError as error:
        raise SinkError(f"cannot make the directory {one_line(str(place))}: {error.strerror or error}; name another one with -o") from error
    book = place / XLSX
    if not xlsx.available():
        found.notes.append(NO_XLSX)
        _set_aside(book)
    written = [
        write_text(place / JSON, json_text(found)),
        write_text(place / HTML, page.page(found)),
    ]
    if xlsx.available():
        xlsx.write_book(book, tables.tables(found, old))
        written.insert(0, book)
    return written


def json_text(found: Comparison) -> str:
    return finite_json(found.as_json()).decode()


def write_text(path: Path, text: str) -> Path:
    """Write one file, mode 0640, whole or not at all.

    Raises:
        SinkError: it cannot be written.
    """
    try:
        write_named(path, [text.encode("utf-8", "backslashreplace")])
    except OSError as error:
        raise SinkError(f"cannot write {one_line(str(path))}: {error.strerror or error}; name another place") from error
    return path


def _set_aside(path: Path) -> None:
    if path.exists():
        os.replace(path, path.with_name(f"{path.stem}.earlier{path.suffix}"))
