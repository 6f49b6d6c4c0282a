"""The tables of rules in docs/guide/alerts.md: ``python -m msprobe_engine.probe.rules.document docs/guide/alerts.md`` writes them anew."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from msprobe_engine.probe.rules.arguments import CommonArgs
from msprobe_engine.probe.rules.registry import RECOMMENDED, RULES

BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"
_COMMON = frozenset(f.name for f in dataclasses.fields(CommonArgs))


def page(text: str) -> str:
    """`text` with the tables between the two marks as the code has them.

    Raises:
        ValueError: the marks are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """What each rule looks for, and what its alerts mean. Markdown."""
    lines = [f"| rule | fires when | `args` (default) | severity | in `{RECOMMENDED}` |", "| --- | --- | --- | --- | --- |"]
    for name, rule in RULES.items():
        args = ", ".join(f"`{f.name}` ({_default(f.default)})" for f in dataclasses.fields(rule.args_type) if f.name not in _COMMON)
        lines.append(f"| `{name}` | {rule.fires} | {args} | {rule.severity} | {'yes' if rule.recommended else ''} |")
    lines += ["", "## What they mean", "", "| rule | what it usually means | what to run next |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {rule.meaning} | {rule.next} |" for name, rule in RULES.items() if name not in ("condition", "learned")]
    return "\n".join(lines) + "\n"


def _default(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return "empty" if value == "" else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
