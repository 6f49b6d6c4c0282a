"""Files beside the tables of a rank: numbers of the steps, alerts, and what the run says about itself.

::

    scalars_{first step}-{last step}.csv    step,name,value
    alerts.jsonl                            one object per alert
    run.json                                rank, world_size, rank_info, version, host, started, started_unix, launch, restart, job,
                                            first_step, monitor, rules[, program: {command, directory, git, versions, drivers}, masks,
                                            without_optimizer, computed_in, tensors_of, missing,
                                            ended: {how: closed, exception or signal[, error, message, where]}]
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msprobe_engine import __version__
from msprobe_engine.config.secrets.masking import mask_setting
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.io.json_text import dumps
from msprobe_engine.core.io.output_files import replace_file
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.core.process.launch import is_restart, job_id
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import MonitorSettings

ALERTS = "alerts.jsonl"
RUN = "run.json"
ENDED = "ended"
SCALARS_HEADER = ["step", "name", "value"]


def scalar_lines(frame: Frame) -> list[str]:
    """Rows of the scalars file: full floats, ``nan`` and ``inf`` as Python prints them."""
    return [f"{frame.step},{safe_cell(name)},{float(value)!r}" for name, value in frame.scalars.items()]


def alert_lines(alerts: Sequence[Alert]) -> str:
    """One JSON object per line."""
    return "".join(dumps(alert_fields(alert)) + "\n" for alert in alerts)


def alert_fields(alert: Alert) -> dict[str, Any]:
    """Fields of an alert in a fixed order, where it is first."""
    fields = {name: getattr(alert, name) for name in ("step", "rank", "rule", "severity", "kind", "name", "micro_step", "value")}
    return {**fields, "expected": alert.expected, "message": alert.message, "order": alert.order, "extra": dict(alert.extra)}


class RunFile:
    """run.json of one rank; written again when more has become known.

    Args:
        rank: global rank.
        world_size: number of ranks, 0 when unknown.
        rules: names of the rules that look at every step; None: not known.
    """

    def __init__(
        self, directory: Path | None, rank: int, world_size: int, monitor: MonitorSettings | None, rules: Sequence[str] | None = None
    ) -> None:
        now = time.time()
        self.content: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "rank_info": {},
            "version": __version__,
            "host": platform.node(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now)),
            "started_unix": round(now, 3),
            "launch": secrets.token_hex(8),
            "restart": is_restart(),
            "job": mask_setting("", job_id()),
            "monitor": None if monitor is None else asdict(monitor),
            "rules": None if rules is None else list(rules),
            "losses": True,  # beside it lies a `LossFile`: where that is gone, somebody has taken it away
        }
        self._directory = directory
        self._watched: dict[str, Mapping[str, Any]] = {}
        self._stale = True

    def watch(self, facts: Mapping[str, Any], key: str = "rank_info") -> None:
        """Facts in a mapping that its owner fills when they are known: about the rank (tp, pp, dp, ...), or under another key."""
        self._watched[key] = facts

    def conclude(self) -> bool:
        """As `refresh`, when the run is over; a run without a step says nothing."""
        return "first_step" in self.content and self.refresh(self.content["first_step"], over=True)

    def stale(self) -> None:
        """What was taken over has not been written after all."""
        self._stale = True

    def refresh(self, step: int, *, over: bool = False) -> bool:
        """Take over what has become known until a step was written, and write the file when that is anything new; True then.

        How the run ended is taken over when it is `over` only: while the last steps wait to be written it is known already.

        Raises:
            SinkError: it cannot be written.
        """
        if "first_step" not in self.content:
            self.content["first_step"] = step
            self._stale = True
        for key, facts in self._watched.items():
            if (over or key != ENDED) and (known := dict(facts)) != self.content.get(key, {}):
                self.content[key] = known
                self._stale = True
        if not self._stale:
            return False
        if self._directory is not None:
            replace_file(self._directory / RUN, (dumps(self.content) + "\n").encode())
        self._stale = False
        return True
