"""Arguments of a recorded call, made again: saved tensors where the dump has them, otherwise drawn from their statistics."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from msprobe_engine.dump.tensor_reader import TensorFiles
from msprobe_engine.errors import DumpFormatError, UsageError
from msprobe_integrations.torch.backend import TorchBackend

LARGEST = 1 << 33
"""Bytes of one drawn tensor: a damaged shape must not take the machine's memory."""
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DEEPEST = 20


class CannotMake(Exception):
    """An argument is of a kind that no dump can give back; the text says which."""


class Arguments:
    """Makes arguments of the records of one rank directory.

    Args:
        files: its saved tensors, or None.

    Attributes:
        drawn: whether any tensor since the last `of` was drawn and not read.
    """

    def __init__(self, files: TensorFiles | None) -> None:
        self._files = files
        self._backend = TorchBackend()
        self.drawn = False

    def of(self, record: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of a forward record, on the CPU.

        Raises:
            CannotMake: an argument cannot be made.
        """
        self.drawn = False
        args, kwargs = record.get("input_args") or [], record.get("input_kwargs") or {}
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise CannotMake("its arguments are damaged")
        return [self.make(item) for item in args], {str(key): self.make(item) for key, item in kwargs.items()}

    def make(self, item: Any, depth: int = 0) -> Any:
        """One argument."""
        if depth > _DEEPEST:
            raise CannotMake("its arguments are nested too deep")
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, list):
            return [self.make(child, depth + 1) for child in item]
        if not isinstance(item, Mapping):
            raise CannotMake(f"an argument is a {type(item).__name__}")
        kind = item.get("type")
        if isinstance(item.get("dtype"), str) and "shape" in item:
            return self._tensor(item)
        if kind is None:
            return {str(key): self.make(child, depth + 1) for key, child in item.items()}
        return _plain(str(kind), item.get("value"))

    def _tensor(self, item: Mapping[str, Any]) -> torch.Tensor:
        name = item.get("data_name")
        if self._files is not None and isinstance(name, str) and name not in ("", "-1"):
            try:
                loaded = self._files.load(name, self._backend)
                if isinstance(loaded, torch.Tensor):
                    return loaded.detach()
            except (DumpFormatError, UsageError):
                pass  # not saved, or damaged: drawn, and the result says so
        self.drawn = True
        return draw(item)


def draw(item: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of the recorded type and shape between the recorded extremes, both of which occur; NaN and Inf occur where they did.

    Raises:
        CannotMake: type or shape is not one of torch, or the tensor would be larger than `LARGEST`.
    """
    dtype = getattr(torch, str(item["dtype"]).removeprefix("torch."), None)
    shape = item["shape"]
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise CannotMake(f"a tensor of type {str(item['dtype'])[:40]} and shape {str(shape)[:80]}")
    if math.prod(shape) * 16 > LARGEST:
        raise CannotMake(f"a tensor of shape {shape} is too large to be drawn")
    low, high = _number(item.get("Min")), _number(item.get("Max"))
    generator = torch.Generator().manual_seed(zlib.crc32(repr((str(dtype), shape, low, high)).encode()))
    a, b = (low if math.isfinite(low) else -1.0), (high if math.isfinite(high) else 1.0)
    a, b = min(a, b), max(a, b)
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * (b - a) + a
    if values.numel():
        flat = values.reshape(-1)
        flat[0], flat[-1] = low, high
    if dtype is torch.bool:
        return values >= 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        values = values.nan_to_num().round()
    return values.to(dtype)


def _number(value: Any) -> float:
    if isinstance(value, str):
        value = _WORDS.get(value)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _plain(kind: str, value: Any) -> Any:
    if kind == "slice" and isinstance(value, list) and len(value) == 3:
        return slice(*value)
    if kind == "ellipsis":
        return ...
    if kind == "torch.Size" and isinstance(value, Sequence):
        return torch.Size(value)
    if kind in ("torch.dtype", "torch.memory_format", "torch.layout"):
        found = getattr(torch, str(value).removeprefix("torch."), None)
        if isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
            return found
    if kind == "torch.device":
        return torch.device("cpu")
    if kind in ("int", "float", "bool", "str", "NoneType"):
        return _WORDS.get(value, value) if kind == "float" and isinstance(value, str) else value
    if kind == "complex":
        try:
            return complex(value)
        except (TypeError, ValueError):
            pass
    raise CannotMake(f"an argument of type {kind[:80]}")
