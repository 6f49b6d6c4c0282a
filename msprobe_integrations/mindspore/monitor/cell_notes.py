"""Notes of the first monitored step of a MindSpore training, see `msprobe_integrations.common.monitor.module_notes`."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import mindspore

from msprobe_integrations.common.monitor import module_notes
from msprobe_integrations.mindspore.hooks import autograd, frames

if TYPE_CHECKING:
    from msprobe_integrations.mindspore.monitor.module_monitor import ModuleMonitor


def _reached(_watch: autograd.Watch) -> None:
    """A backward pass has come to a call: notes have no order."""


class CellNotes(module_notes.ModuleNotes):
    """See there. Gradients need MindSpore 2.10."""

    tensor = mindspore.Tensor

    def __init__(self, side: ModuleMonitor) -> None:
        super().__init__(side)
        self._newest = -1

    def hides(self, code: CodeType) -> bool:
        """Frames of MindSpore and of the probe are left out."""
        return frames.hides(code)

    def _first_run(self) -> bool:
        return autograd.graph_task() == -1

    def _recording(self) -> bool:
        return autograd.available and bool(autograd.recording())

    def _edges(self, tensors: Sequence[Any]) -> tuple[list[Any], int]:
        if not self._recording():
            return [None] * len(tensors), 0
        edges = [autograd.edge(tensor) for tensor in tensors]
        self._newest = max(self._newest, autograd.newest(edges))
        return edges, self._newest + 1

    def _make_watch(self, name: str, inputs: int, outputs: int) -> autograd.Watch:
        watch = autograd.Watch(name, inputs, outputs, self._describe, self._gradients, self._fail)
        watch.reached = _reached
        return watch
