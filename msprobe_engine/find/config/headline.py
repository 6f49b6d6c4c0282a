"""What two packs come to, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from msprobe_engine.config.severity import CHANGES, HARMLESS, MAY
from msprobe_engine.find.config.comparison import Comparison

MOST_HARMLESS = 5
"""Names of harmless differences that are told."""


def headline(found: Comparison, lines: Mapping[str, int] | None = None) -> str:
    """One line: is there a difference that matters?

    Args:
        lines: severity -> in how many lines its differences are told, where these follow.
    """
    counts = found.counts()
    harmless = f"{counts[HARMLESS]} harmless" if counts[HARMLESS] else "none"
    if found.equal and found.unknown:
        names = ", ".join(found.unknown[:MOST_HARMLESS]) + (", ..." if len(found.unknown) > MOST_HARMLESS else "")
        return f"Cannot tell: {len(found.unknown)} of what may change the numbers cannot be compared ({names}); no difference in the rest."
    if found.equal and found.problems:
        return "Cannot tell: not everything can be read or compared, see the problems; no difference in the rest."
    if found.equal and found.not_shown:
        values = "1 value cannot" if found.not_shown == 1 else f"{found.not_shown} values cannot"
        return f"No difference that matters{f' ({harmless})' if counts[HARMLESS] else ''}; {values} be compared."
    if found.equal:
        return f"No difference that matters ({harmless})." if counts[HARMLESS] else "No difference."
    told = {severity: _in_lines(counts[severity], (lines or {}).get(severity, counts[severity])) for severity in (CHANGES, MAY)}
    parts = []
    if counts[CHANGES]:
        parts.append(f"{counts[CHANGES]} change{'s' if counts[CHANGES] == 1 else ''} the numbers{told[CHANGES]}")
    if counts[MAY]:
        parts.append(f"{counts[MAY]} may change them{told[MAY]}")
    worst = found.differences[0]
    first = f"{worst.name} {worst.values}" if worst.values else f"{worst.sheet} {worst.name}"
    return f"The configurations differ: {first}; {', '.join(parts)}{f'; {harmless}' if counts[HARMLESS] else ''}."


def _in_lines(differences: int, lines: int) -> str:
    return "" if lines == differences else f" (in {lines} line{'s' if lines != 1 else ''}: many of a kind are one)"
