"""Reads pickles without importing or calling anything they name.

A pickle is a program for a small stack machine (CPython ``Lib/pickletools.py`` describes its instructions; protocols 0 to 5). Here the
machine builds lists, dicts, tuples, text and numbers itself and hands everything else, names, calls, states, to `Hooks`, which make inert
descriptions of them. Nothing in a pickle can do more than take memory in proportion to its own size.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any

from msprobe_engine.formats.tensors.pickle_machine import BROKEN, NO_ARGUMENTS, Hooks, Machine, Step, Wrong, checked_key, set_all

_MAX_INTEGER = 1024
"""Bytes of an integer; the state of no random generator has one that large."""


def load(data: bytes, hooks: Hooks, start: int = 0) -> tuple[Any, int]:
    """The value of the pickle that begins at byte `start`, and the byte behind it.

    Raises:
        Wrong: it is damaged, cut off, or `hooks` refuse something in it.
    """
    machine = Machine(data, hooks, start, _TABLE)
    try:
        return machine.run(), machine.at
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
        raise Wrong(f"has a pickle that is cut off or damaged at byte {machine.at} ({type(error).__name__})") from None


def _push(value: Callable[[Machine], Any]) -> Step:
    return lambda m: m.stack.append(value(m))


def _put_memo(key: Callable[[Machine], int]) -> Step:
    def step(m: Machine) -> None:
        m.memo[key(m)] = m.stack[-1]

    return step


def _get_memo(key: Callable[[Machine], int]) -> Step:
    return lambda m: m.stack.append(m.memo[key(m)])


def _push_sized(width: int, made: Callable[[bytes], Any]) -> Step:
    return lambda m: m.stack.append(made(m.take_bytes(m.number(width))))


def _protocol(m: Machine) -> None:
    if (found := m.byte()) > 5:
        raise Wrong(f"has a pickle of protocol {found}; protocols up to 5 are known")


def _frame(m: Machine) -> None:
    m.number(8)  # how much a reader should buffer


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.above_mark()


# Numbers and text


def _integer(m: Machine, width: int) -> int:
    if width > _MAX_INTEGER:
        raise Wrong(f"has an integer of {width} bytes")
    return int.from_bytes(m.take_bytes(width), "little", signed=True)


def _written_integer(m: Machine) -> Any:
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


def _read_quoted(m: Machine) -> str:
    text = m.line().strip()
    if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
        raise Wrong(f"{BROKEN}: a text has no end")
    return _old_text(codecs.escape_decode(text[1:-1])[0])


# Containers


def _tuple(m: Machine) -> None:
    items = m.above_mark()
    m.stack.append(tuple(items))


def _tuple_of_three(m: Machine) -> None:
    if len(m.stack) < 3:
        raise Wrong(BROKEN)
    m.stack[-3:] = (tuple(m.stack[-3:]),)


def _list(m: Machine) -> None:
    items = m.above_mark()
    m.stack.append(items)


def _dict(m: Machine) -> None:
    items = m.above_mark()
    m.stack.append({})
    set_all(m.hooks, m.stack[-1], items)


def _frozenset(m: Machine) -> None:
    items = m.above_mark()
    m.stack.append(frozenset(checked_key(item) for item in items))


def _add_items(m: Machine) -> None:
    items = m.above_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise Wrong(BROKEN)
    target.update(checked_key(item) for item in items)


def _append_all(m: Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is list:
        target.extend(items)
    else:
        m.hooks.extended(target, items)


def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    set_all(m.hooks, m.stack[-1], [key, value])


# Names, calls and states


def _global(m: Machine) -> None:
    module, name = m.line(), m.line()
    m.stack.append(m.hooks.named(_text(module), _text(name)))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise Wrong(f"{BROKEN}: a name is no text")
    m.stack.append(m.hooks.named(module, name))


def _call(m: Machine, function: Any, arguments: Any, keywords: Any) -> None:
    if type(arguments) is not tuple or type(keywords) is not dict:
        raise Wrong(NO_ARGUMENTS)
    m.stack.append(m.hooks.called(function, arguments, keywords))


def _newobj_ex(m: Machine) -> None:
    keywords, arguments, function = m.stack.pop(), m.stack.pop(), m.stack.pop()
    _call(m, function, arguments, keywords)


def _inst(m: Machine) -> None:
    function = m.hooks.named(_text(m.line()), _text(m.line()))
    arguments = m.above_mark()
    _call(m, function, tuple(arguments), {})


def _obj(m: Machine) -> None:
    items = m.above_mark()
    _call(m, items[0], tuple(items[1:]), {})


def _extension(_: Machine) -> None:
    raise Wrong("has a pickle that names an object by number (an extension of one program); it is not executed. Do not trust it")


def _buffer(_: Machine) -> None:
    raise Wrong("has a pickle whose data lie elsewhere (out-of-band buffers), which are not in the file")


_STEPS: dict[int, Step] = {
    0x80: _protocol,  # what is not here stands in `Machine.run`
    0x95: _frame,
    ord("0"): _pop,
    ord("1"): lambda m: m.above_mark().clear(),
    ord("2"): _push(lambda m: m.stack[-1]),
    ord("p"): _put_memo(lambda m: int(m.line())),
    ord("g"): _get_memo(lambda m: int(m.line())),
    ord("N"): _push(lambda _: None),
    0x88: _push(lambda _: True),
    0x89: _push(lambda _: False),
    ord("J"): _push(lambda m: _integer(m, 4)),
    0x8A: _push(lambda m: _integer(m, m.byte())),
    0x8B: _push(lambda m: _integer(m, m.number(4))),
    ord("I"): _push(_written_integer),
    ord("L"): _push(lambda m: int(m.line().rstrip(b"L"))),
    ord("G"): _push(lambda m: struct.unpack(">d", m.take_bytes(8))[0]),
    ord("F"): _push(lambda m: float(m.line())),
    0x8C: _push_sized(1, _text),
    ord("X"): _push_sized(4, _text),
    0x8D: _push_sized(8, _text),
    ord("C"): _push_sized(1, bytes),
    ord("B"): _push_sized(4, bytes),
    0x8E: _push_sized(8, bytes),
    0x96: _push_sized(8, bytearray),
    ord("U"): _push_sized(1, _old_text),
    ord("T"): _push_sized(4, _old_text),
    ord("V"): _push(lambda m: str(m.line(), "raw-unicode-escape")),
    ord("S"): _push(_read_quoted),
    ord("t"): _tuple,
    0x87: _tuple_of_three,
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
