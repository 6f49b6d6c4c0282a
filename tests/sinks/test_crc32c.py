"""CRC-32C with numpy."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.sinks.crc32c import crc32c, masked_crc32c


@pytest.mark.parametrize(("data", "crc"), [(b"\0" * 32, 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E), (b"", 0)])
def test_known_values(data: bytes, crc: int) -> None:
    """The examples of RFC 3720, appendix B.4."""
    assert crc32c(data) == crc


@given(st.integers(0, 70_000), st.integers())
def test_equal_to_tensorboards(length: int, seed: int) -> None:
    """For any length it is what TensorBoard computes byte by byte."""
    from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

    data = random.Random(seed).randbytes(length)
    assert crc32c(data) == pywrap_tensorflow.crc32c(data)
    assert masked_crc32c(data) == pywrap_tensorflow.masked_crc32c(data)
