"""Reads one word of a shell script: quotes, escapes, all that begins with a dollar sign. Rules as in the manual of bash, chapter 3.

Time is linear in the text; nesting is bounded (`MAX_DEPTH`), deeper text is an error and no deep recursion.
"""

from __future__ import annotations

import re
from itertools import groupby

from msprobe_engine.config.launch_scripts.shell.cursor import MAX_DEPTH, Cursor
from msprobe_engine.config.launch_scripts.shell.syntax import (
    Arithmetic,
    CommandList,
    Literal,
    Parameter,
    Part,
    PendingHereDocument,
    ProcessFile,
    ShellSyntaxError,
    Substitution,
    Word,
)

MAX_PARTS = 200_000

_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_BRACED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_PREFIX = re.compile(r"#(?=[A-Za-z0-9_@*])|!(?=[A-Za-z0-9_@*#])")
_BACKQUOTED = re.compile(r"[^`\\]*(?:\\.[^`\\]*)*`", re.DOTALL)
_ANSI_QUOTED = re.compile(r"[^'\\]*(?:\\.[^'\\]*)*'", re.DOTALL)
_OPERATOR = re.compile(r":[-=?+]|[-=?+]|##?|%%?|//|/#|/%|/|\^\^?|,,?|@[A-Za-z]|:")
_PLAIN = {
    "bare": re.compile(r"[^\ue000\s\\'\"$`|&;()<>\n]+"),
    "brace": re.compile(r"[^\ue000\\'\"$`}/:\n]+\n?|\n"),
    "subscript": re.compile(r"[^\ue000\\'\"$`\]\n]+"),
    "double": re.compile(r"[^\ue000\\\"$`}/:\n]+\n?|\n"),
    "text": re.compile(r"[^\ue000\\$`\n]+\n?|\n"),
    "sum": re.compile(r"[^\ue000\\\"'$`()\n;]+\n?|\n"),
    "regex": re.compile(r"[^\ue000\s\\'\"$`()]+"),
}
PASTED = re.compile("\ue000([0-9]{1,6})\ue001")
"""Stands in a text for the n-th piece that is not known (`Context.paste`): command lines are put together from such texts and then read."""
_ESCAPED = {"a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ANSI = re.compile(r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})|c(.)|(.))", re.DOTALL)
_METACHARACTERS = frozenset("|&;()<> \t\n")


class WordReader(Cursor):
    """Reads words. `commands` (in `grammar.ScriptReader`) is what stands between ``$(`` and ``)``."""

    def __init__(self, text: str, first_line: int = 1, depth: int = 0) -> None:
        super().__init__(text, first_line, depth)
        self.pending: list[PendingHereDocument] = []
        self._no_sum: set[int] = set()
        self._parts_left = MAX_PARTS

    def commands(self, end: str) -> CommandList:
        """Commands up to `end`, which is left unread."""
        raise NotImplementedError

    def sub_reader(self, text: str, first_line: int) -> WordReader:
        """A reader of text that was taken out of this one."""
        raise NotImplementedError

    # words

    def word(self) -> Word | None:
        """The word at the cursor; None where there is none."""
        line = self.line()
        parts = self._parts("bare")
        return Word(tuple(parts), line) if parts else None

    def regex_word(self) -> Word:
        """What stands behind ``=~``: parentheses belong to it."""
        return Word(tuple(self._parts("regex")), self.line())

    def whole(self, mode: str = "text") -> Word:
        """All of the text as one word: the body of a here-document (mode ``text``) or a calculation (``double``)."""
        line = self.line()
        return Word(tuple(self._parts(mode)), line)

    def subscript(self) -> Word:
        """What stands between ``[`` and ``]``; the cursor is behind the first and will be behind the second."""
        line = self.line()
        parts = self._parts("subscript")
        self.pos += 1
        return Word(tuple(parts), line)

    def _parts(self, mode: str, ends: str = "", quoted: bool = False) -> list[Part]:
        """Parts of a word up to where `mode` ends; `ends`: characters that end it besides.

        Modes: bare (a word), brace (behind an operator in ``${}``, quotes active), subscript, double (inside double quotes or such a
        ``${}``), text (here-document), sum (arithmetic), regex.
        """
        self.deeper()
        parts: list[Part] = []
        text, plain = self.text, _PLAIN[mode]
        inside = quoted or mode in ("double", "text")
        parentheses = 0
        while True:
            self._parts_left -= 1
            if self._parts_left < 0:
                raise self.error(f"more than {MAX_PARTS} pieces of words")
            if self.pos >= len(text):
                if mode in ("bare", "text", "regex") or (mode == "double" and not ends):
                    break
                raise self.error(f"the script ends before '{_closing_mark(mode, ends)}'")
            c = text[self.pos]
            if c in ends and not parentheses:
                break
            if mode in ("bare", "regex") and c in _METACHARACTERS:
                if mode == "regex" and c in "()":
                    parentheses += 1 if c == "(" else -1
                elif (mode == "regex" and c in "|<>") or (mode == "regex" and parentheses > 0 and c != "\n"):
                    pass
                elif c in "<>" and text.startswith("(", self.pos + 1):
                    parts.append(self._process_file())
                    continue
                else:
                    break
                parts.append(Literal(c, self.line()))
                self.pos += 1
                continue
            if mode == "subscript" and c == "]":
                break
            if mode == "sum" and c in "()":
                if c == ")" and not parentheses:
                    break
                parentheses += 1 if c == "(" else -1
                parts.append(Literal(c, self.line()))
                self.pos += 1
                continue
            if match := plain.match(text, self.pos):
                parts.append(Literal(match[0], self.line(), inside))
                self.pos = match.end()
                continue
            part = self._special(c, mode, inside, bool(ends))
            if part is not None:
                parts.extend(part)
        self.depth -= 1
        return _join_literals(parts)

    def _special(self, c: str, mode: str, inside: bool, bounded: bool) -> list[Part] | None:
        """Quotes, escapes, dollars and backquotes at the cursor."""
        text, line = self.text, self.line()
        if c == "\\":
            following = text[self.pos + 1 : self.pos + 2]
            self.pos += 2
            if following == "\n":
                return None
            if inside and following not in ('$`\\"' if mode == "double" else "$`\\") and not (bounded and following == "}"):
                return [Literal(c + following, line, True)]
            return [Literal(following or c, line, True)]
        if c == "'" and not inside and mode != "sum":
            end = text.find("'", self.pos + 1)
            if end < 0:
                raise self.error("a single quote is not closed")
            content, self.pos = text[self.pos + 1 : end], end + 1
            return [part for i, piece in enumerate(content.splitlines(keepends=True) or [""]) for part in _parse_quoted(piece, line + i)]
        if c == '"' and mode == "sum":
            self.pos += 1
            return None
        if c == '"' and mode != "text":
            self.pos += 1
            start = self.pos
            parts = self._parts("double", '"')
            if self.pos >= len(text):
                raise self.error("a double quote is not closed", start)
            self.pos += 1
            return parts or [Literal("", line, True)]
        if c == "\ue000" and (pasted := PASTED.match(text, self.pos)):
            self.pos = pasted.end()
            return [Parameter(pasted[0], line, inside, "")]
        if c == "`":
            return [self._backquotes(inside)]
        if c == "$":
            return self._dollar(inside, mode)
        self.pos += 1
        return [Literal(c, line, inside)]

    def _dollar(self, inside: bool, mode: str) -> list[Part]:
        text, start, line = self.text, self.pos, self.line()
        if self.peek("$(("):
            total = self._sum(start + 3, inside, start)
            if total is not None:
                return [total]
        if self.peek("$("):
            self.pos += 2
            self.deeper()
            body = self.commands(")")
            self.depth -= 1
            if not self.peek(")"):
                raise self.error("'$(' is not closed", start)
            self.pos += 1
            return [Substitution(body, line, inside, text[start : self.pos])]
        if self.peek("${"):
            self.deeper()
            part = self._read_parameter(inside)
            self.depth -= 1
            return [part]
        if self.peek("$'") and not inside and mode != "sum":
            return [self._ansi()]
        if self.peek('$"') and not inside:
            self.pos += 1
            return []
        if match := _PARAMETER.match(text, start + 1):
            self.pos = match.end()
            return [Parameter(match[0], line, inside, text[start : self.pos])]
        self.pos += 1
        return [Literal("$", line, inside)]

    def _sum(self, start: int, inside: bool, begin: int) -> Arithmetic | None:
        """``$((...))`` from behind its opening; None where it is a command substitution with a subshell."""
        if start in self._no_sum:
            return None
        before, depth = self.pos, self.depth
        line = self.line(begin)
        self.pos = start
        try:
            parts = self._parts("sum")
        except ShellSyntaxError:
            if self.depth > MAX_DEPTH:
                raise
            parts = []
            self.pos = len(self.text)
        if not self.peek("))"):
            self._no_sum.add(start)
            self.pos, self.depth = before, depth
            return None
        self.pos += 2
        return Arithmetic(Word(tuple(parts), line), line, inside, self.text[begin : self.pos])

    def calculation(self) -> Word | None:
        """The expression of a ``((...))`` at the cursor; None where two subshells begin."""
        total = self._sum(self.pos + 2, True, self.pos)
        return total.expression if total is not None else None

    def expression(self, ends: str) -> Word:
        """A part of ``for ((a; b; c))`` up to one of `ends`, which is left unread."""
        line = self.line()
        return Word(tuple(self._parts("sum", ends)), line)

    def _read_parameter(self, inside: bool) -> Part:
        """``${...}`` at the cursor."""
        text, start, line = self.text, self.pos, self.line()
        self.pos += 2
        prefix = ""
        if _PREFIX.match(text, self.pos):
            prefix = text[self.pos]
            self.pos += 1
        match = _BRACED.match(text, self.pos)
        if match is None:
            raise self.error(f"'{text[start : start + 20]}' names no variable", start)
        name, self.pos = match[0], match.end()
        index: Word | None = None
        if self.peek("["):
            self.pos += 1
            index = self.subscript()
        operator = ""
        arguments: tuple[Word, ...] = ()
        if not self.peek("}"):
            found = _OPERATOR.match(text, self.pos)
            if found is None:
                if prefix == "!" and text[self.pos : self.pos + 2] in ("@}", "*}"):
                    operator, self.pos = "names", self.pos + 1
                else:
                    raise self.error(f"'{text[start : start + 20]}' is no expansion of bash", start)
            else:
                operator, self.pos = found[0], found.end()
                arguments = self._arguments(operator, inside)
        if not self.peek("}"):
            raise self.error("'${' is not closed", start)
        self.pos += 1
        return Parameter(name, line, inside, text[start : self.pos], index, prefix, operator, arguments)

    def _arguments(self, operator: str, inside: bool) -> tuple[Word, ...]:
        """The words behind an operator of ``${}``; quotes keep their meaning in patterns also between double quotes."""
        if operator.startswith("@"):
            return ()
        pattern = operator[0] in "#%/^,"
        mode = "double" if inside and not pattern else "brace"
        if operator == ":":
            first = Word(tuple(self._parts("double", ":}")), self.line())
            if not self.peek(":"):
                return (first,)
            self.pos += 1
            return first, Word(tuple(self._parts("double", "}")), self.line())
        if operator.startswith("/"):
            begin: list[Part] = []
            if operator == "//" and self.peek("/"):  # the first character is no end of the pattern
                begin.append(Literal("/", self.line()))
                self.pos += 1
            first = Word((*begin, *self._parts("brace", "/}")), self.line())
            if not self.peek("/"):
                return (first,)
            self.pos += 1
            return first, Word(tuple(self._parts("double" if inside else "brace", "}")), self.line())
        return (Word(tuple(self._parts(mode, "}")), self.line()),)

    def _backquotes(self, inside: bool) -> Substitution:
        text, start, line = self.text, self.pos, self.line()
        match = _BACKQUOTED.match(text, start + 1)
        if match is None:
            raise self.error("a backquote is not closed", start)
        self.pos = match.end()
        content = re.sub(r'\\([$`\\"])' if inside else r"\\([$`\\])", r"\1", match[0][:-1])
        self.deeper()
        reader = self.sub_reader(content, line)
        body = reader.commands("")
        self.depth -= 1
        return Substitution(body, line, inside, text[start : self.pos])

    def _ansi(self) -> Literal:
        """``$'...'`` with the escapes of C."""
        line = self.line()
        match = _ANSI_QUOTED.match(self.text, self.pos + 2)
        if match is None:
            raise self.error("a single quote is not closed")
        self.pos = match.end()
        return Literal(_ANSI.sub(_unescape_match, match[0][:-1]).split("\0")[0], line, True)

    def _process_file(self) -> ProcessFile:
        start, line = self.pos, self.line()
        self.pos += 2
        self.deeper()
        self.commands(")")
        self.depth -= 1
        if not self.peek(")"):
            raise self.error("'<(' is not closed", start)
        self.pos += 1
        return ProcessFile(line, self.text[start : self.pos])

    # here-documents

    def newline(self) -> bool:
        """Go over one line end and the here-documents that begin behind it; False where there is none."""
        if not self.peek("\n"):
            return False
        self.pos += 1
        pending, self.pending = self.pending, []
        for document in pending:
            self._here_document(document)
        return True

    def _here_document(self, document: PendingHereDocument) -> None:
        line, lines = self.line(), []
        while self.pos < len(self.text):
            end = self.text.find("\n", self.pos)
            end = len(self.text) if end < 0 else end
            content = self.text[self.pos : end]
            self.pos = min(end + 1, len(self.text))
            if document.strip_tabs:
                content = content.lstrip("\t")
            if content == document.delimiter:
                break
            lines.append(content + "\n")
        if document.quoted:
            document.redirection.target = Word(tuple(Literal(text, line + i, True) for i, text in enumerate(lines)), line)
        else:
            self.deeper()
            document.redirection.target = self.sub_reader("".join(lines), line).whole()
            self.depth -= 1


def _parse_quoted(text: str, line: int) -> list[Part]:
    """Text between single quotes, in which only pieces that are not known are no text."""
    pieces = re.split("(\ue000[0-9]{1,6}\ue001)", text)
    parts: list[Part] = [Parameter(piece, line, True, "") if i % 2 else Literal(piece, line, True) for i, piece in enumerate(pieces)]
    return [part for part in parts if not isinstance(part, Literal) or part.text] or [Literal("", line, True)]


def _join_literals(parts: list[Part]) -> list[Part]:
    """Neighbouring text of one line as one part."""
    out: list[Part] = []
    for _, group in groupby(parts, lambda part: (part.line, part.quoted) if isinstance(part, Literal) else id(part)):
        first, *more = group
        texts = [part.text for part in (first, *more) if isinstance(part, Literal)]
        out.append(Literal("".join(texts), first.line, first.quoted) if isinstance(first, Literal) and more else first)
    return out


def _closing_mark(mode: str, ends: str) -> str:
    return {"subscript": "]", "sum": "))"}.get(mode, ends[-1:] or "}")


def _unescape_match(match: re.Match[str]) -> str:
    for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
        if match[group] is not None:
            number = int(match[group], base)
            return chr(number & 0xFF if group == 4 else number) if number <= 0x10FFFF else ""
    if match[5] is not None:
        return chr(ord(match[5]) & 0x1F)
    return _ESCAPED.get(match[6], match[6] if match[6] in "\\'\"?" else "\\" + match[6])
