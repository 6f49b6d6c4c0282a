"""The frame of every html page: one file that needs nothing else, streamed.

Styles and scripts are those of this package, written into the file and named by their SHA-256 in its content security policy, so
nothing that a dump brings along can run or load anything, whatever it is called. Data comes as islands that no browser executes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from msprobe_engine import __version__
from msprobe_engine.report.web.markup import text
from msprobe_engine.report.web.words import section_of, words

Verdict = Literal["good", "warn", "bad"]

_HERE = Path(__file__).parent
_BLOCK = 3 << 18
"""Bytes of an island that are encoded at once; a multiple of three, so that base64 of blocks is base64 of the whole."""
_START = "Kit.start();"
_MARKS: Mapping[Verdict, str] = {"good": "✓", "warn": "!", "bad": "✕"}
_LOGO = (
    '<svg class="logo" viewBox="0 0 28 28" width="24" height="24" aria-hidden="true"><rect width="28" height="28" rx="7"/>'
    '<path d="M4 15h4l2.4-7 4 13 3.2-9 1.8 3H24" fill="none" stroke-width="2.2" stroke-linecap="round" stroke-linejoin="round"/></svg>'
)


class Packed(bytes):
    """Content of an island as the file has it; `pack` makes it, in any process."""


def pack(content: bytes) -> Packed:
    """Bytes as base64 of gzip, the same for the same bytes."""
    return Packed(base64.b64encode(gzip.compress(content, 6, mtime=0)))


def page(
    title: str,
    *,
    kind: str,
    body: str = "",
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    sections: Sequence[str] = (),
    data: Iterable[tuple[str, bytes]] = (),
    verdict: Verdict | None = None,
    headline: str | None = None,
    app: bool = False,
    wide: bool = False,
) -> Iterator[bytes]:
    """One self-contained html file, piece by piece.

    Scripts run before the islands are read: ``await Kit.data(id)`` waits for the one it names, so a page of many megabytes shows
    something at once.

    Args:
        title: of the window, plain text; also the headline unless that is given.
        kind: what kind of page it is, a key of section ``kit`` of kit_texts.json beginning with ``kind_``, without that.
        body: html of `msprobe_engine.report.web.markup`; the page has to be readable with it alone where scripts are switched off.
        styles: further files of this package after kit.css, such as ``graph/graph.css``.
        scripts: further files after kit.js, in this order.
        sections: of kit_texts.json that scripts of this page need, besides ``kit`` and what `body` uses.
        data: islands: id and bytes (packed here), or `Packed`.
        verdict: colour and sign of the headline.
        headline: html of the headline where it is more than the title.
        app: the page fills the window and has its own layout (the graph viewer): the title stands in the bar, there is no footer.
        wide: the page is as wide as the window.
    """
    sheets = [source("kit.css"), *map(source, styles)]
    codes = [source("kit.js"), *map(source, scripts), _START]
    texts = {name: section_of(name) for name in dict.fromkeys(("kit", *sections))}
    yield (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(sheets, codes)}">\n'
        f'<meta name="generator" content="msprobe {__version__}"><meta name="referrer" content="no-referrer">\n'
        f"<title>{text(str(title))}</title>\n"
        f'<script type="application/json" id="kit-texts">{json_text(texts)}</script>\n'
    ).encode()
    for sheet in sheets:
        yield f"<style>{sheet}</style>\n".encode()
    yield f"<script>{codes[0]}</script></head>\n".encode()
    yield _frame(title, kind, body, verdict, headline, app, wide).encode("utf-8", "backslashreplace")
    for code in codes[1:]:
        yield f"<script>{code}</script>\n".encode()
    for name, content in data:
        yield f'<script type="application/octet-stream" id="{text(name)}">'.encode()
        packed = content if isinstance(content, Packed) else pack(content)
        for start in range(0, len(packed), _BLOCK):
            yield packed[start : start + _BLOCK]
        yield b"</script>\n"
    yield b"</body></html>\n"


def document(title: str, **options: Any) -> str:
    """`page` as one text, for pages that are small."""
    return b"".join(page(title, **options)).decode()


def _frame(title: str, kind: str, body: str, verdict: Verdict | None, headline: str | None, app: bool, wide: bool) -> str:
    kind_text = words("kit", f"kind_{kind}")
    sign = f'<span class="sign {verdict}" aria-hidden="true">{_MARKS[verdict]}</span>' if verdict else ""
    top = f"{sign}<h1>{headline or text(title)}</h1>"
    bar = (
        f'<header class="bar"><span class="brand">{_LOGO}<b>msprobe</b></span><span class="kind">{kind_text}</span>'
        f'{top if app else ""}<span class="switches" id="kit-switches"></span></header>\n'
    )
    if app:
        return f'<body class="app">\n{bar}<main id="main">\n{body}\n</main>\n'
    width, tone = "wide" if wide else "text", verdict or "plain"
    return (
        f'<body class="{width}">\n{bar}<main id="main"><div class="banner {tone}">{top}</div>\n{body}\n</main>\n'
        f"<footer>{words('kit', 'made_by', __version__)}</footer>\n"
    )


def policy(styles: Iterable[str], scripts: Iterable[str]) -> str:
    """The content security policy of a page that has these style sheets and scripts in it, and nothing else."""
    return (
        f"default-src 'none'; style-src {_hashes(styles)}; script-src {_hashes(scripts)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hashes(contents: Iterable[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in contents)


@lru_cache(maxsize=64)
def source(name: str) -> str:
    """A style sheet or script of this package, by its path in it."""
    content = (_HERE / name).read_text(encoding="utf-8")
    if "</script" in content or "</style" in content or "<!--" in content:
        raise ValueError(f"{name} holds what ends an element of html")
    return content


def json_text(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends one or begins a comment."""
    found = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark in ("<", ">", "&", "\u2028", "\u2029"):
        found = found.replace(mark, f"\\u{ord(mark):04x}")
    return found
