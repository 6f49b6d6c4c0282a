"""One capture level put on and taken off a model: modules, APIs and collectives together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.process.garbage_collection import StepCollection
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_integrations.common.capture.filters import RecordFilter, record_filter
from msprobe_integrations.torch.capture.api import ApiCapture
from msprobe_integrations.torch.capture.closures import around_closure
from msprobe_integrations.torch.capture.modules import ModuleCapture, ModuleInfo
from msprobe_integrations.torch.capture.optimizer_calls import OptimizerCalls
from msprobe_integrations.torch.capture.recorder import Recorder
from msprobe_integrations.torch.dump.tensor_saver import TensorSaver
from msprobe_integrations.torch.hooks import nodes as node_hooks
from msprobe_integrations.torch.hooks.compiled import CompiledCode
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task
from msprobe_integrations.torch.hooks.graphed import graphed_modules
from msprobe_integrations.torch.parameters import placements
from msprobe_integrations.torch.tensors.slices import Slices
from msprobe_integrations.torch.tensors.uninitialized_memory import scratch_buffers

_tracing = torch._C._get_tracing_state  # not None while torch.jit.trace runs here: calls of the probe would become part of the program


class Capture:
    """Everything a dump of one level sees.

    Args:
        level: ``L0`` modules, ``L1`` APIs, ``mix`` both.
        stacks, data_mode, kept, slices, keeper: see `Recorder`.
        record_collectives: make entries of collectives; None: at L1 and mix. They are watched at every level, because they change
            tensors without telling.
        optimizer_calls: see the torch calls inside ``optimizer.step()`` too.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        level: str,
        *,
        stacks: bool = True,
        data_mode: Sequence[str] = ("all",),
        kept: RecordFilter | None = None,
        slices: Slices | None = None,
        keeper: TensorSaver | None = None,
        record_collectives: bool | None = None,
        optimizer_calls: bool = True,
    ) -> None:
        if level not in ("L0", "L1", "mix"):
            raise UsageError(f"capture level is '{level}'; allowed: L0, L1, mix")
        self.level = level
        self.on = False
        self._collecting = False
        self._optimizer_hooks: list[Any] = []
        self._collector = StepCollection()
        self.recorder = Recorder(pipeline, stacks=stacks, data_mode=data_mode, kept=kept, slices=slices, keeper=keeper)
        self._origins = OptimizerCalls()
        self.modules = ModuleCapture(self.recorder, self._modules_on, lambda: self._collecting) if level in ("L0", "mix") else None
        self.api = ApiCapture(self.recorder, self._is_on, self._origins if level == "mix" else None) if level in ("L1", "mix") else None
        self._compiled = CompiledCode(self.api, self.modules, lambda error: pipeline.faults.fail("compiled code", error))
        self.collectives: Any = None
        self._no_infos: list[ModuleInfo] = []
        self._placed: tuple[Sequence[ModuleInfo], int] | None = None
        self._pipeline = pipeline
        self._optimizer_calls = optimizer_calls
        self._in_optimizer = False
        self._record_collectives = level != "L0" if record_collectives is None else record_collectives

    @classmethod
    def of_dump(cls, pipeline: Pipeline, dump: DumpSettings, slices: Slices | None, keeper: TensorSaver | None) -> Capture:
        """What sees the calls that a dump asks for."""
        kept = record_filter(dump, current_graph_task)
        return cls(pipeline, dump.level, stacks=dump.extra_info, data_mode=dump.data_mode, kept=kept, slices=slices, keeper=keeper)

    def attach(self, models: nn.Module | Sequence[nn.Module], anew: bool = False) -> None:
        """Name the modules of the model (or of a list of models); `anew`: see `ModuleCapture.attach`."""
        if self.modules is not None:
            self.modules.attach(models, anew)
        infos = self.modules.infos if self.modules is not None else self._no_infos
        if self._placed is None or self._placed[0] is not infos or self._placed[1] != len(infos):
            self._placed = (infos, len(infos))
            with self._pipeline.faults.guard("parallel layout"):
                self._pipeline.parallel = placements.describe_parallel(infos)

    def open(self, modes: int | None = None) -> None:
        """Put hooks on (nothing happens when they are) and start seeing calls; `modes`: see `ApiCapture.install`."""
        if not self.on:
            node_hooks.install()
        if not self._collecting:
            for buffer in scratch_buffers():
                self.recorder.raw.add(buffer)
        self.on = self._collecting = True
        self._collector.raise_threshold()
        self._pipeline.level = self.level
        if self.modules is not None:
            self.modules.install()
            graphed_modules.join(self.modules)
        if self.api is not None:
            self.api.install(modes)
        self._compiled.install()
        self._observe_collectives()
        if not self._optimizer_hooks:
            self._optimizer_hooks = [
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ]

    def pause(self) -> None:
        """Stop seeing new calls; hooks stay for the next `open`, and gradients of calls already seen still come."""
        if self.on:
            node_hooks.remove()
        self.on = False
        if self.api is not None:
            self.api.remove()

    def close(self) -> None:
        """Take everything off: what is left costs nothing."""
        self.pause()
        self._collector.restore_threshold()
        self._compiled.remove()
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks = []
        if self.modules is not None:
            graphed_modules.leave(self.modules)
            self.modules.remove()
        if self.collectives is not None:
            from msprobe_integrations.torch.collectives.kernels import kernels

            kernels.discard(self.collectives)
            self.collectives = None
        if self.recorder.keeper is not None:
            self.recorder.keeper.rest()

    def end_step(self) -> list[list[str]]:
        """Close the step's numbering; returns the texts of all stacks."""
        self._collecting = self._in_optimizer = self._origins.stepping = False
        self.recorder.end_step()
        self._collector.restore_threshold()
        if self.modules is not None:
            self.modules.end_step()
        if self.collectives is not None:
            self.collectives.end_step()
        if self.recorder.keeper is not None:
            self.recorder.keeper.end_step(self._pipeline.entries)
        return self.recorder.stacks.texts() if self.recorder.stacks is not None else []

    def _is_on(self) -> bool:
        return self.on and not self._in_optimizer and _tracing() is None

    def _modules_on(self) -> bool:
        return self.on and not self._in_optimizer and not self._compiled.inside and _tracing() is None

    def _before_optimizer(self, _optimizer: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._in_optimizer = not self._optimizer_calls
        self._origins.stepping = self._optimizer_calls
        return around_closure(args, kwargs, self._passes) if self._in_optimizer else None

    def _passes(self, closure: Callable[[], Any]) -> Any:
        """Passes that the optimizer has made are seen as those outside of its step."""
        self._in_optimizer = False
        try:
            return closure()
        finally:
            self._in_optimizer = not self._optimizer_calls

    def _after_optimizer(self, *_: Any) -> None:
        self._in_optimizer = self._origins.stepping = False
        with self._pipeline.faults.guard("capture"):
            # fused and `.data` updates leave version counters as they are: what was reduced before is no longer true
            self._pipeline.backend.forget()

    def _observe_collectives(self) -> None:
        if self.collectives is not None:
            return
        with self._pipeline.faults.guard("collective capture"):
            from msprobe_integrations.torch.collectives.kernels import kernels
            from msprobe_integrations.torch.collectives.observer import CollectiveObserver

            recorder = self.recorder
            observer = CollectiveObserver(
                recorder.reduce,
                lambda entry: self._pipeline.entries.append(entry),
                read=recorder.reduce_gradient,
                record=self._record_collectives,
                is_on=self._is_on,
                forget=self._forget_tensor,
                where=recorder.where,
                stack=recorder.stack_at,
                wanted=recorder.keeps,
                inputs=recorder.inputs,
                outputs=recorder.outputs,
                lose=self._pipeline.lose,
                takers=lambda name: (recorder.reduce_for(name), recorder.reduce_gradient_for(name)),
                fail=lambda error: self._pipeline.faults.fail("collective capture", error),
            )
            kernels.add(observer)
            self.collectives = observer

    def _forget_tensor(self, tensor: torch.Tensor) -> None:
        self._pipeline.backend.forget(tensor)
        self.recorder.raw.forget(tensor)
