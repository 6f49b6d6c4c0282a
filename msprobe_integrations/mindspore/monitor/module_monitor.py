"""The module side of a MindSpore probe: Cells and communication."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any

import mindspore

from msprobe_engine.core.log import warn_once
from msprobe_engine.core.settings.schema import LayerFeatureSettings
from msprobe_integrations.common.monitor import module_monitor, module_notes
from msprobe_integrations.common.monitor.targets import Named
from msprobe_integrations.mindspore.hooks import autograd, frames
from msprobe_integrations.mindspore.hooks.cells import CellHooks
from msprobe_integrations.mindspore.models import named_parameters
from msprobe_integrations.mindspore.monitor.cell_names import named_cells, unwrap_model
from msprobe_integrations.mindspore.monitor.collectives import CollectiveWatch
from msprobe_integrations.mindspore.monitor.tensors import CellWatch


class ModuleMonitor(module_monitor.ModuleMonitor):
    """See `msprobe_integrations.common.monitor.module_monitor.ModuleMonitor`."""

    def attach(self, models: Sequence[Any]) -> None:
        """Choose the Cells by the settings."""
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            warn_once(
                "monitor graph mode",
                "monitor: in GRAPH_MODE Cells are called inside of a compiled graph, where activations are not seen; use PYNATIVE_MODE, or "
                "a dump of level L0",
            )
        super().attach(models)

    def _make_hooks(self) -> CellHooks:
        return CellHooks()

    def _make_collectives(self) -> CollectiveWatch | None:
        monitor = self.monitor
        return CollectiveWatch(self) if monitor.collectives or monitor.collective_inputs or monitor.collective_stacks else None

    def _make_watch(self) -> CellWatch:
        return CellWatch(self)

    def _make_features(self, settings: LayerFeatureSettings) -> Any:
        del settings
        warn_once("monitor.layer_features", "monitor.layer_features has no effect with MindSpore: they are made for PyTorch")

    def _make_notes(self) -> CellNotes:
        return CellNotes(self)

    def _named_modules(self, models: Sequence[Any]) -> list[Named]:
        return list(named_cells(models))

    def _parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in named_parameters(unwrap_model(model))]

    def _counts(self) -> bool:
        return bool(autograd.recording()) and autograd.graph_task() == -1

    def _is_training(self, root: Any) -> bool:
        """MindSpore's Cells begin in evaluation mode, and many programs leave them there: what is recorded for gradients is training."""
        return bool(root.training) or bool(autograd.recording())


def _ignore_order(_watch: autograd.Watch) -> None:
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

    def _is_recording(self) -> bool:
        return autograd.available and bool(autograd.recording())

    def _edges(self, tensors: Sequence[Any]) -> tuple[list[Any], int]:
        if not self._is_recording():
            return [None] * len(tensors), 0
        edges = [autograd.edge(tensor) for tensor in tensors]
        self._newest = max(self._newest, autograd.newest(edges))
        return edges, self._newest + 1

    def _make_watch(self, name: str, inputs: int, outputs: int) -> autograd.Watch:
        watch = autograd.Watch(name, inputs, outputs, self._describe, self._gradients, self._fail)
        watch.reached = _ignore_order
        return watch
