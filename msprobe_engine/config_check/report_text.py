"""A comparison as text for a console: the first line is the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msprobe_engine.config_check.comparison import Comparison
from msprobe_engine.config_check.difference import Difference
from msprobe_engine.config_check.severity import CHANGES, HARMLESS, MAY
from msprobe_engine.log import one_line

TOP = 20
MANY = 4
"""So many differences of one kind are told in one line."""
MOST_HARMLESS = 5
"""Names of harmless differences that are told."""
_WIDTH = 16


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
    return f"The configurations differ: {', '.join(parts)}{f'; {harmless}' if counts[HARMLESS] else ''}."


def _in_lines(differences: int, lines: int) -> str:
    return "" if lines == differences else f" (in {lines} line{'s' if lines != 1 else ''}: many of a kind are one)"


def text(found: Comparison, top: int = TOP) -> str:
    """Verdict, checkers, differences, the worst first.

    Args:
        top: how many differences are listed.
    """
    told = {severity: _sentences([one for one in found.differences if one.severity == severity]) for severity in (CHANGES, MAY)}
    lines = [headline(found, {severity: len(sentences) for severity, sentences in told.items()})]
    words = ", ".join(f"{name} {verdict}" for name, verdict in found.summary().items())
    lines += _named("checkers", [words] if words else ["the packs have nothing in common that can be compared"])
    for severity, sentences in told.items():
        if len(sentences) > top:
            sentences[top:] = [f"... and {len(sentences) - top} more, see the report"]
        lines += _named(severity.replace(" numerics", ""), sentences)
    lines += _named("computed", [f"{name}: {a} against {b}" for name, (a, b, equal) in found.derived.items() if not equal])
    if found.harmless:
        names = list(dict.fromkeys(f"{one.sheet} {one.name}" for one in found.harmless))
        more = f" and {len(names) - MOST_HARMLESS} more" if len(names) > MOST_HARMLESS else ""
        lines += _named("harmless", [", ".join(names[:MOST_HARMLESS]) + more])
    lines += _named("not compared", list(found.not_compared.values()))
    lines += _named("problem", found.problems)
    lines += _named("note", found.notes)
    return "\n".join(one_line(line) for line in lines)


def _sentences(differences: list[Difference]) -> list[str]:
    """One each; many of a kind (all weights after another seed) are one."""
    alike: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], list[Difference]] = {}
    for one in differences:
        alike.setdefault((one.sheet, one.why, one.ranks, one.steps), []).append(one)
    found = []
    for group in alike.values():
        if len(group) < MANY:
            found += [one.sentence() for one in group]
        else:
            names = ", ".join(one.name for one in group[:3])
            found.append(replace(group[0], bench_name=f"{len(group)} of them ({names}, ...)", cmp_name="", bench="", cmp="").sentence())
    return found


def _named(word: str, items: list[str]) -> list[str]:
    return [f"  {word if i == 0 else '':{_WIDTH}}{item}" for i, item in enumerate(items)]
