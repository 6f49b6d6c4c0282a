"""Which rank the probe is, also when the ranks were joined after it was made, and what is set up once they know each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.log import get_logger, set_rank
from msprobe_engine.probe.rules.base import Rule

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.probe import Probe

_log = get_logger()


class RankDiscovery:
    """The probe's place among the ranks.

    Args:
        grouped: are the ranks joined by now?
        watch: connects them, in the background, for the rules that want the numbers of all ranks beside each other (of the ranks that are
            monitored, empty: all). None where no rule wants that.

    Attributes:
        rank: global rank, None outside of a distributed run.
    """

    def __init__(self, probe: Probe, grouped: Callable[[], bool], watch: Callable[[Sequence[Rule], Sequence[int]], Any]) -> None:
        self._probe = probe
        self.rank: int | None = probe.backend.rank()
        self._grouped, self._watch = grouped, watch
        self._alone = not grouped()
        self._compared = False
        self._numbers: Any = None

    def update_rank(self) -> None:
        """At the begin of every step."""
        probe = self._probe
        if self.rank is None and (rank := probe.backend.rank()) is not None:
            self.rank = rank
            set_rank(rank)
            if rank:
                _log.warning(
                    "the ranks were joined after the probe was made: this rank's files are named as if it were alone; "
                    "build the probe after joining them"
                )
        if self._alone and self._grouped():
            self._alone = False
            with probe.guard("incidents"):
                self._meet()
        if not self._alone and not self._compared:
            self._compared = True
            with probe.guard("rule outlier_rank"):
                # Where a rule wants the numbers of the ranks beside each other
                monitor = self._probe.monitor
                self._numbers = self._watch(self._probe.pipeline.rules, monitor.rank if monitor is not None else ())
                if self._numbers is not None:
                    self._probe.pipeline.listeners.append(self._numbers.on_frame)

    def close(self) -> None:
        """Take the groups of ours apart."""
        if self._numbers is not None:
            self._numbers.close()

    def _meet(self) -> None:
        """From now on incidents are announced between the ranks."""
        incidents = self._probe.session.incidents
        notifier = self._probe.make_notifier() if incidents is not None else None
        if incidents is not None and notifier is not None:
            incidents.notifier.close()
            incidents.notifier = notifier
            incidents.world_size = self._probe.backend.world_size()
