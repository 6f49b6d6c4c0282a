"""Loads what Megatron saved without importing Megatron, which takes seconds: its classes in the arguments stay text."""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import Any

import torch


class _WithoutMegatron(types.ModuleType):
    """`pickle`, but for classes of Megatron."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            return str if module.startswith("megatron") else super().find_class(module, name)

    load = staticmethod(pickle.load)


def load(file: Path) -> dict[str, Any]:
    """What a file of ``torch.save`` holds, as torch gives it."""
    found: dict[str, Any] = torch.load(file, weights_only=False, pickle_module=_WithoutMegatron)
    return found
