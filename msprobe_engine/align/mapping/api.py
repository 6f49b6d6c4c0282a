"""API mapping (``-am``): functions of MindSpore and their positions, as PyTorch has them.

The built-in names (`api_equivalents`) come first, then the user's entries::

    - ms_api: Functional.gelu
      pt_api: Functional.gelu
      ms_args: [0]          # positions on the MindSpore side ...
      pt_args: [0]          # ... and those they belong to
      ms_output: [0]        # ms_outputs, pt_outputs do as well
      pt_output: [0]

A file holds a list of entries, one entry alone, entries under names of their own, or a plain map ``ms_api: pt_api``. Positions that an
entry does not list match nothing; a kind of positions that it does not mention stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.align.mapping.api_equivalents import in_pytorch
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.mapping_file import read_mapping

_KINDS = {
    "args": (".input.", ".kwargs."),
    "output": (".output.",),
    "parameters": (".parameters.",),
    "parameters_grad": (".parameters_grad.",),
}


@dataclass(frozen=True)
class Entry:
    """One function: ``{kind}.{name}`` of both sides, and positions by kind as (of the target, of the golden side)."""

    target: str
    golden: str
    places: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)


class ApiMapping:
    """Renames functions.

    Args:
        entries: the user's.
        loose: positions are compared by how they begin (8.1.1: 1 stands for 10 too).
    """

    def __init__(self, entries: Iterable[Entry], loose: bool) -> None:
        self.entries = {entry.target: entry for entry in entries}
        self.loose = loose

    @classmethod
    def read(cls, source: Any, loose: bool) -> ApiMapping | None:
        """From a file or plain data; True: the built-in names only. None without one.

        Raises:
            UsageError: it cannot be read, or an entry is none; which and why is said.
        """
        if source is None or source is False or source == "":
            return None
        return cls([] if source is True else _entries(read_mapping(source, "api mapping")), loose)

    def record_name(self, name: str, known: frozenset[str]) -> str:
        """What a record is called on the golden side, whose functions are `known`."""
        entry = self._entry(name, known)
        return self._renamed(name) if entry is None else name.replace(entry.target, entry.golden, 1)

    def row_names(self, names: Sequence[str], records: Sequence[str], golden: DumpTable) -> list[str]:
        """What rows are called on the golden side, one per row; a row that an entry does not list gets a name that matches nothing.

        Args:
            names, records: row names and the names of their records.
            golden: the other side; entries for functions that it has not are left out.
        """
        known = functions(golden)
        found = []
        for name, record in zip(names, records):
            entry = self._entry(record, known)
            found.append(self._renamed(name) if entry is None else self._placed(entry, name))
        return found

    def _entry(self, record: str, known: frozenset[str]) -> Entry | None:
        entry = self.entries.get(function_of(record))
        return entry if entry is not None and entry.golden in known else None

    def _renamed(self, name: str) -> str:
        kind, _, rest = name.partition(".")
        function, dot, tail = rest.partition(".")
        return f"{in_pytorch(kind, function)}{dot}{tail}" if dot else name

    def _placed(self, entry: Entry, name: str) -> str:
        name = name.replace(entry.target, entry.golden, 1)
        for kind, words in _KINDS.items():
            for word in words:
                head, found, place = name.partition(word)
                if not found:
                    continue
                if kind not in entry.places:
                    return name
                for mine, other in entry.places[kind]:
                    if place == mine or place.startswith(mine if self.loose else f"{mine}."):
                        return f"{head}{word}{other}{place[len(mine) :]}"
                return f"{name}.abandoned"
        return name


def function_of(name: str) -> str:
    """``{kind}.{function}``: the first two parts of a name."""
    return ".".join(name.split(".", 2)[:2])


def functions(side: DumpTable) -> frozenset[str]:
    """`function_of` all records of a side."""
    return frozenset(function_of(name) for name in side.ops)


def _entries(content: Any) -> list[Entry]:
    if isinstance(content, Mapping):
        if "ms_api" in content or "pt_api" in content:
            content = [content]
        elif all(isinstance(value, Mapping) for value in content.values()):
            content = [{"ms_api": key, **value} for key, value in content.items()]
        else:
            content = [{"ms_api": key, "pt_api": value} for key, value in content.items()]
    return [_entry_of(item, at) for at, item in enumerate(content)]


def _shown(item: Any) -> str:
    """Text of an entry that is none; the text of a few nested aliases may be gigabytes."""
    if isinstance(item, Mapping):
        item = {key: value if isinstance(value, str) else type(value).__name__ for key, value in list(item.items())[:9]}
    return repr(str(item)[:120]) if isinstance(item, (Mapping, str, int, float)) else f"a {type(item).__name__}"


def _entry_of(item: Any, at: int) -> Entry:
    if not isinstance(item, Mapping) or not all(isinstance(item.get(key), str) for key in ("ms_api", "pt_api")):
        raise UsageError(f"compare: entry {at} of the api mapping is {_shown(item)}; it needs the names ms_api and pt_api")
    places = {}
    for kind in _KINDS:
        mine, other = (_positions(item, f"{side}_{kind}", at) for side in ("ms", "pt"))
        if mine is None and other is None:
            continue
        if mine is None or other is None or len(mine) != len(other):
            raise UsageError(
                f"compare: entry {at} of the api mapping ({item['ms_api']}) lists {len(mine or ())} ms_{kind} and {len(other or ())} "
                f"pt_{kind}; as many are needed on both sides"
            )
        places[kind] = tuple(zip(mine, other))
    return Entry(item["ms_api"], item["pt_api"], places)


def _positions(item: Mapping[str, Any], key: str, at: int) -> list[str] | None:
    found = item.get(key, item.get(f"{key}s"))
    if found is None:
        return None
    if not isinstance(found, (list, tuple)):
        raise UsageError(f"compare: entry {at} of the api mapping has {key}: {str(found)[:80]!r}; a list of positions is needed")
    return [str(place) for place in found]
