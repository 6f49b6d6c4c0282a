"""`seed_all`: the same random numbers and deterministic kernels in every run."""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from msprobe_engine.errors import UsageError


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed Python, numpy and torch (all devices) and choose deterministic algorithms.

    Args:
        seed: 0 .. 2**32 - 1.
        mode: use deterministic algorithms.
        rm_dropout: dropout functions and modules pass their input through.

    Raises:
        UsageError: a value is of the wrong type or out of range.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise UsageError(f"seed_all: seed is {seed!r}; allowed: an int from 0 to 4294967295")
    for name, value in (("mode", mode), ("rm_dropout", rm_dropout)):
        if not isinstance(value, bool):
            raise UsageError(f"seed_all: {name} is {value!r}; allowed: True or False")
    random.seed(seed)
    np.random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(mode)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        npu.manual_seed_all(seed)
        os.environ["HCCL_DETERMINISTIC"] = str(mode)
    if rm_dropout:
        for name in ("dropout", "dropout2d", "dropout3d"):
            _without_dropout(name)


def _without_dropout(name: str) -> None:
    original = getattr(functional, name)
    if getattr(original, "_msprobe_removed", False):
        return

    @functools.wraps(original)
    def passing(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if p < 0.0 or p > 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        return original(input, p=0.0, training=training, inplace=inplace)

    passing._msprobe_removed = True  # type: ignore[attr-defined]
    setattr(functional, name, passing)
