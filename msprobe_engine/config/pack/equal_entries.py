"""Entries that ranks of one pack have in common are stored once: ``msprobe/same/rank{r}.json`` says which entries of rank r are those of
which other rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from zipfile import ZipInfo
from zlib import crc32

from msprobe_engine.config.pack.file import Opened
from msprobe_engine.core.errors import ArchiveError
from msprobe_engine.core.io.archives import read_member
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.pack import entries

_PARTS = ("env", "withheld", "system", "hyperparameters")
_MOST_BYTES = 1 << 24
"""Of an entry that others may stand for."""


def fold(made: Mapping[str, bytes], before: Opened, rank: int) -> dict[str, bytes]:
    """What a rank writes in the place of `made`: the entries that no other rank has, and whose the others are. An entry that others are
    said to have, and that becomes another one, is written for these.

    Raises:
        ArchiveError: an entry that is there is damaged.
    """
    there = {entry.filename: entry for entry in before.entries}
    own, kept, equal = entries.of_rank(entries.SAME, rank), dict[str, bytes](), dict[str, str]()
    for name, content in made.items():
        twin = None if name in there else _twin(name, content, before, there)
        if twin is None:
            kept[name] = content
        else:
            equal[name] = twin
    said = {name: of_entry(read_member(before.file, there[name], _MOST_BYTES)) for name in there if entries.is_same(name)}
    changed = {own} if equal or made.keys() & said.get(own, {}).keys() else set[str]()
    said[own] = {name: of for name, of in said.get(own, {}).items() if name not in made} | equal
    for digest, names in said.items():
        for name in [name for name, of in names.items() if of in kept and of in there]:
            kept[name] = read_member(before.file, there[names.pop(name)], _MOST_BYTES)
            changed.add(digest)
    return kept | {digest: json.dumps(said[digest]).encode() for digest in changed}


def _twin(name: str, content: bytes, before: Opened, there: Mapping[str, ZipInfo]) -> str | None:
    """An entry of another rank that is the same."""
    part = entries.ranks_of(name)
    if part is None or part[0] not in _PARTS or len(content) > _MOST_BYTES:
        return None
    check = crc32(content)
    for other, entry in there.items():
        of = entries.ranks_of(other) if (entry.CRC, entry.file_size) == (check, len(content)) else None
        if of is not None and of[0] == part[0]:
            try:
                if read_member(before.file, entry, _MOST_BYTES) == content:
                    return other
            except ArchiveError:
                continue
    return None


def of_entry(content: bytes) -> dict[str, str]:
    """Entry -> the entry that it is the same as, as a file says it; what is none is left out."""
    try:
        found: Any = parse_json(content)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: of for name, of in found.items() if isinstance(of, str) and _of_one_part(name, of)}


def _of_one_part(name: str, of: str) -> bool:
    own, other = entries.ranks_of(name), entries.ranks_of(of)
    return own is not None and other is not None and own[0] == other[0] and own[0] in _PARTS
