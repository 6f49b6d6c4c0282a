"""Ways out of a part of a script."""

from __future__ import annotations


class Leave(Exception):
    """Ends what is being walked.

    Args:
        status: of it; None: not known.
    """

    def __init__(self, status: bool | None = True) -> None:
        super().__init__()
        self.status = status


class Exit(Leave):
    """``exit``, ``exec``: the shell ends."""


class Return(Leave):
    """``return``: the function or sourced script ends."""


class Break(Leave):
    """``break`` or ``continue``.

    Args:
        levels: how many loops.
        goes_on: the outermost of them has another turn (``continue``).
    """

    def __init__(self, levels: int = 1, goes_on: bool = False) -> None:
        super().__init__()
        self.levels = levels
        self.goes_on = goes_on
