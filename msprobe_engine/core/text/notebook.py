"""What notebooks show of an object: HTML in which nothing of the object's texts is markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_MOST_ROWS = 50


def text_block(text: str) -> str:
    """A text with its line breaks."""
    return f"<pre>{escape(text)}</pre>"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table under a title; of many rows the first `_MOST_ROWS`, and how many more there are."""
    shown = [[escape(str(cell)) for cell in row] for row in rows]
    more = len(shown) - _MOST_ROWS
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in shown[:_MOST_ROWS])
    left = f"<p>and {more} more</p>" if more > 0 else ""
    return f"<p><b>{escape(title)}</b></p><table><tr>{''.join(f'<th>{escape(word)}</th>' for word in head)}</tr>{body}</table>{left}"
