"""Ranks of one program hold columns that are the same: they are kept once, whatever the number of ranks.

The ranks of a step differ in their numbers, and where a rank is a replica of another one, or of the golden run's, not even in these. Names,
types, shapes, arguments and what encloses what are those of a few programs (one for each stage of a pipeline, say). Columns that are shared
must not be changed in place: `own_columns` gives tables columns of their own again.
"""

from __future__ import annotations

import copy
import hashlib
import marshal
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msprobe_engine.formats.dump.dump_table import DumpTable

_COLUMNS = ("ops", "name", "dtype", "md5", "data_name", "shape", "requires_grad", "values", "tags")
"""Lists and dictionaries, which are told apart by their text: 1 and True are not the same."""
_ARRAYS = ("offsets", "op", "role", "numbers")
_GROUP = "group_ranks"
_PLAIN = 0
"""Version of marshal without references, whose bytes follow from the content alone."""


class SharedColumns:
    """What has been seen of the tables of one step."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def share(self, table: DumpTable) -> DumpTable:
        """Put the columns of an earlier table in the place of those that are the same."""
        for name in _COLUMNS:
            setattr(table, name, self._same_text(name, getattr(table, name)))
        for name in _ARRAYS:
            column = getattr(table, name)
            setattr(table, name, self._known.setdefault((name, _digest(bytes(column))), column))
        for record in table.collectives.values():
            self._share_groups(record)
        for facts in table.extra.values():
            self._share_groups(facts)
        return table

    def share_construct(self, table: DumpTable) -> None:
        """The same of what encloses the records."""
        table.share_construct(self._same_text("construct", table.construct))

    def _same_text(self, name: str, column: Any) -> Any:
        return self._known.setdefault((name, _digest(_text(column))), column)

    def _share_groups(self, node: Any) -> None:
        """Lists of the ranks of a group, each of which every record of it has."""
        children: Iterable[Any] = ()
        if isinstance(node, dict):
            group = node.get(_GROUP)
            if isinstance(group, list):
                node[_GROUP] = self._same_text(_GROUP, group)
            children = node.values()
        elif isinstance(node, list):
            children = node
        for child in children:
            if (isinstance(child, dict) and "dtype" not in child) or (isinstance(child, list) and child):  # no tensor
                self._share_groups(child)


def _text(column: Any) -> bytes:
    """Bytes that are equal for equal content of equal types."""
    try:
        return marshal.dumps(column, _PLAIN)
    except ValueError:  # nested too deep
        return repr(column).encode(errors="surrogatepass")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def own_columns(table: DumpTable) -> None:
    """Columns that no other table has."""
    if table.template is not None:
        for name in ("tags", "values", "nonfloat_stats", "extra", "collectives"):
            setattr(table, name, copy.deepcopy(dict(getattr(table, name))))
        table.nans, table.infs = dict(table.nans), dict(table.infs)
        table.template = None
    mapped = table.aliases is not table.ops
    for name in _COLUMNS:
        column = getattr(table, name)
        setattr(table, name, dict(column) if isinstance(column, dict) else list(column))
    table.aliases = table.aliases if mapped else table.ops
    for name in ("offsets", "op", "numbers"):
        setattr(table, name, array(getattr(table, name).typecode, getattr(table, name)))
    table.role = bytearray(table.role)


Plan = dict[Any, Any]
"""Key (or position in a list) -> number of the place, or the plan of what stands there."""


def _fill_ranks(node: Any, plan: Plan, ranks: Sequence[Any]) -> Any:
    made = node.copy()
    for key, place in plan.items():
        made[key] = ranks[place] if type(place) is int else _fill_ranks(node[key], place, ranks)
    return made


class RankNodes(Mapping[int, Any]):
    """Trees of a template by record or row, with the ranks of one rank."""

    def __init__(self, nodes: Mapping[int, Any], plan: Plan, ranks: Sequence[Any]) -> None:
        self._nodes, self._plan, self._rank_names = nodes, plan, ranks

    def __getitem__(self, key: int) -> Any:
        node = self._nodes[key]
        plan = self._plan.get(key)
        return node if plan is None else _fill_ranks(node, plan, self._rank_names)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


class RankTexts(RankNodes):
    """Values of a template by row, in which the text of a group is that of one rank; four times where it stands for statistics."""

    def __getitem__(self, key: int) -> Any:
        node = self._nodes[key]
        place = self._plan.get(key)
        if place is None:
            return node
        text = str(self._rank_names[place])
        return (text,) * len(node) if type(node) is tuple else text


class RankList(Sequence[Any]):
    """A column of a template, in which the text of a group is that of one rank."""

    def __init__(self, column: Sequence[Any], places: Mapping[int, int], ranks: Sequence[Any]) -> None:
        self._column, self._places, self._rank_names = column, places, ranks

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        place = self._places.get(row + len(self) if row < 0 else row)
        return self._column[row] if place is None else str(self._rank_names[place])

    def __len__(self) -> int:
        return len(self._column)
