"""``scope`` and ``list`` of the dump settings as one function on record names."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def name_filter(scope: Sequence[str], names: Sequence[str]) -> Callable[[str], bool] | None:
    """A function that says whether a record is kept; None when all are.

    Args:
        scope: [first, last] record names: kept from the first to the last one, both included, in the order of execution.
        names: kept when one of these is a part of the record's name. With a scope as well, both must hold.
    """
    if not scope and not names:
        return None
    within = _Range(*scope) if scope else None

    def wanted(name: str) -> bool:
        inside = within(name) if within is not None else True
        return inside and (not names or any(n in name for n in names))

    return wanted


class _Range:
    """On from the first mention of `first` to the last mention of `last`; the same call is asked about at its start and its end."""

    def __init__(self, first: str, last: str) -> None:
        self._first, self._last = first, last
        self._open = False
        self._closing = False

    def __call__(self, name: str) -> bool:
        if name == self._first:
            self._open, self._closing = True, False
        elif self._closing and name != self._last:
            self._open = self._closing = False
        if self._open and name == self._last:
            self._closing = True
        return self._open
