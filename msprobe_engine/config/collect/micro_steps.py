"""Which forward passes of a training are collected."""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_engine.core.errors import UsageError


class MicroSteps:
    """Which forward passes are collected.

    Args:
        wanted: a number n: the first n; numbers: these, from 0; ``"all"``: every one.

    Raises:
        UsageError: it is neither.
    """

    def __init__(self, wanted: int | Sequence[int] | str) -> None:
        self._every = wanted == "all"
        self._those: frozenset[int] = frozenset()
        if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
            self._those = frozenset(range(min(wanted, 1_000_000)))
        elif not isinstance(wanted, (str, bool, int)) and all(type(n) is int and n >= 0 for n in wanted):
            self._those = frozenset(wanted)
        elif not self._every:
            raise UsageError(f"micro_steps is {wanted!r}; allowed: how many of the first forward passes, a list of their numbers, or 'all'")

    def __contains__(self, step: int) -> bool:
        return self._every or step in self._those

    def last(self, step: int) -> bool:
        """Is there none to come after `step`?"""
        return not self._every and all(one <= step for one in self._those)
