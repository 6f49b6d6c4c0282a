"""`ConfigChecker` for torch: what a training is started with, its first inputs and weights, and its random calls, in one pack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.log import one_line, warn_once
from msprobe_engine.formats.pack import entries
from msprobe_integrations.common.config.checker import PATIENCE, ConfigCheck
from msprobe_integrations.common.monitor.targets import Named
from msprobe_integrations.common.shutdown import at_exit, signal_shutdown
from msprobe_integrations.torch.config import start as config_start
from msprobe_integrations.torch.config.random_states import TorchRandomCalls, states
from msprobe_integrations.torch.config.tensors import TensorCollector
from msprobe_integrations.torch.hooks.modules import ModuleHooks
from msprobe_integrations.torch.tensors.devices import capturing

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


class TorchConfigChecker(ConfigCheck):
    """See `msprobe_integrations.common.config.checker.ConfigCheck`."""

    kind = nn.Module
    kind_names = ("torch.nn.Module", "modules")
    unseen = (
        "the model has had no forward pass in training, so the pack has no weights, inputs and random calls; "
        "evaluation=True collects forward passes of evaluation too"
    )

    def _make_writer(self, path: str | Path) -> PackWriter:
        return config_start.pack_writer(path)

    def _start(self) -> Mapping[str, Any]:
        self._tensors = TensorCollector()
        start = config_start.Start(self.rank, self._environment, self._models, frame=sys._getframe(2))
        _note_states("constructed")
        self._names = set(start.settings)
        return start.entries()

    def _put_on(self) -> Callable[[], None]:
        root = self._models[0]
        hooks = ModuleHooks(self._fail)
        hooks.add(Named(0, "", root, root, root, False), self._before_forward, None)
        hooks.install()
        at_exit.register(self.close)
        signal_shutdown.at_signal(self.close, PATIENCE)
        return hooks.clear

    def close(self) -> None:
        at_exit.unregister(self.close)
        try:
            super().close()
        finally:
            signal_shutdown.forget(self.close)

    def _is_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (self._evaluation or model.training or torch.is_grad_enabled()) and not _only_looked_at(args, kwargs)

    def _collect(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        weights = self._tensors.weights(self._models, statistics=self._statistics)
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


__all__ = ["TorchConfigChecker", "apply_patches", "calls", "undo_patches"]
