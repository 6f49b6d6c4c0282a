"""A comparison of checkpoints on the console: the verdict, then what differs, the furthest apart first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.ranges import format_ranges
from msprobe_engine.core.text.words import size
from msprobe_engine.find.checkpoint.result import GOLDEN, RUN, Result, SideFacts, format_count, short_value, sort_by_distance
from msprobe_engine.find.checkpoint.tensor_result import TensorResult

TOP = 20
_NAMES, _FEW = 10, 3
_NAME_WIDTH = 90


def text(result: Result, top: int = TOP) -> str:
    """The report, lines of at most about 160 characters; `top`: how many of the tensors that differ are listed."""
    lines = [result.verdict()]
    lines += [f"  hint: {one_line(hint)}" for hint in result.hints]
    lines += [_side(RUN, result.a), _side(GOLDEN, result.b)]
    lines += _values(result)
    different = result.different
    if different:
        shown = sort_by_distance(different, top)
        lines += ["", f"differ ({len(shown)} of {len(different)}, the furthest apart first):" if len(shown) < len(different) else "differ:"]
        lines += _table(("tensor", "type", "shape", "changed", "rel. norm", "max abs", "at", "cos"), [_row(t) for t in shown])
        lines += [f"  {one_line(t.name)}: {one_line(t.hint or t.note)}" for t in shown if t.hint or t.note]
        lines += _files(result)
    lines += _names(f"only in {RUN}", result.only_in_a) + _names(f"only in {GOLDEN}", result.only_in_b)
    if result.unknown:
        lines += ["", "not compared whole:"]
        lines += [f"  {one_line(t.name)}: {one_line(t.note)}" for t in result.unknown[:_NAMES]] + _more(len(result.unknown))
    for part in result.not_compared:
        lines += ["", f"not compared, of {RUN if part.side == 'a' else GOLDEN} ({part.reason}): {_some(part.names, _FEW)}"]
    lines += _summary(result)
    bad = [t for t in result.tensors if t.nan_a or t.nan_b or t.inf_a or t.inf_b]
    if bad:
        lines += ["", f"NaN or Inf in {format_count(len(bad), 'tensor')}:"]
        lines += [f"  {one_line(t.name)}: {t.nan_a} NaN {t.inf_a} Inf, golden {t.nan_b} NaN {t.inf_b} Inf" for t in bad[:_NAMES]]
        lines += _more(len(bad))
    drifted = [t for t in result.tensors if t.drift_a or t.drift_b]
    if drifted:
        lines += ["", f"replicas on other ranks that are not the same ({format_count(len(drifted), 'tensor')}):"]
        lines += [f"  {one_line(t.name)}: {t.drift_a} elements, golden {t.drift_b}, {_some(t.drift_files)}" for t in drifted[:_NAMES]]
        lines += _more(len(drifted))
    for title, items in (("problems", result.problems), ("notes", _notes(result))):
        if items:
            lines += ["", f"{title}:", *(f"  {one_line(item)}" for item in items)]
    speed = result.nbytes / max(result.seconds, 1e-9)
    resumed = f", {result.resumed} results taken over from a run that was not finished" if result.resumed else ""
    lines += ["", f"read {size(result.nbytes)} in {result.seconds:.1f} s ({size(int(speed))}/s){resumed}"]
    return "\n".join(lines)


def _values(result: Result) -> list[str]:
    if not result.values:
        return []
    expected = sum(not value.matters for value in result.values)
    lines = ["", f"values: {_differ(len(result.values) - expected)}, {expected} more as expected, {result.values_equal} the same"]
    lines += [f"  {one_line(v.name)}: {short_value(v.a)}, golden {short_value(v.b)}" for v in result.values_that_matter[:TOP]]
    return lines + _more(len(result.values_that_matter), TOP)


def number(value: float | None) -> str:
    """A number in a few characters, ``-`` for none."""
    return "-" if value is None else f"{value:.3g}"


def type_of(t: TensorResult) -> str:
    """``bfloat16``, or both types."""
    return t.dtype_a if t.dtype_a == t.dtype_b else f"{t.dtype_a} / {t.dtype_b}"


def shape_of(t: TensorResult) -> str:
    """``[4, 8]``, or both shapes."""
    return str(list(t.shape_a)) if t.shape_a == t.shape_b else f"{list(t.shape_a)} / {list(t.shape_b)}"


def changed_of(t: TensorResult) -> str:
    """``12 (0.1 %)`` of the elements."""
    if t.changed is None or t.share is None:
        return "-"
    return f"{t.changed} ({100 * t.share:.3g} %)"


def _row(t: TensorResult) -> tuple[str, ...]:
    at = "-" if t.max_at is None else str(list(t.max_at))
    cos = "-" if t.cos is None else f"{t.cos:.6f}"
    return one_line(t.name), type_of(t), shape_of(t), changed_of(t), number(t.rel_norm), number(t.max_abs), at, cos


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    widths[0] = max(len(head[0]), min(widths[0], _NAME_WIDTH))
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]


def _files(result: Result) -> list[str]:
    """Where the changed elements lie, when few of many files hold them all."""
    lines = []
    for which, side, files in (
        (RUN, result.a, [t.files_a for t in result.different]),
        (GOLDEN, result.b, [t.files_b for t in result.different]),
    ):
        counts: Counter[str] = Counter()
        for each_file in files:
            counts.update(each_file)
        if 1 < len(counts) <= 3 and len(counts) < side.files:  # a single one is a hint
            each = ", ".join(f"{one_line(file)} ({count})" for file, count in counts.most_common())
            lines.append(f"  all changed elements of {which} lie in {each}")
    return lines


def _names(title: str, names: Sequence[str]) -> list[str]:
    return ["", f"{title} ({len(names)}): {_some(names)}"] if names else []


def _some(names: Sequence[str], most: int = _NAMES) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(one_line(name) for name in names[:most]) + more


def _differ(n: int) -> str:
    return "1 differs" if n == 1 else f"{n} differ"


def _more(total: int, most: int = _NAMES) -> list[str]:
    return [f"  and {total - most} more"] if total > most else []


def _summary(result: Result) -> list[str]:
    """By kind, all layers together."""
    if not result.different:
        return []
    rows: dict[tuple[str, str], list[int]] = {}
    layers: dict[tuple[str, str], set[int]] = {}
    for row in result.summary():
        key = (row["kind"], row["state"])
        counts = rows.setdefault(key, [0, 0])
        counts[0] += row["tensors"]
        counts[1] += row["different"]
        if row["different"] and row["layer"] is not None:
            layers.setdefault(key, set()).add(row["layer"])
    cells = [
        (kind, state, f"{counts[1]} of {counts[0]}", ranges(layers.get((kind, state), ())))
        for (kind, state), counts in sorted(rows.items())
        if counts[1]
    ]
    return ["", "by kind:", *_table(("kind", "state", "differ", "in layers"), cells)]


def ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7`` of 0, 1, 2, 3, 7."""
    return format_ranges(numbers) or "-"


def _side(which: str, side: SideFacts) -> str:
    held = f"{format_count(side.tensors, 'tensor')}, {size(side.nbytes)}, {format_count(side.files, 'file')}"
    return f"  {which}: {one_line(side.path)}: {side.format}, {held}"


def _notes(result: Result) -> list[str]:
    return [*(f"{RUN}: {note}" for note in result.a.notes), *(f"{GOLDEN}: {note}" for note in result.b.notes), *dict.fromkeys(result.notes)]
