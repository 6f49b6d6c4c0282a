"""Walks the tree of a script as bash would run it, and runs nothing: commands that are no part of the shell are written down.

A condition that cannot be decided is gone both ways, each in a copy of the state; what differs behind it is not known, and a command
that stands under it is marked with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from msprobe_engine.config_check.shell import braces, builtins, patterns, printing, sums
from msprobe_engine.config_check.shell.assignments import assign
from msprobe_engine.config_check.shell.call import Call, Status
from msprobe_engine.config_check.shell.conditions import double_bracket, opposite
from msprobe_engine.config_check.shell.context import Context, Exhausted, Started, short
from msprobe_engine.config_check.shell.expand import Expander, NotKnown
from msprobe_engine.config_check.shell.filters import filtered
from msprobe_engine.config_check.shell.flow import Break, Leave, Return
from msprobe_engine.config_check.shell.grammar import ScriptReader
from msprobe_engine.config_check.shell.syntax import (
    AndOr,
    Assignment,
    Calculation,
    Case,
    Command,
    CommandList,
    CountingFor,
    For,
    Function,
    Group,
    If,
    Literal,
    Pipeline,
    Redirection,
    ShellSyntaxError,
    Simple,
    Substitution,
    Test,
    While,
    Word,
)
from msprobe_engine.config_check.shell.values import Known, Place, State, Text, Unknown, Variable, known, merge, shown, unknown_of
from msprobe_engine.config_check.shell.wrappers import Unwrapped, unwrap

MAX_ITERATIONS = 5_000
MAX_SCRIPTS_DEEP = 12

Way = tuple[str, Callable[[State], Status] | None]


class Evaluator:
    """One reading of a script and all it leads to.

    Args:
        context: limits, notes, and what was found.
        find: the text of a script by its path and the working directory; None where there is none, with the reason in a note.
    """

    def __init__(self, context: Context, find: Callable[[str, State, Place], tuple[str, str] | None]) -> None:
        self.context = context
        self.expander = Expander(context, self._captured)
        self.find = find
        self.input: Text | None = None
        self.output: list[Text] | None = None
        self._scripts = 0
        self._outer: list[tuple[Text, ...]] = []
        self._walks: dict[type, Callable[..., Status]] = {
            Simple: self._simple,
            Pipeline: self._pipeline,
            AndOr: self._and_or,
            CommandList: self._sequence,
            Group: self._group,
            If: self._if,
            While: self._while,
            For: self._for,
            CountingFor: self._counting_for,
            Case: self._case,
            Function: self._function,
            Test: self._test,
            Calculation: self._calculation,
        }

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
                self.context.note(
                    Place(file, first_line), f"scripts inside each other more than {MAX_SCRIPTS_DEEP} deep; this one is not read"
                )
                return
            for command in ScriptReader(text, first_line).top_level():
                self.run(command, state)
        except ShellSyntaxError as error:
            self.context.note(Place(file, error.line), f"not understood: {error.what}; the rest of the script is not read")
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

    # walking

    def run(self, command: Command, state: State) -> Status:
        """Walk one command; its status is true, false, or None where only a run can tell."""
        self.context.spend()
        self.context.deeper()
        try:
            state.status = self._walks[type(command)](command, state)
        finally:
            self.context.nested -= 1
        return state.status

    def _sequence(self, sequence: CommandList, state: State) -> Status:
        status: Status = True
        for i, command in enumerate(sequence.commands):
            if i in sequence.background:
                self._aside(command, state)
                status = True
            else:
                status = self.run(command, state)
        return status

    def _aside(self, command: Command, state: State) -> Status:
        """A command in a shell of its own: what it sets is gone afterwards."""
        inner = state.copy()
        try:
            return self.run(command, inner)
        except Leave as leave:
            return leave.status

    def _group(self, group: Group, state: State) -> Status:
        given = self.input
        self.input = self._redirections(group.redirections, state, given)
        try:
            return self._aside(group.body, state) if group.subshell else self.run(group.body, state)
        finally:
            if group.redirections:
                self.input = given

    def _pipeline(self, pipeline: Pipeline, state: State) -> Status:
        if len(pipeline.commands) == 1:
            status = self.run(pipeline.commands[0], state)
        else:
            output, self.output = self.output, None
            given = self.input
            try:
                for i, command in enumerate(pipeline.commands):
                    last = i == len(pipeline.commands) - 1
                    self.output = output if last else []
                    status = self._aside(command, state)
                    self.input = None if last or self.output is None else _joined(self.output)
            finally:
                self.output, self.input = output, given
        return opposite(status) if pipeline.negated else status

    def _and_or(self, command: AndOr, state: State) -> Status:
        status = self.run(command.first, state)
        wanted = command.operator == "&&"
        if status is not None:
            return self.run(command.second, state) if status is wanted else status
        label = self._label(command.first, command.line) + (" holds" if wanted else " fails")
        statuses = self.either(state, [(label, lambda s: self.run(command.second, s)), ("", None)], command.line)
        return statuses[0] if statuses and statuses[0] is (not wanted) else None

    def _label(self, command: Command, line: int) -> str:
        """A condition in words."""
        source = ""
        if isinstance(command, CommandList) and len(command.commands) == 1:
            command = command.commands[0]
        if isinstance(command, Simple):
            source = " ".join(_source(word) for word in command.words if not isinstance(word, Assignment))
        elif isinstance(command, Test):
            source = " ".join(item if isinstance(item, str) else _source(item) for item in command.items)
        return f"the condition in line {line}{f' ({short(source)})' if source else ''}"

    def either(self, state: State, ways: list[Way], line: int) -> list[Status]:
        """Go several ways, each from the state as it is, and put the state together again.

        A way that ends the script does not count, unless all do.

        Args:
            ways: what has to hold for a way to be gone, and the way; None: nothing happens.
        """
        at = self.expander.place(line)
        ends: list[State] = []
        statuses: list[Status] = []
        leaves: list[Leave] = []
        for phrase, way in ways:
            branch = state.copy()
            self.context.conditions.append(phrase)
            try:
                statuses.append(way(branch) if way is not None else None)
                ends.append(branch)
            except Leave as leave:
                leaves.append(leave)
                if isinstance(leave, (Return, Break)):
                    self.context.note(
                        at, f"whether {phrase} cannot be decided; a function or loop may be left there, which is not followed"
                    )
            finally:
                self.context.conditions.pop()
        if not ends:
            raise leaves[0]
        result = ends[0]
        for other in ends[1:]:
            result = merge(result, other, f"depends on whether {ways[0][0]}", at)
            self.context.spend(len(result.scopes[0]))
        state.become(result)
        return statuses

    def _if(self, command: If, state: State) -> Status:
        undecided: list[tuple[CommandList, str]] = []
        certain: CommandList | None = command.otherwise
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

    def _way(self, body: CommandList) -> Callable[[State], Status]:
        return lambda state: self.run(body, state)

    def _case(self, command: Case, state: State) -> Status:
        subject = self.expander.assumed(self.expander.text(command.subject, state))
        ways: list[Way] = []
        label = f"the word of 'case' in line {command.line} is"
        through = False
        for words, body, end in command.branches:
            phrase = f"{label} {short('|'.join(_source(word) for word in words))}"
            verdict: Status = through
            for word in words:
                if verdict is True:
                    break
                one = self._matches(subject, word, state)
                verdict = True if one else None if one is None or verdict is None else False
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

    def _matches(self, subject: str | None, word: Word, state: State) -> Status:
        pieces = self.expander.pattern(word, state)
        if pieces == [("*", False)]:
            return True
        if subject is None or pieces is None:
            return None
        try:
            return patterns.matches(patterns.compiled(pieces), subject)
        except patterns.PatternTooLong:
            return None

    def _loop(self, body: CommandList, state: State) -> bool:
        """One turn; False: the loop is left."""
        try:
            self.run(body, state)
        except Break as leave:
            if leave.levels > 1:
                raise Break(leave.levels - 1, leave.goes_on) from None
            return leave.goes_on
        return True

    def _perhaps(self, body: CommandList, phrase: str, state: State, line: int) -> None:
        """A turn of a loop that may be there or not."""
        self.either(state, [(phrase, lambda s: self._loop(body, s) or None), ("", None)], line)

    def _while(self, command: While, state: State) -> Status:
        given = self.input
        self.input = self._redirections(command.redirections, state, given)
        try:
            return self._turns(command, state)
        finally:
            if command.redirections:
                self.input = given

    def _turns(self, command: While, state: State) -> Status:
        for turn in range(MAX_ITERATIONS):
            before, read = state.copy() if turn < 3 else None, self.input
            status = self.run(command.condition, state)
            if command.until:
                status = opposite(status)
            if status is None:
                label = self._label(command.condition, command.line)
                self.context.note(self.expander.place(command.line), f"{label} of a loop cannot be decided; its body is read once")
                self._perhaps(command.body, f"{label} holds", state, command.line)
                return None
            if not status or not self._loop(command.body, state):
                return True
            if before is not None and before.scopes == state.scopes and before.positional == state.positional and self.input is read:
                self.context.note(self.expander.place(command.line), "a loop without end; its body is read once")
                return True
        self.context.note(self.expander.place(command.line), f"a loop of more than {MAX_ITERATIONS} turns; the rest of them is not read")
        return None

    def _for(self, command: For, state: State) -> Status:
        items = list(state.positional or ()) if command.words is None else self.expander.fields(command.words, state)
        for item in items[:MAX_ITERATIONS]:
            several = any(isinstance(piece, Unknown) and piece.many for piece in item)
            if several and all(isinstance(piece, Unknown) and piece.absent for piece in item):
                self.expander.assumed(item)
                continue
            self.expander.assign(command.name, item, state)
            if several:
                self._perhaps(command.body, f"the loop in line {command.line} has a turn for {shown(item)}", state, command.line)
            elif not self._loop(command.body, state):
                break
        if len(items) > MAX_ITERATIONS:
            self.context.note(
                self.expander.place(command.line), f"a loop of more than {MAX_ITERATIONS} turns; the rest of them is not read"
            )
        return True

    def _counting_for(self, command: CountingFor, state: State) -> Status:
        try:
            self.expander.number(command.start, state)
            for _ in range(MAX_ITERATIONS):
                if command.check.parts and not self.expander.number(command.check, state):
                    return True
                if not self._loop(command.body, state):
                    return True
                self.expander.number(command.step, state)
        except (NotKnown, sums.SumError):
            self.context.note(self.expander.place(command.line), "how often a loop turns cannot be decided; its body is read once")
            self._perhaps(command.body, f"the loop in line {command.line} turns", state, command.line)
            return None
        self.context.note(self.expander.place(command.line), f"a loop of more than {MAX_ITERATIONS} turns; the rest of them is not read")
        return None

    def _function(self, command: Function, state: State) -> Status:
        state.functions = {**state.functions, command.name: (command.body, self.expander.file)}
        return True

    def _test(self, command: Test, state: State) -> Status:
        return double_bracket(command, self.expander, state)

    def _calculation(self, command: Calculation, state: State) -> Status:
        try:
            return self.expander.number(command.expression, state) != 0
        except (NotKnown, sums.SumError):
            return None

    # simple commands

    def _simple(self, command: Simple, state: State) -> Status:
        arguments = [word for word in command.words if isinstance(word, Assignment) and not _braced(word)]
        words: list[Word] = []
        for word in command.words:
            plain = _braced(word) if isinstance(word, Assignment) else word
            words.extend([plain] if plain is not None else [])
        fields = self.expander.fields(words, state)
        if not command.words or not fields:
            for assignment in command.assignments:
                assign(self, assignment, state)
            self._redirections(command.redirections, state, None)
            return None if any(_captures(assignment) for assignment in command.assignments) else True
        prefix = {}
        for assignment in command.assignments:
            if assignment.value is not None:
                prefix[assignment.name] = self.expander.text(assignment.value, state)
        reads = any(redirection.operator.startswith("<") for redirection in command.redirections)
        given = self.input
        self.input = self._redirections(command.redirections, state, given)
        written = self._file_written(command.redirections, state)
        output = self.output
        if written is not None:
            self.output = []
        try:
            return self.command(fields, arguments, prefix, state, self.expander.place(command.line))
        finally:
            if written is not None:
                printing.write(state, written[0], written[1], _joined(self.output or []))
                self.output = output
            if reads:
                self.input = given

    def _redirections(self, redirections: tuple[Redirection, ...], state: State, given: Text | None) -> Text | None:
        """What the command reads, where that stands in the script."""
        for redirection in redirections:
            given = self._redirect(redirection, state) if redirection.operator.startswith("<") else given
        return given

    def _redirect(self, redirection: Redirection, state: State) -> Text | None:
        if redirection.operator in ("<<", "<<-"):
            return self.expander.text(redirection.target, state)
        if redirection.operator == "<<<":
            return (*self.expander.text(redirection.target, state), Known("\n", self.expander.place(redirection.line)))
        return None

    def _file_written(self, redirections: tuple[Redirection, ...], state: State) -> tuple[str, bool] | None:
        """The file that the output goes to and whether it is appended; None: none that is known."""
        for redirection in redirections:
            if redirection.operator in (">", ">>", ">|") and redirection.descriptor in ("", "1"):
                path = known(self.expander.text(redirection.target, state))
                if path and path != "/dev/null":
                    return path, redirection.operator == ">>"
        return None

    def command(self, fields: list[Text], arguments: list[Assignment], prefix: dict[str, Text], state: State, at: Place) -> Status:
        """A command with its words expanded: a function, a part of the shell, or one that is started."""
        name = known(fields[0])
        if name is None:
            unknown = unknown_of(fields[0])
            if unknown is not None and unknown.absent and len(fields[0]) == 1 and len(fields) > 1:
                self.context.note(at, f"{unknown.source} {unknown.why}; what stands behind it is taken as the command")
                return self.command(fields[1:], arguments, prefix, state, at)
            return self._external(fields, prefix, state, at)
        if name in state.functions:
            return self._call(name, fields[1:], prefix, state)
        if name in builtins.TABLE:
            return self._with_prefix(prefix, state, lambda: builtins.TABLE[name](Call(self, state, fields, arguments, at)))
        return self._external(fields, prefix, state, at)

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

    def _call(self, name: str, arguments: list[Text], prefix: dict[str, Text], state: State) -> Status:
        body, file = state.functions[name]
        positional, before = state.positional, self.expander.file
        state.scopes.append({key: Variable(value, exported=True) for key, value in prefix.items()})
        depth = len(state.scopes)
        state.positional = _arguments(arguments)
        self.expander.file = file
        try:
            return self.run(body, state)  # type: ignore[arg-type]
        except Return as leave:
            return leave.status
        finally:
            del state.scopes[depth - 1 :]
            state.positional = positional
            self.expander.file = before

    def _external(self, fields: list[Text], prefix: dict[str, Text], state: State, at: Place) -> Status:
        """A command that the shell would start: written down, or a script that is walked in a shell of its own."""
        if self._filter(fields, at):
            return True
        inner = unwrap(fields, {**state.exported(), **prefix})
        if inner.kind != "command" and self._inner_shell(inner, fields, state, at):
            return True
        condition = "; ".join(self.context.conditions)
        captured = self.context.capturing > 0
        self.context.start(Started(tuple(fields), inner.env, at, condition, state.directory, state.written, captured, tuple(self._outer)))
        self.unknown_output(shown(fields[0]), at)
        return builtins.external_status(fields)

    def _filter(self, fields: list[Text], at: Place) -> bool:
        """A filter in a pipe whose input is known; False: it is none."""
        given = known(self.input) if self.input is not None and self.output is not None else None
        words = [known(field) for field in fields]
        output = filtered([word or "" for word in words], given) if given is not None and None not in words else None
        if output is None:
            return False
        self.context.spend(len(output))
        self.emit((Known(output, at),))
        return True

    def _inner_shell(self, inner: Unwrapped, fields: list[Text], state: State, at: Place) -> bool:
        """Walk the script or text that a command gives to a shell; False where that is not at hand."""
        name = known(inner.argv[0]) if inner.argv else None
        arguments = _arguments(list(inner.argv[1:]))
        self._outer.append(tuple(fields))
        try:
            if inner.kind == "text":
                if name is None:
                    self.context.note(at, f"a command line that is not known ({short(shown(inner.argv[0]))}) is not read")
                    return True
                self.child(name, at.file, state, "bash", arguments and arguments[1:], inner.env, at.line)
                return True
            if inner.kind == "input":
                text = known(self.input) if self.input is not None else None
                if text is not None:
                    self.child(text, at.file, state, "bash", arguments, inner.env, at.line)
                return text is not None
            found = self.find(name, state, at) if name is not None else None
            if found is None or name is None:
                return False
            self.child(found[0], found[1], state, name, arguments, inner.env)
            return True
        finally:
            self._outer.pop()

    def emit(self, text: Text) -> None:
        """Output of a command that the reader knows."""
        if self.output is not None:
            self.output.append(text)

    def unknown_output(self, source: str, at: Place) -> None:
        if self.output is not None:
            self.output.append((Unknown(short(source), "is the output of a command", at),))

    def _captured(self, part: Substitution, state: State) -> Text:
        """``$(...)``: known where all that writes is the shell itself."""
        at = self.expander.place(part.line)
        unknown: Text = (Unknown(short(part.source), "is the output of a command, which is not run", at),)
        output, given = self.output, self.input
        self.output, self.input = [], None
        self.context.capturing += 1
        try:
            self._aside(part.body, state)
            text = _joined(self.output)
        finally:
            self.context.capturing -= 1
            self.output, self.input = output, given
        value = known(text)
        if value is None:
            return unknown
        return (Known(value.rstrip("\n"), at),)


def _joined(output: list[Text]) -> Text:
    return tuple(piece for text in output for piece in text)


def _arguments(fields: list[Text]) -> tuple[Text, ...] | None:
    """Arguments of a function or script; None where their number is not known."""
    if any(isinstance(piece, Unknown) and piece.many and not piece.absent for text in fields for piece in text):
        return None
    return tuple(text for text in fields if not all(isinstance(piece, Unknown) and piece.many for piece in text))


def _source(word: Word) -> str:
    """A word about as it stands in the script."""
    return "".join(part.text if isinstance(part, Literal) else part.source for part in word.parts)


def _braced(argument: Assignment) -> Word | None:
    """An argument of ``export`` that braces make several words of; these are ordinary ones and no assignments any more."""
    if argument.value is None or argument.index is not None or len(braces.expanded(argument.value)) < 2:
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
        text: the script.
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
        what = str(error) if isinstance(error, Exhausted) else "nested too deep"
        context.note(Place(file, 0), f"reading ends early: {what}")
    return state
