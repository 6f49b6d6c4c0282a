"""Pieces of html for pages that have to be readable without scripts: every text escaped, tables that scroll inside themselves."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from html import escape

from msprobe_engine.core.log import printable
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.report.web.sentences import chinese

_SHORT, _SHORT_NAME = 24, 40
"""Characters of a cell that is not broken."""


class Html(str):
    """Text that is html already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Any value as text of a page, with what a terminal or a browser would obey shown as escapes; `Html` as it is. A `Sentence` brings its
    Chinese along, which kit.js puts in its place."""
    if isinstance(value, Html):
        return value
    shown = Html(escape(printable(str(value))))
    other = chinese(value) if isinstance(value, Sentence) else value
    return shown if other == value else Html(f'<span data-zh="{escape(printable(str(other)))}">{shown}</span>')


def section(title: object, content: str) -> list[str]:
    """A headline and what is below it; nothing where there is nothing below it."""
    return [f"<section><h2>{text(title)}</h2>{content}</section>"] if content else []


def paragraph(content: object, soft: bool = False) -> Html:
    """A paragraph; a soft one stands back."""
    return Html(f"<p{' class=soft' if soft else ''}>{text(content)}</p>")


def code(value: object) -> Html:
    """A name or a line to type."""
    return Html(f"<code>{text(value)}</code>")


def soft(value: object) -> Html:
    """A line below what it belongs to, standing back; empty for no text."""
    return Html(f'<div class="soft">{text(value)}</div>' if value else "")


def bullets(items: Iterable[object]) -> Html:
    """A list; empty for no items."""
    rows = "".join(f"<li>{text(item)}</li>" for item in items)
    return Html(f"<ul>{rows}</ul>" if rows else "")


def fold_content(title: object, content: str) -> Html:
    """What is only shown when it is asked for; empty for no content."""
    return Html(f"<details><summary>{text(title)}</summary>{content}</details>" if content else "")


def facts(rows: Iterable[tuple[object, object]]) -> Html:
    """Names and what they are, one a line; empty for none."""
    found = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in rows)
    return Html(f'<dl class="facts">{found}</dl>' if found else "")


def tiles(items: Iterable[tuple[object, object, str]]) -> Html:
    """The few numbers that matter, large: name, number and tone (good, warn, bad or empty) of each; empty for none."""
    found = "".join(f'<div class="tile {tone}"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value, tone in items)
    return Html(f'<div class="tiles">{found}</div>' if found else "")


def badge(value: object, tone: str = "") -> Html:
    """A word in a coloured frame; `tone`: good, warn, bad or empty."""
    return Html(f'<span class="badge {tone}">{text(value)}</span>')


def table(
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Collection[int] = (),
    names: Collection[int] = (),
    tones: Iterable[str] | None = None,
    kind: str = "stack",
) -> Html:
    """A table that scrolls inside itself where it is wider than the window; empty for no rows.

    Args:
        numbers: columns set flush right.
        names: columns of names, which may be broken anywhere.
        tones: one per row: good, warn, bad, apart (in bold) or empty.
        kind: ``stack`` (in a narrow window a row is a list of its cells), or ``narrow``: of few short columns.
    """
    lines = []
    tone = iter(tones) if tones is not None else None
    for row in rows:
        of_row = next(tone, "") if tone is not None else ""
        cells = "".join(f"<td{_class(i, numbers, names, cell)}>{text(cell)}</td>" for i, cell in enumerate(row))
        lines.append(f'<tr class="{of_row}">{cells}</tr>' if of_row else f"<tr>{cells}</tr>")
    if not lines:
        return Html("")
    top = "".join(f"<th scope=col{_class(i, numbers, ())}>{text(cell)}</th>" if text(cell) else "<td></td>" for i, cell in enumerate(head))
    return Html(f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>')


def _class(i: int, numbers: Collection[int], names: Collection[int], cell: object = None) -> str:
    found = ["number"] if i in numbers else ["name"] if i in names else []
    if isinstance(cell, Html):
        whole = cell.startswith("<span") and len(re.sub("<[^>]*>", "", cell)) <= _SHORT  # a word or a badge, not a sentence
    else:
        whole = cell is not None and len(str(cell)) <= (_SHORT_NAME if i in names else _SHORT)
    return f' class="{" ".join([*found, *(["short"] if whole else [])])}"' if found or whole else ""
