"""Control flow of a script: lists, pipes, conditions, loops, and the two ways of what cannot be decided.

A condition that cannot be decided is gone both ways, each in a copy of the state; what differs behind it is not known, and a command
that stands under it is marked with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from msprobe_engine.config.launch_scripts.shell import syntax
from msprobe_engine.config.launch_scripts.shell.conditions import double_bracket, opposite
from msprobe_engine.config.launch_scripts.shell.context import Context, short
from msprobe_engine.config.launch_scripts.shell.control_exceptions import Break, Leave
from msprobe_engine.config.launch_scripts.shell.expansion import arithmetic, patterns
from msprobe_engine.config.launch_scripts.shell.expansion.expand import Expander
from msprobe_engine.config.launch_scripts.shell.expansion.parameters import NotKnown
from msprobe_engine.config.launch_scripts.shell.values import Known, Place, State, Status, Text, Unknown, known_text, show_text
from msprobe_engine.config.launch_scripts.shell.ways import Way, Ways, join_output

MAX_ITERATIONS = 5_000
MAX_REPEATED = 8
"""Turns of a loop whose number is not known; each takes what the one before has changed as not known, so two or three are enough."""


class Control(Ways):
    """Walks commands. `simple`, `command`, `script` and `capture_output` are left to `evaluate.Evaluator`.

    Args:
        context: limits, notes, and what was found.
        find: the text of a script by its path and the working directory; None where there is none, with the reason in a note.
    """

    def __init__(self, context: Context, find: Callable[[str, State, Place], tuple[str, str] | None]) -> None:
        super().__init__(context, Expander(context, self.capture_output))
        self.find = find
        self.input: Text | None = None
        self._walks: dict[type, Callable[..., Status]] = {
            syntax.Simple: self.simple,
            syntax.Pipeline: self._pipeline,
            syntax.AndOr: self._and_or,
            syntax.CommandList: self._sequence,
            syntax.Group: self._group,
            syntax.If: self._if,
            syntax.While: partial(self._loop, self._while),
            syntax.For: partial(self._loop, self._for),
            syntax.CountingFor: partial(self._loop, self._counting_for),
            syntax.Case: self._case,
            syntax.Function: self._function,
            syntax.Test: self._test,
            syntax.Calculation: self._calculation,
        }

    def simple(self, command: syntax.Simple, state: State) -> Status:
        """A command of words."""
        raise NotImplementedError

    def command(self, fields: list[Text], arguments: list[syntax.Assignment], prefix: dict[str, Text], state: State, at: Place) -> Status:
        """A command with its words expanded."""
        raise NotImplementedError

    def script(self, text: str, file: str, state: State, first_line: int = 1) -> None:
        """Walk a script in a state."""
        raise NotImplementedError

    def capture_output(self, part: syntax.Substitution, state: State) -> Text:
        """What ``$(...)`` gives."""
        raise NotImplementedError

    def run(self, command: syntax.Command, state: State) -> Status:
        """Walk one command; its status is true, false, or None where only a run can tell."""
        self.context.spend()
        self.context.deeper()
        try:
            state.status = self._walks[type(command)](command, state)
        finally:
            self.context.nested -= 1
        return state.status

    def _sequence(self, sequence: syntax.CommandList, state: State) -> Status:
        status: Status = True
        for i, command in enumerate(sequence.commands):
            if i in sequence.background:
                self.aside(command, state)
                status = True
            else:
                status = self.run(command, state)
        return status

    def aside(self, command: syntax.Command, state: State) -> Status:
        """A command in a shell of its own: what it sets is gone afterwards."""
        inner = state.copy()
        with self.joining(inner, Leave) as joined:
            try:
                status = self.run(command, inner)
            except Leave as leave:
                status = leave.status
        return None if joined else status

    def _group(self, group: syntax.Group, state: State) -> Status:
        given = self.input
        self.input = self.redirections(group.redirections, state, given)
        try:
            with self.divert_output(group.redirections, state):
                return self.aside(group.body, state) if group.subshell else self.run(group.body, state)
        finally:
            if group.redirections:
                self.input = given

    def _pipeline(self, pipeline: syntax.Pipeline, state: State) -> Status:
        if len(pipeline.commands) == 1:
            status = self.run(pipeline.commands[0], state)
        else:
            output, self.output = self.output, None
            given = self.input
            try:
                for i, command in enumerate(pipeline.commands):
                    last = i == len(pipeline.commands) - 1
                    self.output = output if last else []
                    status = self.aside(command, state)
                    self.input = None if last or self.output is None else join_output(self.output)
            finally:
                self.output, self.input = output, given
        return opposite(status) if pipeline.negated else status

    def _and_or(self, command: syntax.AndOr, state: State) -> Status:
        status = self.run(command.first, state)
        wanted = command.operator == "&&"
        if status is not None:
            return self.run(command.second, state) if status is wanted else status
        label = self._label(command.first, command.line) + (" holds" if wanted else " fails")
        statuses = self.either(state, [(label, lambda s: self.run(command.second, s)), ("", None)], command.line)
        return statuses[0] if statuses and statuses[0] is (not wanted) else None

    def _label(self, command: syntax.Command, line: int) -> str:
        """A condition in words."""
        source = ""
        if isinstance(command, syntax.CommandList) and len(command.commands) == 1:
            command = command.commands[0]
        if isinstance(command, syntax.Simple):
            source = " ".join(source_of(word) for word in command.words if not isinstance(word, syntax.Assignment))
        elif isinstance(command, syntax.Test):
            source = " ".join(item if isinstance(item, str) else source_of(item) for item in command.items)
        return f"the condition in line {line}{f' ({short(source)})' if source else ''}"

    def _if(self, command: syntax.If, state: State) -> Status:
        undecided: list[tuple[syntax.CommandList, str]] = []
        certain: syntax.CommandList | None = command.otherwise
        for condition, body in command.branches:
            status = self.run(condition, state)
            if status is True:
                certain = body
                break
            if status is None:
                line = condition.commands[0].line if condition.commands else command.line
                undecided.append((body, self._label(condition, line)))
        if not undecided:
            return self.run(certain, state) if certain is not None else True
        ways: list[Way] = [(f"{label} holds", self._way(body)) for body, label in undecided]
        ways.append((f"{undecided[0][1]} does not hold", self._way(certain) if certain is not None else None))
        self.either(state, ways, command.line)
        return None

    def _way(self, body: syntax.CommandList) -> Callable[[State], Status]:
        return lambda state: self.run(body, state)

    def _case(self, command: syntax.Case, state: State) -> Status:
        subject = self.expander.assume_text(self.expander.text(command.subject, state))
        ways: list[Way] = []
        label = f"the word of 'case' in line {command.line} is"
        through = False
        for words, body, end in command.branches:
            phrase = f"{label} {short('|'.join(source_of(word) for word in words))}"
            verdict: Status = through
            for word in words:
                if verdict is True:
                    break
                matches = self._matches(subject, word, state)
                verdict = True if matches else None if matches is None or verdict is None else False
            if verdict is None:
                ways.append((phrase, self._way(body)))
            elif verdict:
                if ways:
                    ways.append((phrase, self._way(body)))
                    break
                self.run(body, state)
                if end == ";;":
                    return state.status
                through = end == ";&"
        else:
            if ways:
                ways.append((f"{label} something else", None))
        if ways:
            self.either(state, ways, command.line)
            return None
        return True

    def _matches(self, subject: str | None, word: syntax.Word, state: State) -> Status:
        pieces = self.expander.pattern(word, state)
        if pieces == [("*", False)]:
            return True
        if subject is None or pieces is None:
            return None
        try:
            return patterns.matches(patterns.compile_pattern(pieces), subject)
        except patterns.PatternTooLong:
            return None

    def _loop(self, walk: Callable[[Any, State], Status], command: syntax.Command, state: State) -> Status:
        """All turns of a loop."""
        with self.joining(state, Break) as joined:
            status = walk(command, state)
        for way in joined:
            leave = way.leave
            if isinstance(leave, Break) and leave.levels > 1:
                self.keep(replace(way, leave=Break(leave.levels - 1, leave.goes_on)))
        return None if joined else status

    def _turn(self, body: syntax.CommandList, state: State) -> bool:
        """One turn; False: the loop is left."""
        with self.joining(state, Break, turn=True):
            try:
                self.run(body, state)
            except Break as leave:
                if leave.levels > 1:
                    raise Break(leave.levels - 1, leave.goes_on) from None
                return leave.goes_on
            return True

    def _perhaps(self, body: syntax.CommandList, phrase: str, state: State, line: int) -> None:
        """A loop that may have any number of turns: what a turn changes is not known, so turns are read until they change nothing more."""
        started = len(self.context.started)
        for _ in range(MAX_REPEATED):
            before = state.copy()
            del self.context.started[started:]
            self.either(state, [(phrase, lambda s: self._turn(body, s) or None), ("", None)], line)
            if (before.scopes, before.positional, before.directory) == (state.scopes, state.positional, state.directory):
                return
        self.context.add_note(self.expander.place(line), "a loop changes variables in a way that is not followed to its end")

    def _while(self, command: syntax.While, state: State) -> Status:
        for turn in range(MAX_ITERATIONS):
            before, read = state.copy() if turn < 3 else None, self.input
            status = self.run(command.condition, state)
            if command.until:
                status = opposite(status)
            if status is None:
                label = self._label(command.condition, command.line)
                self.context.add_note(self.expander.place(command.line), f"{label} of a loop cannot be decided; its body is read once")
                self._perhaps(command.body, f"{label} holds", state, command.line)
                return None
            if not status or not self._turn(command.body, state):
                return True
            if before is not None and before.scopes == state.scopes and before.positional == state.positional and self.input is read:
                self.context.add_note(self.expander.place(command.line), "a loop without end; its body is read once")
                self.unknown_output("while", self.expander.place(command.line))
                return True
        self.context.add_note(
            self.expander.place(command.line), f"a loop of more than {MAX_ITERATIONS} turns; the rest of them is not read"
        )
        return None

    def _for(self, command: syntax.For, state: State) -> Status:
        items = list(state.positional or ()) if command.words is None else self.expander.fields(command.words, state)
        for item in items[:MAX_ITERATIONS]:
            several = any(isinstance(piece, Unknown) and piece.many for piece in item)
            if several and all(isinstance(piece, Unknown) and piece.absent for piece in item):
                self.expander.assume_text(item)
                continue
            self.expander.assign(command.name, item, state)
            if several:
                self._perhaps(command.body, f"the loop in line {command.line} has a turn for {show_text(item)}", state, command.line)
            elif not self._turn(command.body, state):
                break
        if len(items) > MAX_ITERATIONS:
            self.context.add_note(
                self.expander.place(command.line), f"a loop of more than {MAX_ITERATIONS} turns; the rest of them is not read"
            )
        return True

    def _counting_for(self, command: syntax.CountingFor, state: State) -> Status:
        try:
            self.expander.number(command.start, state)
            for _ in range(MAX_ITERATIONS):
                if command.check.parts and not self.expander.number(command.check, state):
                    return True
                if not self._turn(command.body, state):
                    return True
                self.expander.number(command.step, state)
        except (NotKnown, arithmetic.SumError):
            self.context.add_note(self.expander.place(command.line), "how often a loop turns cannot be decided; its body is read once")
            self._perhaps(command.body, f"the loop in line {command.line} turns", state, command.line)
            return None
        self.context.add_note(
            self.expander.place(command.line), f"a loop of more than {MAX_ITERATIONS} turns; the rest of them is not read"
        )
        return None

    def _function(self, command: syntax.Function, state: State) -> Status:
        state.functions = {**state.functions, command.name: ((command.body, self.expander.file),)}
        return True

    def _test(self, command: syntax.Test, state: State) -> Status:
        return double_bracket(command, self.expander, state)

    def _calculation(self, command: syntax.Calculation, state: State) -> Status:
        try:
            return self.expander.number(command.expression, state) != 0
        except (NotKnown, arithmetic.SumError):
            return None

    def redirections(self, redirections: tuple[syntax.Redirection, ...], state: State, given: Text | None) -> Text | None:
        """What the command reads, where that stands in the script."""
        for redirection in redirections:
            given = self._redirect(redirection, state) if redirection.operator.startswith("<") else given
        return given

    def _redirect(self, redirection: syntax.Redirection, state: State) -> Text | None:
        if redirection.operator in ("<<", "<<-"):
            return self.expander.text(redirection.target, state)
        if redirection.operator == "<<<":
            return (*self.expander.text(redirection.target, state), Known("\n", self.expander.place(redirection.line)))
        return None

    @contextlib.contextmanager
    def divert_output(self, redirections: tuple[syntax.Redirection, ...], state: State) -> Iterator[None]:
        """While output goes elsewhere; what goes into a file of a known name is kept (`State.written`), other output is nobody's."""
        target = self._target(redirections, state)
        if target is None:
            yield
            return
        path, append = target
        output, self.output = self.output, []
        try:
            yield
        finally:
            if path:
                state.write(path, append, join_output(self.output))
            self.output = output

    def _target(self, redirections: tuple[syntax.Redirection, ...], state: State) -> tuple[str, bool] | None:
        """The file that the output goes to (empty: one that is not kept) and whether it is appended; None: it stays."""
        target = None
        for redirection in redirections:
            if redirection.operator.startswith("<") or redirection.descriptor not in ("", "1"):
                continue
            path = known_text(self.expander.text(redirection.target, state))
            if redirection.operator == ">&" and path in ("1", "-"):
                continue
            plain = redirection.operator in (">", ">>", ">|", "&>", "&>>") and path and path != "/dev/null"
            target = (path or "" if plain else "", redirection.operator.endswith(">>"))
        return target


def source_of(word: syntax.Word) -> str:
    """A word about as it stands in the script."""
    return "".join(part.text if isinstance(part, syntax.Literal) else part.source for part in word.parts)
