"""Tensors as files, bytes and arrays."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.output_files import WholeFile
from msprobe_integrations.torch.statistics.pending import quiet
from msprobe_integrations.torch.tensors import describe as _describe
from msprobe_integrations.torch.tensors.arrays import as_array


class TensorBytes:
    """The part of `TorchBackend` that writes tensors and reads them."""

    def save(self, tensor: Any, path: Path) -> None:
        """Write a detached, contiguous CPU copy with ``torch.save``; mode 0640. Waits for the device."""
        with quiet():
            data = _describe.resolve(tensor)[0]
            if data is None:
                data = tensor
            copy = data.detach().to("cpu").contiguous()
            if copy.untyped_storage().nbytes() != copy.numel() * copy.element_size():
                copy = copy.clone()  # a view would take its whole storage into the file
            with WholeFile(path) as whole:
                torch.save(copy, whole.file)

    def to_bytes(self, tensor: Any) -> bytes:
        """A CPU tensor as the content of a ``.pt`` file."""
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return buffer.getvalue()

    def host_array(self, tensor: Any) -> Any:
        """A tensor (of a DTensor this rank's part) as an array of its own; types unknown to numpy as float32, which holds them exactly."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            tensor = tensor.detach()
            local = getattr(tensor, "to_local", None)
            return as_array(tensor if local is None else local())

    def load(self, path: Path) -> Any:
        """A tensor written by `save`, on the CPU. Executes nothing of the file."""
        return torch.load(path, weights_only=True, map_location="cpu")

    def from_bytes(self, data: bytes | bytearray | memoryview, dtype: str, shape: Sequence[int]) -> Any:
        """A tensor on the CPU from its bytes in C order.

        Args:
            dtype: as dump files have it, ``torch.bfloat16``.

        Raises:
            DumpFormatError: there is no such type, or the bytes are not those of the shape.
        """
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise DumpFormatError(f"dtype {dtype!r} is unknown to torch {torch.__version__}; read the dump with the version that wrote it")
        own = bytearray(data)
        try:
            flat = torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)
            return flat.view(kind).view(tuple(shape))
        except RuntimeError as error:
            raise DumpFormatError(f"{len(own)} bytes are no tensor of {dtype} and shape {list(shape)} ({error})") from None
