"""The dump of one process that trains with torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.core.records import Entry, TensorRef
from msprobe_engine.core.settings.schema import DumpSettings, ProbeSettings
from msprobe_integrations.common.capture.custom_api import CustomApis
from msprobe_integrations.common.dump.dump_plugins import DumpPlugin
from msprobe_integrations.common.dump.module_selection import ModuleSelection
from msprobe_integrations.common.dump.run import DumpRun
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture import mode_stack as modestack
from msprobe_integrations.torch.capture.api import ApiCapture
from msprobe_integrations.torch.capture.level import Capture
from msprobe_integrations.torch.capture.modules import ModuleCapture
from msprobe_integrations.torch.config.run import RunConfig
from msprobe_integrations.torch.dump.checks import MODELS
from msprobe_integrations.torch.dump.debug_save import TorchSavedVariables
from msprobe_integrations.torch.dump.dump_plugins import parts_of
from msprobe_integrations.torch.dump.tensor_saver import TensorSaver
from msprobe_integrations.torch.hooks.modules import OwnHook
from msprobe_integrations.torch.randomness.perturb import perturb
from msprobe_integrations.torch.tensors.slices import Slices


class TorchDumpRun(DumpRun):
    """See `DumpRun`."""

    models = MODELS
    backend: TorchBackend
    capture: Capture | None
    keeper: TensorSaver | None
    slices: Slices | None
    _modes = 0
    _perturbed = False

    def start(self, model: Any, token_range: Any, rank_id: Any, scheduled_tokens: Mapping[str, int] | None) -> None:
        self._modes = modestack.depth()
        super().start(model, token_range, rank_id, scheduled_tokens)

    def make_backend(self) -> TorchBackend:
        return TorchBackend()

    def make_config(self, settings: ProbeSettings) -> RunConfig:
        return RunConfig(settings)

    def make_keeper(self, dump: DumpSettings, before: Any) -> TensorSaver | None:
        return TensorSaver.of_dump(dump, self.backend, self.pipeline, self.files.writer, self.faults, before, slices=self.slices)

    def make_capture(self, dump: DumpSettings) -> Capture:
        return Capture.of_dump(self.pipeline, dump, self.slices, self.keeper)

    def make_focus(self) -> ModuleSelection:
        assert self.capture is not None
        recorder = self.capture.recorder
        return ModuleSelection(lambda is_on: ModuleCapture(recorder, is_on, lambda: True))

    def make_saved(
        self, reduce: Callable[[Any], TensorRef], complete: Callable[[Entry], None], broken: Callable[[Exception], None]
    ) -> TorchSavedVariables:
        return TorchSavedVariables(self.pipeline, reduce, complete, broken)

    def make_custom_apis(self) -> CustomApis:
        return CustomApis(self._api, torch.compiler.is_compiling)

    def _api(self) -> ApiCapture | None:
        """What sees calls of APIs now."""
        if self.capture is not None:
            return self.capture.api
        return next((part.api for part in self.extras.parts if part.api is not None), None)  # free benchmark, online

    def make_extras(self, dump: DumpSettings, root: Path) -> list[DumpPlugin]:
        return parts_of(dump, root, self.faults)

    def make_slices(self, dump: DumpSettings) -> Slices:
        return Slices(self.backend, dump.slice)

    def before_forward(self, model: Any, call: Callable[..., None]) -> Any:
        return model.register_forward_pre_hook(OwnHook(call))

    def prepare(self, model: Any) -> None:
        """Move the weights, once, when a calibration run is asked for."""
        if self.dump.perturb and not self._perturbed:
            self._perturbed = True
            with self.faults.guard("perturb"):
                perturb(model, self.dump.perturb, self.dump.perturb_seed)

    def open_capture(self, capture: Capture, inside: bool) -> None:
        """Modes that the program enters inside of the model's call stand above the capture's."""
        capture.open(self._modes if inside else None)
