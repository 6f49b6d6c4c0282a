"""Capture of Cells inside compiled graphs (``jit``, GRAPH_MODE) at levels L0 and mix: forward and backward records, gradients of
parameters. On the CPU probes are operators that call Python (`probes`).

Interface (used by `msprobe_integrations.mindspore.capture.captures`): make one `GraphCapture` beside the `Capture` of the dynamic graph,
from its recorder: numbers, filters, the pipeline and the keeper are common, and records of both go into one dump. `prepare` names the
Cells and watches the compiler; call it before the first step that is captured, best before the first step at all. `open` and `pause` are
a flag that the probes look at, `end_step` makes the backward records (before the recorder's own end of the step), `close` has graphs
compiled again without probes. Until then, while nothing is captured, each probe costs one call of Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import nn

from msprobe_engine.core import log
from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.log import get_logger
from msprobe_integrations.common.hooks.unchanged import Parts
from msprobe_integrations.mindspore.capture.cells import CellInfo, named_infos
from msprobe_integrations.mindspore.capture.recorder import Recorder
from msprobe_integrations.mindspore.graph import compiled, notes, probes
from msprobe_integrations.mindspore.graph.calls import PART, GraphCalls
from msprobe_integrations.mindspore.graph.compiles import GRADIENTS, CompileWatch, forget_graphs
from msprobe_integrations.mindspore.hooks.autograd import wait_for_operators
from msprobe_integrations.mindspore.models import is_cell

_log = get_logger()
_RECOMPUTED = "recompute_"
"""Begin of the scope of Cells after ``Cell.recompute()``. The compiler cannot repeat a forward pass with taps for gradients in it."""
_HOLDERS = (nn.CellList, nn.CellDict) if hasattr(nn, "CellDict") else (nn.CellList,)


class NotCompiled(ProbeError):
    """MindSpore's compiler refused a graph with probes."""


class GraphCapture:
    """See the text of the module.

    Args:
        recorder: of the dynamic graph's capture.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.on = False
        self._recorder = recorder
        self._faults = recorder.pipeline.faults
        self._calls = GraphCalls(recorder, lambda: self.on)
        self._parts: Parts | None = None
        self._infos: list[CellInfo] = []
        self._numbers: dict[int, int] = {}
        self._roots: list[int] = []
        self._watch = CompileWatch(self, (True, False) if recorder.backward else (False,))
        self._restore: list[tuple[Any, Any]] = []
        self._probed = False
        self._written = 0
        self._handles: list[Any] = []

    def prepare(self, models: Any) -> None:
        """Name the Cells of the model (or of a list of models), and have probes compiled into graphs from now on."""
        if not self._faults.is_enabled(PART):
            return
        with self._faults.guard(PART):
            fresh = self._name(models)
            if not self._watch.installed:
                self._watch.install()
                fresh = self._infos
            if self._recorder.backward:
                for info in fresh:
                    self._watch_parameters(info)
            probes.set_listener(self._calls)
            if fresh and forget_graphs([info.module for info in fresh]):
                _log.warning(
                    "graphs were compiled before PrecisionDebugger.start() was given the model: they are compiled again, with probes. "
                    "Call start(model) before the first training step to save the time"
                )

    def attach(self, models: Any, anew: bool = False) -> None:  # noqa: ARG002  # one interface
        """The same; a capture of the dynamic graph has this."""
        self.prepare(models)

    def open(self) -> None:
        """Begin to see calls.

        Raises:
            Exception: of the training, see `autograd.wait_for_operators`.
        """
        self._wait_for_graphs()
        self._calls.begin_window()
        self.on = True

    def pause(self) -> None:
        """See no new calls; gradients of those that were seen still come.

        Raises:
            Exception: of the training, see `autograd.wait_for_operators`.
        """
        try:
            if self.on:
                self._wait_for_graphs()
        finally:
            self.on = False

    def close(self) -> None:
        """Leave the compiler alone; graphs that have probes are compiled again without, when they are called next."""
        self.pause()
        self._watch.remove()
        if self._probed:
            self._probed = False
            with self._faults.guard(PART):
                forget_graphs([info.module for info in self._infos])
                _log.info("the dump is over: compiled graphs with probes are compiled again without them when they run next")
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if probes.get_listener() is self._calls:  # which keeps the Cells and all records of this dump alive
            probes.set_listener(None)

    def end_step(self) -> None:
        """Make the backward records of the step. Called before the records of the step are counted.

        Raises:
            Exception: of the training, see `autograd.wait_for_operators`.
        """
        with self._faults.guard(PART):
            wait_for_operators()  # graphs may run on while Python goes ahead
            self._calls.end_step()

    def _name(self, models: Any) -> list[CellInfo]:
        """Number the Cells that are new; a Cell keeps its number, because compiled graphs hold it."""
        given = models if isinstance(models, (list, tuple)) else [models]
        roots = [model for model in given if isinstance(model, nn.Cell)]
        if self._parts is not None and list(map(id, roots)) == self._roots and self._parts.is_unchanged():
            return []
        self._roots = list(map(id, roots))
        self._parts = Parts([part for root in roots for _, cell in root.cells_and_names() for part in (cell._cells, cell._params)])
        fresh = []
        for info in named_infos(models):
            if not is_cell(info.module) or isinstance(info.module, _HOLDERS) or id(info.module) in self._numbers:
                continue
            self._numbers[id(info.module)] = len(self._calls.cells)
            self._calls.cells.append(info)
            self._infos.append(info)
            fresh.append(info)
        kept = self._recorder.kept
        for info in fresh:
            if kept is not None:
                info.kind = kept.module(info.base)
        return fresh

    def _watch_parameters(self, info: CellInfo) -> None:
        for name, parameter in info.module._params.items():
            if parameter is not None and parameter.requires_grad:
                number = len(self._calls.parameters)
                self._calls.parameters.append((info, name))
                self._handles.append(parameter.register_hook(_in_graphs(compiled.gradient_hook(number, str(parameter.dtype)))))

    def _wait_for_graphs(self) -> None:
        """Graphs may run on while Python goes ahead: what was called inside of the window is seen, what was called before it is not."""
        if self._probed:
            with self._faults.guard(PART):
                wait_for_operators()

    # ---- `compiles.Instrument` ----

    def put_on(self, backward: bool) -> None:
        """Give the Cells a ``construct`` that the compiler reads with probes."""
        self._written = notes.count_notes()
        for info in self._infos:
            cell = info.module
            if any("bprop" in vars(kind) for kind in type(cell).__mro__ if kind is not nn.Cell):
                log.warn_once(f"bprop {info.base}", f"{info.base} has a bprop of its own: no probe goes into it in compiled graphs")
                continue
            had = vars(cell).get("construct")
            parameters = {name: p for name, p in cell._params.items() if p is not None}
            again = str(getattr(cell, "_scope", None) or "").startswith(_RECOMPUTED)
            if backward and again:
                log.warn_once(
                    "recompute in graphs",
                    f"{info.base} and others are recomputed in a compiled graph: they have forward records, and no gradients of their own",
                )
            made = compiled.add_probes(cell.construct, self._numbers[id(cell)], parameters, backward=backward and not again)
            object.__setattr__(cell, "construct", made.__get__(cell, type(cell)))
            self._restore.append((cell, had))

    def take_off(self) -> None:
        """Give them their own back."""
        for cell, had in self._restore:
            if had is None:
                object.__delattr__(cell, "construct")
            else:
                object.__setattr__(cell, "construct", had)
        self._restore = []

    def note_graph(self, has: Sequence[str], refused: Exception | None) -> None:
        """A graph is there. One that nothing was noted of has nothing of the model in it: optimizers are graphs of their own."""
        if notes.count_notes() == self._written:
            has = ()
        self._probed = self._probed or bool(has)
        if GRADIENTS in has:
            log.warn_once(
                "gradient probes in graphs",
                "a compiled graph has probes for gradients: the forward pass keeps its bits, but where the gradients of several uses of a "
                "tensor are added the last bits of the sum may differ. With data_mode ['forward'] the whole training keeps its bits",
            )
        if refused is not None:
            hint = f"a graph was compiled with probes for {' and '.join(has) or 'nothing'}; others may have more"
            said = log.one_line(str(refused).strip().partition("\n")[0])[:300]  # the rest is pages of graph
            why = NotCompiled(f"the compiler says {type(refused).__name__}: {said}")
            why.__cause__ = refused
            self._faults.fail(PART, why, disable=False, hint=hint)


def _in_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that runs in compiled graphs only: the compiler looks through ``__wrapped__``."""

    @functools.wraps(hook)
    def eager(gradient: Any) -> None:  # noqa: ARG001
        return None

    return eager
