"""What comparing two packs gave: the sheets of the existing tool and ours, what matters first, a verdict and an exit code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.config.severity import CHANGES, ERROR, HARMLESS, MAY, PASS, SEVERITIES, WARNING
from msprobe_engine.core.text.sentences import Sentence, join_sentences
from msprobe_engine.find.config.difference import CHECKERS, RANDOM, SYSTEM, Difference, Sheet, in_order

FORMAT = 1


@dataclass
class Comparison:
    """Two packs side by side.

    Attributes:
        bench, cmp: where the packs are.
        sheets: by name, in the order of `CHECKERS`; those that could be compared.
        derived: computed quantities: term -> (bench, cmp, equal).
        not_compared: checkers that were not compared, with the reason.
        notes: what should be known beside the differences.
        problems: what could not be read.
        sides: what each side is, by words.
    """

    bench: str
    cmp: str
    sheets: dict[str, Sheet] = field(default_factory=dict)
    derived: dict[str, tuple[str, str, bool]] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sides: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def everything(self) -> list[Difference]:
        """All differences, the worst first."""
        return in_order(one for sheet in self.sheets.values() for one in sheet.differences)

    @property
    def differences(self) -> list[Difference]:
        """Those that matter, the worst first."""
        return [one for one in self.everything if one.matters]

    @property
    def harmless(self) -> list[Difference]:
        """The others."""
        return [one for one in self.everything if not one.matters]

    @property
    def equal(self) -> bool:
        """There is no difference that matters."""
        return not self.differences

    @property
    def verdict(self) -> str:
        """``error``, ``warning`` or ``pass``, as a sheet has it; random calls and the system alone give no error."""
        words = [WARNING if sheet.verdict == ERROR and name in (RANDOM, SYSTEM) else sheet.verdict for name, sheet in self.sheets.items()]
        return next((word for word in (ERROR, WARNING) if word in words), PASS)

    @property
    def exit_code(self) -> int:
        """0: no difference that matters, 1: differences, 3: none in what can be compared, and something that matters cannot be read or
        compared."""
        return 1 if not self.equal else 3 if self.unknown or self.problems else 0

    @property
    def unknown(self) -> list[str]:
        """What may change the numbers and cannot be compared."""
        return [name for sheet in self.sheets.values() for name in sheet.unknown]

    @property
    def not_shown(self) -> int:
        """How many values cannot be compared because the packs do not hold them, also those that are harmless."""
        return sum(sheet.not_shown for sheet in self.sheets.values())

    def counts(self) -> dict[str, int]:
        """How many differences there are of each severity."""
        found = self.everything
        return {severity: sum(one.severity == severity for one in found) for severity in SEVERITIES}

    def summary(self) -> dict[str, str]:
        """``pass_check`` of every sheet."""
        return {name: self.sheets[name].verdict for name in CHECKERS if name in self.sheets}

    def as_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "format": FORMAT,
            "equal": self.equal and not self.unknown,
            "verdict": self.verdict,
            "bench": self.bench,
            "cmp": self.cmp,
            "summary": self.summary(),
            "counts": self.counts(),
            "compared": {name: sheet.compared for name, sheet in self.sheets.items()},
            "differences": [one.as_json() for one in self.differences],
            "harmless": [one.as_json() for one in self.harmless],
            "derived": {name: {"bench": a, "cmp": b, "equal": equal} for name, (a, b, equal) in self.derived.items()},
            "not_compared": self.not_compared,
            "unknown": self.unknown,
            "not_shown": self.not_shown,
            "notes": self.notes,
            "problems": self.problems,
            "sides": self.sides,
        }


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
    return Sentence("The configurations differ: {0}; {1}{2}.", first, join_sentences(", ", parts), end)


def _in_lines(differences: int, lines: int) -> str:
    if lines == differences:
        return ""
    return Sentence(" (in 1 line: many of a kind are one)") if lines == 1 else Sentence(" (in {0} lines: many of a kind are one)", lines)
