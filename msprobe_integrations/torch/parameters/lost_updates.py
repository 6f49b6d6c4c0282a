"""Which part of the elements of parameters in 16 bits an update leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from msprobe_integrations.common.parameters.gradients import Piece
from msprobe_integrations.common.parameters.source import ParameterValues

PARAMETERS, _ELEMENTS = 16, 2048
"""So many parameters, and of each so many elements, are looked at."""


class LostUpdates:
    """A sample of the elements before and after an update.

    Args:
        optimizer: those of torch round to the nearest number and keep no rest; of others it is not known what stays behind for a later
            update, so nothing is looked at.
    """

    def __init__(self, optimizer: Any, pieces: Sequence[Piece]) -> None:
        own = type(optimizer).__module__.partition(".")[0] == "torch"
        held = {p for group in optimizer.param_groups for p in group["params"]} if own else set()
        short = [p for p in pieces if p.parameter in held and p.parameter.is_floating_point() and p.parameter.element_size() == 2]
        short = [p for p in short if p.parameter.device == short[0].parameter.device]
        self._pieces = short[:: max(1, len(short) // PARAMETERS)][:PARAMETERS]
        self._before: list[tuple[Piece, torch.Tensor, torch.Tensor]] = []

    def before(self, source: ParameterValues) -> None:
        """Gradients are what the update will use."""
        self._before = []
        for piece in self._pieces:
            value, gradient = source.value(piece), source.gradient(piece)
            if value is not None and gradient is not None and source.hyper(piece).get("lr") != 0.0:
                self._before.append((piece, some(value).clone(), some(gradient) != 0))

    def after(self, source: ParameterValues) -> torch.Tensor | None:
        """The part, one number on the device; None where nothing is looked at."""
        before, self._before = self._before, []
        lost, judged = [], []
        for piece, value, has_gradient in before:
            now = source.value(piece)
            if now is not None:
                lost.append(((some(now) == value) & has_gradient).sum())
                judged.append(has_gradient.sum())
        return torch.stack(lost).sum() / torch.stack(judged).sum().clamp(min=1) if lost else None


def some(tensor: torch.Tensor) -> torch.Tensor:
    """A sample of the elements, the same ones each time."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS]
