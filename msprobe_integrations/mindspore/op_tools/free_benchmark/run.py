"""Task free_benchmark with MindSpore: calls are taken at the wrappers of its functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore

from msprobe_engine.accuracy.free_benchmark.table import FreeBenchmarkTable
from msprobe_engine.core import log
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_integrations.common.capture.filters import record_filter
from msprobe_integrations.common.op_tools.free_benchmark.choice import Choice
from msprobe_integrations.common.op_tools.free_benchmark.run import FreeBenchmarkRun
from msprobe_integrations.mindspore.hooks import autograd
from msprobe_integrations.mindspore.hooks.wrappers import WRAPPERS, Names
from msprobe_integrations.mindspore.op_tools.free_benchmark.checker import Checker

_MODULES = {
    "mindspore.mint.nn.functional.": "MintFunctional.",
    "mindspore.mint.linalg.": "Mint.",
    "mindspore.mint.special.": "Mint.",
    "mindspore.mint.": "Mint.",
    "mindspore.ops.": "Functional.",
    "mindspore.Tensor.": "Tensor.",
}
"""Full names, as ``list`` of the existing tool has them, and records' names for them."""


class FreeBenchmark(FreeBenchmarkRun):
    """See `FreeBenchmarkRun`.

    Raises:
        SettingsError: they ask for what MindSpore has not.
    """

    def __init__(self, dump: DumpSettings, root: Path, faults: Faults) -> None:
        chosen = replace(dump, list=tuple(map(record_name, dump.list)))
        super().__init__(chosen, root, faults, FreeBenchmarkTable(root, "pert_type", flipped="7.0"))
        for key, value in (("pert_mode", "to_cpu"), ("if_preheat", True)):
            if getattr(self.settings, key) == value:
                raise SettingsError(f"free_benchmark.{key}: {value!r} works with PyTorch only; choose another value")
        if self.settings.fuzz_stage == "backward" and not hasattr(mindspore._c_expression, "run_backward"):
            raise SettingsError("free_benchmark.fuzz_stage: 'backward' needs MindSpore 2.10 or later; use 'forward'")
        choice = Choice(self.settings, record_filter(self.dump, autograd.graph_task), self.table)
        self._checker = Checker(choice, faults, dump.memory_budget_mb << 20)

    def take_calls(self, model: Any, step: int, rank: int | None) -> None:
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            log.warn_once(
                "free_benchmark graph", "task free_benchmark sees calls of Python; in GRAPH_MODE there are none, use PYNATIVE_MODE"
            )
        self._checker.open(step, rank)
        WRAPPERS.lend(self._checker)
        models = model if isinstance(model, (list, tuple)) else [model]
        WRAPPERS.members(Names(vars(cell)) for one in models if isinstance(one, mindspore.nn.Cell) for _, cell in one.cells_and_names())

    def leave_calls(self) -> None:
        self._checker.on = False
        WRAPPERS.give_back(self._checker)

    def finish(self) -> None:
        self._checker.end_step()


def record_name(element: str) -> str:
    """An element of ``list``; a full name as the beginning of records' names.

    >>> record_name("mindspore.mint.matmul")
    'Mint.matmul.'
    """
    for module, prefix in _MODULES.items():
        if element.startswith(module):
            return f"{prefix}{element.removeprefix(module)}."
    return element
