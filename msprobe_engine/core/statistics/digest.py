"""The position-weighted digest of a tensor: 64 bits that say whether two tensors hold the same bits in the same places.

Definition. Let the tensor have elements in C order, element number i (its *global index* when the tensor is a shard) and let its
bits be cut into 32-bit words: 8- and 16-bit elements are zero-extended to one word, word index j = i; 32-bit elements are one
word, j = i; 64-bit elements (complex64 too) are two words, low half first, j = 2i and 2i + 1; complex128 are four. Then

    digest = sum over words ((b[j] ^ 0x9E3779B9) * w32[j % 1024]) * W64(j // 1024)   mod 2**64
    w32[k] = (splitmix64(0x6D7370726F626500 + k) >> 32) | 1        1024 fixed odd 32-bit constants, all different
    W64(k) = splitmix64(k) | 1
    splitmix64: S. Vigna's finaliser of x + 0x9E3779B97F4A7C15 (public domain, https://prng.di.unimi.it/splitmix64.c)

Properties, each checked in the tests:

* The digests of the shards of a tensor, taken with global indices, sum to the digest of the whole, in any order and for any
  sharding: addition mod 2**64 is associative.
* Every change of a single word is seen: a difference of two words is below 2**32 and not 0, its product with an odd 32-bit
  constant is below 2**64 and not 0, and multiplying by an odd 64-bit number is invertible. Every swap of two different words of
  one 1024-word block is seen for the same reason (the constants differ); other changes are missed with odds near 2**-64.
* A zero word counts (0x9E3779B9 is mixed in), so tensors of zeros of different length differ.

It is an error check, not a cryptographic hash. -0.0 and 0.0, and NaN with different payloads, are different bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import UsageError

XOR = 0x9E3779B9
BLOCK = 1024
SEED = 0x6D7370726F626500
MASK64 = 0xFFFFFFFFFFFFFFFF

U64 = npt.NDArray[np.uint64]


def splitmix64(x: U64) -> U64:
    """The splitmix64 output for each state in `x` (uint64, any shape)."""
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: U64 = z ^ (z >> np.uint64(31))
        return mixed


def word_weights() -> U64:
    """`w32`, [1024] uint64, each below 2**32 and odd."""
    high: U64 = splitmix64(np.uint64(SEED) + np.arange(BLOCK, dtype=np.uint64)) >> np.uint64(32)
    odd: U64 = high | np.uint64(1)
    return odd


def block_weights(first: int, n: int) -> U64:
    """`W64(first) ... W64(first + n - 1)`, [n] uint64."""
    odd: U64 = splitmix64(np.arange(first, first + n, dtype=np.uint64)) | np.uint64(1)
    return odd


_W32 = word_weights()
_PIECE = 1 << 20


def words_of(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The bits of `data` as a flat array of unsigned words of 8, 16 or 32 bits, C order."""
    flat = np.ascontiguousarray(data).reshape(-1)
    size = flat.dtype.itemsize
    if size in (1, 2, 4):
        return flat.view(f"u{size}")
    if size in (8, 16):
        return flat.view(np.uint32)
    raise UsageError(f"digest: elements of {size} bytes ({flat.dtype}) have no definition; allowed are 1, 2, 4, 8 and 16 bytes")


def words_per_element(itemsize: int) -> int:
    """How many 32-bit words one element of `itemsize` bytes has."""
    return max(1, itemsize // 4)


def digest_array(data: npt.NDArray[Any] | bytes | bytearray | memoryview, index0: int = 0) -> int:
    """The digest of `data`; the reference the kernels are tested against.

    Args:
        data: an array (its bits are taken as they are), or bytes (8-bit elements).
        index0: global index of the first element.

    Returns:
        0 <= digest < 2**64; 0 for no elements.
    """
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    first = index0 * words_per_element(array.dtype.itemsize)
    words = words_of(array)
    total = 0
    for start in range(0, words.size, _PIECE):
        piece = words[start : start + _PIECE].astype(np.uint64) ^ np.uint64(XOR)
        j0 = first + start
        head = j0 % BLOCK
        blocks = -(-(head + piece.size) // BLOCK)
        grid = np.zeros(blocks * BLOCK, np.uint64)
        grid[head : head + piece.size] = piece
        with np.errstate(over="ignore"):
            sums = (grid.reshape(blocks, BLOCK) * _W32).sum(1, dtype=np.uint64)
            total += int((sums * block_weights(j0 // BLOCK, blocks)).sum(dtype=np.uint64))
    return total & MASK64
