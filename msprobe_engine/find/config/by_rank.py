"""What every rank has of something, compared rank by rank without looking at equal ranks twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
NO_RANK = -1
"""Of an entry that was written once for all ranks."""


def pairs(
    bench: Mapping[int, T], cmp: Mapping[int, T], content: Callable[[T], Any] = lambda value: value
) -> Iterator[tuple[tuple[int, ...], T, T]]:
    """(ranks, bench, cmp) for every pair of contents that differs from those before; ranks of one side only are left out.

    Args:
        content: what of a value is looked at, JSON-ready.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(set(bench) & set(cmp)):
        groups.setdefault((_text(content(bench[rank])), _text(content(cmp[rank]))), []).append(rank)
    for ranks in groups.values():
        yield tuple(ranks), bench[ranks[0]], cmp[ranks[0]]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
