"""CRC-32 and XOR of host memory: zlib and numpy say what they have to be."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.statistics import host_kernel, rows

needs_kernel = pytest.mark.skipif(not host_kernel.available, reason="the C kernel was not built")
BOTH = host_kernel.WANT_CRC | host_kernel.WANT_XOR
BYTES = np.random.default_rng(7).integers(0, 256, 3_000_000, dtype=np.uint8)


def xor_of(data: bytes) -> int:
    """The definition: words of eight bytes, the last one filled up with zeros."""
    total = 0
    for at in range(0, len(data), 8):
        total ^= int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little")
    return total


def checksums(row: np.ndarray) -> tuple[int | None, int | None]:
    """CRC and XOR of a row."""
    s = rows.read_row(row)
    return s.crc32, s.xor


@pytest.mark.usefixtures("isa")
def test_crc_of_every_length() -> None:
    """Every length up to 1100 bytes and some long ones, from every alignment, gives what zlib gives, also going on from a value."""
    address = BYTES.ctypes.data
    for n in (*range(1101), 4096, 65535, 65537, 1_000_001):
        for offset in (0, 1, 9):
            data = BYTES[offset : offset + n]
            assert host_kernel.crc32(address + offset, n) == zlib.crc32(data)
            assert host_kernel.crc32(address + offset, n, 0xDEADBEEF) == zlib.crc32(data, 0xDEADBEEF)


@given(parts=st.lists(st.integers(0, 3000), max_size=6))
def test_crc_goes_on(parts: list[int]) -> None:
    """The CRC of memory in pieces is that of the whole, wherever it is cut."""
    value, at = 0, 0
    for n in parts:
        value = host_kernel.crc32(BYTES.ctypes.data + at, n, value)
        at += n
    assert value == zlib.crc32(BYTES[:at])


@given(
    name=st.sampled_from(host_kernel.NAMES),
    n=st.one_of(st.integers(0, 40), st.integers(4000, 9000)),
    index0=st.sampled_from([0, 1, 1023]),
    kernel=st.booleans(),
)
def test_rows_of_every_type(name: str, n: int, index0: int, kernel: bool) -> None:
    """CRC and XOR are of the raw bytes of the elements, whatever their type and wherever a shard begins; other words stay as they are."""
    code, size = host_kernel.CODES[name], host_kernel.ITEMSIZE[host_kernel.CODES[name]]
    raw = BYTES[: n * size] % 2 if name == "bool" else BYTES[: n * size].copy()
    out, plain = np.empty(rows.WORDS), np.empty(rows.WORDS)
    if kernel:
        host_kernel.reduce(raw.ctypes.data, n, code, out.ctypes.data, BOTH, index0)
        host_kernel.reduce(raw.ctypes.data, n, code, plain.ctypes.data, 0, index0)
    else:
        out, plain = host_kernel.row_of(raw, code, BOTH, index0), host_kernel.row_of(raw, code, 0, index0)
    assert checksums(out) == (zlib.crc32(raw), xor_of(raw.tobytes()))
    assert checksums(plain) == (None, None)
    assert out[:12].tobytes() == plain[:12].tobytes()


@pytest.mark.usefixtures("isa")
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=4),
    name=st.sampled_from(["float32", "float16", "int64", "uint8", "complex128", "bool"]),
    data=st.data(),
)
def test_strided_memory_in_logical_order(shape: list[int], name: str, data: st.DataObject) -> None:
    """Transposed, sliced and expanded memory has the checksums of a packed copy."""
    code = host_kernel.CODES[name]
    count = int(np.prod(shape))
    whole = (BYTES[: count * np.dtype(name).itemsize] % 2).view(name).reshape(shape)
    view = whole.transpose(data.draw(st.permutations(range(len(shape)))))
    if view.ndim and data.draw(st.booleans()):
        view = view[:: data.draw(st.sampled_from([1, 2, 3]))]
    if data.draw(st.booleans()):
        view = np.broadcast_to(view[..., None], (*view.shape, 3))
    out = np.empty(rows.WORDS)
    strides = tuple(s // view.itemsize for s in view.strides)
    host_kernel.reduce_strided(view.ctypes.data, view.shape, strides, code, out.ctypes.data, BOTH, 0)
    packed = np.ascontiguousarray(view).tobytes()
    assert checksums(out) == (zlib.crc32(packed), xor_of(packed))


@needs_kernel
@pytest.mark.parametrize("arguments", [(0, 5, 0), (BYTES.ctypes.data, -1, 0)])
def test_wrong_memory_is_refused(arguments: tuple[int, int, int]) -> None:
    """A null pointer with a length and a negative length are errors, not reads."""
    with pytest.raises(ValueError, match="null pointer or negative size"):
        host_kernel.crc32(*arguments)


def test_merged_rows_have_no_checksum() -> None:
    """CRC and XOR of a union are not known from those of its parts; a row merged with an empty one keeps them."""
    parts = []
    for n in (8, 16):
        row = rows.empty(1)
        host_kernel.reduce(BYTES.ctypes.data, n, host_kernel.CODES["uint8"], row.ctypes.data, BOTH, 0)
        parts.append(row)
    assert checksums(rows.merge(*parts)[0]) == (None, None)
    assert rows.as_int64(rows.merge(*parts))[0, [rows.CRC, rows.XOR]].tolist() == [0, 0]
    for merged in (rows.merge(parts[0], rows.empty(1)), rows.merge(rows.empty(1), parts[0])):
        assert checksums(merged[0]) == (zlib.crc32(BYTES[:8]), xor_of(BYTES[:8].tobytes()))


def test_values_of_the_existing_format() -> None:
    """What 26.2.0 writes for two small tensors."""
    x = np.array([[0, 1, 2], [3, 4, 5]], np.float32)
    out = np.empty(rows.WORDS)
    host_kernel.reduce(x.ctypes.data, 6, host_kernel.CODES["float32"], out.ctypes.data, BOTH, 0)
    assert checksums(out) == (0x91E79017, 0x3F60000000800000)
    true = np.array([True])
    host_kernel.reduce(true.ctypes.data, 1, host_kernel.CODES["bool"], out.ctypes.data, BOTH, 0)
    assert checksums(out) == (0xA505DF1B, 1)
