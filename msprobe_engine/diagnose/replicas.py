"""Copies of a parameter on several ranks that should be equal: which one is not.

Nothing here says which ranks hold copies and which hold parts (tensor and expert parallelism). Parts differ in every layer; a copy that
has gone astray differs where the same parameter of other layers is equal. Only the latter is called out of step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.compare.side import PARAMETERS, Side
from msprobe_engine.sentences import Sentence

Row = tuple[Any, ...]
"""Statistics (or a checksum) of one copy."""
_CALL = re.compile(r"\.forward\.\d+\.")
_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])")


@dataclass
class Odd:
    """A parameter that is not equal on all its ranks, though it should be."""

    step: int
    name: str
    rank: int
    others: list[int]
    why: str
    numbers: dict[str, Any] = field(default_factory=dict)


def parameters(sides: Mapping[int, Side]) -> dict[str, dict[int, Row]]:
    """Parameter rows of the first forward call of each module: row name -> rank -> shape, statistics, checksum."""
    table: dict[str, dict[int, Row]] = {}
    for rank, side in sides.items():
        seen: set[str] = set()
        for row, role in enumerate(side.role):
            if role != PARAMETERS:
                continue
            name = side.name[row]
            plain = _CALL.sub(".", name)
            if plain not in seen:
                seen.add(plain)
                facts = side.facts.get(row, {})
                table.setdefault(name, {})[rank] = (str(side.shape[row]), *side.four(row), side.md5[row], facts.get("digest"))
    return table


def odd_ones(step: int, table: Mapping[str, Mapping[int, Row]]) -> list[Odd]:
    """Parameters of one step that differ between ranks where the same parameter of most other layers does not.

    Args:
        table: parameter -> rank -> what is known of its copy there, in the order of the model.
    """
    kinds: dict[str, list[bool]] = {}
    equal: dict[str, bool] = {}
    for name, rows in table.items():
        if len(rows) < 2:
            continue
        values = set(rows.values())
        equal[name] = len(values) == 1 or all(_nan(value) for value in values)
        kinds.setdefault(_NUMBER.sub("*", name), []).append(equal[name])
    same, all_of = sum(equal.values()), len(equal)
    found = []
    for name, is_equal in equal.items():
        if is_equal:
            continue
        kind = kinds[_NUMBER.sub("*", name)]
        if (len(kind) > 1 and 2 * sum(kind) >= len(kind)) or (len(kind) == 1 and same == all_of - 1 and same >= 2):
            found.append(_odd(step, name, table[name]))
    return found


def _nan(row: Row) -> bool:
    return any(value != value for value in row)


def _odd(step: int, name: str, rows: Mapping[int, Row]) -> Odd:
    counts = Counter(rows.values())
    usual, often = counts.most_common(1)[0]
    others = sorted(rank for rank, row in rows.items() if row == usual)
    away = sorted(rank for rank, row in rows.items() if row != usual)
    if 2 * often > len(rows):
        why = Sentence("it differs on rank {0} from the copies on ranks {1}", ", ".join(map(str, away)), ", ".join(map(str, others[:8])))
        rank = away[0]
    else:
        rank = away[-1]
        why = Sentence(
            "its copies on ranks {0} differ, and no value has a majority: which of them is wrong cannot be told (rank {1} "
            "is named because it differs from rank {2}, which counts as the one that is copied)",
            ", ".join(map(str, sorted(rows)[:16])),
            rank,
            others[0],
        )
    numbers = {"target": {"row": name, "value": list(rows[rank])}, f"rank {others[0]}": {"row": name, "value": list(usual)}}
    return Odd(step, name, rank, others, Sentence("{0}; the same parameter of other layers is equal everywhere", why), numbers)
