"""`ConfigChecker` for MindSpore: what a training is started with, its first inputs and weights, and its random calls, in one pack."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mindspore

from msprobe_engine.config.collect.random_calls import RandomCalls
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.log import warning
from msprobe_engine.formats.pack import entries
from msprobe_integrations.common.config.checker import ConfigCheck
from msprobe_integrations.mindspore.config import tensors as config_tensors
from msprobe_integrations.mindspore.config.start import Start, ranks
from msprobe_integrations.mindspore.environment import api_module
from msprobe_integrations.mindspore.hooks import eager as hooks
from msprobe_integrations.patching import Patches

_OPS = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal", "uniform"),
    *("standard_normal", "gamma", "poisson", "laplace", "random_categorical", "shuffle", "choice_with_mask"),
)
_METHODS = ("bernoulli", "bernoulli_", "multinomial", "normal_", "uniform_", "random_", "exponential_")
_SEEDING = ("set_seed", "manual_seed", "seed", "set_rng_state")


class _Calls:
    """Of this process: the functions are the process'."""

    def __init__(self) -> None:
        self.record = RandomCalls()
        self._patches = Patches("mindspore", "numpy", "random", "builtins")

    def start(self) -> None:
        self.record.on = True
        if self._patches:
            return
        replace = self._patches.wrap
        self.record.replace_all(replace)
        for owner, prefix, names in (
            (mindspore.ops, "mindspore.ops", _OPS),
            (getattr(mindspore, "mint", None), "mindspore.mint", _OPS),
            (mindspore.Tensor, "mindspore.Tensor", _METHODS),
            (mindspore, "mindspore", _SEEDING),
        ):
            for name in names if owner is not None else ():
                replace(owner, name, functools.partial(self.record.wrap_function, f"{prefix}.{name}"))
        self._patches.early_imports()

    def stop(self) -> None:
        self.record.stop()
        self._patches.undo()


calls = _Calls()


def apply_patches() -> None:
    """Count calls of random functions from now on; a second call changes nothing."""
    calls.start()


def undo_patches() -> None:
    """Put all functions back; what was counted stays."""
    calls.stop()


class MindSporeConfigChecker(ConfigCheck):
    """In graph mode no forward pass is seen: weights are collected at once, and inputs not at all, which is said. Calls inside of compiled
    functions are not seen either."""

    kind = mindspore.nn.Cell
    kind_names = ("mindspore.nn.Cell", "cells")
    unseen = (
        "the model has had no forward pass in training outside of compiled functions (mindspore.jit), so the pack has no weights, inputs "
        "and random calls"
    )

    def _make_writer(self, path: str | Path) -> PackWriter:
        rank, world_size = ranks()
        return PackWriter(path, rank=rank, world_size=world_size, framework="mindspore")

    def _start(self) -> Mapping[str, Any]:
        return Start(self.rank, self._environment, self._models).entries()

    def _put_on(self) -> Callable[[], None] | None:
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            warning("config check: in graph mode forward passes are not seen: weights are collected now, inputs are not")
            self._collect(0, (), {}, with_inputs=False)
            return None
        atexit.register(self.close)
        remove: Callable[[], None] = hooks.before_call(self._models[0], self._before_forward).remove
        return remove

    def close(self) -> None:
        atexit.unregister(self.close)
        super().close()

    def _is_pass(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG002
        if self._evaluation or model.training:
            return True
        # a call part of a gradient run: loops of one's own need no ``set_train()`` for that
        asked = getattr(api_module()._pynative_executor, "grad_flag", None)
        return asked is not None and bool(asked())

    def _collect(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, with_inputs: bool = True) -> None:
        numbers, digests = config_tensors.weights(self._models, statistics=self._statistics)
        made: dict[str, Any] = {
            entries.of_step("weights", step, self.rank): digests,
            entries.weights(step, self.rank): numbers,
            entries.of_rank("random", self.rank): {"calls": calls.record.calls(), "states": {}, "left_out": calls.record.left_out},
        }
        if with_inputs:
            old, own = config_tensors.inputs(args, kwargs)
            made |= {entries.of_step("dataset", step, self.rank): own, entries.dataset(step, self.rank): old}
        if self._first:
            self._first = False
            if len(calls.record) or calls.record.on:
                made[entries.random(self.rank)] = calls.record.to_existing_format()
            calls.stop()
        self._background.submit(lambda: made)
