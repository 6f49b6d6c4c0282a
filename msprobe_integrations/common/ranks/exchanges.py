"""The exchanges of one probe: one per set of ranks, whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_integrations.common.parameters.gradients import Exchange

if TYPE_CHECKING:
    from msprobe_engine.core.settings.schema import MonitorSettings

_SHARDED = ("gradients", "parameters", "optimizer_states", "updates", "momentum_agreement")
_log = get_logger()


class Exchanges:
    """Makes and keeps `Exchange` objects.

    Args:
        make: connects some ranks, in the background, when all of them have come. Raises what goes wrong.

    Attributes:
        watched: ranks that monitor, empty is all: rows of sets that have others among them cannot be merged.
        wanted: something is monitored that may lie in shards; else none is made.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], Exchange]) -> None:
        self._connect = make
        self.watched: Sequence[int] = ()
        self.wanted = True
        self._at_once = self._left = False
        self._made: dict[tuple[int, ...], Exchange | None] = {}
        self._said: set[tuple[int, ...]] = set()

    def apply_settings(self, monitor: MonitorSettings) -> None:
        """These settings hold from now on."""
        self.watched = monitor.rank
        # with `hot` they are made at the start, where all ranks are, and are there when a change wants them
        self.wanted = monitor.hot or (monitor.enabled and any(getattr(monitor, family) for family in _SHARDED))
        self._at_once = monitor.hot

    def of(self, ranks: Sequence[int]) -> Exchange | None:
        """The exchange of these global ranks; None (said once) when there can be none. Where not all of the ranks take part it says so, and
        nothing is merged."""
        key = tuple(ranks)
        if not self.wanted or self._left:
            return None
        if self._at_once and key not in self._made:
            self._made[key] = self._make_exchange(key)
        if self.watched and not set(key).issubset(self.watched):
            if key not in self._said:
                self._said.add(key)
                _log.warning(
                    "monitor.rank leaves out some of the ranks %s that share one optimizer: sharded statistics are those of each rank's "
                    "shard (marked scope: shard); leave monitor.rank empty to get whole parameters",
                    list(key),
                )
            return None
        if key not in self._made:
            self._made[key] = self._make_exchange(key)
        return self._made[key]

    def hurry(self) -> None:
        for exchange in self._made.values():
            if exchange is not None:
                exchange.hurry()

    def close(self, *why: str) -> None:
        """Leave all of them and make no others; `why` is for the other ranks, nothing: the probe is closed."""
        self._left = True
        made, self._made = self._made, {}
        for exchange in made.values():
            if exchange is not None:
                exchange.close(*why)

    def _make_exchange(self, ranks: tuple[int, ...]) -> Exchange | None:
        try:
            return self._connect(ranks)
        except Exception as error:
            raise_of_training(error)
            _log.error("statistics of sharded tensors stay those of this rank's shard (marked scope: shard): %s", error)
            return None
