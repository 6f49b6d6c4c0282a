"""Arguments of a recorded call as Python source.

A dump is not trusted, and what is written here will be run. So nothing of it is copied into the source: numbers and texts go through
`repr`, names of types through a table or a narrow pattern, and every other value is refused.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import WORDS_OF_NUMBERS

__all__ = ["DEVICE", "DTYPE", "Arguments", "CannotWrite", "Spec", "number"]

DTYPE, DEVICE = "dtype", "device"
"""Parameters of the function that makes the call: what raises a type for the bench, and where tensors are to be made."""
_NUMPY = re.compile(r"(?:float|int|uint)[0-9]{1,3}|bool_?|longlong|intc")
_STATISTICS = {"Min": "min", "Max": "max", "Mean": "mean", "Norm": "norm", "nan_count": "nan", "inf_count": "inf"}
_FINITE = {"Min": "Min_except_inf_nan", "Max": "Max_except_inf_nan"}
_LARGEST_DIMENSION = 1 << 40
_DEEPEST = 20
_MOST_VALUES = 100_000


class CannotWrite(UsageError):
    """A recorded call that no script can repeat; the message says which part of it."""


@dataclass(frozen=True)
class Spec:
    """One tensor of a record.

    Attributes:
        source: its type and shape and statistics as the inside of a Python dict display.
        dtype: as the dump has it.
        requires_grad: whether its gradient is wanted.
        data_name: of its file in the dump; None where it was not saved.
    """

    source: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    data_name: str | None


@dataclass
class Arguments:
    """Collects the tensors of a call while the source of its arguments is made.

    Args:
        dtype: source of a type's name (``torch.float32``), None for a name that is none.
        raises: is this the name of a type that the bench raises?
        special: source of a value of the framework: its type's name and record; None for what it does not know.
        tuples: lists of whole numbers were tuples (a dump writes both alike): what most functions of a framework take.

    Attributes:
        tensors: in order, by the name of the parameter.
    """

    dtype: Callable[[str], str | None]
    raises: Callable[[str], bool]
    special: Callable[[str, Mapping[str, Any]], str | None]
    tuples: bool = False
    tensors: dict[str, Spec] = field(default_factory=dict)
    _left: int = _MOST_VALUES

    def positional(self, items: Any, as_tuple: frozenset[int] = frozenset()) -> list[str]:
        """Source of each positional argument; lists at the places `as_tuple` become tuples (a dump writes both alike).

        Raises:
            CannotWrite: one of them cannot be repeated.
        """
        if not isinstance(items, list):
            raise CannotWrite("its arguments are no list; the record is damaged")
        return [self._value(item, f"input_{i}", 0, i in as_tuple) for i, item in enumerate(items)]

    def keywords(self, items: Any) -> list[str]:
        """``name=source`` for each keyword argument.

        Raises:
            CannotWrite: as `positional`, or a name is none that Python allows.
        """
        if not isinstance(items, Mapping):
            raise CannotWrite("its keyword arguments are no object; the record is damaged")
        return [f"{_parameter(name)}={self._value(item, self._free(name), 0, False)}" for name, item in items.items()]

    def tensor(self, item: Mapping[str, Any]) -> Spec:
        """What a record says of a tensor.

        Raises:
            CannotWrite: its type or shape cannot be.
        """
        kind, shape = item.get("dtype"), item.get("shape")
        plain = kind if item.get("type") != "numpy.ndarray" else str(kind).capitalize()
        source = self.dtype(plain) if isinstance(plain, str) else None
        whole = isinstance(shape, list) and all(type(n) is int and 0 <= n < _LARGEST_DIMENSION for n in shape)
        if source is None or not isinstance(plain, str) or not isinstance(shape, list) or not whole or len(shape) > 64:
            raise CannotWrite(f"a tensor of type {str(kind)[:60]!r} and shape {str(shape)[:80]}: there is no such tensor")
        wants = item.get("requires_grad") is True
        parts = [f'"dtype": {source}', f'"shape": {shape!r}']
        for key, name in _STATISTICS.items():
            value = item.get(_FINITE[key], item.get(key)) if key in _FINITE else item.get(key)
            value = WORDS_OF_NUMBERS.get(value) if isinstance(value, str) else value
            if isinstance(value, (bool, int, float)):
                parts.append(f'"{name}": {number(float(f"{value:.9g}") if isinstance(value, float) else value)}')
        saved = item.get("data_name")
        return Spec(", ".join(parts), plain, tuple(shape), wants, saved if isinstance(saved, str) and saved not in ("", "-1") else None)

    def _value(self, item: Any, name: str, depth: int, as_tuple: bool) -> str:
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            raise CannotWrite("its arguments are nested too deeply" if depth > _DEEPEST else f"it has more than {_MOST_VALUES} values")
        if item is None or isinstance(item, (bool, int, float, str)):
            return number(item) if isinstance(item, (bool, int, float)) else ascii(item)
        if isinstance(item, list):
            inside = [self._value(child, f"{name}_{i}", depth + 1, False) for i, child in enumerate(item)]
            whole = self.tuples and all(isinstance(child, Mapping) and child.get("type") == "int" for child in item)
            if as_tuple or whole:
                return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
            return f"[{', '.join(inside)}]"
        if not isinstance(item, Mapping):
            raise CannotWrite(f"an argument is a {type(item).__name__}; the record is damaged")
        if isinstance(item.get("dtype"), str) and "shape" in item:
            self.tensors[name] = self.tensor(item)
            return name
        kind = item.get("type")
        if not isinstance(kind, str):
            if any(isinstance(child, str) for child in item.values()):
                raise CannotWrite(f"an argument is an object with {', '.join(map(ascii, list(item)[:6]))}; a script cannot make one")
            children = (f"{str(k)!a}: {self._value(v, f'{name}_{i}', depth + 1, False)}" for i, (k, v) in enumerate(item.items()))
            return f"{{{', '.join(children)}}}"
        return self._plain(kind, item)

    def _plain(self, kind: str, item: Mapping[str, Any]) -> str:
        value = item.get("value")
        if kind in ("int", "float", "bool") or _NUMPY.fullmatch(kind):
            value = WORDS_OF_NUMBERS.get(value, value) if isinstance(value, str) else value
            if isinstance(value, (bool, int, float)):
                return number(value)
        elif kind == "str" and isinstance(value, str):
            return ascii(value)
        elif kind in ("NoneType", "ellipsis"):
            return "None" if kind == "NoneType" else "..."
        elif kind == "slice" and isinstance(value, list) and len(value) == 3 and all(n is None or type(n) is int for n in value):
            return repr(slice(*value))
        elif kind == "complex":
            return _complex(value)
        text = self.special(kind, item)
        if text is None:
            raise CannotWrite(f"an argument is of type {kind[:80]!r}, value {str(value)[:60]!r}; a script cannot make one")
        return text

    def _free(self, name: str) -> str:
        """A parameter's name for the tensors of a keyword argument that no other parameter has."""
        plain = _parameter(name)
        return f"{plain}_" if plain in (DTYPE, DEVICE) or plain.startswith("input_") else plain


def _parameter(name: str) -> str:
    if not name.isascii() or not name.isidentifier() or keyword.iskeyword(name):
        raise CannotWrite(f"a keyword argument is named {name[:80]!r}, which no function takes; the record is damaged")
    return name


def number(value: float) -> str:
    """Source of a bool, int or float; NaN and infinities too."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, int) and abs(value) >= 1 << 128:
        raise CannotWrite("a number of the record is too large for any tensor; the record is damaged")
    return repr(value)


def _complex(value: Any) -> str:
    try:
        found = complex(value)
    except (TypeError, ValueError):
        raise CannotWrite(f"an argument is of type complex, value {str(value)[:60]!r}; a script cannot make one") from None
    return f"complex({number(found.real)}, {number(found.imag)})"
