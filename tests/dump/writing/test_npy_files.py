"""``.npy`` files made from the bytes of tensors."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.dtypes import plain_name
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.formats.dump.writing.npy_template import NpyTemplate

PLAIN = ("Float64", "Float32", "Float16", "Int64", "Int8", "UInt64", "UInt16", "Bool", "Complex64", "Complex128", "torch.float32", "Int4")
WIDE = ("BFloat16", "Float8E4M3FN", "Float8E5M2", "torch.bfloat16", "torch.float8_e5m2")
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def content(dtype: str, shape: tuple[int, ...], raw: np.ndarray) -> bytes:
    """The file of the tensor with these bytes, put together as the writer threads do."""
    template = NpyTemplate(dtype, shape)
    wide = template.widen_elements(raw.ctypes.data, raw.nbytes)
    whole = template.head + (raw.tobytes() if wide is None else wide.tobytes()) + template.tail(0)
    assert len(whole) == template.overhead + raw.nbytes
    return whole


def bits(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("dtype", PLAIN)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_files_are_what_numpy_writes(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    """Types that numpy has: byte for byte the file of `numpy.save`."""
    kind = np.dtype("int8" if dtype == "Int4" else plain_name(dtype))
    raw = bits(int(np.prod(shape, dtype=int)) * kind.itemsize, seed)
    made = io.BytesIO()
    np.save(made, raw.view(kind).reshape(shape))
    assert content(dtype, shape, raw) == made.getvalue()


@pytest.mark.parametrize("dtype", WIDE)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_types_that_numpy_lacks_become_float32_without_loss(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    """bfloat16 and 8-bit floats are read back as the float32 of the same value, NaN and Inf too."""
    code = host_kernel.CODES[plain_name(dtype)]
    raw = bits(int(np.prod(shape, dtype=int)) * host_kernel.ITEMSIZE[code], seed)
    found = np.load(io.BytesIO(content(dtype, shape, raw)), allow_pickle=False)
    assert (found.dtype, found.shape) == (np.float32, shape)
    np.testing.assert_array_equal(found.reshape(-1), host_kernel.decode(raw, code))
    np.testing.assert_array_equal(NpyTemplate(dtype, shape).array(raw), found)


def test_elements_without_a_type_are_written_as_their_bits() -> None:
    """HiFloat8 has no type in numpy and no exact wider one here: the file holds its codes."""
    found = np.load(io.BytesIO(content("HiFloat8", (2, 3), bits(6, 0))))
    assert (found.dtype, found.shape) == (np.uint8, (2, 3))


@pytest.mark.parametrize(("dtype", "raw", "words"), [("Float7", b"", "size of their elements"), ("Float32", b"12345678", "8 bytes are no")])
def test_what_cannot_be_is_refused(dtype: str, raw: bytes, words: Any) -> None:
    """A type that nobody knows, and bytes of another shape, are errors of this project."""
    with pytest.raises(DumpFormatError, match=words):
        NpyTemplate(dtype, (3,)).array(raw)
