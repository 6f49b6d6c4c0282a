"""Walks the tree of a script as bash would run it, and runs nothing: commands that are no part of the shell are written down.

`control` has the conditions and loops, this the commands in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from msprobe_engine.config.launch_scripts.shell.assignments import assign
from msprobe_engine.config.launch_scripts.shell.commands import builtins
from msprobe_engine.config.launch_scripts.shell.commands.call import Call
from msprobe_engine.config.launch_scripts.shell.commands.filters import filter_text
from msprobe_engine.config.launch_scripts.shell.commands.wrappers import Unwrapped, unwrap
from msprobe_engine.config.launch_scripts.shell.context import Context, Exhausted, Started, short
from msprobe_engine.config.launch_scripts.shell.control import Control
from msprobe_engine.config.launch_scripts.shell.control_exceptions import Leave, Return
from msprobe_engine.config.launch_scripts.shell.expansion import braces
from msprobe_engine.config.launch_scripts.shell.grammar import ScriptReader
from msprobe_engine.config.launch_scripts.shell.syntax import Assignment, Literal, ShellSyntaxError, Simple, Substitution, Word
from msprobe_engine.config.launch_scripts.shell.values import (
    Known,
    Place,
    State,
    Status,
    Text,
    Unknown,
    Variable,
    known_text,
    readable,
    show_text,
    unknown_of,
)
from msprobe_engine.config.launch_scripts.shell.ways import Way, join_output

MAX_SCRIPTS_DEEP = 12


class Evaluator(Control):
    """One reading of a script and all it leads to; arguments as those of `Control`."""

    def __init__(self, context: Context, find: Callable[[str, State, Place], tuple[str, str] | None]) -> None:
        super().__init__(context, find)
        self._scripts = 0
        self._outer: list[tuple[Text, ...]] = []

    # scripts

    def script(self, text: str, file: str, state: State, first_line: int = 1) -> None:
        """Walk a script in a state; an error in it ends it there, which is said.

        Raises:
            Leave: the script ends the shell, a function or a loop around it.
        """
        before, self.expander.file = self.expander.file, file
        self._scripts += 1
        try:
            if self._scripts > MAX_SCRIPTS_DEEP:
                self.context.add_note(
                    Place(file, first_line), f"scripts inside each other more than {MAX_SCRIPTS_DEEP} deep; this one is not read"
                )
                return
            for command in ScriptReader(text, first_line).top_level():
                self.run(command, state)
        except ShellSyntaxError as error:
            self.context.add_note(Place(file, error.line), f"not understood: {error.what}; the rest of the script is not read")
        finally:
            self._scripts -= 1
            self.expander.file = before

    def child(
        self, text: str, file: str, state: State, name: str, positional: tuple[Text, ...] | None, env: dict[str, Text], first_line: int = 1
    ) -> None:
        """Walk a script in a shell of its own, which knows only what is exported."""
        variables: dict[str, Variable | None] = {key: Variable(value, exported=True) for key, value in env.items()}
        inner = State([variables], positional, name, state.directory, written=dict(state.written))
        with contextlib.suppress(Leave):
            self.script(text, file, inner, first_line)
        state.written = inner.written

    # simple commands

    def simple(self, command: Simple, state: State) -> Status:
        arguments = [word for word in command.words if isinstance(word, Assignment) and not _expand_argument(word)]
        words: list[Word] = []
        for word in command.words:
            plain = _expand_argument(word) if isinstance(word, Assignment) else word
            words.extend([plain] if plain is not None else [])
        fields = self.expander.fields(words, state)
        if not command.words or not fields:
            for assignment in command.assignments:
                assign(self, assignment, state)
            if self.output is not None and any(redirection.operator.startswith("<") for redirection in command.redirections):
                self.unknown_output("<", self.expander.place(command.line))  # $(<file)
            with self.divert_output(command.redirections, state):
                pass
            return None if any(_captures(assignment) for assignment in command.assignments) else True
        prefix = {}
        for assignment in command.assignments:
            if assignment.value is not None:
                prefix[assignment.name] = self.expander.text(assignment.value, state)
        reads = any(redirection.operator.startswith("<") for redirection in command.redirections)
        given = self.input
        self.input = self.redirections(command.redirections, state, given)
        try:
            with self.divert_output(command.redirections, state):
                return self.command(fields, arguments, prefix, state, self.expander.place(command.line))
        finally:
            if reads:
                self.input = given

    def command(self, fields: list[Text], arguments: list[Assignment], prefix: dict[str, Text], state: State, place: Place) -> Status:
        """A command with its words expanded: a function, a part of the shell, or one that is started."""
        name = known_text(fields[0])
        if name is None:
            unknown = unknown_of(fields[0])
            if unknown is not None and unknown.absent and len(fields[0]) == 1 and len(fields) > 1:
                self.context.add_note(place, f"{unknown.source} {unknown.why}; what stands behind it is taken as the command")
                return self.command(fields[1:], arguments, prefix, state, place)
            return self._external(fields, prefix, state, place)
        if name in state.functions:
            bodies = [partial(self._call, body, fields[1:], prefix) for body in state.functions[name]]
            if len(bodies) == 1:
                return bodies[0](state)
            ways: list[Way] = [(f"{name} is that of definition {i + 1}", body) for i, body in enumerate(bodies)]
            self.either(state, ways, place.line)
            return None
        if name in builtins.TABLE:
            return self._with_prefix(prefix, state, lambda: builtins.TABLE[name](Call(self, state, fields, arguments, place)))
        return self._external(fields, prefix, state, place)

    def _with_prefix(self, prefix: dict[str, Text], state: State, act: Callable[[], Status]) -> Status:
        """Do something while variables have a value."""
        if not prefix:
            return act()
        state.scopes.append({key: Variable(value, exported=True) for key, value in prefix.items()})
        depth = len(state.scopes)
        try:
            return act()
        finally:
            del state.scopes[depth - 1]

    def _call(self, function: tuple[object, str], arguments: list[Text], prefix: dict[str, Text], state: State) -> Status:
        body, file = function
        positional, before = state.positional, self.expander.file
        state.scopes.append({key: Variable(value, exported=True) for key, value in prefix.items()})
        depth = len(state.scopes)
        state.positional = self._arguments(arguments)
        self.expander.file = file
        try:
            with self.joining(state, Return) as joined:
                try:
                    status = self.run(body, state)  # type: ignore[arg-type]
                except Return as leave:
                    status = leave.status
            return None if joined else status
        finally:
            del state.scopes[depth - 1 :]
            state.positional = positional
            self.expander.file = before

    def _external(self, fields: list[Text], prefix: dict[str, Text], state: State, at: Place) -> Status:
        """A command that the shell would start: written down, or a script that is walked in a shell of its own."""
        if self._filter(fields, at):
            return True
        inner = unwrap(fields, {**state.exported_variables(), **prefix})
        if inner.kind != "command" and self._inner_shell(inner, fields, state, at):
            return True
        condition = "; ".join(self.context.conditions)
        captured = self.context.capturing > 0
        self.context.start(Started(tuple(fields), inner.env, at, condition, state.directory, state.written, captured, tuple(self._outer)))
        self.unknown_output(show_text(fields[0]), at)
        return builtins.external_status(fields)

    def _filter(self, fields: list[Text], at: Place) -> bool:
        """A filter in a pipe whose input is known; False: it is none."""
        given = known_text(self.input) if self.input is not None and self.output is not None else None
        words = [known_text(field) for field in fields]
        output = filter_text([word or "" for word in words], given) if given is not None and None not in words else None
        if output is None:
            return False
        self.context.spend(len(output))
        self.context.note_edit(given or "", output)
        self.emit((Known(output, at),))
        return True

    def _inner_shell(self, inner: Unwrapped, fields: list[Text], state: State, place: Place) -> bool:
        """Walk the script or text that a command gives to a shell; False where that is not at hand."""
        name = known_text(inner.argv[0]) if inner.argv else None
        arguments = self._arguments(list(inner.argv[1:]))
        self._outer.append(tuple(fields))
        try:
            if inner.kind == "text":
                if not readable(inner.argv[0]):
                    self.context.add_note(place, f"a command line that is not known ({short(show_text(inner.argv[0]))}) is not read")
                    return True
                self.child(self.context.paste(inner.argv[0]), place.file, state, "bash", arguments[1:], inner.env, place.line)
                return True
            if inner.kind == "input":
                if self.input is None or not readable(self.input):
                    return False
                self.child(self.context.paste(self.input), place.file, state, "bash", arguments, inner.env, place.line)
                return True
            script = self.find(name, state, place) if name is not None else None
            if script is None or name is None:
                return False
            self.child(script[0], script[1], state, name, arguments, inner.env)
            return True
        finally:
            self._outer.pop()

    def _arguments(self, fields: list[Text]) -> tuple[Text, ...]:
        """Arguments of a function or script, without those that nothing sets and that may be none, which is said."""
        out = []
        for text in fields:
            if all(isinstance(piece, Unknown) and piece.many and piece.absent for piece in text):
                self.expander.assume_text(text)
            else:
                out.append(text)
        return tuple(out)

    def capture_output(self, part: Substitution, state: State) -> Text:
        """``$(...)``: known where all that writes is the shell itself, and no condition that only a run decides stands before it."""
        place = self.expander.place(part.line)
        output, given = self.output, self.input
        self.output, self.input = [], None
        self.context.capturing += 1
        try:
            self.aside(part.body, state)
            text = join_output(self.output)
        finally:
            self.context.capturing -= 1
            self.output, self.input = output, given
        value = known_text(text)
        if value is not None:
            return (Known(value.rstrip("\n"), place),)
        unknown = [piece for piece in text if isinstance(piece, Unknown)]
        if len(unknown) > 1 or not unknown[0].options:
            return (Unknown(short(part.source), "is the output of a command, which is not run", place),)
        ways = [
            show_text(tuple(Known(" ".join(option), place) if piece is unknown[0] else piece for piece in text))
            for option in unknown[0].options
        ]
        return (Unknown(short(part.source), unknown[0].why, place, options=tuple((way.rstrip("\n"),) for way in ways)),)


def _expand_argument(argument: Assignment) -> Word | None:
    """An argument of ``export`` that braces make several words of; these are ordinary ones and no assignments any more."""
    if argument.value is None or argument.index is not None or len(braces.expand_braces(argument.value)) < 2:
        return None
    sign = "+=" if argument.append else "="
    return Word((Literal(argument.name + sign, argument.line), *argument.value.parts), argument.line)


def _captures(assignment: Assignment) -> bool:
    return assignment.value is not None and any(isinstance(part, Substitution) for part in assignment.value.parts)


def start_state(context: Context, name: str, positional: tuple[str, ...] | None, file: str) -> State:
    """The state in which a script begins."""
    at = Place(file, 0)
    variables: dict[str, Variable | None] = {}
    for key, value in (context.environment or {}).items():
        variables[key] = Variable((Known(value, at),), exported=True)
    directory = context.environment.get("PWD") if context.environment is not None else None
    arguments = None if positional is None else tuple((Known(text, at),) for text in positional)
    return State([variables], arguments, name, directory)


def read_script(
    text: str,
    file: str,
    context: Context,
    find: Callable[[str, State, Place], tuple[str, str] | None],
    positional: tuple[str, ...] | None = None,
) -> State:
    """Read a script; the commands it would start are in ``context.started``.

    Args:
        file: its path, as ``$0`` and in messages.
        context: limits, what is given, notes.
        find: gives scripts that this one sources or starts.
        positional: arguments of the script; None: not known.

    Returns:
        The state at its end.
    """
    state = start_state(context, file, positional, file)
    evaluator = Evaluator(context, find)
    try:
        evaluator.script(text, file, state)
    except Leave:
        pass
    except (Exhausted, RecursionError) as error:
        reason = str(error) if isinstance(error, Exhausted) else "nested too deep"
        context.add_note(Place(file, 0), f"reading ends early: {reason}")
    return state
