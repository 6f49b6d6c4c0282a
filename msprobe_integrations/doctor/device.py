"""The device that is checked, as each check gets it."""

from __future__ import annotations

import gc
import importlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """A device, or the CPU in its place.

    Attributes:
        type: ``cuda``, ``npu`` or ``cpu``.
        peer: directory in which the existing tool was installed, "" without it.
        end: when the time of this check is up, by `time.monotonic`.
    """

    type: str = "cpu"
    peer: str = ""
    end: float = field(default_factory=lambda: time.monotonic() + 600.0)

    @property
    def full(self) -> bool:
        """Everything is checked; False: the reduced set of the CPU."""
        return self.type != "cpu"

    @property
    def device(self) -> torch.device:
        """The first device of the type."""
        return torch.device(self.type, 0) if self.full else torch.device("cpu")

    @property
    def module(self) -> Any:
        """``torch.cuda`` or its like."""
        return getattr(torch, self.type)

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.full:
            self.module.synchronize()

    def free_memory(self) -> int:
        """Bytes that a check may take, after what is no longer used was given back; on the CPU a quarter of a GiB."""
        if not self.full:
            return 1 << 28
        gc.collect()
        self.module.synchronize()
        self.module.empty_cache()
        return int(self.module.mem_get_info()[0])


def find_device(wanted: str = "") -> str:
    """The type of the device to check: `wanted`, or the first of ``cuda``, ``npu`` and ``cpu`` that is there.

    Raises:
        RuntimeError: the one that is wanted is not there.
    """
    if wanted in ("", "cuda") and torch.cuda.is_available():
        return "cuda"
    if wanted in ("", "npu"):
        try:
            importlib.import_module("torch_npu")
            if torch.npu.is_available():  # type: ignore[attr-defined]
                return "npu"
        except Exception as error:
            if wanted:
                raise RuntimeError(f"no NPU can be used: {type(error).__name__}: {error}") from None
    if wanted in ("", "cpu"):
        return "cpu"
    raise RuntimeError(f"torch {torch.__version__} finds no device of type {wanted}")
