"""Which words the statistics rows of a run have: what its files show decides."""

from __future__ import annotations

from dataclasses import dataclass

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.statistics.rows import underflow_limit
from msprobe_integrations.common.statistics.row_options import RowOptions


@dataclass(frozen=True)
class StatisticsOptions:
    """What a backend takes besides what every row has.

    Attributes:
        digest: the 64-bit digest.
        moments: third and fourth power sums, for the kurtosis.
        below: elements below this are counted (underflow); 0: not.
        eps: elements below this count as zeros; 0: exact zeros.
    """

    digest: bool = False
    moments: bool = False
    below: float = 0.0
    eps: float = 0.0

    @classmethod
    def of(cls, settings: ProbeSettings) -> StatisticsOptions:
        """What the monitor and the sinks of these settings need."""
        monitor, sinks = settings.monitor, settings.sinks
        if monitor is None or not monitor.enabled:
            return cls()
        ops = set(monitor.ops)
        for sink in sinks.in_files().values():
            ops |= set(getattr(sink, "ops", ()))
        below = underflow_limit(monitor.underflow_dtype) if "underflow" in ops else 0.0
        eps = monitor.eps if "zeros" in ops and not below else 0.0
        return cls(monitor.digest or "digest" in ops, "kurtosis" in ops, below, eps)

    def apply(self, backend: RowOptions, *, digest: bool = False, checksum: str = "") -> None:
        """Tell the backend, from the next row on.

        Args:
            digest: also for a dump that needs it.
            checksum: of a dump; it takes the place of the moments.
        """
        if checksum:
            backend.want_moments = False
        backend.want_checksum = checksum
        if not checksum:
            backend.want_moments = self.moments
        backend.want_digest = self.digest or digest
        if self.below:
            backend.eps = 0.0
            backend.below = self.below
        else:
            backend.below = 0.0
            backend.eps = self.eps
