"""`ConfigChecker` for torch: what a training is started with, its first inputs and weights, and its random calls, in one pack."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.config.collect.micro_steps import MicroSteps
from msprobe_engine.config.pack.background import BackgroundWriter
from msprobe_engine.core.errors import ProbeError, UsageError
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import error, info, one_line, warn_once, warning
from msprobe_engine.formats.pack import entries
from msprobe_integrations.common.config.run import collected_environment
from msprobe_integrations.common.monitor.targets import Named
from msprobe_integrations.common.shutdown import at_exit, exits
from msprobe_integrations.torch.config import start as config_start
from msprobe_integrations.torch.config.random_states import TorchRandomCalls, states
from msprobe_integrations.torch.config.tensors import TensorCollector
from msprobe_integrations.torch.hooks.modules import ModuleHooks
from msprobe_integrations.torch.tensors.devices import capturing

_PATIENCE = 30.0
"""Seconds that the end of a process waits for its pack."""
calls = TorchRandomCalls()
"""Of this process: the functions are the process'."""
_points: dict[str, dict[str, str]] = {}
"""Digests of the random streams at the points that this process has come by."""
_untouched = {name: digest for name, digest in states().items() if name in ("python", "numpy")}
"""These two begin with a state from the system's entropy, another one in every process: as long as it has not moved it says nothing."""


def apply_patches() -> None:
    """Count calls of random functions from now on, until the first pack has them; a second call changes nothing."""
    calls.start()


def undo_patches() -> None:
    """Put all functions back; what was counted stays."""
    calls.stop()


def _note_states(point: str) -> None:
    _points[point] = {name: digest for name, digest in states().items() if _untouched.get(name) != digest}


class TorchConfigChecker:
    """Arguments and errors: `msprobe_integrations.config_checker.ConfigChecker`."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None,
        static: Mapping[str, Any],
        output_zip_path: str | Path,
        *,
        micro_steps: int | Sequence[int] | str = 1,
        evaluation: bool = False,
        statistics: bool = True,
        environment: Sequence[str] = (),
        key_file: str | Path | None = None,
    ) -> None:
        self._models = models_of(model)
        self._micro_steps = MicroSteps(micro_steps)
        self._evaluation, self._with_statistics = evaluation, statistics
        self._writer = config_start.pack_writer(output_zip_path)
        self.rank = self._writer.rank
        self._background = BackgroundWriter(self._writer)
        self._step = 0
        self._first = True
        self._tensors = TensorCollector()
        self._environment = collected_environment(environment, key_file)
        start = config_start.Start(self.rank, self._environment, self._models, frame=sys._getframe(1))
        _note_states("constructed")
        self._names = set(start.settings)
        self._writer.add({**start.entries(), **(static if self.rank == 0 else {})})
        if self.rank == 0:
            info(f"config check: the pack is {one_line(str(self._writer.path))}")
        self._hooks: ModuleHooks | None = None
        if self._models and not self._micro_steps.last(-1):
            root = self._models[0]
            self._hooks = ModuleHooks(self._fail)
            self._hooks.add(Named(0, "", root, root, root, False), self._before_forward, None)
            self._hooks.install()
            at_exit.register(self.close)
            exits.at_signal(self.close, _PATIENCE)

    def close(self) -> None:
        """Take the hook off and finish the pack; done at the end of the process too."""
        at_exit.unregister(self.close)
        try:
            if self._hooks is not None and self._first:
                warning(
                    "config check: the model has had no forward pass in training, so the pack has no weights, inputs and random calls; "
                    "evaluation=True collects forward passes of evaluation too"
                )
            self._remove()
            self._background.close(_PATIENCE)
        finally:
            exits.forget(self.close)

    def flush(self) -> None:
        """Wait until what was collected is in the pack."""
        self._background.flush()

    def _remove(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.clear()

    def _fail(self, fault: Exception) -> None:
        kind = "" if isinstance(fault, ProbeError) else f"{type(fault).__name__}: "
        error(f"config check: nothing more is collected, the training goes on: {kind}{one_line(str(fault)[:500])}")
        self._remove()

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook of the (first) model: one forward pass begins."""
        try:
            if self._hooks is None or not (self._evaluation or model.training or torch.is_grad_enabled()) or _only_looked_at(args, kwargs):
                return
            step, self._step = self._step, self._step + 1
            if step in self._micro_steps:
                self._collect(step, args, kwargs)
            if self._micro_steps.last(step):
                self._remove()
        except Exception as fault:
            raise_of_training(fault)
            self._fail(fault)

    def _collect(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        weights = self._tensors.weights(self._models, statistics=self._with_statistics)
        inputs = self._tensors.inputs(args, kwargs)
        for what, found in (("parameters and buffers", weights), ("inputs", inputs)):
            if found.unread:
                reasons = ", ".join(f"{count} {one_line(why)}" for why, count in sorted(found.unread.items()))
                warn_once(f"config check {what}", f"config check: {what} without anything to read have no digest: {reasons}")
        made = {
            entries.of_step("weights", step, self.rank): weights.digests,
            entries.of_step("dataset", step, self.rank): inputs.digests,
            entries.weights(step, self.rank): weights.existing,
            entries.dataset(step, self.rank): inputs.existing,
        }
        _note_states(f"step{step}")
        made[entries.of_rank("random", self.rank)] = {
            "calls": calls.record.calls(),
            "states": dict(_points),
            "left_out": calls.record.left_out,
            "counted": calls.record.on or bool(len(calls.record)),
        }
        if self._first:
            self._first = False
            made.update(self._at_first())
        self._background.submit(lambda: made)

    def _at_first(self) -> dict[str, Any]:
        """What is known by the first forward pass only: the Trainer or engine that makes it, and all random calls before."""
        made: dict[str, Any] = {}
        if len(calls.record) or calls.record.on:
            made[entries.random(self.rank)] = calls.record.existing()
        calls.stop()
        frame = sys._getframe(1)
        start = config_start.Start(self.rank, self._environment, self._models, frame=frame)
        if set(start.settings) - self._names:
            made.update(start.of_settings())
        return made


def _only_looked_at(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Is the pass made for a tracer, an exporter or a graph of the device, and not to compute anything now?"""
    if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
        return True
    if any(isinstance(one, torch._subclasses.FakeTensor) for one in (*args, *kwargs.values())):
        return True
    return capturing()


def models_of(model: Any) -> list[nn.Module]:
    """The model, or the chunks of one.

    Raises:
        UsageError: it is neither a module nor a list or tuple of modules.
    """
    if model is None:
        return []
    several = list(model) if isinstance(model, (list, tuple)) else [model]
    wrong = next((one for one in several if not isinstance(one, nn.Module)), None)
    if wrong is not None:
        raise UsageError(
            f"ConfigChecker: model is {'a list with ' if isinstance(model, (list, tuple)) else ''}{type(wrong).__name__}; allowed: a "
            "torch.nn.Module, a list or tuple of modules, or None for a pack without weights and inputs"
        )
    return several


__all__ = ["TorchConfigChecker", "apply_patches", "calls", "models_of", "undo_patches"]
