"""How much larger weights have become since the first update that was seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from msprobe_integrations.common.parameters.gradients import Piece
from msprobe_integrations.common.parameters.source import ParameterValues
from msprobe_integrations.torch.parameters.lost_updates import PARAMETERS, some

_STEPS = 100
"""Steps from the first one on that are looked at."""


class WeightGrowth:
    """A sample of the elements of some matrices, which are no scales and no biases that begin with 0."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        matrices = [p for p in pieces if len(p.shape) > 1 and p.parameter.is_floating_point()]
        matrices = [p for p in matrices if p.parameter.device == matrices[0].parameter.device]
        self._pieces = matrices[:: max(1, len(matrices) // PARAMETERS)][:PARAMETERS]
        self._first: torch.Tensor | None = None
        self._until = 0

    def measure(self, source: ParameterValues, step: int) -> torch.Tensor | None:
        """The median over the matrices, one number on the device; None at first and later on. An update is about to begin."""
        if not self._pieces or (self._first is not None and step > self._until):
            return None
        values = [source.value(piece) for piece in self._pieces]
        if any(value is None for value in values):
            return None
        sizes = torch.stack([some(value).float().square().mean().sqrt() for value in values])
        if self._first is None:
            self._first, self._until = sizes, step + _STEPS
            return None
        return torch.nan_to_num(sizes / self._first, nan=1.0, posinf=1.0).median()
