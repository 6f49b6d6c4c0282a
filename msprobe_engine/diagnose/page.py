"""`Diagnosis` as one page of HTML that needs nothing else: no script, no request, every text escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msprobe_engine.diagnose.findings import NONE, Diagnosis, Suspect
from msprobe_engine.htmlpage import document, section, text

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.35rem;border-left:.4rem solid var(--mark);padding-left:.8rem}h2{font-size:1.05rem;margin-top:2rem}
table{border-collapse:collapse;width:100%;font-size:.9rem}
td,th{border-bottom:1px solid #d8dee4;padding:.3rem .6rem;text-align:left;vertical-align:top}
code,pre{font-family:ui-monospace,monospace;font-size:.85rem;background:#f3f5f7;overflow-wrap:anywhere}pre{padding:.6rem;overflow:auto}
@media (prefers-color-scheme:dark){body{background:#15191e;color:#e3e8ee}code,pre{background:#232a32}td,th{border-color:#333c46}}
"""


def page(found: Diagnosis) -> str:
    """The whole document."""
    mark = "#2da44e" if found.finding == NONE else "#cf222e"
    first = found.first_suspect
    parts = [f"<h1>{text(found.headline())}</h1>"]
    if first is not None:
        parts += [f"<p>{text(first.why)}.</p>", _where(first), _numbers(first.numbers)]
    parts += section("Evidence", _list(found.evidence))
    parts += section("Further suspects, in order of execution", _suspects(found.suspects[1:]))
    parts += section("Also", _list(found.first_nonfinite()))
    for side, names in found.unmatched.items():
        parts += section(f"Calls of the {side} side only", _list(names[:200], code=True))
    parts += section("Modules that the other side calls otherwise", _pairs(found.renamed))
    parts += section("What could not be read or compared", _list(found.problems))
    parts += section("Next", _list(found.next, code=True))
    if first is not None and first.stack:
        parts += section("Call stack of the first suspect, innermost first", f"<pre>{text(chr(10).join(first.stack))}</pre>")
    parts += section("Looked at", _pairs({key: str(value) for key, value in found.looked_at.items()}))
    body = "\n".join(parts)
    return document(found.headline(), mark, _STYLE, body)


def _list(items: Sequence[str], code: bool = False) -> str:
    if not items:
        return ""
    rows = (f"<li>{f'<code>{text(item)}</code>' if code else text(item)}</li>" for item in items)
    return f"<ul>{''.join(rows)}</ul>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{text(cell)}</th>' for cell in head)}</tr>{lines}</table>" if lines else ""


def _pairs(items: Mapping[str, str]) -> str:
    return _table(("", ""), items.items())


def _where(first: Suspect) -> str:
    rows = (
        ("record", first.record),
        ("module", first.module or "-"),
        ("step, rank", f"{first.step}, {first.rank}"),
        ("source", " ".join(first.source.split()) or "-"),
        ("tensor", first.tensor or "-"),
        ("on the golden side", first.partner or "-"),
    )
    return _table(("first suspect", ""), rows)


def _numbers(numbers: Mapping[str, Any]) -> str:
    if not numbers:
        return ""
    keys = list(dict.fromkeys(key for side in numbers.values() for key in side))
    return _table(("", *numbers), ((key, *(_shown(side.get(key)) for side in numbers.values())) for key in keys))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _suspects(suspects: Sequence[Suspect]) -> str:
    return _table(("step", "rank", "record", "why"), ((s.step, s.rank, s.record, s.why) for s in suspects))
