"""Tensors as the payload of a message: a complete safetensors file (https://huggingface.co/docs/safetensors, format)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from msprobe_engine.formats.dump.writing.packed_files import DTYPES, family

_PAD = 64


class Content(NamedTuple):
    """One tensor: its ``data_name``, dtype as dump files have it (``torch.bfloat16``), shape, and bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


def safetensors(tensors: Iterable[Content], step: int) -> list[bytes | bytearray | memoryview]:
    """Buffers that are a safetensors file when put one after the other: what `dump.tensor_reader.TensorFiles.of_shard` reads.

    Types that safetensors does not have go as U8 with the true type in the metadata, as packed dumps have them.
    """
    contents = list(tensors)
    metadata = {"format": family(contents[0].dtype) if contents else "pt", "step": str(step)}
    odd = {c.name: [c.dtype, list(c.shape)] for c in contents if c.dtype not in DTYPES}
    if odd:
        metadata["dtypes"] = json.dumps(odd)
    document: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for content in contents:
        size = memoryview(content.data).nbytes
        known = DTYPES.get(content.dtype)
        document[content.name] = {
            "dtype": known[0] if known else "U8",
            "shape": list(content.shape) if known else [size],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAD)
    return [len(text).to_bytes(8, "little") + text, *(c.data for c in contents)]
