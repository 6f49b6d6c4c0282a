"""Places in the code, as settings name them: regular expressions over ``path[line]``."""

from __future__ import annotations

import re


def problem(pattern: str) -> str:
    """What is wrong with a pattern, ``""`` when nothing is."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is no regular expression ({error}); write \\[ for the bracket before a line number, or a part of the path alone"
    return ""
