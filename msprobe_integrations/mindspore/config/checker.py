"""`ConfigChecker` for MindSpore: what a training is started with, its first inputs and weights, and its random calls, in one pack."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore

from msprobe_engine.config.collect.micro_steps import MicroSteps
from msprobe_engine.config.collect.random_calls import RandomCalls
from msprobe_engine.config.pack.background import BackgroundWriter
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.errors import ProbeError, UsageError
from msprobe_engine.core.guard import is_of_training
from msprobe_engine.core.log import error, info, one_line, warning
from msprobe_engine.core.process.patching import Replaced
from msprobe_engine.formats.pack import entries
from msprobe_integrations.common.config.run import collected_environment
from msprobe_integrations.mindspore.config import tensors as config_tensors
from msprobe_integrations.mindspore.config.start import Start, ranks
from msprobe_integrations.mindspore.environment import api_module
from msprobe_integrations.mindspore.hooks import eager as hooks

_PATIENCE = 30.0
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
        self._patches = Replaced("mindspore", "numpy", "random", "builtins")

    def start(self) -> None:
        self.record.on = True
        if self._patches:
            return
        replace = self._patches.replace
        self.record.replace_all(replace)
        for owner, prefix, names in (
            (mindspore.ops, "mindspore.ops", _OPS),
            (getattr(mindspore, "mint", None), "mindspore.mint", _OPS),
            (mindspore.Tensor, "mindspore.Tensor", _METHODS),
            (mindspore, "mindspore", _SEEDING),
        ):
            for name in names if owner is not None else ():
                replace(owner, name, functools.partial(self.record.wrapped, f"{prefix}.{name}"))
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


class MindSporeConfigChecker:
    """Arguments and errors: `msprobe_integrations.config_checker.ConfigChecker`. In graph mode no forward pass is seen: weights are
    collected at once, and inputs not at all, which is said. Calls inside of compiled functions are not seen either."""

    def __init__(
        self,
        model: Any,
        static: Mapping[str, Any],
        output_zip_path: str | Path,
        *,
        micro_steps: int | Sequence[int] | str = 1,
        evaluation: bool = False,
        statistics: bool = True,
        environment: Sequence[str] = (),
        key_file: str | Path | None = None,
    ) -> None:
        self._cells = cells_of(model)
        self._micro_steps = MicroSteps(micro_steps)
        self._evaluation, self._statistics = evaluation, statistics
        self.rank, world_size = ranks()
        self._writer = PackWriter(output_zip_path, rank=self.rank, world_size=world_size, framework="mindspore")
        self._background = BackgroundWriter(self._writer)
        self._step, self._first = 0, True
        self._handle: Any = None
        self._writer.add(
            {**Start(self.rank, collected_environment(environment, key_file), self._cells).entries(), **(static if self.rank == 0 else {})}
        )
        if self.rank == 0:
            info(f"config check: the pack is {one_line(str(self._writer.path))}")
        if not self._cells or self._micro_steps.last(-1):
            return
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            warning("config check: in graph mode forward passes are not seen: weights are collected now, inputs are not")
            self._collect(0, (), {}, with_inputs=False)
        else:
            self._handle = hooks.before_call(self._cells[0], self._before_forward)
            atexit.register(self.close)

    def close(self) -> None:
        """Take the hook off and finish the pack; done at the end of the process too."""
        atexit.unregister(self.close)
        if self._handle is not None and self._first:
            warning(
                "config check: the model has had no forward pass in training outside of compiled functions (mindspore.jit), so the pack "
                "has no weights, inputs and random calls"
            )
        self._remove()
        self._background.close(_PATIENCE)

    def flush(self) -> None:
        """Wait until what was collected is in the pack."""
        self._background.flush()

    def _remove(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _before_forward(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if self._handle is None or not (self._evaluation or cell.training or _differentiated()):
                return
            step, self._step = self._step, self._step + 1
            if step in self._micro_steps:
                self._collect(step, args, kwargs)
            if self._micro_steps.last(step):
                self._remove()
        except Exception as fault:
            if is_of_training(fault):
                raise
            kind = "" if isinstance(fault, ProbeError) else f"{type(fault).__name__}: "
            error(f"config check: nothing more is collected, the training goes on: {kind}{one_line(str(fault)[:500])}")
            self._remove()

    def _collect(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, with_inputs: bool = True) -> None:
        numbers, digests = config_tensors.weights(self._cells, statistics=self._statistics)
        made: dict[str, Any] = {
            entries.of_step("weights", step, self.rank): digests,
            entries.weights(step, self.rank): numbers,
            entries.of_rank("random", self.rank): {"calls": calls.record.calls(), "states": {}, "left_out": calls.record.left_out},
        }
        if with_inputs:
            old, ours = config_tensors.inputs(args, kwargs)
            made |= {entries.of_step("dataset", step, self.rank): ours, entries.dataset(step, self.rank): old}
        if self._first:
            self._first = False
            if len(calls.record) or calls.record.on:
                made[entries.random(self.rank)] = calls.record.existing()
            calls.stop()
        self._background.submit(lambda: made)


def _differentiated() -> bool:
    """Is a call part of a gradient run? Loops of one's own need no ``set_train()`` for that."""
    asked = getattr(api_module()._pynative_executor, "grad_flag", None)
    return asked is not None and bool(asked())


def cells_of(model: Any) -> list[Any]:
    """The cell, or the cells of a list.

    Raises:
        UsageError: it is neither a cell nor a list or tuple of cells.
    """
    if model is None:
        return []
    several = list(model) if isinstance(model, (list, tuple)) else [model]
    wrong = next((one for one in several if not isinstance(one, mindspore.nn.Cell)), None)
    if wrong is not None:
        raise UsageError(
            f"ConfigChecker: model is {'a list with ' if isinstance(model, (list, tuple)) else ''}{type(wrong).__name__}; allowed: a "
            "mindspore.nn.Cell, a list or tuple of cells, or None for a pack without weights and inputs"
        )
    return several
