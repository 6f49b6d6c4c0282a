"""The module side of a torch probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from msprobe_engine.core.settings.schema import LayerFeatureSettings
from msprobe_integrations.common.monitor import module_monitor, module_notes
from msprobe_integrations.common.monitor.targets import Named
from msprobe_integrations.torch.hooks import frames
from msprobe_integrations.torch.hooks import nodes as node_hooks
from msprobe_integrations.torch.hooks.backward import GradientWatch, edge, sequence_number
from msprobe_integrations.torch.hooks.modules import ModuleHooks, say_sealed
from msprobe_integrations.torch.monitor.targets import named_modules, unwrap_model
from msprobe_integrations.torch.monitor.tensors import TensorWatch

if TYPE_CHECKING:
    from msprobe_integrations.torch.monitor.collectives import CollectiveWatch
    from msprobe_integrations.torch.monitor.features import LayerFeatures

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class ModuleMonitor(module_monitor.ModuleMonitor):
    """See `msprobe_integrations.common.monitor.module_monitor.ModuleMonitor`."""

    def _make_hooks(self) -> ModuleHooks:
        probe = self.probe
        return ModuleHooks(lambda error: probe.faults.fail("compiled code", error))

    def _make_collectives(self) -> CollectiveWatch | None:
        if not torch.distributed.is_available():
            return None
        from msprobe_integrations.torch.monitor.collectives import CollectiveWatch

        return CollectiveWatch(self)

    def _make_watch(self) -> TensorWatch:
        return TensorWatch(self)

    def _make_features(self, settings: LayerFeatureSettings) -> LayerFeatures:
        from msprobe_integrations.torch.monitor.features import LayerFeatures

        return LayerFeatures(self, settings)

    def _make_notes(self) -> ModuleNotes:
        return ModuleNotes(self)

    def _named_modules(self, models: Sequence[Any]) -> list[Named]:
        return list(named_modules(models))

    def _parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in unwrap_model(model).named_parameters()]

    def _counts(self) -> bool:
        return torch.is_grad_enabled() and _graph_task() == -1 and not torch.compiler.is_compiling()

    def _say_sealed(self, count: int) -> None:
        say_sealed(count)

    def _set_light_hooks(self, on: bool) -> None:
        node_hooks.install() if on else node_hooks.remove()


class ModuleNotes(module_notes.ModuleNotes):
    """See there."""

    tensor = torch.Tensor

    def hides(self, code: CodeType) -> bool:
        """Frames of torch and of the probe are left out."""
        return frames.hides(code)

    def _first_run(self) -> bool:
        return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1

    def _is_recording(self) -> bool:
        return torch.is_grad_enabled()

    def _edges(self, tensors: Sequence[Any]) -> tuple[list[Any], int]:
        return [edge(tensor) for tensor in tensors], sequence_number()

    def _make_watch(self, name: str, inputs: int, outputs: int) -> GradientWatch:
        return GradientWatch(name, inputs, outputs, self._describe, self._gradients, self._fail)
