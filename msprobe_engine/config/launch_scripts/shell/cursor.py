"""A place in the text of a shell script."""

from __future__ import annotations

import bisect
import re

from msprobe_engine.config.launch_scripts.shell.syntax import ShellSyntaxError

MAX_DEPTH = 50
_BLANKS = re.compile(r"(?:[ \t]+|\\\n)*")


class Cursor:
    """Goes over the text.

    Args:
        first_line: number of its first line.
        depth: how deep it stands inside others.
    """

    def __init__(self, text: str, first_line: int = 1, depth: int = 0) -> None:
        self.text = text
        self.pos = 0
        self.depth = depth
        self._first_line = first_line
        self._newlines = [match.start() for match in re.finditer("\n", text)]

    def line(self, pos: int | None = None) -> int:
        """The line of a position (default: of the cursor)."""
        return self._first_line + bisect.bisect_left(self._newlines, self.pos if pos is None else pos)

    def error(self, what: str, pos: int | None = None) -> ShellSyntaxError:
        return ShellSyntaxError(self.line(pos), what)

    def deeper(self) -> None:
        """One level down; `self.depth` goes up again with ``-= 1``."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"nested more than {MAX_DEPTH} deep")

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.pos)

    def blanks(self) -> None:
        """Go over spaces, continued lines and a comment."""
        match = _BLANKS.match(self.text, self.pos)
        if match is not None:
            self.pos = match.end()
        if self.peek("#"):
            end = self.text.find("\n", self.pos)
            self.pos = len(self.text) if end < 0 else end
