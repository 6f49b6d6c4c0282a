"""Reads pickles without importing or calling anything they name.

A pickle is a program for a small stack machine (CPython ``Lib/pickletools.py`` describes its instructions; protocols 0 to 5). Here the
machine builds lists, dicts, tuples, text and numbers itself and hands everything else, names, calls, states, to `Hooks`, which make inert
descriptions of them. Nothing in a pickle can do more than take memory in proportion to its own size.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any, Protocol

from msprobe_engine.core.errors import DumpFormatError

_MAX_INTEGER = 1024
"""Bytes of an integer; the state of no random generator has one that large."""
_MAX_KEY = 1000
"""Nodes of a tuple that is a key: nested tuples that share parts would take for ever to hash."""
_PLAIN_KEYS = frozenset({str, int, float, bool, bytes, complex, type(None)})


class Wrong(Exception):
    """What is wrong with a pickle; the message has no subject, for the caller puts the file before it.

    Attributes:
        named: what it becomes then.
    """

    named: type[DumpFormatError] = DumpFormatError


class Hooks(Protocol):
    """What is done with the instructions that would run something. All may raise `Wrong`."""

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


def load(data: bytes, hooks: Hooks, start: int = 0) -> tuple[Any, int]:
    """The value of the pickle that begins at byte `start`, and the byte behind it.

    Raises:
        Wrong: it is damaged, cut off, or `hooks` refuse something in it.
    """
    machine = _Machine(data, hooks, start)
    try:
        return machine.run(), machine.at
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
        raise Wrong(f"has a pickle that is cut off or damaged at byte {machine.at} ({type(error).__name__})") from None


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


class _Machine:
    """The stack, its marks, the memo, and the place in the data."""

    def __init__(self, data: bytes, hooks: Hooks, start: int) -> None:
        self.data = data
        self.at = start
        self.hooks = hooks
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """What nearly all instructions of a large checkpoint are is done here, without a call for each."""
        data, table, memo, outer = self.data, _TABLE, self.memo, self.outer
        called, built = self.hooks.called, self.hooks.built
        at, stack = self.at, self.stack
        try:
            while True:
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
                elif code == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif code == 0x28:  # MARK
                    outer.append(stack)
                    stack = []
                elif code == 0x4B:  # BININT1
                    stack.append(data[at])
                    at += 1
                elif code == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                elif code in (0x81, 0x52):  # NEWOBJ, REDUCE
                    arguments = stack.pop()
                    if type(arguments) is not tuple:
                        raise Wrong(_NO_ARGUMENTS)
                    stack[-1] = called(stack[-1], arguments, {})
                elif code == 0x62:  # BUILD
                    state, value = stack.pop(), stack[-1]
                    if (found := built(value, state)) is not value:
                        stack[-1] = found
                        _replace(memo, value, found)
                elif code == 0x75:  # SETITEMS
                    items, stack = stack, outer.pop()
                    _set_all(self.hooks, stack[-1], items)
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

    def take(self, count: int) -> bytes:
        begin = self.at
        if count < 0 or begin + count > len(self.data):
            raise Wrong(_BROKEN)
        self.at = begin + count
        return self.data[begin : begin + count]

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def number(self, width: int) -> int:
        begin, self.at = self.at, self.at + width
        part = self.data[begin : self.at]
        if len(part) < width:
            raise Wrong(_BROKEN)
        return int.from_bytes(part, "little")

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at)
        begin, self.at = self.at, end + 1
        return self.data[begin:end]

    def above_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items


_Step = Callable[[_Machine], None]
_BROKEN = "has a pickle that is cut off or damaged"
_NO_ARGUMENTS = f"{_BROKEN}: a call has no arguments"
_UNSIGNED = struct.Struct("<I").unpack_from


def _push(value: Callable[[_Machine], Any]) -> _Step:
    return lambda m: m.stack.append(value(m))


def _put(key: Callable[[_Machine], int]) -> _Step:
    def step(m: _Machine) -> None:
        m.memo[key(m)] = m.stack[-1]

    return step


def _get(key: Callable[[_Machine], int]) -> _Step:
    return lambda m: m.stack.append(m.memo[key(m)])


def _sized(width: int, made: Callable[[bytes], Any]) -> _Step:
    return lambda m: m.stack.append(made(m.take(m.number(width))))


def _protocol(m: _Machine) -> None:
    if (found := m.byte()) > 5:
        raise Wrong(f"has a pickle of protocol {found}; protocols up to 5 are known")


def _frame(m: _Machine) -> None:
    m.number(8)  # how much a reader should buffer


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.above_mark()


# Numbers and text


def _integer(m: _Machine, width: int) -> int:
    if width > _MAX_INTEGER:
        raise Wrong(f"has an integer of {width} bytes")
    return int.from_bytes(m.take(width), "little", signed=True)


def _written_integer(m: _Machine) -> Any:
    text = m.line()
    return text == b"01" if text in (b"00", b"01") else int(text)  # 00 and 01 are False and True in protocols 0 and 1


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _old_text(data: bytes) -> str:
    """Text of Python 2, whose bytes and text were one."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _quoted(m: _Machine) -> str:
    text = m.line().strip()
    if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
        raise Wrong(f"{_BROKEN}: a text has no end")
    return _old_text(codecs.escape_decode(text[1:-1])[0])


# Containers


def _tuple(m: _Machine) -> None:
    items = m.above_mark()
    m.stack.append(tuple(items))


def _tuple_of(count: int) -> _Step:
    def step(m: _Machine) -> None:
        if len(m.stack) < count:
            raise Wrong(_BROKEN)
        m.stack[-count:] = (tuple(m.stack[-count:]),)

    return step


def _list(m: _Machine) -> None:
    items = m.above_mark()
    m.stack.append(items)


def _dict(m: _Machine) -> None:
    items = m.above_mark()
    m.stack.append({})
    _set_all(m.hooks, m.stack[-1], items)


def _frozenset(m: _Machine) -> None:
    items = m.above_mark()
    m.stack.append(frozenset(checked_key(item) for item in items))


def _add_items(m: _Machine) -> None:
    items = m.above_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise Wrong(_BROKEN)
    target.update(checked_key(item) for item in items)


def _append_all(m: _Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is list:
        target.extend(items)
    else:
        m.hooks.extended(target, items)


def _set_all(hooks: Hooks, target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise Wrong(f"{_BROKEN}: a key has no value")
    pairs = zip(items[::2], items[1::2])
    if type(target) is dict:
        for key, value in pairs:
            target[key if type(key) is str else checked_key(key)] = value
    else:
        hooks.updated(target, [(checked_key(key), value) for key, value in pairs])


def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_all(m.hooks, m.stack[-1], [key, value])


# Names, calls and states


def _global(m: _Machine) -> None:
    module, name = m.line(), m.line()
    m.stack.append(m.hooks.named(_text(module), _text(name)))


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise Wrong(f"{_BROKEN}: a name is no text")
    m.stack.append(m.hooks.named(module, name))


def _call(m: _Machine, function: Any, arguments: Any, keywords: Any) -> None:
    if type(arguments) is not tuple or type(keywords) is not dict:
        raise Wrong(_NO_ARGUMENTS)
    m.stack.append(m.hooks.called(function, arguments, keywords))


def _newobj_ex(m: _Machine) -> None:
    keywords, arguments, function = m.stack.pop(), m.stack.pop(), m.stack.pop()
    _call(m, function, arguments, keywords)


def _inst(m: _Machine) -> None:
    function = m.hooks.named(_text(m.line()), _text(m.line()))
    arguments = m.above_mark()
    _call(m, function, tuple(arguments), {})


def _obj(m: _Machine) -> None:
    items = m.above_mark()
    _call(m, items[0], tuple(items[1:]), {})


def _replace(memo: dict[int, Any], value: Any, found: Any) -> None:
    """What was made of `value` by its state stands for it from now on; it was put into the memo a few instructions ago."""
    for _, key in zip(range(4096), reversed(memo)):
        if memo[key] is value:
            memo[key] = found
            break


def _extension(_: _Machine) -> None:
    raise Wrong("has a pickle that names an object by number (an extension of one program); it is not executed. Do not trust it")


def _buffer(_: _Machine) -> None:
    raise Wrong("has a pickle whose data lie elsewhere (out-of-band buffers), which are not in the file")


_STEPS: dict[int, _Step] = {
    0x80: _protocol,  # what is not here stands in `_Machine.run`
    0x95: _frame,
    ord("0"): _pop,
    ord("1"): lambda m: m.above_mark().clear(),
    ord("2"): _push(lambda m: m.stack[-1]),
    ord("p"): _put(lambda m: int(m.line())),
    ord("g"): _get(lambda m: int(m.line())),
    ord("N"): _push(lambda _: None),
    0x88: _push(lambda _: True),
    0x89: _push(lambda _: False),
    ord("M"): _push(lambda m: m.number(2)),
    ord("J"): _push(lambda m: _integer(m, 4)),
    0x8A: _push(lambda m: _integer(m, m.byte())),
    0x8B: _push(lambda m: _integer(m, m.number(4))),
    ord("I"): _push(_written_integer),
    ord("L"): _push(lambda m: int(m.line().rstrip(b"L"))),
    ord("G"): _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    ord("F"): _push(lambda m: float(m.line())),
    0x8C: _sized(1, _text),
    ord("X"): _sized(4, _text),
    0x8D: _sized(8, _text),
    ord("C"): _sized(1, bytes),
    ord("B"): _sized(4, bytes),
    0x8E: _sized(8, bytes),
    0x96: _sized(8, bytearray),
    ord("U"): _sized(1, _old_text),
    ord("T"): _sized(4, _old_text),
    ord("V"): _push(lambda m: str(m.line(), "raw-unicode-escape")),
    ord("S"): _push(_quoted),
    ord("t"): _tuple,
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("]"): _push(lambda _: []),
    ord("l"): _list,
    ord("a"): lambda m: _append_all(m, [m.stack.pop()]),
    ord("e"): lambda m: _append_all(m, m.above_mark()),
    ord("d"): _dict,
    ord("s"): _setitem,
    0x8F: _push(lambda _: set()),
    0x91: _frozenset,
    0x90: _add_items,
    ord("c"): _global,
    0x93: _stack_global,
    0x92: _newobj_ex,
    ord("i"): _inst,
    ord("o"): _obj,
    ord("Q"): _push(lambda m: m.hooks.persistent(m.stack.pop())),
    ord("P"): _push(lambda m: m.hooks.persistent(_text(m.line()))),
    0x82: _extension,
    0x83: _extension,
    0x84: _extension,
    0x97: _buffer,
    0x98: _buffer,
}
_TABLE = [_STEPS.get(code) for code in range(256)]
