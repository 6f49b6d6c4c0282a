"""Numbers into the text of dump.json: one template per layout, only the numbers change from step to step.

Two functions, each with an optional C implementation (`msprobe_engine/native/_dumptext.c`) and a Python one that gives the same result:

* `same_layout` tells whether the entries of this step differ from those of an earlier one in nothing but row indices and float
  scalars, and collects these;
* `render` puts the statistics of the rows into the template, without holding the GIL in C.

The text is that of ``json.dumps(..., indent=1)``, NaN and infinities as Python's json writes them, as the existing format has it.
"""

from __future__ import annotations

import importlib
import math
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.records import Entry, Opaque
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows

if TYPE_CHECKING:
    from types import ModuleType

NUMERIC, BOOLEAN, TAIL, SCALAR, CRC, XOR, TRUES = 0, 1, 2, 3, 4, 5, 6
"""What an operation writes: the four statistics of a tensor, those of a bool tensor, the additional keys after a tensor's
other keys (``nan_count``, ``inf_count``, ``digest``, ``redacted``; each only when there is something to say), a float scalar, the key
``md5`` after other keys (CRC-32 as 8 hexadecimal digits), the key ``md5`` in place of statistics (XOR as ``0x`` and 16 digits; null when
there are no elements), the key ``true_count`` of a bool tensor after other keys (nothing where the row has no numbers). ``md5`` is null
where the row has no such checksum; the name is the existing format's."""

MAX_DEPTH = 64
"""Deeper structures are not described (null)."""

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


class Template(NamedTuple):
    """Text with places for numbers.

    Attributes:
        text: ASCII.
        ops: [n, 4] int32, each (offset in `text`, kind, indentation, index into slots or, for SCALAR, into floats), by offset.
    """

    text: bytes
    ops: Int32


@lru_cache(maxsize=1)
def _load_native() -> ModuleType | None:
    """The C implementation, None when it was not built."""
    try:
        module = importlib.import_module("msprobe_engine.native._dumptext")
    except ImportError:
        return None
    module.set_powers(powers_of_ten())
    return module


def powers_of_ten() -> bytes:
    """10**k for k in -292..324 as 128-bit significands rounded up, high and low word: the table of the Schubfach algorithm."""
    table = bytearray()
    for k in range(-292, 325):
        power = 10 ** abs(k)
        if k >= 0:
            shift = power.bit_length() - 128
            g = power << -shift if shift <= 0 else -(-power >> shift)
        else:
            bits = 127 + power.bit_length()
            g = -(-(1 << bits) // power)
        table += struct.pack("=QQ", g >> 64, g & 0xFFFFFFFFFFFFFFFF)
    return bytes(table)


def same_layout(new: list[Entry], old: list[Entry], slots: Int32, floats: Float64) -> bool:
    """Are the entries equal, but for row indices and float scalars? If so, `slots` and `floats` hold those of `new`, in the
    order of a walk through the sections.

    Args:
        slots: [number of tensors in `old`] int32, written; -1 stands for "no statistics".
        floats: [number of float scalars in `old`] float64, written.
    """
    compiled = _load_native()
    if compiled is not None:
        same: bool = compiled.same_layout(new, old, slots, floats)
        return same
    return same_layout_python(new, old, slots, floats)


def same_layout_python(new: list[Entry], old: list[Entry], slots: Int32, floats: Float64) -> bool:
    """`same_layout` without C."""
    if len(new) != len(old):
        return False
    rows: list[int] = []
    scalars: list[float] = []
    for new_entry, old_entry in zip(new, old):
        if (
            new_entry.name != old_entry.name
            or new_entry[2:5] != old_entry[2:5]
            or not _same_json(new_entry.tags, old_entry.tags, 0)
            or not _same(new_entry.sections, old_entry.sections, rows, scalars, 0)
        ):
            return False
    if len(rows) != len(slots) or len(scalars) != len(floats):
        return False
    slots[:] = rows
    floats[:] = scalars
    return True


def scalar(json: Any) -> float | None:
    """The value of an `Opaque` that is a plain float (``{"type": "float", "value": 0.5}``): it gets a place in the template, since
    such values (learning rates, bias corrections) change from step to step."""
    if type(json) is dict and len(json) == 2 and type(json.get("value")) is float and json.get("type") == "float":
        value: float = json["value"]
        return value
    return None


def _same(new: Any, old: Any, rows: list[int], scalars: list[float], depth: int) -> bool:
    if type(new) is not type(old) or depth > MAX_DEPTH:
        return False
    if isinstance(new, Opaque):
        value, other = scalar(new.json), scalar(old.json)
        if value is None or other is None:
            return value is other and _same_json(new.json, old.json, 0)
        scalars.append(value)
        return True
    if isinstance(new, tuple):
        rows.append(max(new[0], -1))
        return bool(new[1] is old[1] or new[1] == old[1])
    if isinstance(new, list):
        return len(new) == len(old) and all(_same(new_item, old_item, rows, scalars, depth + 1) for new_item, old_item in zip(new, old))
    if isinstance(new, dict):
        return list(new) == list(old) and all(
            _same(new_item, old_item, rows, scalars, depth + 1) for new_item, old_item in zip(new.values(), old.values())
        )
    return _same_json(new, old, depth)


def _same_json(new: Any, old: Any, depth: int) -> bool:
    """Equal as text: 1, 1.0 and True differ, 0.0 and -0.0 differ, NaN equals NaN."""
    if new is old:
        return True
    if type(new) is not type(old) or depth > MAX_DEPTH:
        return False
    if type(new) is float:
        return struct.pack("d", new) == struct.pack("d", old)
    if isinstance(new, (list, tuple)):
        return len(new) == len(old) and all(_same_json(new_item, old_item, depth + 1) for new_item, old_item in zip(new, old))
    if isinstance(new, dict):
        return list(new) == list(old) and all(
            _same_json(new_item, old_item, depth + 1) for new_item, old_item in zip(new.values(), old.values())
        )
    return bool(new == old)


def render(template: Template, slots: Int32, rows: Rows, floats: Float64) -> bytes:
    """The text with the statistics of this step.

    Args:
        slots: [n] int32, row of each tensor of the layout, -1 for none.
        rows: [m, 16] float64 statistics.
        floats: [k] float64, float scalars of the layout.

    Raises:
        ValueError: template, slots and rows do not belong together (a damaged frame log).
    """
    compiled = _load_native()
    if compiled is not None:
        text: bytes = compiled.render(template.text, template.ops, slots, np.ascontiguousarray(rows), floats)
        return text
    return render_python(template, slots, rows, floats)


def render_python(template: Template, slots: Int32, rows: Rows, floats: Float64) -> bytes:
    """`render` without C."""
    rows = np.ascontiguousarray(rows)
    out: list[bytes] = []
    done, text = 0, template.text
    for offset, kind, depth, index in template.ops.tolist():
        if not done <= offset <= len(text) or not 0 <= depth <= MAX_DEPTH or not 0 <= kind <= TRUES:
            raise ValueError("offsets of the template must grow and stay inside it")
        limit = len(floats) if kind == SCALAR else len(slots)
        if not 0 <= index < limit:
            raise ValueError("slot or kind out of range")
        out.append(text[done:offset])
        done = offset
        if kind == SCALAR:
            out.append(number(float(floats[index])).encode())
            continue
        slot = int(slots[index])
        if slot >= len(rows):
            raise ValueError("a slot refers to a row that does not exist")
        stats = _rows.read_row(rows[slot]) if slot >= 0 else None
        if kind == TAIL:
            out.append(_tail(stats, depth).encode())
        elif kind == TRUES:
            out.append(_true_count(stats, depth).encode())
        elif kind in (CRC, XOR):
            out.append(_checksum(stats, kind, depth).encode())
        else:
            out.append(_statistics(stats, kind, depth).encode())
    out.append(text[done:])
    return b"".join(out)


def number(value: float | int | None) -> str:
    """JSON text of a number, None as null; NaN and infinities as the existing format writes them."""
    if value is None:
        return "null"
    if isinstance(value, int):
        return int.__repr__(value)
    if math.isfinite(value):
        return float.__repr__(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _statistics(stats: _rows.Statistics | None, kind: int, depth: int) -> str:
    values: tuple[float | int | None, ...] = (None, None, None, None)
    if stats is not None:
        values = stats.max, stats.min, stats.mean, stats.norm
    if kind == BOOLEAN:
        texts = ["null" if v is None else "true" if v else "false" for v in values[:2]] + ["null", "null"]
    else:
        texts = [number(v) for v in values]
    indent = " " * depth
    return ",\n".join(f'{indent}"{key}": {text}' for key, text in zip(("Max", "Min", "Mean", "Norm"), texts))


def _checksum(stats: _rows.Statistics | None, kind: int, depth: int) -> str:
    text = "null"
    if stats is not None and kind == CRC and stats.crc32 is not None:
        text = f'"{stats.crc32:08x}"'
    elif stats is not None and kind == XOR and stats.xor is not None and stats.count:
        text = f'"0x{stats.xor:016x}"'
    return f'{"" if kind == XOR else "," + chr(10)}{" " * depth}"md5": {text}'


def _true_count(stats: _rows.Statistics | None, depth: int) -> str:
    if stats is None or not stats.count or stats.redacted is not None:
        return ""
    return f',\n{" " * depth}"true_count": {stats.count - stats.zeros}'


def _tail(stats: _rows.Statistics | None, depth: int) -> str:
    if stats is None:
        return ""
    out, indent = "", " " * depth
    if stats.nans:
        out += f',\n{indent}"nan_count": {stats.nans}'
    if stats.infs:
        out += f',\n{indent}"inf_count": {stats.infs}'
    if stats.digest is not None:
        out += f',\n{indent}"digest": "{stats.digest:016x}"'
    if stats.redacted is not None:
        out += f',\n{indent}"redacted": "{stats.redacted:016x}"' if stats.redacted else f',\n{indent}"redacted": "no key"'
    return out
