"""A comparison of checkpoints as one page of html, readable without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msprobe_engine.core.text.words import size
from msprobe_engine.find.checkpoint.result import SAME, UNKNOWN, Result, sort_by_distance
from msprobe_engine.find.checkpoint.tensor_result import TensorResult
from msprobe_engine.formats.checkpoint.model import MODEL
from msprobe_engine.report.checkpoint.text import changed_of, number, ranges, shape_of, type_of
from msprobe_engine.report.web.markup import Html, bullets, fold_content, paragraph, section, table, text, tiles
from msprobe_engine.report.web.page import Verdict, document
from msprobe_engine.report.web.words import words

MOST_ROWS = 5000
"""Tensors in the table of one page; the CSV file has all."""
_MOST_NAMES = 500
_EDGES = (1e-7, 1e-5, 1e-3, 1e-2, 1e-1)
"""Relative norms between the classes of colour of the map."""
_VERDICTS: Mapping[int, Verdict] = {SAME: "good", UNKNOWN: "warn"}


def page(result: Result, only_different: bool = False, top: int | None = None) -> str:
    """The whole document.

    Args:
        only_different: tensors that are equal are not listed.
        top: of those that differ, only so many.
    """
    different = sort_by_distance(result.different, top)
    count = len(result.different)
    parts: list[str] = [_tiles(result)]
    parts += section(_t("hints"), bullets(result.hints))
    matter = [(v.name, repr(v.a), repr(v.b), v.why) for v in result.values_that_matter]
    expected = [(v.name, repr(v.a), repr(v.b), v.why) for v in result.values if not v.matters]
    parts += section(_t("values", len(matter), result.values_equal), _values(matter))
    parts += section(_t("map"), _map(result))
    title = _t("different_tensors", count) if top is None else _t("different_tensors_top", count, len(different))
    parts += section(title, _tensors(different[:MOST_ROWS]))
    for letter, names in (("a", result.only_in_a), ("b", result.only_in_b)):
        parts += section(_t(f"only_{letter}", len(names)), _list(names))
    parts += section(_t("values_expected", len(expected)), _show_on_demand(_values(expected)))
    parts += section(_t("unknown"), table(_head("tensor", "why"), [(t.name, t.note) for t in result.unknown], names={0}))
    for part in result.not_compared:
        parts += section(_t(f"not_compared_{part.side}", part.reason, len(part.names)), _show_on_demand(_list(part.names)))
    parts += section(_t("nonfinite"), _nonfinite(result.tensors))
    parts += section(_t("problems"), bullets(result.problems))
    parts += section(_t("notes"), bullets([*result.a.notes, *result.b.notes, *result.notes]))
    if not only_different and top is None:
        equal = [t for t in result.tensors if t.equal]
        more = paragraph(_t("first_listed", MOST_ROWS), soft=True) if len(equal) > MOST_ROWS else ""
        shown = _equal(equal[:MOST_ROWS])
        parts += section(_t("equal_tensors", len(equal)), _show_on_demand(f"{shown}{more}" if shown else ""))
    parts += section(_t("sides"), f"{_sides(result)}{paragraph(_t('seconds', size(result.nbytes), f'{result.seconds:.1f}'), soft=True)}")
    return document(
        result.verdict(),
        kind="checkpoint",
        body="\n".join(parts),
        sections=("checkpoint",),
        verdict=_VERDICTS.get(result.code, "bad"),
        headline=text(result.verdict()),
    )


def _t(key: str, *arguments: object) -> Html:
    return words("checkpoint", key, *arguments)


def _head(*keys: str) -> list[Html]:
    return [_t(key) for key in keys]


def _tiles(result: Result) -> Html:
    shown: list[tuple[str, int, str]] = [("tile_tensors", len(result.tensors), "")]
    shown.append(("tile_different", len(result.different), "bad" if result.different else "good"))
    rare = (("tile_only_a", result.only_in_a), ("tile_only_b", result.only_in_b), ("tile_values", result.values_that_matter))
    shown += ((key, len(found), "bad") for key, found in rare if found)
    return tiles((_t(key), f"{count:,}", tone) for key, count, tone in shown)


def _show_on_demand(content: str) -> Html:
    return fold_content(_t("show"), content)


def _list(items: Sequence[str]) -> Html:
    more = [_t("and_more", len(items) - _MOST_NAMES)] if len(items) > _MOST_NAMES else []
    return bullets([*items[:_MOST_NAMES], *more])


def _values(rows: Iterable[Sequence[object]]) -> Html:
    return table((_t("value"), _t("side_a"), _t("side_b"), _t("why")), rows, names={0})


def _sides(result: Result) -> Html:
    rows = [
        (letter, s.path, s.format, s.tensors, size(s.nbytes), s.files) for letter, s in ((_t("side_a"), result.a), (_t("side_b"), result.b))
    ]
    return table(_head("side", "path", "format", "tensors", "size", "files"), rows, numbers={3, 4, 5}, names={1})


def _tensors(tensors: Sequence[TensorResult]) -> Html:
    head = _head("tensor", "type", "shape", "changed", "rel_norm", "l2", "max_abs", "at", "cos", "looks_like")
    rows = (
        (
            t.name, type_of(t), shape_of(t), changed_of(t), number(t.rel_norm), number(t.l2), number(t.max_abs),
            "-" if t.max_at is None else list(t.max_at), "-" if t.cos is None else f"{t.cos:.8f}", t.hint or t.note,
        )
        for t in tensors
    )  # fmt: skip
    return table(head, rows, numbers=range(3, 9), names={0})


def _equal(tensors: Sequence[TensorResult]) -> Html:
    rows = ((t.name, type_of(t), shape_of(t), t.status, t.by, t.note) for t in tensors)
    return table((*_head("tensor", "type", "shape", "status", "by"), ""), rows, names={0})


def _nonfinite(tensors: Sequence[TensorResult]) -> Html:
    rows = [(t.name, t.nan_a, t.inf_a, t.nan_b, t.inf_b) for t in tensors if t.nan_a or t.nan_b or t.inf_a or t.inf_b]
    return table(_head("tensor", "nan_a", "inf_a", "nan_b", "inf_b"), rows[:MOST_ROWS], numbers={1, 2, 3, 4}, names={0})


def _map(result: Result) -> Html:
    """Layers down, kinds and states across; the colour is the order of magnitude of the largest relative norm."""
    rows = result.summary()
    if not any(row["different"] for row in rows):
        return Html("")
    columns = sorted({(row["state"] != "weight", row["state"], row["kind"]) for row in rows})
    layers = sorted({-1 if row["layer"] is None else row["layer"] for row in rows})
    cells = {(-1 if row["layer"] is None else row["layer"], row["state"], row["kind"]): row for row in rows}
    odd = {_place(t) for t in result.different if (t.nan_a, t.inf_a) != (t.nan_b, t.inf_b)}
    lines: list[str] = []
    alike: list[int] = []
    last = ""
    for layer in layers:
        line = "".join(_cell(cells.get((layer, state, kind)), (layer, state, kind) in odd) for _, state, kind in columns)
        if layer >= 0 and line == last:
            alike.append(layer)
            lines.pop()
        else:
            alike, last = [layer], line
        name = _t("outside") if layer < 0 else ranges(alike)
        lines.append(f"<tr><th scope=row>{name}</th>{line}</tr>")
    head = "".join(f"<th scope=col>{text(kind)}<br><small>{text(state)}</small></th>" for _, state, kind in columns)
    top = f"<thead><tr><th scope=col>{_t('layer')}</th>{head}</tr></thead>"
    marks = [
        ("u0", _t("equal")),
        *((f"u{i + 1}", f"< {edge:g}") for i, edge in enumerate(_EDGES)),
        ("u6", f"≥ {_EDGES[-1]:g}"),
        ("ubad", _t("nonfinite")),
    ]
    note = f'<div class="legend">{"".join(f"<span><i class={mark}></i>{name}</span>" for mark, name in marks)}</div>'
    return Html(f'<div class="scroll"><table class="heat">{top}<tbody>{"".join(lines)}</tbody></table></div>{note}')


def _place(t: TensorResult) -> tuple[int, str, str]:
    return -1 if t.layer is None else t.layer, t.state or ("weight" if t.group == MODEL else t.group), t.kind


def _cell(row: dict[str, Any] | None, odd: bool) -> str:
    """A cell of the map; `odd`: in one of its tensors other elements are NaN or Inf, which no norm says."""
    if row is None:
        return "<td></td>"
    if not row["different"]:
        return f'<td class="u0" title="{text(row["tensors"])} equal">=</td>'
    rel = row["max_rel_norm"]
    depth = 1 + sum(not rel < edge for edge in _EDGES)  # NaN is the last class
    title = f"{row['different']} of {row['tensors']} differ; furthest: {row['worst']}"
    if odd:
        return f'<td class="ubad" title="{text(title)}">NaN</td>'
    return f'<td class="u{depth}" title="{text(title)}">{number(rel)}</td>'
