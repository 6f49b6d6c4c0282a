"""One difference between two runs, and the tables that show them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from msprobe_engine.config.settings.pack_settings import DEFAULT_OF
from msprobe_engine.config.severity import ERROR, HARMLESS, PASS, SEVERITIES, level, worst
from msprobe_engine.core.text.ranges import format_ranges
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.words import shorten_text

ENV, PIP, DATASET, WEIGHTS, SETTINGS, RANDOM, SYSTEM = "env", "pip", "dataset", "weights", "hyperparameters", "random", "system"
CHECKERS = (ENV, PIP, DATASET, WEIGHTS, SETTINGS, RANDOM, SYSTEM)
"""In the order of the existing tool's summary; ours behind."""

_CAUSES = (SETTINGS, ENV, PIP, SYSTEM, RANDOM, DATASET, WEIGHTS)
"""A seed is the cause of weights and of samples, and neither is the cause of a setting."""

ADDED = ("severity", "why", "term", "ranks", "where")
"""Columns of ours, behind those of the existing tool."""
COLUMNS = {
    ENV: ("bench_env_name", "cmp_env_name", "bench_value", "cmp_value", "level"),
    PIP: ("package", "bench version", "cmp version", "level"),
    DATASET: ("step", "rank", "tag", "equal", "max_relative_diff", "min_relative_diff", "mean_relative_diff", "norm_relative_diff"),
    WEIGHTS: ("step", "rank", "weight_name", "equal", "max_relative_diff", "min_relative_diff", "mean_relative_diff", "norm_relative_diff"),
    SETTINGS: ("file_name", "bench_para", "cmp_para", "bench_value", "cmp_value", "matched_with", "level"),
    RANDOM: ("op", "rank", "bench_stack", "cmp_stack", "bench_count", "cmp_count", "check_result"),
    SYSTEM: ("name", "bench_value", "cmp_value", "level"),
}
MANY = 4
"""So many differences of one kind are told in one line."""
_NOT_INSTALLED = "not installed"
ONLY_BENCH, ONLY_CMP = "Only in benchmark", "Only in comparison"
"""In the name column of the side that does not have a setting."""
SIDES = {"bench": Sentence("golden"), "cmp": Sentence("target")}
"""What the sides are called in sentences."""
HAS_BENCH, HAS_CMP = "only bench have", "only cmp have"
"""In the column ``equal`` of what one side does not have."""


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on both sides.

    Attributes:
        sheet: one of `CHECKERS`.
        bench_name, cmp_name: what it is called; empty on a side that does not have it.
        bench, cmp: the values, as text; empty on a side that does not have it.
        severity, why: see `msprobe_engine.config.severity`; one sentence.
        term: the common name of a setting, empty when it has none.
        matched: how the two names were brought together.
        file: the column ``file_name``.
        where: file and line of the values, where they are known.
        ranks: of the ranks; empty: all, or not by rank.
        steps: forward passes where it is seen; empty: not by step.
        level: the existing tool's verdict, where it is not that of the severity.
    """

    sheet: str
    bench_name: str
    cmp_name: str
    bench: str
    cmp: str
    severity: str
    why: str
    term: str = ""
    matched: str = ""
    file: str = ""
    where: str = ""
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    level: str = ""

    @property
    def matters(self) -> bool:
        """Not harmless."""
        return self.severity != HARMLESS

    @property
    def name(self) -> str:
        """What it is called, on the side that has it."""
        unnamed = self.bench_name in ("", ONLY_CMP) or self.bench_name.startswith(DEFAULT_OF)
        return self.cmp_name if unnamed else self.bench_name

    @property
    def verdict(self) -> str:
        """``error``, ``warning`` or ``pass``."""
        return self.level or level(self.severity)

    def as_json(self) -> dict[str, Any]:
        """JSON-ready; what is empty is left out."""
        named = {
            "sheet": self.sheet,
            "name": self.name,
            "bench_name": self.bench_name,
            "cmp_name": self.cmp_name,
            "bench_value": self.bench,
            "cmp_value": self.cmp,
            "severity": self.severity,
            "why": self.why,
            "level": self.verdict,
        }
        more = {
            "term": self.term,
            "matched_with": self.matched,
            "file": self.file,
            "where": self.where,
            "ranks": list(self.ranks),
            "steps": list(self.steps),
        }
        return named | {key: value for key, value in more.items() if value}

    def sentence(self) -> str:
        """One line for a console."""
        alone = self.bench_name in (self.cmp_name, "", ONLY_CMP) or self.cmp_name in ("", ONLY_BENCH)
        name = self.name if alone else f"{self.cmp_name} / {self.bench_name}"
        at = "".join(
            (f", step {format_ranges(self.steps)}" if self.steps else "", f", rank {format_ranges(self.ranks)}" if self.ranks else "")
        )
        return Sentence("{0}: {1}{2}", self.sheet, f"{name}{at}{': ' if self.bench or self.cmp else '; '}", self.reason())

    def reason(self) -> str:
        """The two values, that of the golden run last, and what they do."""
        return Sentence("{0}; {1}", self.values, self.why) if self.values and self.why else self.values or self.why

    @property
    def values(self) -> str:
        """``0.003, golden 0.001``; "" where there are none."""
        return Sentence("{0}, golden {1}", *self.both) if self.bench or self.cmp else ""

    @property
    def both(self) -> tuple[str, str]:
        """The two values as they are shown."""
        bench, cmp = (_NOT_INSTALLED if self.sheet == PIP and one == "None" else short(one) for one in (self.bench, self.cmp))
        return cmp, bench


@dataclass
class SettingsComparison:
    """What comparing the settings gave.

    Attributes:
        differences: rows of the sheet; also the harmless ones.
        derived: every computed quantity of both sides: term -> (bench, cmp, equal).
        notes: what could not be compared.
        unknown: names of settings that may change the numbers and cannot be compared: masked on a side although their names say of no
            secret, or left to the default of an unknown framework.
        compared: how many settings have been held against something.
    """

    differences: list[Difference] = field(default_factory=list)
    derived: dict[str, tuple[str, str, bool]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    compared: int = 0


@dataclass
class Sheet:
    """What one checker found.

    Attributes:
        name: one of `CHECKERS`.
        rows: cells by the columns of `COLUMNS`, and those of `ADDED` where they say something.
        differences: as few as say it all; the same weight at many steps is one.
        compared: how many things were compared.
        unknown: names of what may change the numbers and cannot be compared.
        not_shown: how many values in all cannot be compared, because the packs do not hold them.
        notes: what should be known beside the differences.
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    unknown: tuple[str, ...] = ()
    not_shown: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """``pass_check`` of the summary."""
        words = [one.verdict for one in self.differences if one.matters]
        return ERROR if ERROR in words else words[0] if words else PASS

    @property
    def severity(self) -> str:
        """The worst of its differences; `HARMLESS` when there is none."""
        return worst([one.severity for one in self.differences])


def in_order(differences: Iterable[Difference]) -> list[Difference]:
    """The worst first; among equals what can be a cause before what follows from it."""
    return sorted(differences, key=lambda d: (SEVERITIES.index(d.severity), _CAUSES.index(d.sheet), d.name, d.ranks, d.steps))


def merge_ranks(differences: Iterable[tuple[tuple[int, ...], Difference]], everyone: tuple[int, ...]) -> list[Difference]:
    """The same difference seen at several ranks is one, with these ranks; without ranks when it is all of `everyone`."""
    found: dict[Difference, set[int]] = {}
    for ranks, one in differences:
        found.setdefault(one, set()).update(ranks)
    return [replace(one, ranks=() if ranks >= set(everyone) else tuple(sorted(ranks))) for one, ranks in found.items()]


def fold_differences(differences: Iterable[Difference]) -> list[Difference]:
    """`MANY` or more of one kind (all weights after another seed) are one, with the first names."""
    alike: dict[tuple[str, str, str, tuple[int, ...], tuple[int, ...]], list[Difference]] = {}
    for one in differences:
        alike.setdefault((one.severity, one.sheet, one.why, one.ranks, one.steps), []).append(one)
    found = []
    for group in alike.values():
        if len(group) < MANY:
            found += group
        else:
            names = ", ".join(one.name for one in group[:3])
            found.append(replace(group[0], bench_name=f"{len(group)} of them ({names}, ...)", cmp_name="", bench="", cmp=""))
    return found


def short(text: str, longest: int = 80) -> str:
    """A value that fits into a line."""
    return shorten_text(text or "not set", longest)


T = TypeVar("T")
NO_RANK = -1
"""Of an entry that was written once for all ranks."""


def pairs(
    bench: Mapping[int, T], cmp: Mapping[int, T], content: Callable[[T], Any] = lambda value: value
) -> Iterator[tuple[tuple[int, ...], T, T]]:
    """(ranks, bench, cmp) for every pair of contents that differs from those before; ranks of one side only are left out.

    Args:
        content: what of a value is looked at, JSON-ready.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(set(bench) & set(cmp)):
        groups.setdefault((_text(content(bench[rank])), _text(content(cmp[rank]))), []).append(rank)
    for ranks in groups.values():
        yield tuple(ranks), bench[ranks[0]], cmp[ranks[0]]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
