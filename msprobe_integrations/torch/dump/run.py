"""The dump of one process that trains with torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.dump_rules import kernel_api
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.core.window import Window
from msprobe_integrations.common.capture.custom_api import CustomApis
from msprobe_integrations.common.dump.debug_save import SavedVariables
from msprobe_integrations.common.dump.dump_plugins import DumpPlugin
from msprobe_integrations.common.dump.module_selection import ModuleSelection
from msprobe_integrations.common.dump.run import DumpRun
from msprobe_integrations.torch.ascend.kernel_dump import KernelDump
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture import mode_stack as modestack
from msprobe_integrations.torch.capture.api import ApiCapture
from msprobe_integrations.torch.capture.level import Capture
from msprobe_integrations.torch.capture.modules import ModuleCapture
from msprobe_integrations.torch.config.run import RunConfig
from msprobe_integrations.torch.dump.checks import MODELS
from msprobe_integrations.torch.dump.replay import Replay
from msprobe_integrations.torch.dump.tensor_saver import TensorSaver
from msprobe_integrations.torch.hooks.modules import OwnHook
from msprobe_integrations.torch.randomness.perturb import perturb
from msprobe_integrations.torch.tensors.slices import Slices
from msprobe_integrations.torch.tensors.structure import convert


class TorchSavedVariables(SavedVariables):
    """See `SavedVariables`."""

    tensors = torch.Tensor

    convert = staticmethod(convert)
    unseen = torch._C.DisableTorchFunction

    @staticmethod
    def hook(tensor: Any, arrived: Callable[[Any], None]) -> Any:
        return tensor.register_hook(arrived) if tensor.requires_grad else None


class TorchDumpRun(DumpRun):
    """See `DumpRun`."""

    models = MODELS
    backend_type, config_type, saved_type = TorchBackend, RunConfig, TorchSavedVariables
    backend: TorchBackend
    capture: Capture | None
    keeper: TensorSaver | None
    slices: Slices | None
    _modes = 0
    _perturbed = False

    def start(self, model: Any, token_range: Any, rank_id: Any, scheduled_tokens: Mapping[str, int] | None) -> None:
        self._modes = modestack.depth()
        super().start(model, token_range, rank_id, scheduled_tokens)

    def make_keeper(self, dump: DumpSettings, before: Any) -> TensorSaver | None:
        return TensorSaver.of_dump(dump, self.backend, self.pipeline, self.files.writer, self.faults, before, slices=self.slices)

    def make_capture(self, dump: DumpSettings) -> Capture:
        return Capture.of_dump(self.pipeline, dump, self.slices, self.keeper)

    def make_focus(self) -> ModuleSelection:
        assert self.capture is not None
        recorder = self.capture.recorder
        return ModuleSelection(lambda is_on: ModuleCapture(recorder, is_on, lambda: True))

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


def parts_of(dump: DumpSettings, root: Path, faults: Faults) -> list[DumpPlugin]:
    """What the settings ask for.

    Raises:
        SettingsError: level L2 for something else than one API.
        UsageError: level L2 without an NPU.
    """
    parts: list[DumpPlugin] = [] if dump.load is None else [Replay(dump.load, faults)]
    if dump.task == "free_benchmark":
        from msprobe_integrations.torch.op_tools.free_benchmark.run import FreeBenchmark  # here: a plain dump does not pay for it

        parts.append(FreeBenchmark(dump, root, faults))
    if dump.online is not None:
        from msprobe_integrations.torch.op_tools.online.calls import OnlineCalls  # here: sockets and TLS

        parts.append(OnlineCalls(dump, faults))
    if dump.level == "L2":
        parts.append(_Kernels(KernelDump(kernel_api(dump), root, faults), Window(dump.rank, dump.step)))
    return parts


class _Kernels(DumpPlugin):
    """The kernel dump in the steps where it is wanted."""

    def __init__(self, kernels: KernelDump, window: Window) -> None:
        self._kernels = kernels
        self._window = window

    def begin(self, model: Any, step: int, rank: int | None) -> None:  # noqa: ARG002
        if self._window.is_wanted(step, rank):
            self._kernels.begin(step, rank)

    def pause(self) -> None:
        self._kernels.pause()

    def end_step(self, next_step: int) -> None:  # noqa: ARG002
        self._kernels.end_step()

    def close(self) -> None:
        self._kernels.close()
