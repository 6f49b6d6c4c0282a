"""Ranks whose dumps differ only in the ranks that they name are read once: memory follows the number of different ranks.

Two ranks of one program that hold the same numbers write the same text, but for the ranks of their groups and their peers. Such places are
cut out of the text before it is held against the texts that were read before. A rank that nobody has written like before becomes a
template, a table in which each place bears a mark; every rank is a view of its template with its own ranks in these places, and costs some
kilobytes. Nobody may change a view in place; `shared_columns.own_columns` makes a table of its own of it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import TENSOR, DumpTable, fill, read_side, say_missing
from msprobe_engine.formats.dump.reader import object_inside, parse_json, parse_object
from msprobe_engine.formats.dump.ring_file import read_step_file
from msprobe_engine.formats.dump.shared_columns import Plan, RankList, RankNodes, RankTexts, SharedColumns
from msprobe_engine.formats.dump.stream import records_of, split_header

MOST_BYTES = 1 << 28
"""Files beyond it are read in blocks, each for itself."""
_PLACES = re.compile(rb'"(?:group_ranks": (\[[\d,\s]*\])|group_id": ("[^"\\]*")|peer": (\d+)|root": (\d+))')
"""Where ranks are named."""
_FIRST = 1 << 62
_LIST, _TEXT = f"[-{str(_FIRST)[:12]}", "#msprobe rank "
_MARKED = tuple(word.encode() for word in (_LIST[1:], _TEXT))
_PLAN = "collectives", "extra", "tags"
_TABLE, _VIEW = 4, 1 << 13
"""Memory of a table, per byte of its file, and of a view."""
KEPT = 1 << 27
"""Bytes of what was read that are kept for a second look."""
_CONSTRUCT = layout.COMPANIONS.index(layout.CONSTRUCT)
_SHOWN = "values", "nonfloat_stats", "md5"

T = TypeVar("T")


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
    for piece in _marked(body, places):
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


class ReplicaReader:
    """Reads the ranks of a step, of one run or of several that are held against each other.

    Args:
        shared: columns of the tables that were read before.
        keep: what a file was found to be is kept for who looks at it again.
        scheduler: address of a Dask scheduler whose workers read the files that `expect` names; "": they are read here.

    Attributes:
        shared: columns of the tables that were read.
        held: bytes of memory of the templates and of the views that are kept, as an estimate.
    """

    def __init__(self, shared: SharedColumns, keep: bool = False, scheduler: str = "") -> None:
        self.held = 0
        self.shared = shared
        self._templates: dict[bytes, Template | None] = {}  # None: cannot stand for others
        self._words: dict[bytes, Any] = {}
        self._ranks: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._kept: dict[Path, DumpTable | None] | None = {} if keep else None
        self._scheduler = scheduler
        self._ahead: dict[Path, Seen | None] = {}
        self._own: dict[Path, DumpTable] = {}

    def expect(self, paths: Sequence[Path]) -> None:
        """These are read next; the workers of a cluster read them now.

        Raises:
            MissingExtraError: Dask is not installed.
            UsageError: no cluster answers.
        """
        if not self._scheduler:
            return
        from msprobe_engine.formats.dump import read_far

        todo = [path for path in paths if path not in self._ahead and not (self._kept and path in self._kept)]
        for path, answer in read_far.look(todo, self._scheduler).items():
            self._ahead[path] = answer.seen
            if answer.seen is not None and answer.template is not None and answer.seen.digest not in self._templates:
                self._add(answer.seen, answer.template)
            if answer.table is not None:
                self._own[path] = answer.table

    def read(self, path: Path) -> DumpTable:
        """As `read_side`.

        Raises:
            DumpFormatError: as there.
        """
        view = self._known(path)
        if view is not None:
            return view
        own = self._own.pop(path, None)
        return self.shared.share(read_side(path) if own is None else own)

    def template(self, path: Path) -> DumpTable | None:
        """One and the same for all files that differ only in the ranks that they name; None of a file that has to be read for itself."""
        view = self._known(path)
        return None if view is None else view.template

    def _known(self, path: Path) -> DumpTable | None:
        if path.name != layout.DUMP:
            return None
        if self._kept is None:
            return self._view(path)
        view = self._kept.get(path)
        if path not in self._kept or (view is not None and view.template is None):  # somebody has made it a table of its own
            view = self._kept[path] = self._view(path)
            self.held += _VIEW
        return view

    def _view(self, path: Path) -> DumpTable | None:
        """None: the file has to be read for itself, and what is wrong with it is said then."""
        text = None
        if path in self._ahead:
            seen = self._ahead.pop(path)
        else:
            text = read_text(path)
            seen = None if text is None else text.seen
        if seen is None:
            return None
        if seen.digest not in self._templates:
            text = text or read_text(path)
            if text is None or text.seen.digest != seen.digest:  # it has changed since a worker saw it
                return None
            self._add(seen, make_template(path, text))
        template = self._templates[seen.digest]
        if template is None:
            return None
        found = [self._word(text) for text in seen.named]
        return self._made(template, path, seen.header, seen.whole, self._ranks.setdefault(tuple(map(id, found)), tuple(found)))

    def _add(self, seen: Seen, template: Template | None) -> None:
        if template is not None:
            self.shared.share(template.table)
            self.shared.share_construct(template.table)
        self._templates[seen.digest] = template
        self.held += seen.size * _TABLE

    def _word(self, text: bytes) -> Any:
        known = self._words.get(text)
        if known is None:
            known = self._words[text] = parse_json(text, Path())
        return known

    @staticmethod
    def _made(template: Template, path: Path, header: dict[str, Any], whole: bool, ranks: tuple[Any, ...]) -> DumpTable:
        table = copy.copy(template.table)
        table.path, table.header, table.problems = path, header, []
        table.template, table.named_ranks = template.table, ranks
        for name, plan in template.nodes.items():
            setattr(table, name, RankNodes(getattr(template.table, name), plan, ranks))
        for name, places in template.texts.items():
            column = getattr(template.table, name)
            setattr(table, name, (RankTexts if isinstance(column, dict) else RankList)(column, places, ranks))
        say_missing(table, 0, whole)
        return table


def make_template(path: Path, text: Text) -> Template | None:
    """None of a file that cannot stand for others."""
    table = DumpTable(path)
    try:
        with guard_reading(path, "a dump"), collection_paused():
            records = records_of(path, text.head, b"".join(_marked(text.body, text.places)))
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
        made.texts[name] = {row: _number(shown) for row, value in items if _LIST in (shown := _shown(value))}
    if any(_LIST[1:] in word or _TEXT in word for word in (*table.name, *table.ops, *table.data_name)):
        return None
    return made


class StepTables:
    """Readers of some steps for who goes through the steps twice: what was read at first is kept while it takes no more than `memory`
    bytes, and is read again of the steps behind.

    Args:
        scheduler: as of `ReplicaReader`.
    """

    def __init__(self, memory: int = KEPT, scheduler: str = "") -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._kept: dict[int, ReplicaReader] = {}
        self._now: tuple[int, ReplicaReader] | None = None

    def of(self, step: int) -> ReplicaReader:
        """The reader of a step; nothing may be changed in its tables, but with `shared_columns.own_columns`."""
        if step in self._kept:
            return self._kept[step]
        if self._now is None or self._now[0] != step:
            free = sum(reader.held for reader in self._kept.values()) < self._memory
            self._now = step, ReplicaReader(SharedColumns(), keep=free, scheduler=self._scheduler)
            if free:
                self._kept[step] = self._now[1]
        return self._now[1]


def of_each(sides: Mapping[int, DumpTable], look: Callable[[DumpTable], T]) -> dict[int, T]:
    """Rank -> what `look` says of its table but for the ranks that it names, asked once for all that have one template."""
    known: dict[int, T] = {}
    found: dict[int, T] = {}
    for rank, side in sides.items():
        same = id(side if side.template is None else side.template)
        if same not in known:
            known[same] = look(side)
        found[rank] = known[same]
    return found


def _program(header: Mapping[str, Any]) -> bytes:
    """What the headers of ranks that may be the same have in common."""
    told = header.get("parallel")
    parallel = dict(told) if isinstance(told, dict) else {}
    place = parallel.pop("rank", None)
    stage = place.get("pp") if isinstance(place, dict) else None
    return repr({**header, "rank": None, "parallel": (parallel, stage)}).encode(errors="surrogatepass")


def _marked(body: bytes, places: Sequence[tuple[int, int]]) -> Iterator[bytes]:
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


def _shown(value: Any) -> str:
    text = value[0] if type(value) is tuple else value
    return text if type(text) is str else ""


def _number(text: str) -> int:
    return -int(text.strip("[]")) - _FIRST
