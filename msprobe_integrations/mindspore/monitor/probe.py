"""`MindSporeProbe`: the always-on probe of a MindSpore training run.

probe = MindSporeProbe.from_config("probe.yaml")
probe.attach(net, optimizer)
for step, (data, label) in enumerate(dataset):
    probe.begin_step(step)
    loss, gradients = forward_and_gradients(data, label)
    optimizer(gradients)
    probe.end_step({"loss": loss})
probe.close()
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import mindspore

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import TensorDescription
from msprobe_engine.core.settings.schema import DumpSettings, MonitorSettings
from msprobe_engine.probe.incident.notify import DirectoryNotifier, Notifier
from msprobe_integrations.common.monitor.probe import Probe
from msprobe_integrations.common.parameters.gradients import Exchange
from msprobe_integrations.common.parameters.parameter_monitor import ParameterMonitor
from msprobe_integrations.common.ranks.exchanges import Exchanges
from msprobe_integrations.common.ranks.rank_discovery import RankDiscovery
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.capture.captures import Captures
from msprobe_integrations.mindspore.capture.level import Capture
from msprobe_integrations.mindspore.config.run import RunConfig
from msprobe_integrations.mindspore.dump.tensor_saver import TensorSaver
from msprobe_integrations.mindspore.models import is_model
from msprobe_integrations.mindspore.monitor.module_monitor import ModuleMonitor
from msprobe_integrations.mindspore.parameters.adapter_source import AdapterSource, is_adapter_optimizer
from msprobe_integrations.mindspore.parameters.optimizers import is_optimizer
from msprobe_integrations.mindspore.parameters.source import CellSource
from msprobe_integrations.mindspore.ranks import job
from msprobe_integrations.mindspore.ranks.exchange import JobRanks, watch_ranks


class MindSporeProbe(Probe):
    """Monitor, rules, sinks and incidents around a training loop.

    All methods are safe to call at any time: a fault inside disables the part it happened in and the training goes on.
    """

    backend_type = MindSporeBackend
    number = TensorDescription("mindspore.Tensor", "Float32", (), None)
    backend: MindSporeBackend
    _watch: ModuleMonitor | None

    def _make_parameters(self) -> ParameterMonitor:
        return ParameterMonitor(self, find_source, Exchanges(_no_exchange), JobRanks(Path(self.settings.output_dir)))

    def _make_membership(self) -> RankDiscovery:
        return RankDiscovery(self, job.is_initialized, watch_ranks)

    def _make_run_config(self) -> RunConfig:
        return RunConfig(self.settings, self.pipeline.program)

    def _make_capture(self, level: str, **options: Any) -> Capture:
        del options  # communication is recorded with the other APIs, and what an optimizer calls is compiled
        return Capture(self.pipeline, level)

    def _make_dump(self, dump: DumpSettings) -> tuple[Captures, TensorSaver | None]:
        keeper = TensorSaver.of_dump(dump, self.backend, self.pipeline, self.session.writer, self.faults)
        return Captures(self.pipeline, dump, keeper), keeper

    def _make_watch(self, monitor: MonitorSettings | None) -> ModuleMonitor | None:
        return ModuleMonitor.build(self, monitor)

    def make_notifier(self, about: str = "") -> Notifier | None:
        """What tells other ranks of incidents, or of what `about` names, through a directory that all of them see; None for one process."""
        if self.backend.world_size() == 1:
            return None
        return DirectoryNotifier(Path(self.settings.output_dir) / (about or "incidents") / ".notify")

    def chunks_of(self, models: Any, optimizer: Any) -> list[Any]:
        """The network, or a list of networks, as a list.

        Raises:
            UsageError: `models` is something else, or `optimizer` updates nothing.
        """
        chunks = [models] if is_model(models) else list(models) if isinstance(models, (list, tuple)) else []
        if not chunks or not all(is_model(chunk) for chunk in chunks):
            raise UsageError(f"attach: the network is of type {type(models).__name__}; give the nn.Cell, or a list of them")
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            if each is not None and not is_optimizer(each) and not is_adapter_optimizer(each):
                raise UsageError(
                    f"attach: the optimizer is of type {type(each).__name__}; allowed: an optimizer of mindspore.nn, mint.optim or "
                    "experimental.optim, or a Cell with 'parameters' that is called with their gradients"
                )
        return chunks

    def unseen(self) -> AbstractContextManager[Any]:
        """Nothing to do: no operation of the framework runs."""
        return nullcontext()

    shield = unseen

    def at_hand(self, value: Any) -> bool:
        """Is this a tensor on the host?"""
        return self.backend.is_tensor(value) and self.backend.describe(value).device == "cpu"

    def finer(self, main: Any, parameter: Any) -> bool:
        """Optimizers of MindSpore update the parameters themselves."""
        del main, parameter
        return False

    def _step_ends(self) -> None:
        """Updates that no hook has seen are looked for."""
        for watch in self.parameters.watches:
            source = watch.source
            if isinstance(source, CellSource):
                source.step_ends()

    def _local_place(self) -> tuple[int, int]:
        """As the communication knows, else as `msrun` tells its workers: the device, and how many ranks there are."""
        if job.is_initialized():
            return int(mindspore.communication.get_local_rank()), int(mindspore.communication.get_local_rank_size())
        local = os.environ.get("LOCAL_RANK") or os.environ.get("DEVICE_ID") or "0"
        world = os.environ.get("LOCAL_WORLD_SIZE") or "1"
        return (int(local) if local.isdecimal() else 0), (int(world) if world.isdecimal() else 1)


def find_source(probe: Probe, models: Sequence[Any], optimizer: Any) -> CellSource | None:
    """The source for an optimizer; None without one."""
    if optimizer is None:
        return None
    return (AdapterSource if is_adapter_optimizer(optimizer) else CellSource)(probe, models, optimizer)


def _no_exchange(ranks: Sequence[int]) -> Exchange:
    raise UsageError(f"ranks {list(ranks)}: rows of slices of a parameter are not merged in MindSpore")
