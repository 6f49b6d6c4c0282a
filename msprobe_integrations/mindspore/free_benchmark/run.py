"""Task free_benchmark beside the calls of the debugger: in which steps and on which ranks calls are taken, and what is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore

from msprobe_engine import log
from msprobe_engine.accuracy.free_benchmark.table import FreeBenchmarkTable
from msprobe_engine.errors import SettingsError
from msprobe_engine.guard import Faults
from msprobe_engine.settings.schema import DumpSettings, FreeBenchmarkSettings
from msprobe_engine.window import Window
from msprobe_integrations.common.filters import record_filter
from msprobe_integrations.mindspore import autograd
from msprobe_integrations.mindspore.free_benchmark.checker import Checker
from msprobe_integrations.mindspore.wrappers import WRAPPERS, Names

_MODULES = {
    "mindspore.mint.nn.functional.": "MintFunctional.",
    "mindspore.mint.linalg.": "Mint.",
    "mindspore.mint.special.": "Mint.",
    "mindspore.mint.": "Mint.",
    "mindspore.ops.": "Functional.",
    "mindspore.Tensor.": "Tensor.",
}
"""Full names, as ``list`` of the existing tool has them, and records' names for them."""


class FreeBenchmark:
    """An `Extra` in the place of a dump.

    Args:
        dump: settings with task free_benchmark.
        root: dump_path.
        faults: isolation of failures.

    Raises:
        SettingsError: they ask for what MindSpore has not.
    """

    alone = True

    def __init__(self, dump: DumpSettings, root: Path, faults: Faults) -> None:
        settings = dump.free_benchmark or FreeBenchmarkSettings()
        for key, value in (("pert_mode", "to_cpu"), ("if_preheat", True)):
            if getattr(settings, key) == value:
                raise SettingsError(f"free_benchmark.{key}: {value!r} works with PyTorch only; choose another value")
        if settings.fuzz_stage == "backward" and not hasattr(mindspore._c_expression, "run_backward"):
            raise SettingsError("free_benchmark.fuzz_stage: 'backward' needs MindSpore 2.10 or later; use 'forward'")
        self._table = FreeBenchmarkTable(root, "pert_type", flipped="7.0")
        self._faults = faults
        self._window = Window(dump.rank, dump.step)
        chosen = replace(dump, list=tuple(map(record_name, dump.list)), risk_level="ALL")
        self._checker = Checker(settings, record_filter(chosen, autograd.graph_task), self._table, faults, dump.memory_budget_mb << 20)
        self._rank: int | None = None
        self._closed = False

    def begin(self, model: Any, step: int, rank: int | None) -> None:
        """``start()``."""
        self._rank = rank
        if not self._window.wanted(step, rank):
            return
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            log.warn_once(
                "free_benchmark graph", "task free_benchmark sees calls of Python; in GRAPH_MODE there are none, use PYNATIVE_MODE"
            )
        self._checker.open(step, rank)
        WRAPPERS.lend(self._checker)
        models = model if isinstance(model, (list, tuple)) else [model]
        WRAPPERS.members(Names(vars(cell)) for one in models if isinstance(one, mindspore.nn.Cell) for _, cell in one.cells_and_names())

    def pause(self) -> None:
        """``stop()``."""
        self._checker.on = False
        WRAPPERS.give_back(self._checker)

    def end_step(self, _next_step: int) -> None:
        """``step()``."""
        self.pause()
        self._checker.end_step()
        with self._faults.guard("free benchmark"):
            self._table.flush()

    def close(self) -> None:
        """Write what is there, and say what was found, once."""
        if self._closed:
            return
        self._closed = True
        self.end_step(0)
        with self._faults.guard("free benchmark"):
            path = self._table.summary(self._rank)
            if path is None:
                log.warning(
                    "free benchmark: no call of an API was looked at; see that start() is before the forward pass, and at rank, step, list"
                )
            else:
                log.info(f"{self._table.text()}; all operators: {path}")


def record_name(element: str) -> str:
    """An element of ``list``; a full name as the beginning of records' names.

    >>> record_name("mindspore.mint.matmul")
    'Mint.matmul.'
    """
    for module, prefix in _MODULES.items():
        if element.startswith(module):
            return f"{prefix}{element.removeprefix(module)}."
    return element
