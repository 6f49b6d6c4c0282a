"""Objects in the pickles of ``torch.save``: tensors become descriptions of where they lie, numpy values become numbers, the rest is inert.

The functions are those of ``torch/_utils.py``, ``torch/_tensor.py`` and ``numpy/_core/multiarray.py``; what they would do is known here,
and none of them is called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.formats.tensors.opaque_objects import Inert, Named, full_name, is_known
from msprobe_engine.formats.tensors.pickle_machine import Wrong, checked_key
from msprobe_engine.formats.tensors.pt_parts import format_parts, is_size, is_view, reach

LAZY, CONJUGATE, NEGATIVE = "torch.Tensor", "lazy conjugate of what is in the file", "lazy negative of what is in the file"
"""Class and further arguments of the `Inert` that stands for such a tensor; its first argument is what is in the file."""
_LARGEST = 1 << 40
"""Elements that a small storage may stand for (a broadcast tensor); reading more would take for ever."""
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128", "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8", "QInt32Storage": "qint32", "UntypedStorage": "",
}  # fmt: skip
"""Types of storages and what their elements are; ``""``: bytes, whose type the tensor has."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file, and where it lies.

    Attributes:
        dtype: plain name, ``bfloat16``.
        strides: in elements.
        start: byte of the file at which its first element begins.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    file: Path
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes that tensors are views of.

    Attributes:
        dtype: of its elements; "": bytes.
        start: first byte in the file.
        nbytes: how many.
    """

    dtype: str
    file: Path
    start: int
    nbytes: int


_OTHERS = "copyreg._reconstructor", "copyreg.__newobj__", "builtins.getattr"
"""Calls that stand for something besides those of `_MADE`."""
Locate = Callable[[str, str, int, Any], Storage]
"""``locate(key, dtype, count of elements, what is behind these in the identity)``"""


@dataclass
class _Array:
    """A numpy array that waits for its data."""


@dataclass
class _Dtype:
    """A numpy data type that waits for its byte order."""

    text: str
    order: str = "="


@dataclass
class TorchHooks:
    """See `msprobe_engine.formats.tensors.pickle_machine.Hooks`.

    Attributes:
        locate: where a storage lies.
        trust: names (``module.Class``) or modules that are not refused.
        refused: names that were met and are not known.
    """

    locate: Locate
    trust: Collection[str] = ()
    refused: dict[str, None] = field(default_factory=dict)
    name: ClassVar[type] = Named
    inert: ClassVar[type] = Inert
    made: dict[Any, str | None] = field(default_factory=dict)
    _names: dict[tuple[str, str], Named] = field(default_factory=dict)

    def named(self, module: str, name: str) -> Any:
        found = self._names.get((module, name))
        if found is None:
            found = self._names[module, name] = Named(full_name(module, name))
            if not is_known(found.name, self.trust):
                self.refused[found.name] = None
            if _MADE.get(found.name) is _make_tuple:
                self.made[found] = None
            elif found.name not in _MADE and found.name not in _OTHERS:
                self.made[found] = found.name
        return found

    def called(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not isinstance(function, Named):
            raise Wrong(
                f"has a pickle that calls a {type(function).__name__}, which no checkpoint does; it is not executed. Do not trust it"
            )
        make = _MADE.get(function.name)
        found = make(arguments) if make is not None and not keywords else None
        if found is not None:
            return found
        if function.name in _OTHERS[:2] and arguments and isinstance(arguments[0], Named):
            return Inert(arguments[0].name)
        if function.name == _OTHERS[2]:
            return _attribute(arguments)
        return Inert(function.name, arguments, keywords) if keywords else Inert(function.name, arguments)

    def persistent(self, identity: Any) -> Any:
        if isinstance(identity, tuple) and len(identity) in (5, 6) and identity[0] == "storage" and isinstance(identity[1], Named):
            _, kind, key, _, count = identity[:5]
            dtype = _STORAGES.get(kind.name.rpartition(".")[2])
            if dtype is not None and kind.name.startswith(("torch.", "torch_npu.")) and isinstance(key, str) and is_size(count):
                return self.locate(key, dtype, count, identity[5] if len(identity) == 6 else None)
        if isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module" and isinstance(identity[1], Named):
            return identity[1]  # before 1.6: a class with its source
        raise Wrong(f"has a storage of an unknown kind: {format_parts(identity)}")

    def built(self, value: Any, state: Any) -> Any:
        if isinstance(value, Inert):
            value.state = state
        elif isinstance(value, _Array):
            return _fill_array(state)
        elif isinstance(value, _Dtype):
            if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
                value.order = state[1]
        elif not isinstance(value, (dict, list, set, FileTensor)):  # these have attributes of their own only as notes for torch
            raise Wrong(f"has a pickle that sets the state of a {type(value).__name__}; it is damaged")
        return value

    def extended(self, value: Any, elements: list[Any]) -> None:
        if not isinstance(value, Inert):
            raise Wrong(f"has a pickle that appends to a {type(value).__name__}; it is damaged")
        value.append_all(elements)

    def updated(self, value: Any, pairs: list[tuple[Any, Any]]) -> None:
        if not isinstance(value, Inert):
            raise Wrong(f"has a pickle that sets items of a {type(value).__name__}; it is damaged")
        value.set_all(pairs)


def _attribute(arguments: tuple[Any, ...]) -> Named:
    """A member of an enumeration, which some Pythons save as ``getattr(Class, "member")``."""
    if len(arguments) == 2 and isinstance(arguments[0], Named) and type(arguments[1]) is str:
        return Named(f"{arguments[0].name}.{arguments[1]}")
    raise Wrong("has a pickle that looks up an attribute of a value, which no checkpoint does; it is not executed. Do not trust it")


def _make_view(dtype: str, storage: Any, offset: Any, shape: Any, strides: Any) -> FileTensor | None:
    """A view of a storage.

    Raises:
        Wrong: it reaches out of the storage.
    """
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        return None
    width = item_size(dtype)
    if not is_view(offset, shape, strides) or width is None:
        raise Wrong(
            f"has a tensor of {dtype or 'bytes'} with shape {format_parts(shape)} and strides {format_parts(strides)}, which cannot be"
        )
    numel = math.prod(shape)
    if reach(offset, shape, strides) * width > storage.nbytes:
        raise Wrong(f"describes a tensor of {dtype} with shape {list(shape)} that reaches behind its storage of {storage.nbytes} bytes")
    if numel * width > max(storage.nbytes, _LARGEST):
        raise Wrong(f"describes a tensor of shape {list(shape)} over a storage of {storage.nbytes} bytes; it was made to take for ever")
    return FileTensor(dtype, shape, strides, storage.file, storage.start + offset * width)


def _tensor_v2(arguments: tuple[Any, ...]) -> Any:
    """``(storage, offset, shape, strides[, requires grad, hooks[, metadata]])``, also of older and of Ascend's functions."""
    if len(arguments) < 4 or not isinstance(arguments[0], Storage):
        return None
    return _plain_view(arguments[:4], arguments[0].dtype, arguments[6:])


def _tensor_v3(arguments: tuple[Any, ...]) -> Any:
    """``(storage, offset, shape, strides, requires grad, hooks, dtype[, metadata])``"""
    if len(arguments) < 7 or not isinstance(arguments[6], Named):
        return None
    return _plain_view(arguments[:4], arguments[6].name.removeprefix("torch."), arguments[7:])


def _plain_view(place: tuple[Any, ...], dtype: str, rest: tuple[Any, ...]) -> Any:
    metadata = rest[0] if rest and isinstance(rest[0], dict) else {}
    found = _make_view(dtype, *place)
    lazy = [word for key, word in (("conj", CONJUGATE), ("neg", NEGATIVE)) if metadata.get(key) is True]
    return Inert(LAZY, (found, *lazy)) if found is not None and lazy else found


def _same_tensor(arguments: tuple[Any, ...]) -> Any:
    """``(tensor, ...)``: a parameter, or a tensor of another device."""
    return arguments[0] if arguments and isinstance(arguments[0], (FileTensor, Inert)) else None


def _from_type(arguments: tuple[Any, ...]) -> Any:
    """``(function, type, arguments, state)``: a tensor with attributes, or of a subclass."""
    if len(arguments) != 4 or not isinstance(arguments[0], Named) or not isinstance(arguments[2], tuple):
        return None
    make = _MADE.get(arguments[0].name)
    found = make(arguments[2]) if make is not None else None
    if found is not None:
        return found
    kind = arguments[1].name if isinstance(arguments[1], Named) else arguments[0].name
    return Inert(kind, arguments[2], state=arguments[3])


def _make_dict(arguments: tuple[Any, ...]) -> Any:
    """``OrderedDict()``, ``OrderedDict([(key, value), ...])``, ``dict(...)``"""
    if not arguments:
        return {}
    if len(arguments) == 1 and isinstance(arguments[0], dict):
        return dict(arguments[0])
    pairs = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)) else None
    if pairs is None or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        return None
    return {checked_key(key): value for key, value in pairs}


def _default_dict(arguments: tuple[Any, ...]) -> Any:
    return _make_dict(arguments[1:])


def _sequence(arguments: tuple[Any, ...]) -> Any:
    """``deque([...], length)``, ``list([...])``"""
    if not arguments:
        return []
    return list(arguments[0]) if isinstance(arguments[0], (list, tuple)) else None


def _make_tuple(arguments: tuple[Any, ...]) -> Any:
    """``torch.Size((2, 3))``, ``tuple([...])``"""
    if not arguments:
        return ()
    return tuple(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)) else None


def _make_set(arguments: tuple[Any, ...]) -> Any:
    if not arguments:
        return set()
    return {checked_key(item) for item in arguments[0]} if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)) else None


def _encode_latin1(arguments: tuple[Any, ...]) -> Any:
    """Bytes in protocol 2: ``_codecs.encode("...", "latin1")``"""
    if len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in ("latin1", "latin-1"):
        return arguments[0].encode("latin-1")
    return None


def _bytes(arguments: tuple[Any, ...]) -> Any:
    """``bytes()``; ``bytearray("...", "latin-1")`` of protocol 2, ``bytearray(b"...")``"""
    if not arguments:
        return b""
    return bytes(arguments[0]) if isinstance(arguments[0], (bytes, bytearray)) and len(arguments) == 1 else _encode_latin1(arguments)


def _complex(arguments: tuple[Any, ...]) -> Any:
    return complex(*arguments) if len(arguments) == 2 and all(isinstance(part, (int, float)) for part in arguments) else None


def _dtype(arguments: tuple[Any, ...]) -> Any:
    """``numpy.dtype("f8", False, True)``, to which the byte order is set as state."""
    text = arguments[0] if arguments else None
    return _Dtype(text) if isinstance(text, str) and re.fullmatch(r"[biufcSU][0-9]{1,6}", text) else None


def _numpy_type(dtype: Any) -> np.dtype[Any] | None:
    if not isinstance(dtype, _Dtype):
        return None
    found = np.dtype(dtype.text)
    return found.newbyteorder(dtype.order) if dtype.order in "<>" and found.itemsize else found if found.itemsize else None  # type: ignore[arg-type]


def _scalar(arguments: tuple[Any, ...]) -> Any:
    """``scalar(dtype, bytes)``"""
    kind = _numpy_type(arguments[0]) if len(arguments) == 2 else None
    if kind is None or not isinstance(arguments[1], bytes) or len(arguments[1]) != kind.itemsize:
        return None
    found = np.frombuffer(arguments[1], kind)[0]
    return float(found) if kind.kind == "f" else found.item()


def _fill_array(state: Any) -> Any:
    """The array of ``(version, shape, dtype, Fortran order, data)``."""
    if isinstance(state, tuple) and len(state) == 5:
        _, shape, dtype, fortran, data = state
        found = _array(data, dtype, shape, bool(fortran))
        if found is not None:
            return found
    return Inert("numpy.ndarray", state=state)


def _array(data: Any, dtype: Any, shape: Any, fortran: bool) -> Any:
    kind = _numpy_type(dtype)
    if kind is None or not isinstance(data, (bytes, bytearray)) or not isinstance(shape, tuple) or not all(map(is_size, shape)):
        return None
    if math.prod(shape) * kind.itemsize != len(data):
        raise Wrong(f"has a numpy array of shape {format_parts(shape)} and {len(data)} bytes; it is damaged")
    return np.frombuffer(bytes(data), kind).reshape(shape, order="F" if fortran else "C")


def _from_buffer(arguments: tuple[Any, ...]) -> Any:
    """``_frombuffer(data, dtype, shape, order)`` of protocol 5"""
    return _array(*arguments[:3], fortran=arguments[3] == "F") if len(arguments) == 4 else None


_MADE: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _same_tensor,
    "torch._utils._rebuild_parameter_with_state": _same_tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _same_tensor,
    "torch_npu.utils.storage._rebuild_npu_tensor": _tensor_v2,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _make_tuple,
    "collections.OrderedDict": _make_dict,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _make_dict,
    "collections.deque": _sequence,
    "builtins.dict": _make_dict,
    "builtins.list": _sequence,
    "builtins.tuple": _make_tuple,
    "builtins.set": _make_set,
    "builtins.frozenset": _make_set,
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _encode_latin1,
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray._reconstruct": lambda _: _Array() for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
}
"""What calls stand for, by the name of the function; None: the call is not as it should be and stays inert."""
