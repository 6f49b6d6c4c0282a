"""What two packs come to, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from msprobe_engine.config.severity import CHANGES, HARMLESS, MAY
from msprobe_engine.core.text.sentences import Sentence, joined
from msprobe_engine.find.config.comparison import Comparison

MOST_HARMLESS = 5
"""Names of harmless differences that are told."""


def headline(found: Comparison, lines: Mapping[str, int] | None = None) -> Sentence:
    """One line: is there a difference that matters?

    Args:
        lines: severity -> in how many lines its differences are told, where these follow.
    """
    counts = found.counts()
    harmless = counts[HARMLESS]
    if found.equal and found.unknown:
        names = ", ".join(found.unknown[:MOST_HARMLESS]) + (", ..." if len(found.unknown) > MOST_HARMLESS else "")
        return Sentence(
            "Cannot tell: {0} of what may change the numbers cannot be compared ({1}); no difference in the rest.",
            len(found.unknown),
            names,
        )
    if found.equal and found.problems:
        return Sentence("Cannot tell: not everything can be read or compared, see the problems; no difference in the rest.")
    if found.equal:
        said = Sentence("No difference")
        if harmless or found.not_shown:
            said = Sentence("No difference that matters")
        if harmless:
            said = Sentence("{0} ({1} harmless)", said, harmless)
        if found.not_shown == 1:
            return Sentence("{0}; 1 value cannot be compared, see the notes of config_check.", said)
        template = "{0}; {1} values cannot be compared, see the notes of config_check."
        return Sentence(template, said, found.not_shown) if found.not_shown else Sentence("{0}.", said)
    told = {severity: _in_lines(counts[severity], (lines or {}).get(severity, counts[severity])) for severity in (CHANGES, MAY)}
    parts = []
    if counts[CHANGES] == 1:
        parts.append(Sentence("1 changes the numbers{0}", told[CHANGES]))
    elif counts[CHANGES]:
        parts.append(Sentence("{0} change the numbers{1}", counts[CHANGES], told[CHANGES]))
    if counts[MAY]:
        parts.append(Sentence("{0} may change them{1}", counts[MAY], told[MAY]))
    worst = found.differences[0]
    first = f"{worst.name} {worst.values}" if worst.values else f"{worst.sheet} {worst.name}"
    end = Sentence("; {0} harmless", harmless) if harmless else ""
    return Sentence("The configurations differ: {0}; {1}{2}.", first, joined(", ", parts), end)


def _in_lines(differences: int, lines: int) -> str:
    if lines == differences:
        return ""
    return Sentence(" (in 1 line: many of a kind are one)") if lines == 1 else Sentence(" (in {0} lines: many of a kind are one)", lines)
