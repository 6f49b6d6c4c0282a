"""What a comparison of two checkpoints found: a `Result` with the verdict, of a `TensorResult` per pair of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.sentences import Sentence, join_sentences
from msprobe_engine.find.checkpoint.tensor_result import (
    BITS,
    CRC,
    DIFFERENT,
    DIGEST,
    EQUAL,
    INCOMPLETE,
    ROUNDED,
    SHAPE,
    UNREADABLE,
    VALUES,
    WITHIN,
    TensorResult,
)
from msprobe_engine.find.findings import SAME_FILES
from msprobe_engine.formats.checkpoint.model import MODEL, RANDOM

_LONGEST_VALUE = 60
RUN, GOLDEN = Sentence("the run"), Sentence("the golden run")

SAME, OTHER_VALUES, UNKNOWN = 0, 1, 3
"""Exit codes of a comparison: equal, different, cannot tell."""


def strict(value: Any) -> Any:
    """A value as JSON can hold it: NaN and Inf as text, names as text, anything else that JSON lacks as Python shows it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value if isinstance(value, str | int) or value is None else repr(value)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was not compared: names and one reason.

    Attributes:
        open: it is on both sides and might differ, so nothing can be said of it; else it says nothing of a difference.
    """

    side: str
    names: tuple[str, ...]
    reason: str
    open: bool = False


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A plain value that differs: iteration, learning rate, an argument.

    Attributes:
        matters: False: expected to differ between two saves of the same training (paths, times, parallel sizes).
    """

    name: str
    a: Any
    b: Any
    group: str
    matters: bool = True
    why: str = ""


@dataclass
class SideFacts:
    """One of the two checkpoints in the report."""

    path: str
    format: str
    tensors: int
    nbytes: int
    files: int
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Result:
    """All that a comparison found.

    Attributes:
        tensors: pairs, in the order of checkpoint A.
        only_in_a, only_in_b: keys of tensors that the other side lacks.
        not_compared: what says nothing of a difference, with reasons.
        values: plain values that differ. values_equal: how many are the same.
        hints: what several differences together look like.
        same_files: both sides are one path, so that they are equal says nothing.
        seconds, nbytes: of the comparison.
    """

    a: SideFacts
    b: SideFacts
    tensors: list[TensorResult] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    not_compared: list[LeftOut] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    values_equal: int = 0
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    atol: float = 0.0
    rtol: float = 0.0
    quick: bool = False
    same_files: bool = False
    seconds: float = 0.0
    nbytes: int = 0
    resumed: int = 0

    @property
    def different(self) -> list[TensorResult]:
        """Pairs that differ, shapes too."""
        return [t for t in self.tensors if t.status in (DIFFERENT, SHAPE)]

    @property
    def unknown(self) -> list[TensorResult]:
        """Pairs of which a part could not be read."""
        return [t for t in self.tensors if t.status in (INCOMPLETE, UNREADABLE)]

    @property
    def values_that_matter(self) -> list[ValueDifference]:
        return [v for v in self.values if v.matters]

    @property
    def problems(self) -> list[str]:
        """What is missing or damaged in the checkpoints."""
        return [f"{side.path}: {text}" if side.path not in text else text for side in (self.a, self.b) for text in side.problems]

    @property
    def equal(self) -> bool:
        """True: all that both hold is the same, and neither lacks anything."""
        return self.code == SAME

    @property
    def code(self) -> int:
        """The exit code. Checkpoints without a tensor in common say nothing of each other: likely names that are not known."""
        if not self.tensors:
            return UNKNOWN
        if self.different or self.only_in_a or self.only_in_b or self.values_that_matter:
            return OTHER_VALUES
        return UNKNOWN if self.unknown or self.problems or self._open else SAME

    @property
    def _open(self) -> int:
        """Tensors of which nothing can be said."""
        return sum(len(part.names) for part in self.not_compared if part.open)

    def verdict(self) -> str:
        """The first line of every report."""
        n = len(self.tensors)
        if self.code == SAME and self.same_files:
            return SAME_FILES
        if self.code == SAME:
            return Sentence("equal: {0} ({1})", format_count(n, "tensor"), self._ground()) + self._beside()
        if self.code == UNKNOWN:
            if not n and not self._open:
                template = (
                    "cannot tell: the checkpoints hold no tensor that is called alike ({0} only in the run, {1} only in the golden one); "
                    "--map takes names that "
                    "belong together"
                )
                return Sentence(template, len(self.only_in_a), len(self.only_in_b))
            unread = len(self.unknown)
            if self._open and not unread:
                template = "cannot tell: {0} could not be compared; no difference in the rest"
                return Sentence(template, format_count(self._open, "tensor")) + self._beside()
            reason = Sentence("a checkpoint is damaged")
            if unread:
                reason = Sentence("{0} of {1} could not be compared whole", format_count(unread, "tensor"), n)
            return Sentence("cannot tell: {0}; no difference in the rest", reason) + self._beside()
        parts: list[Sentence] = []
        if self.values_that_matter:  # a learning rate says why elements differ; the elements do not say more
            first, *more = sorted(self.values_that_matter, key=lambda value: value.group == RANDOM)
            parts.append(Sentence("{0} is {1}, golden {2}", first.name, short_value(first.a), short_value(first.b)))
            if more:
                parts.append(Sentence("{0} more that matter", format_count(len(more), "value")))
        broken = [t for t in self.different if (t.nan_a, t.inf_a) != (t.nan_b, t.inf_b)]
        if broken:  # whatever else differs, this is what the training fails of
            worst, *more_broken = broken
            kind = "NaN" if worst.nan_a != worst.nan_b else "Inf"
            side = RUN if worst.nan_a + worst.inf_a > worst.nan_b + worst.inf_b else GOLDEN
            parts.append(Sentence("{0} holds {1} in {2}", worst.name, kind, side))
            if more_broken:
                parts.append(Sentence("{0} more with NaN or Inf", format_count(len(more_broken), "tensor")))
        if self.different:
            counts = len(self.different), format_count(n, "tensor"), self._beyond_weights()
            parts.append(Sentence("{0} of {1} differs{2}", *counts) if n == 1 else Sentence("{0} of {1} differ{2}", *counts))
        for side, names in ((RUN, self.only_in_a), (GOLDEN, self.only_in_b)):
            if names:
                parts.append(Sentence("{0} only in {1}", format_count(len(names), "tensor"), side))
        if self.unknown:
            parts.append(Sentence("{0} could not be compared whole", format_count(len(self.unknown), "tensor")))
        return Sentence("different: {0}", join_sentences(", ", parts)) + self._beside()

    def _beyond_weights(self) -> str:
        """Said where the weights are equal and something else is not."""
        groups = {t.group for t in self.different}
        if MODEL in groups or not any(t.group == MODEL and t.equal for t in self.tensors):
            return ""
        return Sentence(", no weights among them ({0} only)", " and ".join(sorted(groups)))

    def _ground(self) -> str:
        """What equality rests on."""
        grounds: list[Sentence] = []
        by = [t.by for t in self.tensors]
        within = sum(t.status == WITHIN for t in self.tensors)
        for how, text in (
            (BITS, Sentence("same bits")),
            (VALUES, Sentence("same values in another element type")),
            (ROUNDED, Sentence("float32 copies rounded to the type they are trained in")),
            (CRC, Sentence("same CRC-32, not read")),
            (DIGEST, Sentence("same digest")),
        ):
            count = sum(t.by == how and t.status == EQUAL for t in self.tensors)
            if count:
                grounds.append(text if count == len(by) else Sentence("{0} {1}", count, text))
        if within:
            grounds.append(Sentence("{0} within atol {1}, rtol {2}", within, f"{self.atol:g}", f"{self.rtol:g}"))
        return join_sentences(", ", grounds)

    def _beside(self) -> str:
        not_compared = sum(len(part.names) for part in self.not_compared)
        return Sentence("; not compared: {0}", format_count(not_compared, "tensor")) if not_compared else ""

    def summary(self) -> list[dict[str, Any]]:
        """A row per layer, kind and state: pairs, how many differ, the largest relative norm and the name it is of."""
        rows: dict[tuple[int, str, str], dict[str, Any]] = {}
        for t in self.tensors:
            state = t.state or ("weight" if t.group == MODEL else t.group)
            key = (-1 if t.layer is None else t.layer, t.kind, state)
            row = rows.setdefault(
                key,
                {"layer": t.layer, "kind": t.kind, "state": state, "tensors": 0, "different": 0, "changed": 0, "max_rel_norm": 0.0,
                 "max_abs": 0.0, "worst": ""},
            )  # fmt: skip
            row["tensors"] += 1
            row["different"] += not t.equal
            row["changed"] += t.changed or 0
            row["max_abs"] = max(row["max_abs"], t.max_abs or 0.0)
            if (t.rel_norm or 0.0) > row["max_rel_norm"]:
                row["max_rel_norm"], row["worst"] = t.rel_norm, t.name
        return [rows[key] for key in sorted(rows)]

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """The report, verdict first, without the list of all tensors."""
        data = {
            "verdict": self.verdict(),
            "equal": self.equal,
            "exit_code": self.code,
            "a": asdict(self.a),
            "b": asdict(self.b),
            "compared": len(self.tensors),
            "different_count": len(self.different),
            "different": [t.to_json() for t in sort_by_distance(self.different, top)],
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "not_compared": [
                *({"name": t.name, "side": "", "reason": t.note or t.status} for t in self.unknown),
                *({"name": name, "side": part.side, "reason": part.reason} for part in self.not_compared for name in part.names),
            ],
            "values": [asdict(v) for v in self.values],
            "values_equal": self.values_equal,
            "hints": self.hints,
            "notes": self.notes,
            "problems": self.problems,
            "tolerance": {"atol": self.atol, "rtol": self.rtol},
            "summary": self.summary(),
            "seconds": round(self.seconds, 3),
            "bytes_read": self.nbytes,
        }
        return {key: strict(value) for key, value in data.items()}


def sort_by_distance(tensors: Iterable[TensorResult], top: int | None = None) -> list[TensorResult]:
    """The furthest apart first: other shapes, then by relative norm, then by the share that changed."""

    def far(t: TensorResult) -> tuple[float, float]:
        if t.status == SHAPE:
            return math.inf, 1.0
        rel = t.rel_norm if t.rel_norm is not None else (math.inf if t.l2 else 0.0)
        return rel, t.share or 0.0

    order = sorted(tensors, key=far, reverse=True)
    return order if top is None else order[:top]


def format_count(n: int, word: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    if word == "value":
        return Sentence("{0} value", n) if n == 1 else Sentence("{0} values", n)
    if word == "tensor":
        return Sentence("{0} tensor", n) if n == 1 else Sentence("{0} tensors", n)
    return f"{n} {word}" + ("" if n == 1 else "s")


def short_value(value: object) -> str:
    """A value as it fits into a line."""
    shown = one_line(repr(value))
    return shown if len(shown) <= _LONGEST_VALUE else shown[: _LONGEST_VALUE - 3] + "..."
