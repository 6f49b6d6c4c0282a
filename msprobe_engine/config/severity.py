"""What a difference does to the numbers of a training: three words, the same in every table and for every checker."""

from __future__ import annotations

CHANGES, MAY, HARMLESS = "changes numerics", "may change numerics", "harmless"
SEVERITIES = (CHANGES, MAY, HARMLESS)
"""The worst first."""

SHORT = {"changes": CHANGES, "may": MAY, "harmless": HARMLESS}
"""The words of the data files."""

ERROR, WARNING, PASS = "error", "warning", "pass"
"""Verdicts of the existing tool: ``level`` of a row and ``pass_check`` of a sheet."""
_LEVELS = {CHANGES: ERROR, MAY: WARNING, HARMLESS: PASS}


def level(severity: str) -> str:
    """The existing tool's word for a row of this severity."""
    return _LEVELS[severity]


def worst(severities: list[str]) -> str:
    """The worst of them; `HARMLESS` when there is none."""
    return min(severities, key=SEVERITIES.index, default=HARMLESS)
