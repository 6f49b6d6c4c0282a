"""Which rank the probe is, also when the process group came up after it, and what is set up once the ranks know each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from msprobe_engine.log import get_logger, set_rank
from msprobe_integrations.torch.notify import find_notifier
from msprobe_integrations.torch.rank_watch import RankWatch, watch_ranks

if TYPE_CHECKING:
    from msprobe_integrations.torch.probe import TorchProbe

_log = get_logger()


def grouped() -> bool:
    """True when there is a process group."""
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


class Membership:
    """The probe's place among the ranks.

    Attributes:
        rank: global rank, None outside of a distributed run.
    """

    def __init__(self, probe: TorchProbe) -> None:
        self._probe = probe
        self.rank: int | None = probe.backend.rank()
        self._alone = not grouped()
        self._compared = False
        self._numbers: RankWatch | None = None

    def look(self) -> None:
        """At the begin of every step."""
        probe = self._probe
        if self.rank is None and (rank := probe.backend.rank()) is not None:
            self.rank = rank
            set_rank(rank)
            if rank:
                _log.warning(
                    "the process group came up after the probe: this rank's files are named as if it had none; build the probe after it"
                )
        if self._alone and grouped():
            self._alone = False
            with probe.guard("incidents"):
                self._meet()
        if not self._alone and not self._compared:
            self._compared = True
            with probe.guard("rule outlier_rank"):
                self._compare()

    def close(self) -> None:
        """Take the groups of ours apart."""
        if self._numbers is not None:
            self._numbers.close()

    def _meet(self) -> None:
        """From now on incidents are announced between the ranks."""
        incidents = self._probe.session.incidents
        notifier = find_notifier(Path(self._probe.settings.output_dir)) if incidents is not None else None
        if incidents is not None and notifier is not None:
            incidents.notifier.close()
            incidents.notifier = notifier
            incidents.world_size = self._probe.backend.world_size()

    def _compare(self) -> None:
        """Where a rule wants the numbers of the ranks beside each other: a collective call in the first step."""
        monitor = self._probe.monitor
        self._numbers = watch_ranks(self._probe.pipeline.rules, monitor.rank if monitor is not None else ())
        if self._numbers is not None:
            self._probe.pipeline.listeners.append(self._numbers.on_frame)
