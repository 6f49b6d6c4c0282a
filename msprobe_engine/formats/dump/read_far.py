"""Dump files read by the workers of a Dask cluster. Over the network go what each rank says of itself and one table of each different
rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.process.jobs import on_cluster
from msprobe_engine.formats.dump.dump_table import DumpTable, read_side
from msprobe_engine.formats.dump.replicas import Seen, Template, make_template, read_text

_log = get_logger()

R = TypeVar("R")


class Answer(NamedTuple):
    """Of one file. seen: where it may be the same as others; table: where it has to be read for itself and nothing is wrong with it;
    there: the worker has found it."""

    seen: Seen | None = None
    table: DumpTable | None = None
    there: bool = True


def look(paths: Sequence[Path], scheduler: str) -> dict[Path, Answer]:
    """What the files are. A file with which something is wrong has no answer here: who reads it says so."""
    found = _on_workers(paths, _look, scheduler, "read")
    for path, answer in found.items():
        if answer.table is not None:
            answer.table.path = path
    unseen = [path for path, answer in found.items() if not answer.there and path.exists()]
    if unseen:
        _log.warning(
            "the workers of %s do not see %d of %d files, the first is %s; these are read here: give a path on a file system that the "
            "workers share",
            scheduler, len(unseen), len(paths), unseen[0],
        )  # fmt: skip
    return found


def templates(files: Mapping[bytes, Path], scheduler: str) -> dict[bytes, Template | None]:
    """A table for all ranks that are the same, of one file of each digest; None of a file that has another one by now."""
    found = _on_workers(list(files.values()), _template, scheduler, "tables")
    told: dict[bytes, Template | None] = {}
    for digest, path in files.items():
        now, template = found[path]
        told[digest] = template if now == digest else None
        if template is not None:
            template.table.path = path
    return told


def _on_workers(paths: Sequence[Path], work: Callable[[Path], R], scheduler: str, word: str) -> dict[Path, R]:
    files = {Path(os.path.abspath(path)): path for path in paths}  # workers run in directories of their own
    found: dict[Path, R] = {}
    if files:
        with bar(word, len(files)) as advance:
            for file, answer in on_cluster(list(files), work, scheduler):
                found[files[file]] = answer
                advance(str(files[file]))
    return {path: found[path] for path in paths}


def _look(file: Path) -> Answer:
    text = read_text(file)
    if text is not None:
        return Answer(text.seen)
    try:
        table = read_side(file)
    except DumpFormatError:
        return Answer(there=file.exists())
    return Answer(table=None if table.problems else table)


def _template(file: Path) -> tuple[bytes, Template | None]:
    text = read_text(file)
    return (b"", None) if text is None else (text.seen.digest, make_template(file, text))
