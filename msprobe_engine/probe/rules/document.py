"""The list of rules in docs/guide/alerts.md: ``python -m msprobe_engine.probe.rules.document docs/guide/alerts.md`` writes them anew."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from msprobe_engine.probe.rules.arguments import CommonArgs
from msprobe_engine.probe.rules.registry import RECOMMENDED, RULES

BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"
_USUAL = (("patience", "1"), ("recovery", "10"))
"""Defaults that the page says in words."""
_COMMON = frozenset(f.name for f in dataclasses.fields(CommonArgs))


def page(text: str) -> str:
    """`text` with the list between the two marks as the code has them.

    Raises:
        ValueError: the marks are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """What each rule looks for, with its arguments. Markdown."""
    others = ", ".join(f"`{name}`" for name, rule in RULES.items() if not rule.recommended)
    critical = ", ".join(f"`{name}`" for name, rule in RULES.items() if rule.severity == "critical")
    lines = [f"`{RECOMMENDED}` has all of these but {others}. Alerts of {critical} are critical, others are warnings.", ""]
    for name, rule in RULES.items():
        given = [(f.name, _default(f.default)) for f in dataclasses.fields(rule.args_type) if f.name not in _COMMON]
        args = ", ".join(f"`{arg}` {value}" for arg, value in given if (arg, value) not in _USUAL)
        lines.append(f"* `{name}`: {rule.fires}." + (f" Arguments: {args}." if args else ""))
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
