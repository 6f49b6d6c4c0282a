"""stack.json: which lines of the program each record was called from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stack_lines(document: Mapping[str, Any]) -> tuple[dict[str, list[str]], int]:
    """Record name -> lines, innermost first, and how many stacks were left out because they are no lists of text.

    Args:
        document: either layout: ``{number: [[names], [lines]]}`` and the older ``{name: [lines]}``. One line may stand without its list.
    """
    found: dict[str, list[str]] = {}
    odd = 0
    for key, value in document.items():
        names: Any = [key]
        lines: Any = value
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list):
            names, lines = value
            lines = [lines] if isinstance(lines, str) else lines
        if _are_texts(lines) and _are_texts(names):
            found.update((name, lines) for name in names)
        else:
            odd += 1
    return found, odd


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
