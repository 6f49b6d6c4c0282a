"""Ranks whose dumps differ only in the ranks that they name are read once: memory follows the number of different ranks.

Two ranks of one program that hold the same numbers write the same text, but for the ranks of their groups and their peers. Such places are
cut out of the text before it is held against the texts that were read before. A rank that nobody has written like before becomes a
template, a table in which each place bears a mark; every rank is a view of its template with its own ranks in these places, and costs some
kilobytes. Nobody may change a view in place; `shared_columns.own_columns` makes a table of its own of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.rank_files import parse_json
from msprobe_engine.formats.dump.read_table import read_side, say_missing
from msprobe_engine.formats.dump.replicas import far
from msprobe_engine.formats.dump.replicas.shared_columns import RankList, RankNodes, RankTexts, SharedColumns
from msprobe_engine.formats.dump.replicas.template import Seen, Template, make_template, read_text

_TABLE, _VIEW = 4, 1 << 13
"""Memory of a table, per byte of its file, and of a view."""
KEPT = 1 << 27
"""Bytes of what was read that are kept for a second look."""

T = TypeVar("T")


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
        todo = [path for path in paths if path not in self._ahead and not (self._kept and path in self._kept)]
        for path, answer in far.ask_workers(todo, self._scheduler).items():
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
        view = self._find_view(path)
        if view is not None:
            return view
        own = self._own.pop(path, None)
        return self.shared.share(read_side(path) if own is None else own)

    def template(self, path: Path) -> DumpTable | None:
        """One and the same for all files that differ only in the ranks that they name; None of a file that has to be read for itself."""
        view = self._find_view(path)
        return None if view is None else view.template

    def _find_view(self, path: Path) -> DumpTable | None:
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
        return self._make_table(template, path, seen.header, seen.whole, self._ranks.setdefault(tuple(map(id, found)), tuple(found)))

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
    def _make_table(template: Template, path: Path, header: dict[str, Any], whole: bool, ranks: tuple[Any, ...]) -> DumpTable:
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
