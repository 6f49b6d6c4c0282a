"""Commands of a shell script: lists, pipelines, if, loops, case, functions, tests. Rules as in the manual of bash, section 3.2."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msprobe_engine.config.launch_scripts.shell import syntax
from msprobe_engine.config.launch_scripts.shell.simple_commands import SimpleCommandReader

_FUNCTION = re.compile(r"([^\s|&;()<>\"'$`\\=#]+)[ \t]*\([ \t]*\)")
_FUNCTION_WORD = re.compile(r"function[ \t]+([^\s|&;()<>\"'$`\\]+)[ \t]*(?:\([ \t]*\))?")
_RESERVED = re.compile(r"(?:if|then|elif|else|fi|while|until|for|select|do|done|case|esac|in|function|\{|\}|!|\[\[|time)(?=[\s;&|()<>]|$)")
_CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
_TEST_OPERATORS = ("&&", "||", "(", ")", "<", ">")


class ScriptReader(SimpleCommandReader):
    """`top_level` gives the commands of a script one after another, as bash reads them: an error comes only where it stands."""

    def sub_reader(self, text: str, first_line: int) -> ScriptReader:
        return ScriptReader(text, first_line, self.depth)

    def top_level(self) -> Iterator[syntax.Command]:
        """The commands of the script; those of one line come together, with the here-documents behind it.

        Raises:
            ShellSyntaxError: at the first place that is not understood.
        """
        while True:
            self._separators()
            if self.pos >= len(self.text):
                return
            line, commands, background = self.line(), [], set()
            while self.pos < len(self.text) and not self.peek("\n"):
                if self.text[self.pos] in ");" or self._peek_reserved_word() in _CLOSING:
                    raise self.error(f"'{self.text[self.pos : self.pos + 10].split()[0]}' stands where a command should begin")
                commands.append(self._and_or())
                if self._terminator():
                    background.add(len(commands) - 1)
                self.blanks()
            self.newline()
            yield commands[0] if len(commands) == 1 and not background else syntax.CommandList(tuple(commands), line, frozenset(background))

    def commands(self, end: str) -> syntax.CommandList:
        """A list of commands up to the character `end` (`)`), a closing reserved word, or the end of the text; left unread."""
        self.deeper()
        line = self.line()
        commands: list[syntax.Command] = []
        background: set[int] = set()
        while True:
            self._separators()
            if self.pos >= len(self.text) or (end and self.peek(end)) or self.peek(";;") or self.peek(";&"):
                break
            if self._peek_reserved_word() in _CLOSING:
                break
            commands.append(self._and_or())
            if self._terminator():
                background.add(len(commands) - 1)
        self.depth -= 1
        return syntax.CommandList(tuple(commands), line, frozenset(background))

    def _terminator(self) -> bool:
        """Go over ``;`` or ``&`` behind a command; True for ``&``."""
        self.blanks()
        if self.peek(";;") or self.peek(";&"):
            return False
        if self.peek("&") or self.peek(";"):
            self.pos += 1
            return self.text[self.pos - 1] == "&"
        if self.pos < len(self.text) and self.text[self.pos] not in "\n)" and self._peek_reserved_word() not in _CLOSING:
            raise self.error(f"'{self.text[self.pos : self.pos + 10].splitlines()[0]}' is not expected here")
        return False

    def _peek_reserved_word(self) -> str:
        """The reserved word at the cursor, unread; empty where there is none."""
        match = _RESERVED.match(self.text, self.pos)
        return match[0] if match else ""

    def _expect(self, word: str) -> None:
        self._separators()
        if self._peek_reserved_word() != word:
            found = self.text[self.pos : self.pos + 12].split("\n")[0] or "the end"
            raise self.error(f"'{word}' is expected, not '{found}'")
        self.pos += len(word)

    def _and_or(self) -> syntax.Command:
        command = self._pipeline()
        while True:
            self.blanks()
            operator = self.text[self.pos : self.pos + 2]
            if operator not in ("&&", "||"):
                return command
            line = self.line()
            self.pos += 2
            self._separators()
            command = syntax.AndOr(command, operator, self._pipeline(), line)

    def _pipeline(self) -> syntax.Command:
        line, negated = self.line(), False
        while (word := self._peek_reserved_word()) in ("!", "time"):
            self.pos += len(word)
            negated ^= word == "!"
            self.blanks()
            if word == "time" and re.compile(r"-p(?=\s)").match(self.text, self.pos):
                self.pos += 2
                self.blanks()
        commands = [self._command()]
        while True:
            self.blanks()
            if not self.peek("|") or self.peek("||"):
                break
            self.pos += 2 if self.peek("|&") else 1
            self._separators()
            commands.append(self._command())
        return syntax.Pipeline(tuple(commands), negated, line) if negated or len(commands) > 1 else commands[0]

    def _command(self) -> syntax.Command:
        self.deeper()
        line, word = self.line(), self._peek_reserved_word()
        command: syntax.Command
        if word == "if":
            command = self._if(line)
        elif word in ("while", "until"):
            self.pos += 5
            condition = self.commands("")
            body = self._body()
            command = syntax.While(condition, body, word == "until", line)
        elif word in ("for", "select"):
            self.pos += len(word)
            command = self._for(line, word == "select")
        elif word == "case":
            command = self._case(line)
        elif word == "[[":
            self.pos += 2
            command = self._test(line)
        elif word == "{":
            self.pos += 1
            body = self.commands("")
            self._expect("}")
            command = syntax.Group(body, False, line)
        elif word == "function" and (match := _FUNCTION_WORD.match(self.text, self.pos)):
            command = self._function(match, line)
        elif self.peek("((") and (expression := self.calculation()) is not None:
            command = syntax.Calculation(expression, line)
        elif self.peek("("):
            self.pos += 1
            body = self.commands(")")
            if not self.peek(")"):
                raise self.error("'(' is not closed")
            self.pos += 1
            command = syntax.Group(body, True, line)
        elif word not in _CLOSING and (match := _FUNCTION.match(self.text, self.pos)):
            command = self._function(match, line)
        else:
            command = self._simple(line)
        redirections = self._redirections()
        if redirections:
            command = syntax.Group(syntax.CommandList((command,), line), False, line, redirections)
        self.depth -= 1
        return command

    def _function(self, match: re.Match[str], line: int) -> syntax.Function:
        self.pos = match.end()
        self._separators()
        return syntax.Function(match[1], self._command(), line)

    def _body(self) -> syntax.CommandList:
        self._expect("do")
        body = self.commands("")
        self._expect("done")
        return body

    def _if(self, line: int) -> syntax.If:
        branches = []
        self.pos += 2
        while True:
            condition = self.commands("")
            self._expect("then")
            branches.append((condition, self.commands("")))
            self._separators()
            word = self._peek_reserved_word()
            self.pos += len(word)
            if word == "elif":
                continue
            otherwise = None
            if word == "else":
                otherwise = self.commands("")
                self._expect("fi")
            elif word != "fi":
                raise self.error("'fi' is expected")
            return syntax.If(tuple(branches), otherwise, line)

    def _for(self, line: int, asks: bool) -> syntax.For | syntax.CountingFor:
        self.blanks()
        if self.peek("(("):
            self.pos += 2
            start, check, step = (self._clause(end) for end in (";", ";", ")"))
            if not self.peek(")"):
                raise self.error("'))' is expected")
            self.pos += 1
            self.blanks()
            if self.peek(";"):
                self.pos += 1
            return syntax.CountingFor(start, check, step, self._loop_body(), line)
        name = self.word()
        plain = name.plain() if name else None
        if plain is None:
            raise self.error("a variable is expected behind 'for'")
        self._separators()
        words: tuple[syntax.Word, ...] | None = None
        if self._peek_reserved_word() == "in":
            self.pos += 2
            words = tuple(self._words())
        if asks:  # the word that is chosen
            words = (syntax.Word((syntax.Parameter("REPLY", line, False, "$REPLY"),), line),)
        self.blanks()
        if self.peek(";"):
            self.pos += 1
        return syntax.For(plain, words, self._loop_body(), line)

    def _clause(self, end: str) -> syntax.Word:
        """A part of ``((a; b; c))`` and the character behind it."""
        part = self.expression(end)
        self.pos += 1
        return part

    def _loop_body(self) -> syntax.CommandList:
        self._separators()
        if self._peek_reserved_word() == "{":
            self.pos += 1
            body = self.commands("")
            self._expect("}")
        else:
            body = self._body()
        return body

    def _words(self) -> list[syntax.Word]:
        words: list[syntax.Word] = []
        while True:
            self.blanks()
            word = self.word()
            if word is None:
                return words
            words.append(word)

    def _case(self, line: int) -> syntax.Case:
        self.pos += 4
        self.blanks()
        subject = self.word()
        if subject is None:
            raise self.error("a word is expected behind 'case'")
        self._expect("in")
        branches: list[tuple[tuple[syntax.Word, ...], syntax.CommandList, str]] = []
        while True:
            self._separators()
            if self._peek_reserved_word() == "esac":
                self.pos += 4
                return syntax.Case(subject, tuple(branches), line)
            if self.peek("("):
                self.pos += 1
            patterns = []
            while True:
                self.blanks()
                pattern = self.word()
                if pattern is None:
                    raise self.error("a pattern of 'case' is expected")
                patterns.append(pattern)
                self.blanks()
                if not self.peek("|"):
                    break
                self.pos += 1
            if not self.peek(")"):
                raise self.error("')' is expected behind a pattern of 'case'")
            self.pos += 1
            body = self.commands("")
            end = next((end for end in (";;&", ";;", ";&") if self.peek(end)), "")
            self.pos += len(end)
            branches.append((tuple(patterns), body, end or ";;"))
            self._separators()
            if not end and self._peek_reserved_word() != "esac":
                raise self.error("'esac' is expected")

    def _test(self, line: int) -> syntax.Test:
        items: list[syntax.Word | str] = []
        regex = False
        while True:
            self._separators()
            if self.pos >= len(self.text):
                raise self.error("']]' is expected")
            if not regex and (operator := next((o for o in _TEST_OPERATORS if self.peek(o)), "")):
                self.pos += len(operator)
                items.append(operator)
                continue
            word = self.regex_word() if regex else self.word()
            if word is None or not word.parts:
                raise self.error(f"'{self.text[self.pos]}' is not expected in '[['")
            plain = word.plain()
            if plain == "]]" and not regex:
                return syntax.Test(tuple(items), line)
            regex = plain == "=~"
            items.append(word)
