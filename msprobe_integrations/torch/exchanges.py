"""The exchanges of one probe: one per set of ranks, whoever asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_engine.log import get_logger
from msprobe_integrations.torch.merge import RowExchange

_log = get_logger()


class Exchanges:
    """Makes and keeps `RowExchange` objects.

    Attributes:
        watched: ranks that monitor, empty is all: rows of sets that have others among them cannot be merged.
    """

    def __init__(self) -> None:
        self.watched: Sequence[int] = ()
        self._made: dict[tuple[int, ...], RowExchange | None] = {}
        self._said: set[tuple[int, ...]] = set()

    def of(self, ranks: Sequence[int]) -> RowExchange | None:
        """The exchange of these global ranks. A collective call of theirs the first time; None (said once) when there can be none.

        Ranks that are in several sets ask for them in the same order on all ranks: sorted.
        """
        key = tuple(ranks)
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
            self._made[key] = self._make(key)
        return self._made[key]

    def close(self) -> None:
        """Take all apart."""
        made, self._made = self._made, {}
        for exchange in made.values():
            if exchange is not None:
                exchange.close()

    @staticmethod
    def _make(ranks: tuple[int, ...]) -> RowExchange | None:
        try:
            return RowExchange(ranks=ranks)
        except Exception as error:
            _log.error("statistics of sharded tensors stay those of this rank's shard (marked scope: shard): %s", error)
            return None
