"""`ConfigChecker` for torch: what a training is started with, its first inputs and weights, and its random calls, in one pack."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from msprobe_engine.config.collect.random_calls import RandomCalls
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.log import one_line, warn_once
from msprobe_engine.formats.pack import entries
from msprobe_integrations.autoload.imports import after_import, before_import
from msprobe_integrations.common.config.checker import PATIENCE, ConfigCheck
from msprobe_integrations.common.monitor.targets import Named
from msprobe_integrations.common.shutdown import at_exit, signal_shutdown
from msprobe_integrations.torch.config import start as config_start
from msprobe_integrations.torch.config.tensors import TensorCollector
from msprobe_integrations.torch.hooks.frames import PLUMBING, kind_of
from msprobe_integrations.torch.hooks.functions import Rebinding
from msprobe_integrations.torch.hooks.modules import ModuleHooks
from msprobe_integrations.torch.randomness.calls import TENSOR, TORCH
from msprobe_integrations.torch.tensors.devices import in_use, is_any_capturing, is_capturing, kinds

_SEEDING = ("manual_seed", "seed", "set_rng_state")
_DEVICE_SEEDING = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
_DROPS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_ALWAYS_FUNCTIONAL = ("gumbel_softmax",)
_COMPILER = "torch._dynamo"
_TRACKERS = ("megatron.core.tensor_parallel.random",)
"""Modules with ``get_cuda_rng_tracker``; looked up among those that are loaded, never imported."""


def _drops(input: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> bool:  # noqa: ARG001
    return bool(training) and p > 0


def _drops_in_torch(input: Any, p: float = 0.0, train: bool = False, *_: Any, **__: Any) -> bool:  # noqa: ARG001
    return bool(train) and p > 0


def _attends(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> bool:  # noqa: ARG001
    return dropout_p > 0


class TorchRandomCalls:
    """The record of this process, and the wrappers that make it."""

    def __init__(self) -> None:
        self.record = RandomCalls(lambda code: kind_of(code) == PLUMBING, torch.compiler.is_compiling)
        self._patches = Rebinding()

    def start(self) -> None:
        """Replace the functions, also where they were imported by name; nothing happens when they are replaced already."""
        self.record.on = True
        if self._patches:
            return
        before_import(_COMPILER, self._patches.undo)
        after_import(_COMPILER, self._beside_compiler)
        if _COMPILER not in sys.modules:
            self._replace()

    def _beside_compiler(self, module: Any) -> None:
        """The compiler knows functions of torch by identity, and makes its tables of the names it finds: they are made of the originals."""
        rules = getattr(sys.modules.get(f"{module.__name__}.trace_rules"), "get_torch_obj_rule_map", None)
        if rules is not None:
            rules()
        if self.record.on and not self._patches:
            self._replace()

    def _replace(self) -> None:
        replace, record = self._patches.wrap, self.record
        record.replace_all(replace)

        def each(owner: Any, prefix: str, names: tuple[str, ...], draws: Callable[..., bool] | None = None) -> None:
            for name in names:
                replace(owner, name, functools.partial(record.wrap_function, f"{prefix}.{name}", draws=draws))

        each(torch, "torch", TORCH)
        each(torch, "torch", _SEEDING)
        each(torch, "torch", ("dropout", "alpha_dropout", "feature_dropout", "native_dropout"), _drops_in_torch)
        each(torch.Tensor, "torch.Tensor", TENSOR)
        each(functional, "torch.nn.functional", _DROPS, _drops)
        each(functional, "torch.nn.functional", _ALWAYS_FUNCTIONAL)
        each(functional, "torch.nn.functional", ("scaled_dot_product_attention",), _attends)
        for kind in kinds():
            if (module := getattr(torch, kind, None)) is not None:
                each(module, f"torch.{kind}", _DEVICE_SEEDING)
        self._patches.early_imports()

    def stop(self) -> None:
        """Put the functions back; what was recorded stays."""
        self.record.stop()
        self._patches.undo()


def states() -> dict[str, str]:
    """Digests of the states of all random streams of this process: ``python``, ``numpy``, ``torch``, of every device that is in use
    ``cuda:0`` and so on, and the streams of Megatron's tracker by name. Equal states have equal digests."""
    digests = {
        "python": _digest(repr(random.getstate()).encode()),
        "numpy": _digest(_text(np.random.get_state(legacy=False)).encode()),
    }
    with torch._C.DisableTorchFunction():
        digests["torch"] = _of_tensor(torch.get_rng_state())
        for kind, module in in_use():
            if is_capturing(kind):
                continue
            for number, state in enumerate(module.get_rng_state_all()):
                digests[f"{kind}:{number}"] = _of_tensor(state)
        for name in _TRACKERS:
            tracker = getattr(sys.modules.get(name), "get_cuda_rng_tracker", None)
            streams = tracker().get_states() if tracker is not None else {}
            digests.update({f"tracker:{stream}": _of_tensor(state) for stream, state in streams.items() if isinstance(state, torch.Tensor)})
    return digests


def _text(state: Any) -> str:
    if isinstance(state, dict):
        return " ".join(f"{name} {_text(value)}" for name, value in sorted(state.items()))
    return state.tobytes().hex() if isinstance(state, np.ndarray) else repr(state)


def _of_tensor(state: torch.Tensor) -> str:
    return _digest(state.cpu().numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


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
        for subject, collector in (("parameters and buffers", weights), ("inputs", inputs)):
            if collector.unread:
                reasons = ", ".join(f"{count} {one_line(why)}" for why, count in sorted(collector.unread.items()))
                warn_once(f"config check {subject}", f"config check: {subject} without anything to read have no digest: {reasons}")
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
            made[entries.random(self.rank)] = calls.record.to_existing_format()
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
    return is_any_capturing()


__all__ = ["TorchConfigChecker", "apply_patches", "calls", "undo_patches"]
