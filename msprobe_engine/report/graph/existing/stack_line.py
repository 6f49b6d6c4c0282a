"""The one line of a call stack that 8.1.1 keeps of each node."""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_engine.core import names

_RECORDER = ("api_template(", "api_registry.py")
"""In the line with which a dump of that version begins, where its own recorder calls the function."""


def stack_line(name: str, stack: Sequence[str]) -> tuple[str, ...]:
    """Of a module the innermost line that calls it (``self.fc1(x)``), of a function the line that calls it.

    Args:
        stack: its whole stack, innermost line first.

    Returns:
        One line; all lines when none of them says it, none of a node without a stack.
    """
    parsed = names.parse(name)
    if isinstance(parsed, names.ModuleName):
        call = f"{parsed.path.rpartition('.')[2]}("
        return next(((line,) for line in stack if call in line), tuple(stack))
    if isinstance(parsed, names.ApiName):
        for at, line in enumerate(stack[:-1]):
            if any(word in line for word in _RECORDER):
                return (stack[at + 1],)
    return tuple(stack)
