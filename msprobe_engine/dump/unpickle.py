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

_MAX_INTEGER = 1024
"""Bytes of an integer; the state of no random generator has one that large."""
_MAX_KEY = 1000
"""Nodes of a tuple that is a key: nested tuples that share parts would take for ever to hash."""
_PLAIN_KEYS = frozenset({str, int, float, bool, bytes, complex, type(None)})


class Wrong(Exception):
    """What is wrong with a pickle; the message has no subject, for the caller puts the file before it."""


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
        data, table = self.data, _TABLE
        while True:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.stack.pop()
            step = table[code]
            if step is None:
                raise Wrong(f"has a pickle with the instruction 0x{code:02x} at byte {self.at - 1}, which no checkpoint has; it is damaged")
            step(self)

    def take(self, count: int) -> bytes:
        begin = self.at
        if count < 0 or begin + count > len(self.data):
            raise Wrong("has a pickle that is cut off")
        self.at = begin + count
        return self.data[begin : begin + count]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at)
        begin, self.at = self.at, end + 1
        return self.data[begin:end]

    def above_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items


_TABLE: list[Callable[[_Machine], None] | None] = [None] * 256


def _on(*codes: bytes) -> Callable[[Callable[[_Machine], None]], Callable[[_Machine], None]]:
    def note(step: Callable[[_Machine], None]) -> Callable[[_Machine], None]:
        for code in codes:
            _TABLE[code[0]] = step
        return step

    return note


def _constants() -> None:
    def pushes(make: Callable[[], Any]) -> Callable[[_Machine], None]:
        return lambda m: m.stack.append(make())

    _TABLE[ord("N")] = lambda m: m.stack.append(None)
    _TABLE[0x88] = lambda m: m.stack.append(True)
    _TABLE[0x89] = lambda m: m.stack.append(False)
    _TABLE[ord(")")] = lambda m: m.stack.append(())
    for code, make in ((b"}", dict), (b"]", list), (b"\x8f", set)):
        _TABLE[code[0]] = pushes(make)


_constants()


@_on(b"\x80")  # PROTO
def _protocol(m: _Machine) -> None:
    if (found := m.number(1)) > 5:
        raise Wrong(f"has a pickle of protocol {found}; protocols up to 5 are known")


@_on(b"\x95")  # FRAME: how much a reader should buffer
def _frame(m: _Machine) -> None:
    m.number(8)


@_on(b"(")
def _mark(m: _Machine) -> None:
    m.outer.append(m.stack)
    m.stack = []


@_on(b"0")
def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.above_mark()


@_on(b"1")
def _pop_mark(m: _Machine) -> None:
    m.above_mark()


@_on(b"2")
def _duplicate(m: _Machine) -> None:
    m.stack.append(m.stack[-1])


# Memo


@_on(b"\x94")
def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


@_on(b"q")
def _binput(m: _Machine) -> None:
    m.memo[m.number(1)] = m.stack[-1]


@_on(b"r")
def _long_binput(m: _Machine) -> None:
    m.memo[m.number(4)] = m.stack[-1]


@_on(b"p")
def _put(m: _Machine) -> None:
    m.memo[int(m.line())] = m.stack[-1]


@_on(b"h")
def _binget(m: _Machine) -> None:
    m.stack.append(m.memo[m.number(1)])


@_on(b"j")
def _long_binget(m: _Machine) -> None:
    m.stack.append(m.memo[m.number(4)])


@_on(b"g")
def _get(m: _Machine) -> None:
    m.stack.append(m.memo[int(m.line())])


# Numbers


@_on(b"K")
def _binint1(m: _Machine) -> None:
    m.stack.append(m.number(1))


@_on(b"M")
def _binint2(m: _Machine) -> None:
    m.stack.append(m.number(2))


@_on(b"J")
def _binint(m: _Machine) -> None:
    m.stack.append(int.from_bytes(m.take(4), "little", signed=True))


@_on(b"\x8a")
def _long1(m: _Machine) -> None:
    m.stack.append(int.from_bytes(m.take(m.number(1)), "little", signed=True))


@_on(b"\x8b")
def _long4(m: _Machine) -> None:
    if (width := m.number(4)) > _MAX_INTEGER:
        raise Wrong(f"has an integer of {width} bytes")
    m.stack.append(int.from_bytes(m.take(width), "little", signed=True))


@_on(b"I")
def _int(m: _Machine) -> None:
    text = m.line()
    m.stack.append(text == b"01" if text in (b"00", b"01") else int(text))


@_on(b"L")
def _long(m: _Machine) -> None:
    m.stack.append(int(m.line().rstrip(b"L")))


@_on(b"G")
def _binfloat(m: _Machine) -> None:
    m.stack.append(struct.unpack(">d", m.take(8))[0])


@_on(b"F")
def _float(m: _Machine) -> None:
    m.stack.append(float(m.line()))


# Text and bytes


def _sized(width: int, made: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(made(m.take(m.number(width))))


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _old_text(data: bytes) -> str:
    """Text of Python 2, whose bytes and text were one."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


for _code, _width, _made in (
    (0x8C, 1, _text),
    (ord("X"), 4, _text),
    (0x8D, 8, _text),
    (ord("C"), 1, bytes),
    (ord("B"), 4, bytes),
    (0x8E, 8, bytes),
    (0x96, 8, bytearray),
    (ord("U"), 1, _old_text),
    (ord("T"), 4, _old_text),
):
    _TABLE[_code] = _sized(_width, _made)


@_on(b"V")
def _unicode(m: _Machine) -> None:
    m.stack.append(str(m.line(), "raw-unicode-escape"))


@_on(b"S")
def _string(m: _Machine) -> None:
    text = m.line().strip()
    if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
        raise Wrong("has a pickle with text that has no end; it is damaged")
    m.stack.append(_old_text(codecs.escape_decode(text[1:-1])[0]))


# Containers


@_on(b"t")
def _tuple(m: _Machine) -> None:
    items = m.above_mark()
    m.stack.append(tuple(items))


@_on(b"\x85", b"\x86", b"\x87")
def _tuple_of_few(m: _Machine) -> None:
    count = m.data[m.at - 1] - 0x84
    if len(m.stack) < count:
        raise Wrong("has a pickle that is damaged")
    m.stack[-count:] = [tuple(m.stack[-count:])]


@_on(b"l")
def _list(m: _Machine) -> None:
    items = m.above_mark()
    m.stack.append(items)


@_on(b"d")
def _dict(m: _Machine) -> None:
    items = m.above_mark()
    m.stack.append({})
    _set_all(m, items)


@_on(b"\x91")
def _frozenset(m: _Machine) -> None:
    items = m.above_mark()
    m.stack.append(frozenset(checked_key(item) for item in items))


@_on(b"\x90")
def _add_items(m: _Machine) -> None:
    items = m.above_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise Wrong("has a pickle that is damaged")
    target.update(checked_key(item) for item in items)


def _append_all(m: _Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is list:
        target.extend(items)
    else:
        m.hooks.extended(target, items)


@_on(b"a")
def _append(m: _Machine) -> None:
    _append_all(m, [m.stack.pop()])


@_on(b"e")
def _appends(m: _Machine) -> None:
    _append_all(m, m.above_mark())


def _set_all(m: _Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if len(items) % 2:
        raise Wrong("has a pickle that is damaged: a key without a value")
    pairs = zip(items[::2], items[1::2])
    if type(target) is dict:
        for key, value in pairs:
            target[checked_key(key)] = value
    else:
        m.hooks.updated(target, [(checked_key(key), value) for key, value in pairs])


@_on(b"s")
def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_all(m, [key, value])


@_on(b"u")
def _setitems(m: _Machine) -> None:
    _set_all(m, m.above_mark())


# Names, calls and states


@_on(b"c")
def _global(m: _Machine) -> None:
    module, name = m.line(), m.line()
    m.stack.append(m.hooks.named(_text(module), _text(name)))


@_on(b"\x93")
def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise Wrong("has a pickle with a name that is no text; it is damaged")
    m.stack.append(m.hooks.named(module, name))


def _call(m: _Machine, function: Any, arguments: Any, keywords: Any) -> None:
    if type(arguments) is not tuple or type(keywords) is not dict:
        raise Wrong("has a pickle with a call without arguments; it is damaged")
    m.stack.append(m.hooks.called(function, arguments, keywords))


@_on(b"R", b"\x81")  # REDUCE, NEWOBJ
def _reduce(m: _Machine) -> None:
    arguments, function = m.stack.pop(), m.stack.pop()
    _call(m, function, arguments, {})


@_on(b"\x92")
def _newobj_ex(m: _Machine) -> None:
    keywords, arguments, function = m.stack.pop(), m.stack.pop(), m.stack.pop()
    _call(m, function, arguments, keywords)


@_on(b"i")
def _inst(m: _Machine) -> None:
    function = m.hooks.named(_text(m.line()), _text(m.line()))
    arguments = m.above_mark()
    _call(m, function, tuple(arguments), {})


@_on(b"o")
def _obj(m: _Machine) -> None:
    items = m.above_mark()
    _call(m, items[0], tuple(items[1:]), {})


@_on(b"Q")
def _binpersid(m: _Machine) -> None:
    m.stack.append(m.hooks.persistent(m.stack.pop()))


@_on(b"P")
def _persid(m: _Machine) -> None:
    m.stack.append(m.hooks.persistent(_text(m.line())))


@_on(b"b")
def _build(m: _Machine) -> None:
    state = m.stack.pop()
    value = m.stack[-1]
    found = m.hooks.built(value, state)
    if found is value:
        return
    m.stack[-1] = found
    for _, key in zip(range(4096), reversed(m.memo)):  # it was put there a few instructions ago, before its state
        if m.memo[key] is value:
            m.memo[key] = found
            break


@_on(b"\x82", b"\x83", b"\x84")
def _extension(_: _Machine) -> None:
    raise Wrong("has a pickle that names an object by number (an extension of one program); it is not executed. Do not trust it")


@_on(b"\x97", b"\x98")
def _buffer(_: _Machine) -> None:
    raise Wrong("has a pickle whose data lie elsewhere (out-of-band buffers), which are not in the file")
