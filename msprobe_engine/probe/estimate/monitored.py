"""What the monitor of a training will write in its whole length, from what it has written so far."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.errors import NothingCapturedError
from msprobe_engine.core.text.words import size
from msprobe_engine.formats.monitor.reader import Run, open_run

STEPS = 100_000
"""A training whose length nobody says."""


@dataclass(frozen=True)
class MonitorEstimate:
    """Bytes of a monitor.

    Attributes:
        path: the run that was looked at.
        seen_steps, seen_ranks, seen_bytes: what it has written; steps from the first to the last one.
        steps, ranks: of the training to come.
        step_seconds: median of a step; None: not known.
        limit: most bytes of a rank that are wanted; None: as many as fit on the disk.
        free: bytes on the disk of `path`.
    """

    path: str
    seen_steps: int
    seen_ranks: int
    seen_bytes: int
    steps: int
    ranks: int
    step_seconds: float | None
    limit: float | None
    free: int

    @property
    def of_step(self) -> float:
        """Bytes of a step and rank."""
        return self.seen_bytes / self.seen_steps / self.seen_ranks

    @property
    def of_rank(self) -> float:
        """Bytes of a rank in all steps."""
        return self.of_step * self.steps

    @property
    def fits(self) -> bool:
        """Within the limit of a rank, and all ranks on the disk."""
        return (self.limit is None or self.of_rank <= self.limit) and self.of_rank * self.ranks <= self.free

    def to_json(self) -> dict[str, Any]:
        return {
            "monitor": {
                "path": self.path,
                "seen": {"steps": self.seen_steps, "ranks": self.seen_ranks, "bytes": self.seen_bytes},
                "steps": self.steps,
                "ranks": self.ranks,
                "bytes_per_step_and_rank": round(self.of_step),
                "bytes_per_rank": round(self.of_rank),
                "bytes": round(self.of_rank * self.ranks),
                "step_seconds": self.step_seconds,
                "fits": self.fits,
            }
        }

    def __str__(self) -> str:
        ranks = f"{self.ranks:,} rank{'s' if self.ranks != 1 else ''}"
        lines = [
            f"{'Fits' if self.fits else 'DOES NOT FIT'}: {size(self.of_rank)} per rank, {size(self.of_rank * self.ranks)} in all for the "
            f"monitor, in {self.steps:,} steps of {ranks}",
            f"  seen        {size(self.seen_bytes)} in {self.seen_steps:,} steps of {self.seen_ranks:,} ranks of {self.path}: "
            f"{size(self.of_step)} per step and rank",
        ]
        if self.step_seconds is not None:
            lines.append(
                f"  time        {self.step_seconds * self.steps / 3600:,.1f} hours, with a median of {self.step_seconds:.3g} s a step"
            )
        lines.append(
            f"  disk        {size(self.free)} are free{'' if self.limit is None else f', {size(self.limit)} per rank are allowed'}"
        )
        if not self.fits:
            lines.append(
                "  smaller     monitor.interval looks at fewer steps, monitor.targets at fewer modules; sinks.max_gb thins the files"
            )
        return "\n".join(lines)


def estimate_monitor(source: Path | str, steps: int | None = None, ranks: int | None = None, limit: float | None = None) -> MonitorEstimate:
    """Go by what a monitor has written; `steps`, `ranks`: of the training to come; `limit`: bytes per rank.

    Raises:
        UsageError: no monitor has written there.
        NothingCapturedError: it has written no step.
    """
    run = open_run(source)
    seen = {rank: run.recorded_steps(rank)[0] for rank in run.ranks}
    every = frozenset().union(*seen.values())
    if not every:
        raise NothingCapturedError(f"{source}: the monitor has written no step yet; estimate again after some of them")
    nbytes = sum(file.stat().st_size for path in _paths(run) for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    seconds = [series.values for rank in run.ranks if (series := run.scalars(rank).get("step_seconds")) is not None]
    return MonitorEstimate(
        str(source), max(every) - min(every) + 1, len(run.ranks), nbytes, steps or STEPS, ranks or len(run.ranks),
        float(np.nanmedian(np.concatenate(seconds))) if seconds else None, limit, shutil.disk_usage(source).free,
    )  # fmt: skip


def _paths(run: Run) -> list[Path]:
    return list(dict.fromkeys(path for rank in run.ranks for path in run.paths(rank)))
