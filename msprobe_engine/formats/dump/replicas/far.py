"""Dump files read by the workers of a Dask cluster. Over the network go what each rank says of itself and one table of each different
rank."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.process.jobs import on_cluster
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.replicas.template import Seen, Template, make_template, read_text
from msprobe_engine.formats.dump.ring_file import has_step_file

_log = get_logger()


class Answer(NamedTuple):
    """Of one file. seen: where it may be the same as others; template: of the first such file that a worker has read, so that it reads none
    twice; table: where it has to be read for itself and nothing is wrong with it; there: the worker has found it."""

    seen: Seen | None = None
    template: Template | None = None
    table: DumpTable | None = None
    there: bool = True


_KEPT = 16
_answered: dict[str, set[bytes]] = {}
"""In a worker: of the last `_KEPT` calls of `ask_workers` the digests of which it has given a template."""


def ask_workers(paths: Sequence[Path], scheduler: str) -> dict[Path, Answer]:
    """What the files are. A file with which something is wrong has no answer here: who reads it says so."""
    found = _on_workers(paths, partial(_answer_for_file, uuid.uuid4().hex), scheduler)
    for path, answer in found.items():
        for table in (answer.table, None if answer.template is None else answer.template.table):
            if table is not None:
                table.path = path
    unseen = [path for path, answer in found.items() if not answer.there and has_step_file(path)]
    if unseen:
        _log.warning(
            "the workers of %s do not see %d of %d files, the first is %s; these are read here: give a path on a file system that the "
            "workers share",
            scheduler, len(unseen), len(paths), unseen[0],
        )  # fmt: skip
    return found


def _on_workers(paths: Sequence[Path], work: Callable[[Path], Answer], scheduler: str) -> dict[Path, Answer]:
    files = {Path(os.path.abspath(path)): path for path in paths}  # workers run in directories of their own
    found: dict[Path, Answer] = {}
    if files:
        with bar("read", len(files)) as advance:
            for file, answer in on_cluster(list(files), work, scheduler):
                found[files[file]] = answer
                advance(str(files[file]))
    return {path: found[path] for path in paths}


def _answer_for_file(call: str, file: Path) -> Answer:
    text = read_text(file)
    if text is not None:
        answered = _answered.setdefault(call, set())
        for old in list(_answered)[:-_KEPT]:
            _answered.pop(old, None)
        if text.seen.digest in answered:
            return Answer(text.seen)
        answered.add(text.seen.digest)
        return Answer(text.seen, make_template(file, text))
    try:
        table = read_side(file)
    except DumpFormatError:
        return Answer(there=has_step_file(file))
    return Answer(table=None if table.problems else table)
