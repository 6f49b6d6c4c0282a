"""Values of settings as they are meant: ``1e-5`` is ``0.00001``, ``"True"`` is True, ``torch.bfloat16`` is ``bf16``.

Scripts know only text, YAML has its own idea of numbers, frameworks have objects: two sides are compared after all of them have become
plain values. What is shown stays as it was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_NUMBER = re.compile(r"[+-]?(?:0|[1-9][0-9]*|[0-9]*\.[0-9]+|0?[0-9]+\.[0-9]*)(?:[eE][+-]?[0-9]+)?")
_ENUM = re.compile(r"<?(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:: .*>)?")
_EMPTY = frozenset(("", "none", "null", "~"))
_TRUTH = {"true": True, "false": False}
_NOT_FINITE = frozenset(("nan", "inf", "+inf", "-inf", "infinity", "-infinity", ".nan", ".inf", "-.inf"))
_QUOTES = "\"'"
_LONGEST_TEXT = 20_000
"""A longer text is not taken apart."""
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "f16": "float16", "fp32": "float32", "float": "float32",
    "f32": "float32", "single": "float32", "double": "float64", "fp64": "float64", "f64": "float64", "16": "float16",
    "32": "float32", "16-true": "float16", "16-mixed": "float16", "bf16-mixed": "bfloat16", "bf16-true": "bfloat16",
    "32-true": "float32",
}  # fmt: skip
"""Short names of torch, DeepSpeed, Transformers and Lightning."""


@dataclass(frozen=True)
class Several:
    """What a setting is to which several commands or files of one collection give other values: equal only to the same values.

    Attributes:
        meant: the plain values, written out.
        written: the values for a table.
    """

    meant: frozenset[str]
    written: str = field(compare=False)

    @classmethod
    def of(cls, values: Iterable[Any]) -> Several:
        """Of the values in their order; None: one of the commands does not give it."""
        by_meaning = {repr(plain(value)).lower(): "not given" if value is None else show_value(value) for value in values}
        return cls(frozenset(by_meaning), " or ".join(by_meaning.values()))

    def __repr__(self) -> str:
        return self.written


def plain(value: Any) -> Any:
    """A value as it is meant: None, bool, int, float, str, or a tuple or dict of these.

    Texts in quotes lose them; texts that are a number, a truth value or nothing become it; ``torch.float16`` loses its module; a list is
    a tuple, whether it was written ``[0.9, 0.95]``, ``0.9,0.95`` or ``0.9 0.95``.
    """
    if value is None or isinstance(value, (bool, int, Several)):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(plain(child) for child in value)
    return _text(str(value))


def _text(text: str) -> Any:
    text = text.strip()
    while len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES:
        text = text[1:-1].strip()
    if len(text) > _LONGEST_TEXT:
        return text
    low = text.lower()
    if low in _EMPTY:
        return None
    if low in _TRUTH:
        return _TRUTH[low]
    number = float(low.replace(".", "")) if low in _NOT_FINITE else _number(text)
    if number is not None:
        return number
    items = _items(text)
    if items is not None:
        return items
    return low.removeprefix("torch.").removeprefix("mindspore.") if low.startswith(("torch.", "mindspore.")) else text


def _number(text: str) -> int | float | None:
    if not _NUMBER.fullmatch(text) or len(text) > 400:
        return None
    try:
        return int(text)
    except ValueError:
        number = float(text)
        return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _items(text: str) -> tuple[Any, ...] | None:
    """The items of a list in brackets, or of numbers with commas or blanks between them."""
    if text[0] in "[(" and text[-1] in ")]":
        inner = text[1:-1].strip().rstrip(",")
        if any(c in inner for c in "[]{}()"):
            return None
        return tuple(_text(item) for item in inner.split(",")) if inner else ()
    parts = [part for part in re.split(r"[,\s]+", text) if part]
    numbers = [_number(part) for part in parts]
    return tuple(numbers) if len(parts) > 1 and None not in numbers else None


def dtype(value: Any) -> Any:
    """`plain`, and the short names of data types become the long ones: ``bf16`` and ``torch.bfloat16`` are ``bfloat16``."""
    value = plain(value)
    word = str(value).lower()
    return _DTYPES.get(word, word) if isinstance(value, str) or word in _DTYPES else value


def same(value: Any, other: Any) -> bool:
    """Do two plain values mean the same? Words are the same whatever their case; ``AttnBackend.flash`` is ``flash``."""
    if isinstance(value, float) and isinstance(other, float) and math.isnan(value) and math.isnan(other):
        return True
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, tuple) != isinstance(other, tuple):  # one item without brackets
        single, many = (value, other) if isinstance(other, tuple) else (other, value)
        return len(many) == 1 and same(single, many[0])
    if isinstance(value, tuple):
        return len(value) == len(other) and all(same(item, other_item) for item, other_item in zip(value, other))
    if isinstance(value, str) and isinstance(other, str):
        return value == other or (
            "/" not in value and "/" not in other and (value.lower() == other.lower() or _tail(value) == _tail(other))
        )
    return bool(value == other)


def _tail(word: str) -> str:
    """The last part of the name of an enumeration's member, where it is one."""
    m = _ENUM.fullmatch(word)
    return m[1].lower() if m else word


def show_value(value: Any) -> str:
    """A value for a table: texts as they are, everything else as Python writes it."""
    return value if isinstance(value, str) else repr(value)


def is_unset(value: Any) -> bool:
    """Nothing was asked for: None, False, ``no``, ``off``, or an empty text, list or dict."""
    value = plain(value)
    return value is None or value is False or value in ((), {}) or (isinstance(value, str) and value.lower() in ("no", "off"))
