"""The files of one rank of one step: their JSON, and what is missing of them as far as they tell."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError, TextError, UnreadableFileError
from msprobe_engine.core.io.json_text import parse_json as parse_text
from msprobe_engine.core.io.regular_files import OddFileError, open_regular
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.frame_log import why_unfinished
from msprobe_engine.formats.dump.ring_file import read_step_file

MOST_BYTES = 16 << 30
"""Of a file that is read at once; what is larger is in the layout that `formats.dump.stream` reads in blocks."""
_MOST = 8
_END = 64
"""Bytes of the end of a file that are looked at."""


def framework_of(header: Mapping[str, Any], records: Iterable[object]) -> str:
    """``pytorch``, ``mindspore``, ``mindtorch``: what dump.json says, else what the tensors in its records are."""
    said = header.get("framework")
    if isinstance(said, str) and said:
        return said
    return "mindspore" if any('"type": "mindspore.' in json.dumps(record) for record in records) else "pytorch"


def object_inside(data: bytes, file: Path, name: str) -> dict[str, Any]:
    """stack.json or construct.json that a dump.json holds; {} where it does not.

    Args:
        data: of the file, or its end.

    Raises:
        DumpFormatError: it is no JSON object.
    """
    start = data.rfind(b'\n "%s": {' % name.encode())
    if start < 0:  # not there, or somebody has laid the file out in another way
        return as_object(parse_object(data, file).get(name, {}), file) if name.encode() in data else {}
    start = data.index(b"{", start)
    return parse_object(data[start : data.find(b"\n", start)].rstrip(b","), file)


def read_bytes(file: Path) -> bytes:
    """The content of a file of a dump.

    Raises:
        FileNotFoundError: it is not there.
        UnreadableFileError: it is a pipe or a device, which would never end.
        DumpFormatError: it cannot be read, or is larger than `MOST_BYTES`.
    """
    try:
        return read_step_file(file, MOST_BYTES)
    except FileNotFoundError:
        raise
    except OddFileError:
        raise UnreadableFileError(f"{file}: is no regular file; no dump has such a file, do not trust it") from None
    except OSError as error:
        raise DumpFormatError(f"{file}: cannot be read ({error.strerror}); check owner and mode") from None


def parse_json(data: bytes, file: Path, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The JSON of a dump file; NaN and Infinity are accepted, as the format has them. `pairs` makes the objects, as `json.loads` has it.

    Raises:
        DumpFormatError: it is no JSON; file, line and what to do are named.
    """
    if not data.strip():
        raise DumpFormatError(f"{file}: is empty; the run was stopped before it wrote this step. Leave the step out or dump it again")
    try:
        return parse_text(data, pairs)
    except TextError as error:
        if error.line is None:
            raise DumpFormatError(f"{file}: {error}; no dump of a training looks so, do not trust it") from None
        cut = error.at_end or not data.rstrip().endswith(b"}")
        cause = "it was cut off while being written (killed process or full disk)" if cut else "it is damaged or was edited"
        raise DumpFormatError(f"{file}: line {error.line}: {error.problem}; {cause}. Leave the step out or dump it again") from None


def parse_object(data: bytes, file: Path, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> dict[str, Any]:
    """`parse_json` of a file that must hold an object."""
    return as_object(parse_json(data, file, pairs), file)


def as_object(document: Any, file: Path) -> dict[str, Any]:
    """What was parsed of a file, if it is a JSON object.

    Raises:
        DumpFormatError: it is not.
    """
    if not isinstance(document, dict):
        raise DumpFormatError(f"{file}: holds a {type(document).__name__}; a JSON object is needed")
    return document


def stack_lines(document: Mapping[str, Any]) -> tuple[dict[str, list[str]], int]:
    """Record name -> lines, innermost first, and how many stacks were left out because they are no lists of text.

    Args:
        document: either layout: ``{number: [[names], [lines]]}`` and the older ``{name: [lines]}``. One line may stand without its list.
    """
    found: dict[str, list[str]] = {}
    odd = 0
    for key, value in document.items():
        names: Any = [key]
        lines: Any = value
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list):
            names, lines = value
            lines = [lines] if isinstance(lines, str) else lines
        if _are_texts(lines) and _are_texts(names):
            found.update((name, lines) for name in names)
        else:
            odd += 1
    return found, odd


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def missing_records(file: Path, header: Mapping[str, Any], count: int, *, recovered: bool = False, repeated: int = 0) -> list[str]:
    """Sentences about one rank of one step; empty when nothing says that records are missing.

    Args:
        file: its dump.json or debug.json.
        header: the keys of the file but its data.
        recovered: the records are those of the frame log.
        repeated: records of which there are several under one name, so that only one of each was read.
    """
    found: list[str] = []
    why = why_unfinished(file.parent)
    if recovered and why:
        found.append(Sentence("{0}: the run could not write this file: {1}; read from its frame log", file, why))
    elif recovered:
        found.append(Sentence("{0}: the process was killed before it wrote this file; read from its frame log", file))
    if was_cut_off(file, header, recovered) and why:
        found.append(Sentence("{0}: the run could not write this step whole: {1}; records may be missing", file, why))
    elif was_cut_off(file, header, recovered):
        found.append(Sentence("{0}: the run ended before this step was whole, or still writes it; records may be missing", file))
    if lost := header.get("lost"):
        found.append(Sentence("{0}: the run could not keep everything: {1}", file, counts_of(lost)))
    if not count:
        found.append(Sentence("{0}: no record in it", file))
    if repeated:
        template = "{0}: {1} records stand more than once under one name; of those close together the last counts"
        found.append(Sentence(template, file, f"{repeated:,}"))
    return found


def was_cut_off(file: Path, header: Mapping[str, Any], recovered: bool) -> bool:
    """Does a rank of a step say that the run ended before it was whole?"""
    return header.get("complete", True) is False or (not recovered and (file.parent / layout.MARKER).exists())


def missing_companions(file: Path, header: Mapping[str, Any]) -> list[str]:
    """Sentences about stack.json and construct.json that are gone from beside a dump.json, or cut off. Its header says what it was written
    with; of a dump whose header does not (the existing tool's, our older ones) every recorder writes both or none, and of neither another
    rank of the step tells.

    Args:
        header: the keys of the file but its data.
    """
    outside = [name for name in layout.COMPANIONS if not layout.holds_inside(header, name)]
    absent = [name for name in outside if not (file.parent / name).exists()]
    if file.name != layout.DUMP:
        return []
    cut = [cut_off_companion(file.parent / name) for name in outside if name not in absent]
    return [sentence for sentence in cut if sentence] + _describe_missing_files(file, header, absent)


def cut_off_companion(file: Path) -> str:
    """A sentence about a stack.json or construct.json that does not end as it must; "" of a whole one. Who needs nothing of it does not
    read it: its end tells."""
    try:
        with open(open_regular(file, follow=True), "rb") as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - _END))
            whole = opened.read(_END).rstrip().endswith(b"}")
    except OSError:  # who reads it says why it cannot
        return ""
    return (
        ""
        if whole
        else Sentence("{0}: it was cut off while being written (killed process or full disk); {1}", file, _COMPANIONS[file.name])
    )


def _describe_missing_files(file: Path, header: Mapping[str, Any], absent: Sequence[str]) -> list[str]:
    if not absent:
        return []
    written = header.get(layout.WRITTEN_WITH)
    if isinstance(written, list):
        template = "{0}: {1}, which was written with it, is not there; {2}"
        return [Sentence(template, file, name, _COMPANIONS[name]) for name in absent if name in written]
    if len(absent) == 2 and not any(_has_companion(place) for place in _some_ranks(file.parent.parent) if place != file.parent):
        return []
    return [Sentence("{0}: {1} is not there; {2}", file, name, _COMPANIONS[name]) for name in absent]


_COMPANIONS: Mapping[str, str] = {
    layout.STACK: Sentence("no line of code is named, and functions are matched without it"),
    layout.CONSTRUCT: Sentence("which call ran in which module is not known, and calls may be matched wrongly"),
}


def _some_ranks(step: Path) -> list[Path]:
    """A few of a step: this is asked for every rank, and there may be thousands."""
    with contextlib.suppress(OSError), os.scandir(step) as entries:
        return [step / entry.name for entry in itertools.islice((one for one in entries if one.name.startswith("rank")), _MOST)]
    return []


def _has_companion(directory: Path) -> bool:
    return any((directory / name).exists() for name in layout.COMPANIONS)


def counts_of(lost: Any) -> str:
    """Reasons and counts of what the run could not keep."""
    if not isinstance(lost, Mapping):
        return str(lost)[:80]
    shown = [f"{str(reason)[:80]} {str(count)[:20]}" for reason, count in lost.items()]
    return some(shown, _MOST)
