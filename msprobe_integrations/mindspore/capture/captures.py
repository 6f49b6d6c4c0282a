"""What sees the calls of a step: eager code by hooks and wrappers, compiled code by probes inside of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore

from msprobe_engine.core import log
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_integrations.common.capture.filters import record_filter
from msprobe_integrations.common.dump.module_selection import ModuleRecords
from msprobe_integrations.mindspore.capture.cells import CellCapture
from msprobe_integrations.mindspore.capture.level import Capture
from msprobe_integrations.mindspore.capture.recorder import Recorder
from msprobe_integrations.mindspore.dump.tensor_saver import TensorSaver
from msprobe_integrations.mindspore.graph.dump import GraphCapture
from msprobe_integrations.mindspore.hooks import autograd


class Captures:
    """The captures of one dump, as one.

    Args:
        dump: level and selection.
        keeper: saves tensors, None: nothing does.
    """

    def __init__(self, pipeline: Pipeline, dump: DumpSettings, keeper: TensorSaver | None) -> None:
        kept = record_filter(dump, autograd.graph_task)
        self._eager = Capture(pipeline, dump.level, stacks=dump.extra_info, data_mode=dump.data_mode, kept=kept, keeper=keeper)
        self._graph = GraphCapture(self._eager.recorder) if dump.level in ("L0", "mix") else None

    @property
    def on(self) -> bool:
        """Are calls seen?"""
        return self._eager.on

    @on.setter
    def on(self, seen: bool) -> None:
        self._eager.on = seen

    @property
    def recorder(self) -> Recorder:
        return self._eager.recorder

    @property
    def api(self) -> Any:
        """What makes records of API calls, None at a level without."""
        return self._eager.api

    def chosen_cells(self, is_on: Callable[[], bool]) -> ModuleRecords:
        """Records of some Cells, by the numbers and filters of this capture."""
        return CellCapture(self._eager.recorder, is_on, lambda: True)

    def attach(self, models: Any, anew: bool = False) -> None:
        """Name the Cells of the model (or of a list of models)."""
        self.prepare(models)
        self._eager.attach(models, anew)

    def prepare(self, models: Any) -> None:
        """A step of this model will be captured: graphs that are compiled from now on get probes."""
        if self._graph is not None:
            self._graph.prepare(models)

    def open(self) -> None:
        if self._graph is None and mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            log.warn_once("L1 graph", "level L1 sees calls of Python, and in GRAPH_MODE the network makes none; use level L0 for its Cells")
        self._eager.open()
        if self._graph is not None:
            self._graph.open()

    def pause(self) -> None:
        try:
            if self._graph is not None:
                self._graph.pause()  # which waits, and may be told of a failure of the training
        finally:
            self._eager.pause()

    def rest(self) -> None:
        """The next step is not captured: what was put on eager code comes off, graphs keep their probes."""
        if self._graph is not None:
            self._graph.pause()
        self._eager.close()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.close()
        self._eager.close()

    def end_step(self) -> list[list[str]]:
        if self._graph is not None:
            self._graph.end_step()
        return self._eager.end_step()
