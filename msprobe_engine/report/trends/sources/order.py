"""Targets in the order of the model, whatever order the ranks wrote them in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from msprobe_engine.report.trends.sources.source import Target

_NUMBER = re.compile(r"\d{1,18}")
"""Numbers of layers; longer rows of digits are no numbers, and int() of a huge text fails."""
T = TypeVar("T")


class Order(Generic[T]):
    """One order of things of which several lists name some each, in an order of their own: steps, ranks, runs.

    What a later list alone has stands behind what it has before it there, or before the next that is known, or at the end.
    """

    def __init__(self) -> None:
        self._next: dict[T | None, T | None] = {None: None}
        self._last: dict[T | None, T | None] = {None: None}

    def add(self, items: Iterable[T]) -> None:
        """Take a list; what occurs in it again counts where it was first."""
        begin: list[T] = []
        before: T | None = None
        for item in dict.fromkeys(items):
            known = item in self._next
            if not known and before is None:
                begin.append(item)
                continue
            if not known and before is not None:
                self._insert(item, before)
            elif begin:
                self._insert_after(begin, self._last[item])
                begin = []
            before = item
        self._insert_after(begin, self._last[None])

    def __iter__(self) -> Iterator[T]:
        item = self._next[None]
        while item is not None:
            yield item
            item = self._next[item]

    def __len__(self) -> int:
        return len(self._next) - 1

    def _insert_after(self, items: Sequence[T], before: T | None) -> None:
        for item in items:
            self._insert(item, before)
            before = item

    def _insert(self, item: T, before: T | None) -> None:
        after = self._next[before]
        self._next[before] = self._last[after] = item
        self._next[item], self._last[item] = after, before


def in_order(targets: Sequence[Target]) -> list[Target]:
    """Targets as they were first seen, with layers of one list beside each other by their numbers.

    ``layers.10.w`` stands behind ``layers.9.w`` also where another rank wrote it first. Stages of the pipeline follow each other within
    a chunk, as the layers of the model do. A module of a dump stands with the calls in it (``Module.layers.9.Block``, ``layers.9: ...``).
    """
    first: dict[str, int] = {}
    keys = {}
    for i, target in enumerate(targets):
        name = target.name.removeprefix("Module.").removeprefix("Cell.")
        match = _NUMBER.search(name)
        stem = name[: match.start()] if match else name
        place = first.setdefault(f"{target.vpp} {target.pp} {stem}", i)
        keys[target] = (target.vpp, target.pp, place, int(match.group()) if match else -1, i)
    return sorted(targets, key=keys.__getitem__)
