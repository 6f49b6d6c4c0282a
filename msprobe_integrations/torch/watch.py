"""Monitor samples of module inputs, outputs and their gradients (families ``actv`` and ``actv_grad``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from msprobe_engine.records import Sample, TensorRef
from msprobe_integrations.torch.backward import Edge, GradientWatch, edge, sequence_number
from msprobe_integrations.torch.module_hooks import ModuleHooks, Post, Pre
from msprobe_integrations.torch.module_tensors import Found, inputs_of, outputs_of
from msprobe_integrations.torch.recorder import MOST_OPEN, no_torch_function
from msprobe_integrations.torch.targets import Named, matches

if TYPE_CHECKING:
    from msprobe_integrations.torch.module_side import ModuleSide

__all__ = ["TensorWatch", "matches"]

_modes = torch._C._len_torch_function_stack
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_new = tuple.__new__
_NO_EXTRA: dict[str, Any] = {}
_PART = "activation monitor"
_LOST = "activation gradients, too many calls without a backward pass"


class _Site:
    """One watched module.

    Attributes:
        started: calls in progress: edges and names of their inputs, and the sequence number before them.
        without: micro steps of calls that were made without gradients: a recomputation may make them again, with gradients.
    """

    __slots__ = ("chunk", "input", "inputs", "output", "outputs", "root", "started", "without")

    def __init__(self, named: Named) -> None:
        self.chunk = named.chunk
        self.root = named.root
        self.input = f"{named.name}.input"
        self.output = f"{named.name}.output"
        self.inputs: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.started: list[tuple[list[Edge | None], list[str], int]] = []
        self.without: deque[int] = deque()


class TensorWatch:
    """Activations and their gradients.

    Recomputations are not counted twice. A reentrant checkpoint runs without gradients first: there the gradients are those of the
    recomputation, and the activations those of the first run.

    Args:
        side: what this is a part of.
    """

    def __init__(self, side: ModuleSide) -> None:
        self._side = side
        self._probe = side.probe
        monitor = side.monitor
        self._forward = monitor.activations
        self._backward = monitor.activation_gradients
        self._histograms = tuple(family for family in ("actv", "actv_grad") if family in monitor.histograms)
        self._rows: dict[int, int] = {}
        self._sites: list[_Site] = []
        self._watches: list[GradientWatch] = []
        # without the look for modes on torch's stack, which are off where it is called
        self._reduce = self._probe.backend.reduce_unshielded
        self._reduce_gradient: Callable[[torch.Tensor], TensorRef] = (
            self._gradient_with_histogram if "actv_grad" in self._histograms else self._probe.backend.reduce
        )

    def add(self, named: Named, hooks: ModuleHooks) -> None:
        """Watch one module."""
        site = _Site(named)
        self._sites.append(site)
        hooks.add(named, *self._hooks(site), self)

    def end_step(self) -> None:
        """Report gradients that came in part; what comes later is not looked at."""
        for watch in self._watches:
            if watch.unfinished:
                watch.report()
            watch.active = False
        self._watches.clear()
        self._rows.clear()
        for site in self._sites:
            site.started.clear()  # of calls that raised
            site.without.clear()

    def _hooks(self, site: _Site) -> tuple[Pre, Post]:
        side, started = self._side, site.started

        def pre(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _compiling() or not side.sees(site.root):
                return
            try:
                if _modes():
                    with no_torch_function():
                        self._begin(site, args, kwargs)
                else:
                    self._begin(site, args, kwargs)
            except Exception as error:
                self._fail(error)

        def post(_module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
            if not started or _compiling():
                return
            try:
                if _modes():
                    with no_torch_function():
                        self._end(site, result)
                else:
                    self._end(site, result)
            except Exception as error:
                self._fail(error)

        return pre, post

    def _begin(self, site: _Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        again = _graph_task() != -1
        if again and not site.without:
            return
        found = inputs_of(args, kwargs)
        names = site.inputs
        texts = [names.get(end) or names.setdefault(end, site.input + end) for end, _ in found]
        if self._forward and not again:
            self._take(site.chunk, texts, found)
        edges = [edge(tensor) for _, tensor in found] if self._backward and _grad_enabled() else []
        site.started.append((edges, texts, sequence_number()))

    def _end(self, site: _Site, result: Any) -> None:
        edges, texts, since = site.started.pop()
        again = _graph_task() != -1
        found = outputs_of(result)
        names = site.outputs
        ends = [names.get(end) or names.setdefault(end, site.output + end) for end, _ in found]
        if self._forward and not again:
            self._take(site.chunk, ends, found)
        if not self._backward:
            return
        micro_step = self._side.micro_step(site.chunk)
        if not _grad_enabled():
            site.without.append(micro_step)
            return
        if again and site.without:
            micro_step = site.without.popleft()
        if len(self._watches) >= MOST_OPEN:
            self._probe.pipeline.lose(_LOST)
            return
        outputs = [tensor for _, tensor in found]
        tag = (site.chunk, micro_step, texts, ends)
        watch = GradientWatch(tag, len(edges), len(outputs), self._reduce_gradient, self._gradients, self._fail)
        if watch.start(edges, outputs, since):
            self._watches.append(watch)

    def _take(self, chunk: int, names: list[str], found: Found) -> None:
        reduce, samples = self._reduce, self._probe.pipeline.samples
        micro_step = self._side.micro_step(chunk)
        histogram = "actv" in self._histograms
        for name, (_, tensor) in zip(names, found):
            ref = reduce(tensor)
            extra = self._with_histogram(tensor) if histogram and ref[0] >= 0 else _NO_EXTRA
            samples.append(_new(Sample, ("actv", name, ref, "", micro_step, chunk, extra)))

    def _gradients(self, watch: GradientWatch, inputs: Sequence[TensorRef | None], outputs: Sequence[TensorRef | None]) -> None:
        chunk, micro_step, names, ends = watch.tag
        samples = self._probe.pipeline.samples
        for texts, refs in ((ends, outputs), (names, inputs)):
            for name, ref in zip(texts, refs):
                if ref is not None:
                    extra = self._of_gradient(ref) if self._rows else _NO_EXTRA
                    samples.append(_new(Sample, ("actv_grad", name, ref, "", micro_step, chunk, extra)))

    def _with_histogram(self, tensor: torch.Tensor) -> dict[str, Any]:
        return {"histogram": {"row": self._probe.backend.histogram(tensor, "log2"), "kind": "log2", "bins": 50}}

    def _gradient_with_histogram(self, gradient: torch.Tensor) -> TensorRef:
        ref: TensorRef = self._probe.backend.reduce(gradient)
        if ref.row >= 0 and ref.row not in self._rows:
            self._rows[ref.row] = self._probe.backend.histogram(gradient, "log2")
        return ref

    def _of_gradient(self, ref: TensorRef) -> dict[str, Any]:
        row = self._rows.get(ref.row)
        return _NO_EXTRA if row is None else {"histogram": {"row": row, "kind": "log2", "bins": 50}}

    def _fail(self, error: Exception) -> None:
        self._probe.faults.fail(_PART, error)
        self._side.drop(self)
