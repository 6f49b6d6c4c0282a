"""A metric with all its samples, as Prometheus understands it."""

from __future__ import annotations

from typing import NamedTuple

Labels = tuple[tuple[str, str], ...]


class Family(NamedTuple):
    """One metric family: name (counters without ``_total``), type, help, and samples (suffix, labels, value)."""

    name: str
    type: str
    help: str
    samples: list[tuple[str, Labels, float]]
