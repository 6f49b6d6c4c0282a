"""Simple commands of a shell script: words, assignments and redirections. Rules as in the manual of bash, sections 3.2.2, 3.4 and 3.6."""

from __future__ import annotations

import re

from msprobe_engine.config.launch_scripts.shell.syntax import (
    Assignment,
    PendingHereDocument,
    Redirection,
    Simple,
    Word,
)  # fmt: skip
from msprobe_engine.config.launch_scripts.shell.words import WordReader

DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
"""Commands whose arguments may be assignments, arrays too."""

_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=|(?=\[))")
_REDIRECTED = re.compile(r"([0-9]*|\{[A-Za-z_]\w*\})(&>>|&>|<<<|<<-|<<|<>|<&|>>|>&|>\||<(?!\()|>(?!\())")


class SimpleCommandReader(WordReader):
    def _redirections(self) -> tuple[Redirection, ...]:
        found: list[Redirection] = []
        while True:
            self.blanks()
            redirection = self._redirection()
            if redirection is None:
                return tuple(found)
            found.append(redirection)

    def _redirection(self) -> Redirection | None:
        match = _REDIRECTED.match(self.text, self.pos)
        if match is None:
            return None
        line = self.line()
        self.pos = match.end()
        self.blanks()
        start = self.pos
        target = self.word()
        if target is None:
            raise self.error(f"a file is expected behind '{match[2]}'")
        redirection = Redirection(match[2], match[1], target, line)
        if match[2] in ("<<", "<<-"):
            delimiter = self.text[start : self.pos]
            bare = re.sub(r"['\"\\]", "", delimiter)
            self.pending.append(PendingHereDocument(redirection, bare, bare != delimiter, match[2] == "<<-", line))
        return redirection

    def _simple(self, line: int) -> Simple:
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        redirections: list[Redirection] = []
        declaring = False
        while True:
            self.blanks()
            redirection = self._redirection()
            if redirection is not None:
                redirections.append(redirection)
                continue
            if not words or declaring:
                assignment = self._assignment()
                if assignment is not None:
                    (words if words else assignments).append(assignment)
                    continue
            word = self.word()
            if word is None:
                break
            if not words:
                declaring = word.plain() in DECLARING
            words.append(word)
        if not (assignments or words or redirections):
            near = self.text[self.pos : self.pos + 12].split("\n")[0] or "the end of the script"
            raise self.error(f"a command is expected, not '{near}'")
        return Simple(tuple(assignments), tuple(words), tuple(redirections), line)

    def _assignment(self) -> Assignment | None:
        """``NAME=...`` at the cursor, else None and the cursor stays."""
        start, line = self.pos, self.line()
        match = _ASSIGNED.match(self.text, start)
        if match is None:
            return None
        self.pos = match.end()
        index: Word | None = None
        operator = match[2]
        if not operator:
            self.pos += 1
            if (end := self.text.find("]", self.pos)) < 0 or end - self.pos > 1000:
                self.pos = start
                return None
            index = self.subscript()
            operator = "+=" if self.peek("+=") else "=" if self.peek("=") else ""
            if not operator:
                self.pos = start
                return None
            self.pos += len(operator)
        if self.peek("(") and index is None:
            self.pos += 1
            return Assignment(match[1], line, None, operator == "+=", None, tuple(self._items()))
        value = self.word() or Word((), line)
        return Assignment(match[1], line, value, operator == "+=", index)

    def _items(self) -> list[tuple[Word | None, Word]]:
        """The words of an array up to its closing parenthesis."""
        items: list[tuple[Word | None, Word]] = []
        while True:
            self._separators()
            if self.peek(")"):
                self.pos += 1
                return items
            start, index = self.pos, None
            if self.peek("["):
                self.pos += 1
                index = self.subscript()
                if self.peek("="):
                    self.pos += 1
                    items.append((index, self.word() or Word((), self.line())))
                    continue
                self.pos = start
            word = self.word()
            if word is None:
                raise self.error("an array is not closed")
            items.append((None, word))

    def _separators(self) -> None:
        self.blanks()
        while self.newline():
            self.blanks()
