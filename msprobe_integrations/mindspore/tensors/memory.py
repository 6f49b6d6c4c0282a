"""Where the elements of a MindSpore tensor are: its description, and its memory on the host.

Element types of MindSpore, as its tensors print them and dump files have them, and the kernel that reads them.

======================================== ==========================================================================
MindSpore                                in memory
======================================== ==========================================================================
``Float64`` ... ``Bool``, ``Complex128`` as numpy has them
``BFloat16``                             two bytes, the upper half of a float32
``Float8E4M3FN``, ``Float8E5M2``         one byte, as torch has them
``Int4``                                 one byte for one element (packed only inside the kernels of Ascend)
``HiFloat8``                             one byte; no statistics here: the format is Ascend's own
======================================== ==========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mindspore
import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import plain_name
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import of_training, raise_of_training
from msprobe_engine.core.records import TensorDescription
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics.host_kernel import CODES
from msprobe_integrations.common.capture.descriptions import LIMIT, intern
from msprobe_integrations.mindspore import environment

TYPE = "mindspore.Tensor"
NO_CODE = -1
_BYTE = host_kernel.CODES["uint8"]
Look = tuple[TensorDescription, int, int]
_known: dict[tuple[Any, ...], Look] = {}


def _own_device() -> Callable[[Any], Any]:
    """What MindSpore itself says of the place of a tensor. MSAdapter gives the class ``Tensor`` an attribute ``device`` that is ``npu``
    for every tensor, so the classes below it are asked."""
    for kind in (*mindspore.Tensor.__mro__[1:], mindspore.Tensor):
        found = vars(kind).get("device")
        if hasattr(type(found), "__get__"):
            of: Callable[[Any], Any] = found.__get__
            return of
    return lambda _: "CPU"  # an older version: its tensors are read by `asnumpy` wherever they are


_device_of = _own_device()


def describe_memory(tensor: Any) -> Look:
    """Description, number of elements (-1 where the shape is not known) and code for the statistics kernel (-1: it has none). Reads no
    data and waits for nothing; equal descriptions are the same object."""
    dtype, shape = tensor.dtype, tensor.shape
    try:
        device = _device_of(tensor)
    except TypeError:  # no tensor of MindSpore, but something that describes one
        device = getattr(tensor, "device", "CPU")
    look = _known.get((dtype, shape, device))
    if look is None:
        if len(_known) > LIMIT:
            _known.clear()
        text, whole = str(dtype), tuple(int(n) for n in shape)
        numel = -1 if any(n < 0 for n in whole) else math.prod(whole)
        place = str(device).lower()
        look = intern(TYPE, text, whole, None, "cpu" if place in ("", "none") else place), numel, KERNEL.get(text, NO_CODE)
        _known[(dtype, shape, device)] = look
    return look


def describe(tensor: Any) -> TensorDescription:
    """The description of a tensor.

    Raises:
        Exception: of the training, as `training_errors`; no other.
    """
    try:
        return describe_memory(tensor)[0]
    except Exception as error:
        raise_of_training(error)
        if isinstance(tensor, mindspore.Tensor):
            raise of_training(error) from None
        return intern(TYPE, str(getattr(tensor, "dtype", "")), (), None, "")


def numel_of(tensor: Any) -> int:
    """Number of elements. (``size`` is a number in MindSpore and a method where torch's names stand for it.)"""
    return math.prod(tensor.shape)


@contextmanager
def training_errors(tensor: Any) -> Iterator[None]:
    """Around whatever may wait for the framework. Its operators run in threads of their own, and when one has failed that is reported to
    whoever waits next, once: such an error is given on as it is, marked as the training's (`msprobe_engine.core.guard.of_training`). Kept
    back, the training would go on with memory that nothing was written to."""
    try:
        yield
    except Exception as error:
        raise_of_training(error)
        raise attribute_error(tensor, error) from None


def array_at(tensor: Any) -> npt.NDArray[Any]:
    """``asnumpy``: the values as they are now, in the tensor's own memory where the host reads it. Do not write.

    Raises:
        Exception: of the training, as `training_errors`, or the memory cannot be reached.
    """
    with training_errors(tensor):
        values: npt.NDArray[Any] = tensor.asnumpy()
        return values


def attribute_error(tensor: Any, error: Exception) -> Exception:
    """An error that came up when `tensor` was looked at, marked where it is the training's: it is not when the tensor has a shape, and its
    memory cannot be reached however often one tries (it was moved elsewhere), or when it is no tensor."""
    if not isinstance(tensor, mindspore.Tensor):
        return error
    try:
        description = describe_memory(tensor)[0]
    except Exception as problem:  # the result of an operator that failed
        raise_of_training(problem)
        return of_training(error)
    try:
        place_of(tensor, description.device)
    except Exception as problem:
        raise_of_training(problem)
        return error
    return of_training(error)


Place = tuple[Any, int, "tuple[int, ...] | None"]
"""What keeps elements alive, the address of the first one (0: there is no memory yet), and strides counted in elements (None: they follow
each other in C order)."""


def _by_address(tensor: Any) -> Place:
    return tensor, tensor.data_ptr(), None if tensor.is_contiguous() else tuple(tensor.stride())


def _by_numpy(tensor: Any) -> Place:
    """Older versions have no address for a tensor that was not used yet; their arrays share its memory."""
    if getattr(tensor, "has_init", False):
        return tensor, 0, None
    array = tensor.asnumpy()
    strides = None if array.flags.c_contiguous else tuple(stride // array.itemsize for stride in array.strides)
    return array, array.__array_interface__["data"][0], strides


_on_host: Callable[[Any], Place] = _by_address if environment.version() >= (2, 10) else _by_numpy


def place_of(tensor: Any, device: str) -> Place:
    """Where the elements of a tensor are on the host; those of another device are copied. Waits for them."""
    return _on_host(tensor) if device == "cpu" else _by_numpy(tensor)


class Memory(NamedTuple):
    """Elements on the host.

    Attributes:
        owner: keeps them alive.
        description, numel, code: as `describe_memory`.
        pointer: address of the first one, 0 where there is no memory yet.
        strides: counted in elements; None: the elements follow each other in C order.
    """

    owner: Any
    description: TensorDescription
    numel: int
    code: int
    pointer: int
    strides: tuple[int, ...] | None

    def raw(self) -> npt.NDArray[np.uint8]:
        """A copy of the bytes in C order, flat.

        Raises:
            UsageError: there are none: not initialised, a shape or a type that is not known.
        """
        dtype, shape = self.description.dtype, self.description.shape
        if self.code < 0 and dtype not in WITHOUT_KERNEL:
            raise UsageError(f"tensors of type {dtype} cannot be read; known: {', '.join((*KERNEL, *WITHOUT_KERNEL))}")
        if self.numel < 0 or (not self.pointer and self.numel):
            raise UsageError(f"the tensor of shape {list(shape)} is not initialised, so it has no values: call init_data() first")
        raw: npt.NDArray[np.uint8] = host_kernel.bytes_at(self.pointer, shape, self.steps(), self.code if self.code >= 0 else _BYTE)
        copied: npt.NDArray[np.uint8] = raw.copy()
        return copied

    def steps(self) -> tuple[int, ...]:
        """The strides in any case."""
        if self.strides is not None:
            return self.strides
        shape = self.description.shape
        return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))

    def pack(self) -> Memory:
        """The same elements one after the other."""
        if self.strides is None:
            return self
        raw = self.raw()
        return self._replace(owner=raw, pointer=raw.ctypes.data, strides=None)


def memory_of(tensor: Any) -> Memory:
    """Where the elements of a tensor are; those of a device are copied to the host. Waits for them.

    Raises:
        Exception: of the training, as `training_errors`, or the memory cannot be reached.
    """
    with training_errors(tensor):
        description, numel, code = describe_memory(tensor)
        owner, pointer, strides = place_of(tensor, description.device)
        return Memory(owner, description, numel, code, pointer, strides)


_FLOATS = ("Float64", "Float32", "Float16", "BFloat16", "Float8E4M3FN", "Float8E5M2", "Complex64", "Complex128")
_INTEGERS = ("Int64", "Int32", "Int16", "Int8", "UInt64", "UInt32", "UInt16", "UInt8", "Bool")
KERNEL: dict[str, int] = {name: CODES[plain_name(name)] for name in (*_FLOATS, *_INTEGERS)} | {"Int4": CODES["int8"]}
"""Element type to the code of the statistics kernel; types that are missing have no statistics."""
WITHOUT_KERNEL = ("HiFloat8",)
"""Types that have bytes and no statistics."""
