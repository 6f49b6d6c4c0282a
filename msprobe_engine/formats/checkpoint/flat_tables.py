"""A tree of a checkpoint as two flat tables: tensors and plain values by dotted path."""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.tensors.opaque_objects import Inert, Named, attributes
from msprobe_engine.formats.tensors.torch_pickle import FileTensor, Storage

_MAX_NODES = 1_000_000
_MAX_DEPTH = 100
_LONG = 64
"""Longer lists of numbers or text, arrays and bytes are one value: their length and a digest."""
_MOST_SPELLED = 10_000
_LONGEST_TEXT = 500
_SCALARS = (bool, int, float, str, complex, type(None))


def plain(tree: Any, at: str = "") -> tuple[dict[str, FileTensor], dict[str, Any]]:
    """The tensors and the plain values in a tree, by dotted path (``model.decoder.layers.0.weight``, ``args.num_layers``).

    Objects give their attributes; enumerations, data types, paths and the like are text; long lists, arrays and bytes a digest as text.

    Args:
        tree: of a `TorchFile`, or a part of it.
        at: path of the tree itself.

    Raises:
        DumpFormatError: it holds more than a million values.
    """
    tensors: dict[str, FileTensor] = {}
    values: dict[str, Any] = {}
    alike: dict[str, int] = {}
    count = 0
    # Children are put on the stack in reverse, so that the tables have the order of the file. A path above a node finds cycles.
    waiting: list[tuple[str, Any, tuple[int, ...]]] = [(at, tree, ())]
    while waiting:
        path, value, above = waiting.pop()
        count += 1
        if count > _MAX_NODES:
            raise DumpFormatError(
                f"{path[:200]}: the checkpoint holds more than {_MAX_NODES} values; it is damaged or made to take for ever"
            )
        if isinstance(value, (FileTensor, Storage)):
            tensors[_free(path, tensors, alike)] = value if isinstance(value, FileTensor) else _elements(value)
            continue
        children = None if isinstance(value, _SCALARS) else _children(value)
        if children is None:
            values[_free(path, values, alike)] = value if isinstance(value, _SCALARS) else text_of(value)
        elif id(value) in above or len(above) >= _MAX_DEPTH:
            values[_free(path, values, alike)] = "(an object that holds itself)" if id(value) in above else "(nested too deep)"
        else:
            inside = (*above, id(value))
            found = [(f"{path}.{name}" if path else str(name), child, inside) for name, child in children]
            if len(found) + count > _MAX_NODES:
                raise DumpFormatError(f"{path[:200]}: holds {len(found)} values; more than {_MAX_NODES} are not compared")
            waiting.extend(reversed(found))
    return tensors, values


def _elements(storage: Storage) -> FileTensor:
    """A storage that no tensor of a known kind is a view of: of a quantized tensor, or saved by itself. What it holds counts."""
    dtype = storage.dtype.removeprefix("q") or "uint8"
    return FileTensor(dtype, (storage.nbytes // (item_size(dtype) or 1),), (1,), storage.file, storage.start)


def _free(path: str, taken: dict[str, Any], alike: dict[str, int]) -> str:
    """A path that nothing has yet: keys 0 and ``"0"`` of one dict look the same. `alike`: numbers given so far, by path."""
    free = path
    while free in taken:
        alike[path] = alike.get(path, 1) + 1  # counted on, not from 2 again: there may be very many
        free = f"{path}#{alike[path]}"
    return free


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """What is in a container; None: it is one value."""
    if isinstance(value, dict):
        return [(_key(key), item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, Named):
        if len(value) > _LONG and all(isinstance(item, _SCALARS) for item in value):
            return None
        if not any(isinstance(item, (FileTensor, Storage, Inert, dict, list, tuple, set, frozenset)) for item in value):
            return None
        items = value if isinstance(value, (list, tuple)) else sorted(value, key=repr)
        return [(str(number), item) for number, item in enumerate(items)]
    if isinstance(value, Inert):
        return _inside(value)
    return None


def _inside(value: Inert) -> list[tuple[str, Any]] | None:
    named = attributes(value)
    found = [*named.items(), *((str(n), item) for n, item in enumerate(value.elements))]
    holders = (FileTensor, Storage, Inert, dict, list, np.ndarray)
    found += [(f"args.{n}", item) for n, item in enumerate(value.args) if found or any(isinstance(a, holders) for a in value.args)]
    if value.state is not None and not named and not isinstance(value.state, dict):
        found.append(("state", value.state))
    return found or None


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(key) if isinstance(key, (int, float, bool)) else _format_object(key)


def text_of(value: Any) -> Any:
    """A value that is no number as text that can be compared and shown; short lists of plain values stay lists."""
    if isinstance(value, (bytes, bytearray)):
        return f"bytes[{len(value)}] {_digest(bytes(value))}" if len(value) > _LONG else bytes(value).hex()
    if isinstance(value, np.ndarray):
        if value.size <= _LONG:
            return value.tolist()
        return f"{value.dtype}{list(value.shape)} {_digest(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, Named):
        items = list(value) if isinstance(value, (list, tuple)) else sorted(value, key=repr)
        if len(items) <= _LONG:
            return [item if isinstance(item, _SCALARS) else text_of(item) for item in items]
        return f"list[{len(items)}] {_digest(*(repr(item).encode('utf-8', 'surrogatepass') for item in items))}"
    if isinstance(value, Inert):
        if value.cls.startswith("pathlib.") and all(type(part) is str for part in value.args):
            return str(PurePosixPath(*value.args))
        return _format_object(value)
    return str(value)


class _Mark(NamedTuple):
    """Text between the parts of a value."""

    text: str


def _format_object(value: Any) -> str:
    """An object and what it would be called with: ``torch.device('cpu')``; without recursion, for it may be nested however deep."""
    out: list[str] = []
    waiting: list[Any] = [value]
    nodes = 0
    while waiting:
        part = waiting.pop()
        if isinstance(part, _Mark):
            out.append(part.text)
            continue
        nodes += 1
        if nodes > _MOST_SPELLED:
            out.append(" ... (the rest is not compared)")
            break
        if isinstance(part, Inert):
            opening, items = f"{part.cls}(", list(part.args)
        elif isinstance(part, dict):
            opening, items = "{(", [half for pair in part.items() for half in pair]
        elif isinstance(part, (list, tuple)) and not isinstance(part, Named):
            opening, items = "(", list(part)
        else:
            out.append(repr(part) if isinstance(part, _SCALARS) else str(text_of(part)))
            continue
        out.append(opening)
        waiting.append(_Mark(")"))
        for number, item in enumerate(reversed(items)):
            waiting.extend((item,) if number == len(items) - 1 else (item, _Mark(", ")))
    text = "".join(out)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ... {_digest(text.encode('utf-8', 'surrogatepass'))}"


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return f"sha256:{found.hexdigest()[:32]}"
