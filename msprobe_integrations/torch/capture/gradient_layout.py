"""Which gradients a backward record has a place for, see `msprobe_integrations.common.capture.gradient_layout`."""

from __future__ import annotations

from operator import attrgetter

import torch

from msprobe_integrations.common.capture.gradient_layout import finders
from msprobe_integrations.torch.hooks.backward import edge
from msprobe_integrations.torch.tensors.containers import tensors_in


def _can(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


edges_of, differentiable = finders(torch.Tensor, tensors_in, edge, attrgetter("requires_grad"), _can)
