"""The two ways of what cannot be decided: each is gone in a copy of the state, and what differs behind them is not known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from msprobe_engine.config.launch_scripts.shell.context import Context, short
from msprobe_engine.config.launch_scripts.shell.control_exceptions import Break, Exit, Leave, Return
from msprobe_engine.config.launch_scripts.shell.expansion.expand import Expander
from msprobe_engine.config.launch_scripts.shell.values import Place, State, Status, Text, Unknown, either_text, merge

Way = tuple[str, Callable[[State], Status] | None]


@dataclass(frozen=True, slots=True)
class Left:
    """A way that leaves a function, a loop or the script where it is not decided whether it does.

    Attributes:
        state: as it is there.
        why: what it depends on, a phrase.
        at: the place of that.
    """

    leave: Leave
    state: State
    why: str
    at: Place


class Ways:
    """Goes several ways.

    Attributes:
        output: what is printed where that is read (``$(...)``, a pipe, a file); None: it is not.
    """

    def __init__(self, context: Context, expander: Expander) -> None:
        self.context = context
        self.expander = expander
        self.output: list[Text] | None = None
        self._left: dict[tuple[type[Leave], int, bool], Left] = {}

    def either(self, state: State, ways: list[Way], line: int) -> list[Status]:
        """Go several ways, each from the state as it is, and put the state together again.

        A way that ends the script does not count, unless all do; one that leaves a function or loop counts again where that ends
        (`joining`). What the ways print is one text that is not known, unless they print the same and all go on.

        Args:
            ways: what has to hold for a way to be gone, and the way; None: nothing happens.
        """
        at = self.expander.place(line)
        ends: list[State] = []
        statuses: list[Status] = []
        left: list[Left] = []
        why = f"depends on whether {ways[0][0]}"
        outer, printed = self.output, list[Text]()
        for phrase, way in ways:
            branch = state.copy()
            self.output = None if outer is None else []
            self.context.conditions.append(phrase)
            try:
                statuses.append(way(branch) if way is not None else None)
                ends.append(branch)
            except Leave as leave:
                left.append(Left(leave, branch, why, at))
                if isinstance(leave, (Return, Break)):
                    said = "a function or loop may be left there; the commands behind it are read as if it were not"
                    self.context.add_note(at, f"whether {phrase} cannot be decided; {said}")
            finally:
                self.context.conditions.pop()
                printed.append(join_output(self.output or []))
                self.output = outer
        self.emit(either_text("$(...)", printed, why, at))
        if left and ends:
            self.emit((Unknown("$(...)", why, at),))  # what is printed behind is so on some of the ways only
        left.sort(key=lambda one: (isinstance(one.leave, Exit), isinstance(one.leave, Return)))
        for one in left if ends else left[1:]:
            self.keep(one)
        if not ends:
            state.become(left[0].state)
            raise left[0].leave
        result = ends[0]
        for other in ends[1:]:
            result = merge(result, other, why, at)
            self.context.spend(len(result.scopes[0]))
        state.become(result)
        return statuses

    def keep(self, way: Left) -> None:
        """A way that leaves something, until that ends; ways that leave the same are one."""
        leave = way.leave
        kind = (type(leave), leave.levels, leave.goes_on) if isinstance(leave, Break) else (type(leave), 0, False)
        before = self._left.get(kind)
        self.context.spend(len(way.state.scopes[0]))
        self._left[kind] = way if before is None else replace(way, state=merge(before.state, way.state, way.why, way.at))

    @contextlib.contextmanager
    def joining(self, state: State, ends: type[Leave], turn: bool = False) -> Iterator[list[Left]]:
        """What ways that left here have set is put together with the state behind.

        Args:
            state: that behind.
            ends: what ends here.
            turn: it is one turn of a loop, which ``continue`` ends.

        Returns:
            The ways, there when all is done.
        """
        joined: list[Left] = []
        outer, self._left = self._left, {}
        try:
            yield joined
        finally:
            left, self._left = self._left, outer
            for way in left.values():
                leave = way.leave
                if isinstance(leave, ends) and (not turn or (isinstance(leave, Break) and leave.levels == 1 and leave.goes_on)):
                    joined.append(way)
                    state.become(merge(state, way.state, way.why, way.at))
                    state.status = None
                else:
                    self.keep(way)

    def emit(self, text: Text) -> None:
        """Output of a command that the reader knows."""
        if self.output is not None:
            self.output.append(text)

    def unknown_output(self, source: str, at: Place) -> None:
        self.emit((Unknown(short(source), "is the output of a command", at),))


def join_output(output: list[Text]) -> Text:
    return tuple(piece for text in output for piece in text)
