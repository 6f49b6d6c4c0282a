"""`TorchProbe`: the always-on probe of a PyTorch training run. Framework integrations drive it; people who own their loop use it directly.

probe = TorchProbe.from_config("probe.yaml")
probe.attach(model, optimizer)
for step, batch in enumerate(data):
    probe.begin_step(step)
    loss = train(batch)
    probe.end_step({"loss": loss})
probe.close()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import TensorDescription
from msprobe_engine.core.settings.schema import DumpSettings, MonitorSettings, ProbeSettings
from msprobe_engine.probe.incident.notify import Notifier
from msprobe_engine.probe.sinks.base import Sink
from msprobe_integrations.common.monitor.probe import Probe
from msprobe_integrations.common.parameters.parameter_monitor import ParameterMonitor
from msprobe_integrations.common.ranks.exchanges import Exchanges
from msprobe_integrations.common.ranks.rank_discovery import RankDiscovery
from msprobe_integrations.torch.ascend.overflow import NpuOverflow
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.level import Capture
from msprobe_integrations.torch.config.run import RunConfig
from msprobe_integrations.torch.dump.tensor_saver import TensorSaver
from msprobe_integrations.torch.monitor.module_monitor import ModuleMonitor
from msprobe_integrations.torch.monitor.rerun_on_alert import RerunOnAlert
from msprobe_integrations.torch.parameters.find import find_source
from msprobe_integrations.torch.randomness.perturb import perturb
from msprobe_integrations.torch.ranks.merge import RowExchange
from msprobe_integrations.torch.ranks.notify import find_notifier
from msprobe_integrations.torch.ranks.outliers import watch_ranks
from msprobe_integrations.torch.ranks.replica_channel import Channel
from msprobe_integrations.torch.statistics.derived import on_host
from msprobe_integrations.torch.tensors.computing_types import ComputingTypes
from msprobe_integrations.torch.tensors.slices import Slices
from msprobe_integrations.torch.training import owner
from msprobe_integrations.torch.training.pipelining import StagePreparation


class TorchProbe(Probe):
    """Monitor, rules, sinks and incidents around a training loop.

    All methods are safe to call at any time: a fault inside disables the part it happened in and the training goes on.
    """

    backend: TorchBackend
    _watch: ModuleMonitor | None

    backend_type = TorchBackend
    number = TensorDescription("torch.Tensor", "torch.float32", (), False)
    unseen = torch._C.DisableTorchFunction

    def __init__(self, settings: ProbeSettings, *, extra_sinks: Sequence[Sink] = ()) -> None:
        super().__init__(settings, extra_sinks=extra_sinks)
        self._perturbed = False
        self._overflow = NpuOverflow()
        self._attempts: RerunOnAlert | None = None
        self._types: ComputingTypes | None = None
        self._stages = StagePreparation(self)

    def _make_parameters(self) -> ParameterMonitor:
        return ParameterMonitor(self, find_source, Exchanges(lambda ranks: RowExchange(ranks=ranks)), TorchRanks())

    def _make_membership(self) -> RankDiscovery:
        return RankDiscovery(self, lambda: dist.is_available() and dist.is_initialized(), watch_ranks)

    def _make_run_config(self) -> RunConfig:
        return RunConfig(self.settings, self.pipeline.program)

    def _make_capture(self, level: str, **options: Any) -> Capture:
        return Capture(self.pipeline, level, **options)

    def _make_dump(self, dump: DumpSettings) -> tuple[Capture, TensorSaver | None]:
        slices = Slices(self.backend, dump.slice) if dump.slice else None
        keeper = TensorSaver.of_dump(dump, self.backend, self.pipeline, self.session.writer, self.faults, slices=slices)
        return Capture.of_dump(self.pipeline, dump, slices, keeper), keeper

    def _make_watch(self, monitor: MonitorSettings | None) -> ModuleMonitor | None:
        return ModuleMonitor.build(self, monitor)

    def make_notifier(self, about: str = "") -> Notifier | None:
        """What tells other ranks of incidents, or of what `about` names; None for one process."""
        return find_notifier(Path(self.settings.output_dir), about)

    def chunks_of(self, models: Any, optimizer: Any) -> list[nn.Module]:
        """The model, or its virtual pipeline chunks, as a list.

        Raises:
            UsageError: `models` is something else, or `optimizer` is a module.
        """
        chunks = [models] if isinstance(models, nn.Module) else list(models) if isinstance(models, (list, tuple)) else []
        if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
            raise UsageError(f"attach: the model is of type {type(models).__name__}; give the module, or the list of its pipeline chunks")
        if isinstance(optimizer, nn.Module):
            raise UsageError(f"attach: the optimizer is a module ({type(optimizer).__name__}); expected attach(model, optimizer)")
        return chunks

    @contextmanager
    def shield(self) -> Iterator[None]:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            yield

    def at_hand(self, value: Any) -> bool:
        """Is this a tensor on the host?"""
        return isinstance(value, torch.Tensor) and on_host(value)

    def finer(self, main: torch.Tensor, parameter: torch.Tensor) -> bool:
        return parameter.dtype.is_floating_point and main.dtype.itemsize > parameter.dtype.itemsize

    def _of_user(self) -> None:
        owner.of_user()

    def _prepare_models(self) -> None:
        """A calibration run moves the weights before the first step, once; pipeline stages make their buffers under our eyes."""
        dump = self.settings.dump
        if dump is not None and dump.perturb and not self._perturbed:
            self._perturbed = True
            perturb(self._models, dump.perturb, dump.perturb_seed)
        self._stages.install()
        with self.guard("computing types"):
            self._types = self._types or ComputingTypes(self.session.pipeline.computed_in)
            self._types.look_at(self._models)

    def attempts(self, step: int, reset: Callable[[], Any] | None = None) -> Iterator[int]:
        """Begin a step whose forward and backward pass may run a second time, with everything captured, when a critical alert of a
        rule without history (``nan_inf``, ``extreme_value``) is raised on any rank. Yields 0, and then 1 for the second run.

        All ranks have to use it; each step costs one read of the gradients, a wait for the statistics and a tiny all-reduce.

        Args:
            step: as in `begin_step`, which this replaces.
            reset: takes back what the body adds up, called before the second run: ``optimizer.zero_grad``. None when the body itself
                begins with it.
        """
        self.begin_step(step)
        if self._attempts is None and not self._closed and self.session.incidents is not None and self.faults.is_enabled("attempts"):
            with self.guard("attempts"):
                self._attempts = RerunOnAlert(self, self._models)
        if self._attempts is None or self._closed:
            yield 0
        else:
            yield from self._attempts.run(reset)

    def _numbers(self, scalars: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if self._due and self.faults.is_enabled("overflow flag"):
            with self.guard("overflow flag"):
                return self._overflow.add(scalars)
        return scalars

    def _further_ends(self) -> Iterator[Callable[[], Any]]:
        yield self._stages.remove
        if self._types is not None:
            yield self._types.close
        if self._attempts is not None:
            yield self._attempts.close


class TorchRanks:
    """The ranks of the default process group."""

    def rank(self) -> int | None:
        """This one, None without a group."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else None

    def members(self, group: Any) -> Sequence[int]:
        return dist.get_process_group_ranks(group)

    def channel(self, ranks: Sequence[int], contents: Sequence[str]) -> Channel:
        """Connect these ranks over a group of our own, as soon as all have come."""
        return Channel(ranks, contents)
