"""A comparison as one page of HTML that needs nothing else: no script, no request, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msprobe_engine.config_check.comparison import Comparison
from msprobe_engine.config_check.difference import Difference, listed, short
from msprobe_engine.config_check.report_text import headline
from msprobe_engine.config_check.severity import CHANGES, MAY
from msprobe_engine.htmlpage import document, section, text

MOST_ROWS = 5_000
_LONGEST = 300
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.35rem;border-left:.4rem solid var(--mark);padding-left:.8rem}h2{font-size:1.05rem;margin-top:2rem}
table{border-collapse:collapse;width:100%;font-size:.88rem}td,th{border-bottom:1px solid #d8dee4;padding:.3rem .6rem;text-align:left;
vertical-align:top;overflow-wrap:anywhere}th{position:sticky;top:0;background:#f3f5f7}tr.c td:first-child{border-left:.3rem solid #cf222e}
tr.m td:first-child{border-left:.3rem solid #bf8700}summary{cursor:pointer;font-weight:600;margin-top:2rem}
@media (prefers-color-scheme:dark){body{background:#15191e;color:#e3e8ee}th{background:#232a32}td,th{border-color:#333c46}}
"""
_HEAD = ("where", "bench", "cmp", "bench value", "cmp value", "severity", "why", "step, rank", "stands in")
_MARKS = {"error": "#cf222e", "warning": "#bf8700", "pass": "#2da44e"}
_CLASSES = {CHANGES: "c", MAY: "m"}


def page(found: Comparison) -> str:
    """The whole document."""
    parts = [f"<h1>{text(headline(found))}</h1>"]
    sides = (
        (who, *(str(side.get(key, "-")) for key in ("path", "framework", "world_size", "host", "created")))
        for who, side in found.sides.items()
    )
    parts.append(_table(("", "pack", "framework", "ranks", "host", "made"), sides))
    checkers = [
        (name, verdict, found.sheets[name].compared, sum(o.matters for o in found.sheets[name].differences))
        for name, verdict in found.summary().items()
    ]
    parts += section("Checkers", _table(("checker", "verdict", "compared", "differences"), checkers))
    parts += section("Differences, the worst first", _differences(found.differences))
    derived = ((name.replace("_", " "), a, b, "equal" if equal else "differs") for name, (a, b, equal) in found.derived.items())
    parts += section("Computed of several settings", _table(("quantity", "bench", "cmp", ""), derived))
    parts += section("Not compared", _list(found.not_compared.values()))
    parts += section("Problems", _list(found.problems))
    parts += section("Notes", _list(found.notes))
    if found.harmless:
        parts.append(f"<details><summary>{len(found.harmless)} harmless differences</summary>{_differences(found.harmless)}</details>")
    body = "\n".join(part for part in parts if part)
    return document(headline(found), _MARKS[found.verdict], _STYLE, body)


def _differences(items: Sequence[Difference]) -> str:
    rows = []
    for one in items[:MOST_ROWS]:
        at = ", ".join(
            part for part in (f"step {listed(one.steps)}" if one.steps else "", f"rank {listed(one.ranks)}" if one.ranks else "") if part
        )
        cells = (one.sheet, one.bench_name, one.cmp_name, one.bench, one.cmp, one.severity, one.why, at, one.where)
        shown = "".join(f"<td>{text(short(cell, _LONGEST) if cell else '')}</td>" for cell in cells)
        rows.append(f"<tr class={_CLASSES.get(one.severity, 'h')}>{shown}</tr>")
    if not rows:
        return ""
    more = f"<p>{len(items) - MOST_ROWS} more are in result.json.</p>" if len(items) > MOST_ROWS else ""
    return f"<table><tr>{''.join(f'<th>{text(cell)}</th>' for cell in _HEAD)}</tr>{''.join(rows)}</table>{more}"


def _list(items: Iterable[str]) -> str:
    rows = "".join(f"<li>{text(item)}</li>" for item in items)
    return f"<ul>{rows}</ul>" if rows else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{text(cell)}</th>' for cell in head)}</tr>{lines}</table>" if lines else ""
