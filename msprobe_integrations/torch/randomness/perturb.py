"""Moves the weights of a training by about one rounding unit before its first step: a calibration run.

This changes the training on purpose. Dumps of such runs show how far round-off carries each record (``msprobe diagnose --calibration``).
Replicas stay equal: the signs follow from the name of a parameter and the seed, and torch's random streams are left alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import nn

from msprobe_engine.core.log import get_logger
from msprobe_integrations.torch.tensors.dtensors import local as local_part

_log = get_logger()


def perturb(model: nn.Module | Sequence[nn.Module], how: str, seed: int) -> int:
    """Change all floating-point parameters of 16 bits and more in place; returns how many tensors were changed.

    Args:
        how: ``ulp`` multiplies each element by 1, 1 - eps or 1 + eps of its dtype; ``bf16`` rounds each element to bfloat16.
        seed: other numbers give other signs.
    """
    changed = 0
    for chunk, part in enumerate(model if isinstance(model, Sequence) else [model]):
        for name, parameter in part.named_parameters():
            local = local_part(parameter).detach()  # of a DTensor the shard
            if not local.is_floating_point() or local.element_size() < 2 or local.is_meta:
                continue
            if how == "bf16":
                local.copy_(local.to(torch.bfloat16))
            else:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{chunk}/{name}".encode()))
                signs = torch.randint(-1, 2, local.shape, generator=generator, dtype=torch.int8).to(local.device, local.dtype)
                local.add_(local * signs * torch.finfo(local.dtype).eps)
            changed += 1
    _log.warning(
        "calibration run: %d parameter tensors were %s before the first step; this training differs from the real one on purpose",
        changed,
        "rounded to bfloat16" if how == "bf16" else "moved by one rounding unit",
    )
    return changed
