"""The stack machine that a pickle is a program for; its rarer instructions are in `unpickle`."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from msprobe_engine.core.errors import DumpFormatError

_MAX_KEY = 1000
"""Nodes of a tuple that is a key: nested tuples that share parts would take for ever to hash."""
_PLAIN_KEYS = frozenset({str, int, float, bool, bytes, complex, type(None)})
_UNSIGNED = struct.Struct("<I").unpack_from
BROKEN = "has a pickle that is cut off or damaged"
NO_ARGUMENTS = f"{BROKEN}: a call has no arguments"


class Wrong(Exception):
    """What is wrong with a pickle; the message has no subject, for the caller puts the file before it.

    Attributes:
        named: what it becomes then.
    """

    named: type[DumpFormatError] = DumpFormatError


class Hooks(Protocol):
    """What is done with the instructions that would run something. All may raise `Wrong`.

    Attributes:
        name, inert: classes of what stands for names, and for objects whose state is set as their attribute ``state``.
        made: calls that need no `called`, by what stands for their name. A text: ``inert(text, arguments)``; None: of one tuple, which it
            is.
    """

    name: ClassVar[type]
    inert: ClassVar[type]
    made: dict[Any, str | None]

    def named(self, module: str, name: str) -> Any:
        """What stands for a name."""

    def called(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What stands for the result of a call, or for a new object of a class."""

    def persistent(self, identity: Any) -> Any:
        """What stands for an object that the pickle names but does not hold."""

    def built(self, value: Any, state: Any) -> Any:
        """What stands for `value` when `state` was set on it; mostly `value` itself."""

    def extended(self, value: Any, elements: list[Any]) -> None:
        """`elements` are appended to something that is no list."""

    def updated(self, value: Any, pairs: list[tuple[Any, Any]]) -> None:
        """Items are set on something that is no dict."""


def checked_key(value: Any) -> Any:
    """`value`, when it can be the key of a dict without harm.

    Raises:
        Wrong: it is a tuple of very many nested parts.
        TypeError: it cannot be hashed.
    """
    if type(value) is tuple:
        waiting, seen = [value], 0
        while waiting:
            part = waiting.pop()
            seen += 1
            if type(part) is tuple:
                if seen + len(waiting) + len(part) > _MAX_KEY:
                    raise Wrong("has a key of very many nested parts; it was made to take for ever")
                waiting.extend(part)
    elif type(value) not in _PLAIN_KEYS:
        hash(value)
    return value


Advance = Callable[["Machine", bytes, int, list[Any], Hooks], tuple[int, list[Any]]]


@lru_cache(maxsize=1)
def load_native() -> Advance | None:
    """The C implementation of the usual instructions, None when it was not built."""
    try:
        found: Advance = importlib.import_module("msprobe_engine.native._pickletree").advance
    except ImportError:
        return None
    return found


class Machine:
    """The stack, its marks, the memo, and the place in the data."""

    def __init__(self, data: bytes, hooks: Hooks, start: int, table: Sequence[Step | None]) -> None:
        self.data = data
        self.at = start
        self.hooks = hooks
        self._table = table
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """What nearly all instructions of a large checkpoint are is done here, without a call for each, or in C where that was built. What
        is damaged comes to an end here in any case: C goes no further than to the instruction in front of it."""
        advance = load_native() if type(self.data) is bytes else None
        data, table, memo, outer = self.data, self._table, self.memo, self.outer
        called, built = self.hooks.called, self.hooks.built
        at, stack = self.at, self.stack
        try:
            while True:
                if advance is not None:
                    at, stack = advance(self, data, at, stack, self.hooks)
                code = data[at]
                at += 1
                if code == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                elif code == 0x68:  # BINGET
                    stack.append(memo[data[at]])
                    at += 1
                elif code == 0x6A:  # LONG_BINGET
                    stack.append(memo[_UNSIGNED(data, at)[0]])
                    at += 4
                elif code == 0x4B:  # BININT1
                    stack.append(data[at])
                    at += 1
                elif code == 0x86:  # TUPLE2
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                elif code == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif code in (0x81, 0x52):  # NEWOBJ, REDUCE
                    arguments = stack.pop()
                    if type(arguments) is not tuple:
                        raise Wrong(NO_ARGUMENTS)
                    stack[-1] = called(stack[-1], arguments, {})
                elif code == 0x4D:  # BININT2
                    stack.append(data[at] + 256 * data[at + 1])
                    at += 2
                elif code == 0x28:  # MARK
                    outer.append(stack)
                    stack = []
                elif code == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                elif code == 0x62:  # BUILD
                    state, value = stack.pop(), stack[-1]
                    if (found := built(value, state)) is not value:
                        stack[-1] = found
                        self.replace(value, found)
                elif code == 0x75:  # SETITEMS
                    items, stack = stack, outer.pop()
                    self.set_items(stack[-1], items)
                elif code == 0x7D:  # EMPTY_DICT
                    stack.append({})
                elif code == 0x71:  # BINPUT
                    memo[data[at]] = stack[-1]
                    at += 1
                elif code == 0x72:  # LONG_BINPUT
                    memo[_UNSIGNED(data, at)[0]] = stack[-1]
                    at += 4
                elif code == 0x2E:  # STOP
                    return stack.pop()
                else:
                    step = table[code]
                    if step is None:
                        raise Wrong(
                            f"has a pickle with the instruction 0x{code:02x} at byte {at - 1}, which no checkpoint has; it is damaged"
                        )
                    self.at, self.stack = at, stack
                    step(self)
                    at, stack = self.at, self.stack
        finally:
            self.at, self.stack = max(at, self.at), stack

    def set_items(self, target: Any, items: list[Any]) -> None:
        set_all(self.hooks, target, items)

    def replace(self, value: Any, found: Any) -> None:
        """What was made of `value` by its state stands for it from now on; it was put into the memo a few instructions ago."""
        for _, key in zip(range(4096), reversed(self.memo)):
            if self.memo[key] is value:
                self.memo[key] = found
                break

    def take_bytes(self, count: int) -> bytes:
        begin = self.at
        if count < 0 or begin + count > len(self.data):
            raise Wrong(BROKEN)
        self.at = begin + count
        return self.data[begin : begin + count]

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def number(self, width: int) -> int:
        begin, self.at = self.at, self.at + width
        part = self.data[begin : self.at]
        if len(part) < width:
            raise Wrong(BROKEN)
        return int.from_bytes(part, "little")

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at)
        begin, self.at = self.at, end + 1
        return self.data[begin:end]

    def above_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items


Step = Callable[[Machine], None]


def set_all(hooks: Hooks, target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise Wrong(f"{BROKEN}: a key has no value")
    pairs = zip(items[::2], items[1::2])
    if type(target) is dict:
        for key, value in pairs:
            target[key if type(key) is str else checked_key(key)] = value
    else:
        hooks.updated(target, [(checked_key(key), value) for key, value in pairs])
