"""A comparison as text for a console: the first line is the verdict."""

from __future__ import annotations

from msprobe_engine.config_check.comparison import Comparison
from msprobe_engine.config_check.severity import CHANGES, HARMLESS, MAY
from msprobe_engine.log import one_line

TOP = 20
_WIDTH = 16


def headline(found: Comparison) -> str:
    """One line: is there a difference that matters?"""
    counts = found.counts()
    harmless = f"{counts[HARMLESS]} harmless" if counts[HARMLESS] else "none"
    if found.equal:
        return f"No difference that matters ({harmless})." if counts[HARMLESS] else "No difference."
    parts = []
    if counts[CHANGES]:
        parts.append(f"{counts[CHANGES]} change{'s' if counts[CHANGES] == 1 else ''} the numbers")
    if counts[MAY]:
        parts.append(f"{counts[MAY]} may change them")
    return f"The configurations differ: {', '.join(parts)}{f'; {harmless}' if counts[HARMLESS] else ''}."


def text(found: Comparison, top: int = TOP) -> str:
    """Verdict, checkers, differences, the worst first.

    Args:
        top: how many differences are listed.
    """
    lines = [headline(found)]
    words = ", ".join(f"{name} {verdict}" for name, verdict in found.summary().items())
    lines += _named("checkers", [words] if words else ["the packs have nothing in common that can be compared"])
    for severity in (CHANGES, MAY):
        of_it = [one for one in found.differences if one.severity == severity]
        shown = [one.sentence() for one in of_it[:top]]
        if len(of_it) > top:
            shown.append(f"... and {len(of_it) - top} more, see the report")
        lines += _named(severity.replace(" numerics", ""), shown)
    lines += _named("computed", [f"{name}: {a} against {b}" for name, (a, b, equal) in found.derived.items() if not equal])
    lines += _named("not compared", list(found.not_compared.values()))
    lines += _named("problem", found.problems)
    lines += _named("note", found.notes)
    return "\n".join(one_line(line) for line in lines)


def _named(word: str, items: list[str]) -> list[str]:
    return [f"  {word if i == 0 else '':{_WIDTH}}{item}" for i, item in enumerate(items)]
