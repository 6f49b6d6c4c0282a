"""A page of HTML that needs nothing else: no script, no request, every text escaped."""

from __future__ import annotations

from html import escape

from msprobe_engine.log import printable


def text(value: object) -> str:
    """Any value as text of a page."""
    return escape(printable(str(value)))


def section(title: str, content: str) -> list[str]:
    """A headline and what is below it; nothing where there is nothing below it."""
    return [f"<h2>{text(title)}</h2>", content] if content else []


def document(title: str, mark: str, style: str, body: str) -> str:
    """The whole page.

    Args:
        mark: colour of the verdict, ``var(--mark)`` in the style.
        style: of the page, CSS.
        body: HTML whose texts went through `text`.
    """
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{text(title)}</title><style>:root{{--mark:{mark}}}{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
