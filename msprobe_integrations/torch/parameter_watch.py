"""Takes every family of the parameter side at the moments that a source reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from msprobe_integrations.torch.gradients import ACCUMULATED, LOCAL, Piece

if TYPE_CHECKING:
    from msprobe_integrations.torch.parameters import ParameterSource
    from msprobe_integrations.torch.probe import TorchProbe


class ParameterWatch:
    """One per source. A fault in a family switches that family off and nothing else.

    Attributes:
        on_update: called after every update of the optimizer with True when it was skipped; for loops that take an update for a step.
        entry_only: gradients are taken only at the entry of the update, under the phase they have reached by then.
    """

    def __init__(self, probe: TorchProbe, source: ParameterSource) -> None:
        self.on_update: Callable[[bool], None] | None = None
        self.entry_only = False
        self.source = source
        self._probe = probe

    def begin_step(self, due: bool, last: bool) -> None:
        """A step begins. `due`: it is monitored; `last`: the one before was the last for now."""

    def micro_gradient(self, piece: Piece, gradient: torch.Tensor, phase: str = LOCAL, micro_step: int = -1) -> None:
        """The gradient of one micro batch (``micro_batch_gradients``). -1: numbered by the probe, or by how often `piece` came."""

    def unreduced(self, piece: Piece, gradient: torch.Tensor, phase: str = ACCUMULATED, micro_step: int = -1) -> None:
        """The whole gradient of this rank before the reduction (``unreduced_gradients``). The last one of a step counts."""

    def change_to(self, phase: str) -> None:
        """Something is about to change the gradients in place; afterwards they are in `phase`. They are taken as they are if the phase
        they are in is wanted."""

    def before_step(self) -> None:
        """Entry of the update: gradients in the present phase, parameters."""

    def ready(self) -> None:
        """Gradients and states are what the update will use: gradients in the present phase, states before, agreement."""

    def after_step(self, skipped: bool | torch.Tensor = False) -> None:
        """The update is done, or was skipped (a tensor: not known on the host, 0 or 1): parameters, states, update and ratio.
        Calls `on_update`."""

    def scalar(self, name: str, value: Any) -> None:
        """A number of this step; one that is given to `end_step` of the probe replaces it."""

    def end_step(self) -> None:
        """The step is over: merges over ranks and numbers of the whole model are handed on."""

    def close(self) -> None:
        """Take everything off; the probe goes on without it."""
