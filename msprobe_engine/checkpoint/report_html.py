"""A comparison of checkpoints as one page of HTML that needs nothing else: no script, no request, every text escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from msprobe_engine.checkpoint.report_text import changed_of, number, ranges, shape_of, size, type_of
from msprobe_engine.checkpoint.result import SAME, UNKNOWN, Result, TensorResult, ranked
from msprobe_engine.htmlpage import document, section, text

MOST_ROWS = 5000
"""Tensors in the table of one page; the CSV file has all."""
_MOST_NAMES = 500

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:90rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.35rem;border-left:.4rem solid var(--mark);padding-left:.8rem}h2{font-size:1.05rem;margin-top:2rem}
table{border-collapse:collapse;font-size:.88rem}
td,th{border-bottom:1px solid #d8dee4;padding:.25rem .6rem;text-align:left;vertical-align:top}
th{position:sticky;top:0;background:inherit}td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.name{font-family:ui-monospace,monospace;overflow-wrap:anywhere}.map td{text-align:center;border:1px solid #fff;min-width:4.5rem}
.map td.l{text-align:right;border:0}small{color:#667}details summary{cursor:pointer}
@media (prefers-color-scheme:dark){body{background:#15191e;color:#e3e8ee}td,th{border-color:#333c46}.map td{border-color:#15191e;color:#111}
.map td.l{color:inherit}}
"""


def page(result: Result, only_different: bool = False, top: int | None = None) -> str:
    """The whole document.

    Args:
        only_different: tensors that are equal are not listed.
        top: of those that differ, only so many.
    """
    mark = {SAME: "#2da44e", UNKNOWN: "#bf8700"}.get(result.code, "#cf222e")
    parts = [f"<h1>{text(result.verdict())}</h1>"]
    parts += [f"<p>{text(hint)}</p>" for hint in result.hints]
    parts.append(_sides(result))
    different = ranked(result.different, top)
    title = f"Different tensors ({len(result.different)})" + (f", the {len(different)} furthest apart" if top is not None else "")
    parts += section(title, _tensors(different[:MOST_ROWS]))
    parts += section("Largest relative norm by layer and kind", _map(result))
    for letter, names in (("A", result.only_in_a), ("B", result.only_in_b)):
        parts += section(f"Only in {letter} ({len(names)})", _list(names))
    matter = [(v.name, repr(v.a), repr(v.b), v.why) for v in result.values_that_matter]
    expected = [(v.name, repr(v.a), repr(v.b), v.why) for v in result.values if not v.matters]
    parts += section(f"Values that differ ({len(matter)}; {result.values_equal} are the same)", _table(("value", "A", "B", ""), matter))
    parts += section(f"Values that are expected to differ ({len(expected)})", _folded(_table(("value", "A", "B", ""), expected)))
    parts += section("Could not be compared whole", _table(("tensor", "why"), [(t.name, t.note) for t in result.unknown]))
    for part in result.not_compared:
        parts += section(f"Not compared, of {part.side.upper()}: {part.reason} ({len(part.names)})", _folded(_list(part.names)))
    parts += section("NaN and Inf", _nonfinite(result.tensors))
    parts += section("Problems", _list(result.problems))
    parts += section("Notes", _list([*result.a.notes, *result.b.notes, *result.notes]))
    if not only_different and top is None:
        equal = [t for t in result.tensors if t.equal]
        parts += section(f"Equal tensors ({len(equal)})", _folded(_equal(equal[:MOST_ROWS])))
        if len(equal) > MOST_ROWS:
            parts.append(f"<p><small>The first {MOST_ROWS} are listed.</small></p>")
    parts.append(f"<p><small>Read {size(result.nbytes)} in {result.seconds:.1f} s.</small></p>")
    body = "\n".join(parts)
    return document(result.verdict(), mark, _STYLE, body)


def _folded(content: str) -> str:
    return f"<details><summary>show</summary>{content}</details>" if content else ""


def _list(items: Sequence[str]) -> str:
    if not items:
        return ""
    more = f"<li>and {len(items) - _MOST_NAMES} more" if len(items) > _MOST_NAMES else ""
    return f"<ul>{''.join(f'<li>{text(item)}' for item in items[:_MOST_NAMES])}{more}</ul>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: frozenset[int] = frozenset()) -> str:
    lines = []
    for row in rows:
        cells = (f"<td class={'name' if i == 0 else 'n' if i in numbers else 't'}>{text(cell)}" for i, cell in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}")
    return f"<table><tr>{''.join(f'<th>{text(cell)}' for cell in head)}{''.join(lines)}</table>" if lines else ""


def _sides(result: Result) -> str:
    rows = [(letter, s.path, s.format, s.tensors, size(s.nbytes), s.files) for letter, s in (("A", result.a), ("B", result.b))]
    return _table(("", "path", "format", "tensors", "size", "files"), rows, frozenset((3, 4, 5)))


def _tensors(tensors: Sequence[TensorResult]) -> str:
    head = ("tensor", "type", "shape", "changed", "rel. norm", "l2", "max abs", "at", "cos", "what it looks like")
    rows = (
        (
            t.name, type_of(t), shape_of(t), changed_of(t), number(t.rel_norm), number(t.l2), number(t.max_abs),
            "-" if t.max_at is None else list(t.max_at), "-" if t.cos is None else f"{t.cos:.8f}", t.hint or t.note,
        )
        for t in tensors
    )  # fmt: skip
    return _table(head, rows, frozenset(range(3, 9)))


def _equal(tensors: Sequence[TensorResult]) -> str:
    rows = ((t.name, type_of(t), shape_of(t), t.status, t.by, t.note) for t in tensors)
    return _table(("tensor", "type", "shape", "", "by", ""), rows)


def _nonfinite(tensors: Sequence[TensorResult]) -> str:
    rows = [(t.name, t.nan_a, t.inf_a, t.nan_b, t.inf_b) for t in tensors if t.nan_a or t.nan_b or t.inf_a or t.inf_b]
    return _table(("tensor", "NaN in A", "Inf in A", "NaN in B", "Inf in B"), rows[:MOST_ROWS], frozenset((1, 2, 3, 4)))


def _map(result: Result) -> str:
    """Layers down, kinds and states across; the colour is the order of magnitude of the largest relative norm."""
    rows = result.summary()
    if not any(row["different"] for row in rows):
        return ""
    columns = sorted({(row["state"] != "weight", row["state"], row["kind"]) for row in rows})
    layers = sorted({-1 if row["layer"] is None else row["layer"] for row in rows})
    cells = {(-1 if row["layer"] is None else row["layer"], row["state"], row["kind"]): row for row in rows}
    lines: list[str] = []
    alike: list[int] = []
    last = ""
    for layer in layers:
        line = "".join(_cell(cells.get((layer, state, kind))) for _, state, kind in columns)
        if layer >= 0 and line == last:
            alike.append(layer)
            lines.pop()
        else:
            alike, last = [layer], line
        name = "outside" if layer < 0 else ranges(alike)
        lines.append(f"<tr><td class=l>{name}{line}")
    head = "".join(f"<th>{text(kind)}<br><small>{text(state)}</small>" for _, state, kind in columns)
    return f"<table class=map><tr><th>layer{head}{''.join(lines)}</table>"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "<td>"
    if not row["different"]:
        return f"<td style=background:#b7e4c0 title='{row['tensors']} equal'>="
    rel = row["max_rel_norm"]
    # from 1e-8 (pale) to 1 (red)
    depth = 0.0 if rel <= 0 else min(1.0, max(0.0, (math.log10(rel) + 8) / 8))
    colour = f"hsl({45 - 45 * depth:.0f} 90% {78 - 18 * depth:.0f}%)"
    title = f"{row['different']} of {row['tensors']} differ; furthest: {row['worst']}"
    return f"<td style='background:{colour}' title='{text(title)}'>{number(rel)}"
