"""Notes of the first monitored step of a torch training, see `msprobe_integrations.common.monitor.module_notes`."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch

from msprobe_integrations.common.monitor import module_notes
from msprobe_integrations.torch.hooks import frames
from msprobe_integrations.torch.hooks.backward import GradientWatch, edge, sequence_number


class ModuleNotes(module_notes.ModuleNotes):
    """See there."""

    tensor = torch.Tensor

    def hides(self, code: CodeType) -> bool:
        """Frames of torch and of the probe are left out."""
        return frames.hides(code)

    def _first_run(self) -> bool:
        return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1

    def _recording(self) -> bool:
        return torch.is_grad_enabled()

    def _edges(self, tensors: Sequence[Any]) -> tuple[list[Any], int]:
        return [edge(tensor) for tensor in tensors], sequence_number()

    def _make_watch(self, name: str, inputs: int, outputs: int) -> GradientWatch:
        return GradientWatch(name, inputs, outputs, self._describe, self._gradients, self._fail)
