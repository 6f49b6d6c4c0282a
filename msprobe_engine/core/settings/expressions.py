"""Regular expressions in settings: among the elements of ``list`` and ``tensor_list``, and of places in the code."""

from __future__ import annotations

import re

REGULAR = "re:"
"""Prefix of an element that is a regular expression."""


def element_problem(element: str) -> str | None:
    """What is wrong with the regular expression of an element; None when nothing is, or when it is none."""
    if not element.startswith(REGULAR):
        return None
    if element == REGULAR:
        return "is an empty regular expression, which would keep everything; leave it out"
    try:
        re.compile(element.removeprefix(REGULAR))
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error or type(error).__name__}; allowed: Python's syntax"
    return None


def place_problem(pattern: str) -> str:
    """What is wrong with the regular expression of places, which is matched with ``path[line]``; ``""`` when nothing is."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is no regular expression ({error}); write \\[ for the bracket before a line number, or a part of the path alone"
    return ""
