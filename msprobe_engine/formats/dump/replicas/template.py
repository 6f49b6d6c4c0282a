"""The text of a dump file with marks in place of the ranks that it names, and the table that is made of it."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import TENSOR, DumpTable
from msprobe_engine.formats.dump.rank_files import object_inside, parse_json, parse_object
from msprobe_engine.formats.dump.read_table import fill
from msprobe_engine.formats.dump.replicas.shared_columns import Plan
from msprobe_engine.formats.dump.ring_file import read_step_file
from msprobe_engine.formats.dump.stream import records_of, split_header

MOST_BYTES = 1 << 28
"""Files beyond it are read in blocks, each for itself."""
_PLACES = re.compile(rb'"(?:group_ranks": (\[[\d,\s]*\])|group_id": ("[^"\\]*")|peer": (\d+)|root": (\d+))')
"""Where ranks are named."""
_FIRST = 1 << 62
_LIST, _TEXT = f"[-{str(_FIRST)[:12]}", "#msprobe rank "
_MARKED = tuple(word.encode() for word in (_LIST[1:], _TEXT))
_PLAN = "collectives", "extra", "tags"
_CONSTRUCT = layout.COMPANIONS.index(layout.CONSTRUCT)
_SHOWN = "values", "nonfloat_stats", "md5"


class Seen(NamedTuple):
    """What tells a rank from others of its template. digest: of all but the ranks that it names; named: these, in the order of the file;
    whole: what lies beside the file is all there; size: bytes of the records."""

    digest: bytes
    named: list[bytes]
    header: dict[str, Any]
    whole: bool
    size: int


class Text(NamedTuple):
    """What stands in a dump file. construct: the construct.json, empty where none lies beside it; places: where ranks are named."""

    seen: Seen
    head: bytes
    body: bytes
    construct: bytes
    places: list[tuple[int, int]]


def read_text(path: Path) -> Text | None:
    """None of what has to be read for itself: saved tensors, a step that was cut off, a file that is damaged."""
    if (path.parent / layout.MARKER).exists():
        return None
    try:
        data = read_step_file(path, MOST_BYTES)
        beside = [read_input(file, MOST_BYTES) if (file := path.parent / name).exists() else b"" for name in layout.COMPANIONS]
    except OSError:
        return None
    parts = split_header(data)
    if parts is None or any(word in parts[1] for word in _MARKED):
        return None
    head, body = parts
    try:
        header = parse_json(head, path)
    except DumpFormatError:
        return None
    if header.get("task") == TENSOR:  # each has saved tensors of its own
        return None
    places = [match.span(match.lastindex or 0) for match in _PLACES.finditer(body)]
    key = hashlib.sha256(b"".join([hashlib.sha256(text).digest() for text in beside]) + _program(header))
    for piece in _mark_places(body, places):
        key.update(piece)
    whole = all(text.rstrip().endswith(b"}") for text in beside)
    seen = Seen(key.digest(), [body[start:stop] for start, stop in places], header, whole, len(body))
    return Text(seen, head, body, beside[_CONSTRUCT], places)


@dataclass
class Template:
    """The table of ranks that are the same but for the ranks that they name, with a mark in each place that names some."""

    table: DumpTable
    nodes: dict[str, Plan] = field(default_factory=dict)
    texts: dict[str, dict[int, int]] = field(default_factory=dict)


def make_template(path: Path, text: Text) -> Template | None:
    """None of a file that cannot stand for others."""
    table = DumpTable(path)
    try:
        with guard_reading(path, "a dump"), collection_paused():
            records = records_of(path, text.head, b"".join(_mark_places(text.body, text.places)))
            keys = len(records.header)
            damaged = fill(table, records).left_out or records.repeated or len(set(table.ops)) < len(table.ops)
    except DumpFormatError:
        return None
    with contextlib.suppress(DumpFormatError):  # who reads it once more says what is wrong with it
        if layout.holds_inside(table.header, layout.CONSTRUCT):
            table.construct = object_inside(text.body, path, layout.CONSTRUCT)
        elif text.construct:
            table.construct = parse_object(text.construct, path)
    if damaged or len(records.header) > keys or table.problems or table.mode == TENSOR:
        return None
    made = Template(table)
    for name in _PLAN:
        made.nodes[name] = _plan(getattr(table, name)) or {}
    for name in _SHOWN:
        column = getattr(table, name)
        items = column.items() if isinstance(column, dict) else enumerate(column)
        made.texts[name] = {row: _number(shown) for row, value in items if _LIST in (shown := _first_text(value))}
    if any(_LIST[1:] in word or _TEXT in word for word in (*table.name, *table.ops, *table.data_name)):
        return None
    return made


def _program(header: Mapping[str, Any]) -> bytes:
    """What the headers of ranks that may be the same have in common."""
    told = header.get("parallel")
    parallel = dict(told) if isinstance(told, dict) else {}
    place = parallel.pop("rank", None)
    stage = place.get("pp") if isinstance(place, dict) else None
    return repr({**header, "rank": None, "parallel": (parallel, stage)}).encode(errors="surrogatepass")


def _mark_places(body: bytes, places: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """The pieces of a text in which each place bears its mark."""
    end = 0
    for number, (start, stop) in enumerate(places):
        yield body[end:start]
        yield _mark(number, body[start : start + 1])
        end = stop
    yield body[end:]


def _mark(number: int, first: bytes) -> bytes:
    """What stands in a place of the template; `first`: of the text that stood there, a list, a text or a number."""
    if first == b'"':
        return b'"%b%d"' % (_TEXT.encode(), number)
    mark = b"-%d" % (_FIRST + number)
    return b"[%b]" % mark if first == b"[" else mark


def _place(node: Any) -> int:
    """The place that a node is the mark of; -1: none."""
    if type(node) is list and len(node) == 1:
        node = node[0]
    if type(node) is int and node <= -_FIRST:
        return -node - _FIRST
    return int(node[len(_TEXT) :]) if type(node) is str and node.startswith(_TEXT) else -1


def _plan(node: Any) -> Plan | None:
    found: Plan = {}
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        place = _place(child)
        if place >= 0:
            found[key] = place
        elif isinstance(child, (dict, list)) and (plan := _plan(child)):
            found[key] = plan
    return found or None


def _first_text(value: Any) -> str:
    text = value[0] if type(value) is tuple else value
    return text if type(text) is str else ""


def _number(text: str) -> int:
    return -int(text.strip("[]")) - _FIRST
