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
from collections.abc import Hashable, Iterable
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
        table.construct = self._same_text("construct", table.construct)

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
    for name in _COLUMNS:
        column = getattr(table, name)
        setattr(table, name, dict(column) if isinstance(column, dict) else list(column))
    for name in ("offsets", "op", "numbers"):
        setattr(table, name, array(getattr(table, name).typecode, getattr(table, name)))
    table.role = bytearray(table.role)
