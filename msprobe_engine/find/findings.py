"""What `diagnose` says: one finding, the suspects behind it, the numbers that show it, and what to do next; as data and as text."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.notebook import text_block
from msprobe_engine.core.text.ranges import few_ranges, numbers_in, ranges_of
from msprobe_engine.core.text.sentences import Sentence, join_sentences, one_line_of
from msprobe_engine.core.text.source_line import place_in_source
from msprobe_engine.find.argument_names import find_callee_name
from msprobe_engine.find.nonfinite.report import label_lines

if TYPE_CHECKING:
    from msprobe_engine.align.parallel.unshard.plan import PlanLine

NONE, STRUCTURE, DIVERGENCE, NONFINITE, OVERFLOW = "none", "structure", "divergence", "nonfinite", "overflow"
COLLECTIVE, DESYNC, DATA, CONFIG, CHECKPOINT = "collective", "desync", "data", "config", "checkpoint"
FINDINGS = (NONE, STRUCTURE, DIVERGENCE, NONFINITE, OVERFLOW, COLLECTIVE, DESYNC, DATA, CONFIG, CHECKPOINT)

SETTING = "setting"
"""Kind of a suspect: a setting of two runs whose numbers were compared and agree."""

HEADLINES: Mapping[str, str] = {
    NONE: Sentence("No difference beyond round-off"),
    STRUCTURE: Sentence("The runs do not make the same calls; the numbers that both have agree"),
    DIVERGENCE: Sentence("First difference"),
    NONFINITE: Sentence("First NaN or Inf"),
    OVERFLOW: Sentence("First Inf"),
    COLLECTIVE: Sentence("A collective gives a wrong result"),
    DESYNC: Sentence("Ranks that must hold the same values do not"),
    DATA: Sentence("Ranks that must share the data do not"),
    CONFIG: Sentence("The configurations differ"),
    CHECKPOINT: Sentence("The checkpoints differ"),
}

NOTHING = Sentence("No NaN or Inf that matters")
"""What one run was searched for."""

ALONE = Sentence("One run was searched; nothing was compared. A run that is right, as the second argument, shows more.")
"""Of one run in which nothing was found."""

SAME_FILES = Sentence("Nothing was compared: both sides are the same directory or file, so that they are equal says nothing")
"""Of two paths that lead to one run."""

_MOST_FURTHER = 6
"""Suspects on the console."""
_MOST_PROBLEMS = 8
"""What could not be read, on the console."""

_SEEN_ONLY = ("series", "sample", "nan_inf", "loss_not_finite")
"""Kinds of suspects of a monitor: without operators nobody can say where a NaN was born."""
_NOT_IN_JSON = frozenset(("unseen", "steps", "nothing", "alert", "remarks", "places", "gradients", "layout", "other_steps"))

_WORDS = 9
"""Width of the words in front of the lines of the text."""


@dataclass
class Suspect:
    """One place where it may have begun.

    Attributes:
        record: record name, as in dump.json; of a missing call the golden side's.
        module: path of the module it ran in, "" when not known.
        rank, step: where.
        source: the innermost stack line that is the user's own, "" when not known.
        kind: as `msprobe_engine.find.difference.walk` has it.
        why: one sentence.
        cause: of `why` what fits into the first line: ``eps = 1e-05, golden 1e-06``; "" where that is no news.
        parameter: of a call of the optimizer, the parameter that it updates.
        tensor: row that shows it (``Functional.linear.0.forward.output.0``).
        partner: record of the golden side, "" when there is none.
        numbers: the two rows, side by side.
        distance, limit: relative difference, and what would have been round-off.
        stack: call stack lines, innermost first.
        ranks: where it is on one of several and nobody can tell on which: all of them.
        on_ranks: where several ranks have the same: all of them as ranges (``0-255``), `rank` among them; the sentence and the numbers
            are those of `rank`.
        after_update: a forward call that was made when the update of the step was done.
    """

    record: str
    module: str
    rank: int
    step: int
    source: str = ""
    kind: str = ""
    why: str = ""
    cause: str = ""
    parameter: str = ""
    tensor: str = ""
    partner: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    distance: float | None = None
    limit: float | None = None
    stack: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    on_ranks: list[str] = field(default_factory=list)
    after_update: bool = False

    def reason(self) -> str:
        """`why`, and of which rank where several have the same."""
        return Sentence("on rank {0}: {1}", self.rank, self.why) if self.on_ranks and self.why else self.why

    def short_reason(self) -> str:
        """`cause`, and the parameter whose update it is in."""
        if not self.parameter:
            return self.cause
        return Sentence("update of {0}: {1}", self.parameter, self.cause) if self.cause else Sentence("update of {0}", self.parameter)

    def same_elsewhere(self) -> Hashable:
        """What is equal of suspects that say the same of further calls of a function: one change of the source."""
        of_a_call = self.cause and self.kind not in (CONFIG, SETTING)
        return (self.step, self.kind, find_callee_name(self.record), self.cause) if of_a_call else id(self)

    def ranks_text(self) -> str:
        """``rank 3`` or ``ranks 0-3, 8``."""
        return f"ranks {few_ranges(self.on_ranks)}" if self.on_ranks else f"rank {self.rank}"


@dataclass
class Diagnosis:
    """The page as data.

    Attributes:
        finding: one of `FINDINGS`.
        suspects: the most likely first, each once however many ranks have it; empty when nothing was found.
        evidence: sentences with numbers.
        next: commands to run now.
        looked_at: what was read: paths, steps, ranks, records.
        problems: what could not be read or compared, and why.
        differences: how many records differ behind the suspects.
        unmatched: calls of one side only: ``{"target": [...], "golden": [...]}``.
        renamed: module paths that the other side calls otherwise.
        mapping: the same as ``path.Class``: a cell mapping (``-cm``), with which these names are no difference any more.
        functions: of two frameworks, functions of the target that are likely to be others of the golden side: an api mapping (``-am``).
        aligned: of two frameworks, records that have their place on the other side, and all: ``{"target": {"modules": [72, 73], ...}}``.
        nonfinite: side (``target`` or ``golden``) -> its first NaN or Inf, which the other side has not and which is no suspect: it may
            follow from the first suspect or be something else.
        gradients: of runs of different layouts, how many times the golden run's gradients are those that ranks sum up, where no record says
            what becomes of them afterwards; None where it is not known, or told. Not in the json.
        other_steps: the two steps, where each run has one step only and these differ. Not in the json.
        unseen: the target has something that is not finite, or may have, where nothing was held against it. Not in the json.
        steps: those whose records were looked at. Not in the json.
        nothing: the headline when nothing was found: what one run was searched for; "" of two that were compared. Not in the json.
        places: all places where a difference begins, of each rank its own, the most likely first: those that are no suspects, because
            another rank has the same or there are too many, may be without words. Empty: the suspects are all. Not in the json.
        alert: the first suspect is what a rule said of one run. Not in the json.
        layout: of runs of different layouts, how each row of the last step was put together. Not in the json.
        remarks: of `evidence`, what a run says of itself, so that it holds whatever else was found. Not in the json.
    """

    finding: str = NONE
    suspects: list[Suspect] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    looked_at: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    differences: int = 0
    unmatched: dict[str, list[str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    mapping: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    aligned: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    nonfinite: dict[str, Suspect] = field(default_factory=dict)
    gradients: float | None = None
    layout: list[PlanLine] = field(default_factory=list)
    other_steps: tuple[int, int] | None = None
    unseen: bool = False
    steps: list[int] = field(default_factory=list)
    nothing: str = ""
    alert: bool = False
    remarks: list[str] = field(default_factory=list)
    places: list[Suspect] = field(default_factory=list)

    def begins_in(self, step: int, rank: int | None) -> list[Suspect]:
        """Where differences begin in one rank of a step (None: in any of its ranks), the most likely first."""
        return [one for one in self.places or self.suspects if one.step == step and (rank in (None, one.rank) or rank in one.ranks)]

    @property
    def first_suspect(self) -> Suspect | None:
        """The most likely place; None when nothing was found."""
        return self.suspects[0] if self.suspects else None

    @property
    def operator_unknown(self) -> bool:
        """A NaN or Inf was seen by a monitor, and no record says which operator made it."""
        first = self.first_suspect
        return self.finding == NONFINITE and first is not None and first.kind in _SEEN_ONLY

    def headline(self) -> str:
        """The first line: what, and where."""
        first = self.first_suspect
        text: str = HEADLINES[self.finding]
        if self.finding == DIVERGENCE and self.alert:
            text = Sentence("First alert")
        if self.finding == STRUCTURE and self.renamed and not any(self.unmatched.values()):
            text = Sentence("Modules bear other names; the runs make the same calls, and their numbers agree")
        if self.finding == STRUCTURE and first is not None and first.kind == "argument":
            text = Sentence("An argument is not the same; no number that was recorded shows it")
        if self.finding == STRUCTURE and first is not None and first.kind == "precision":
            text = Sentence("The runs are of different precision, and agree within its round-off")
        if self.finding == STRUCTURE and self.differences:
            text = Sentence("The runs have next to no calls in common") if first is None else Sentence("The runs make different calls")
        if self.finding == CONFIG and first is not None and first.kind == SETTING:
            text = Sentence("The configurations differ; no number that was recorded shows it")
        if self.operator_unknown:
            text = Sentence("First seen NaN or Inf")
        if first is None:
            return Sentence("{0}.", self._nothing_found() if self.finding == NONE else text)
        if self.finding in (CONFIG, CHECKPOINT):  # not of a step of a training
            return Sentence("{0}: {1}", text, one_line(f"{first.record} {first.cause}".rstrip()))
        place = _place(first, self.looked_at.get("ranks"))
        said = [one for one in (place_in_source(first.source), one_line_of(first.short_reason())) if one]
        return Sentence("{0}: {1} ({2})", text, join_sentences(": ", said), place) if said else Sentence("{0}: {1}", text, place)

    def _nothing_found(self) -> str:
        """What was searched or compared, and that this was not all of it where something could not be."""
        warnings = self._warnings()
        if not warnings:
            return self.nothing or HEADLINES[NONE]
        said = self.nothing or Sentence("No difference in what could be compared")
        return beside_warnings(said, len(warnings), searched=bool(self.nothing))

    def _warnings(self) -> list[str]:
        """The problems that the headline does not say itself."""
        return [problem for problem in self.problems if problem != self.nothing]

    def first_nonfinite(self) -> list[str]:
        """A sentence for each of `nonfinite`."""
        return [
            Sentence("first NaN or Inf, which the other run has not: {0}", _place(one))
            if side == "target"
            else Sentence("first NaN or Inf of the golden run, which the other run has not: {0}", _place(one))
            for side, one in self.nonfinite.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """JSON-ready, with `finding` and `first_suspect` first."""
        first = self.first_suspect
        head = {"finding": self.finding, "headline": self.headline(), "first_suspect": asdict(first) if first else None}
        shown = replace(self, layout=[], places=[])  # both may be long, and asdict copies all
        return head | {key: value for key, value in asdict(shown).items() if key not in head and key not in _NOT_IN_JSON}

    def text(self) -> str:
        """For the console; the first line is the finding."""
        lines = [self.headline()]
        first = self.first_suspect
        if first is not None:
            lines += label_lines("why", [first.reason()], _WORDS)
            lines += label_lines("source", [" ".join(first.source.split())] if first.source else [], _WORDS)
        lines += label_lines("evidence", self.evidence, _WORDS)
        placed = self.finding not in (CONFIG, CHECKPOINT)
        lines += label_lines("also", self.first_nonfinite() + self._further(placed), _WORDS)
        for side, names in self.unmatched.items():
            if names:
                lines += label_lines(
                    "only in", [f"{side}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"], _WORDS
                )
        warnings = self._warnings()
        more = len(warnings) - _MOST_PROBLEMS
        unnamed = [Sentence("and {0} more, which diagnosis.json names", f"{more:,}")] if more > 0 else []
        lines += label_lines("warning", [*warnings[:_MOST_PROBLEMS], *unnamed], _WORDS)
        lines += label_lines("next", self.next, _WORDS)
        if self.looked_at:
            lines += label_lines("looked at", [", ".join(self._said_looked_at())], _WORDS)
        return "\n".join(one_line(line) for line in lines)

    def _said_looked_at(self) -> list[str]:
        """``step 0, 1 rank, 1,097 of 1,098 records``, and paths with what they are."""
        words = {"ranks": "rank", "records": "record", "collectives": "collective", "numbers": "number", "tensors": "tensor"}
        said = []
        for key, value in self.looked_at.items():
            if key == "steps":
                said.append(f"step{'' if str(value).isdecimal() else 's'} {value}")
            elif key in words and isinstance(value, int):
                of = self.looked_at.get("recorded", value) if key == "records" else value
                said.append(f"{value:,}{f' of {of:,}' if of != value else ''} {words[key]}{'' if of == 1 else 's'}")
            elif key != "recorded":
                said.append(f"{key} {value}")
        return said

    def _further(self, placed: bool) -> list[str]:
        """Lines of the suspects behind the first; those that say the same are one. `placed`: they are of ranks."""
        groups: dict[Hashable, list[Suspect]] = {}
        for one in self.suspects:
            groups.setdefault(one.same_elsewhere(), []).append(one)
        lines: list[str] = []
        for number, (one, *others) in enumerate(list(groups.values())[:_MOST_FURTHER]):
            if number:
                lines.append(f"{f'{one.ranks_text()}  ' if placed else ''}{one.record}: {one.reason()}")
            if others:
                names = ", ".join(f"{other.record}{f' ({other.parameter})' if other.parameter else ''}" for other in others[:2])
                more = f" and {len(others) - 2} more" if len(others) > 2 else ""
                lines.append(Sentence("the same at {0}{1}", names, more))
        return lines

    def _repr_html_(self) -> str:
        return text_block(self.text())


def beside_warnings(said: str, count: int, *, searched: bool = False) -> Sentence:
    """What was found of a part, and how many warnings say which part was not searched, or not compared."""
    if searched:
        template = "{0}; {1} warnings say what could not be looked at"
        if count == 1:
            template = "{0}; {1} warning says what could not be looked at"
    else:
        template = "{0}; {1} warnings say what could not"
        if count == 1:
            template = "{0}; {1} warning says what could not"
    return Sentence(template, said, count)


def _place(one: Suspect, looked_at: object = None) -> Sentence:
    """Where a suspect is; `looked_at`: how many ranks were."""
    place = _place_in_step(one, looked_at)
    return Sentence("{0}, after the update", place) if one.after_update else place


def _place_in_step(one: Suspect, looked_at: object) -> Sentence:
    module, record = one_line(one.module), one_line(one.record)
    if one.on_ranks and numbers_in(one.on_ranks) == looked_at:
        if module:
            return Sentence("step {0}, all {1} ranks, module {2}, {3}", one.step, f"{looked_at:,}", module, record)
        return Sentence("step {0}, all {1} ranks, {2}", one.step, f"{looked_at:,}", record)
    if one.on_ranks or one.ranks:
        ranks = few_ranges(one.on_ranks or ranges_of(one.ranks))
        if module:
            return Sentence("step {0}, ranks {1}, module {2}, {3}", one.step, ranks, module, record)
        return Sentence("step {0}, ranks {1}, {2}", one.step, ranks, record)
    if module:
        return Sentence("step {0}, rank {1}, module {2}, {3}", one.step, one.rank, module, record)
    return Sentence("step {0}, rank {1}, {2}", one.step, one.rank, record)


def finite_json(value: Any, indent: int = 1) -> bytes:
    """JSON of a value that may hold NaN and infinities, with a line end."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # half a surrogate pair, which UTF-8 has not, becomes the escape of JSON


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: their names stand in their place."""
    if isinstance(value, float) and value - value != 0:
        return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(child) for child in value]
    return value
