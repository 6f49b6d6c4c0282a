"""Monitor samples of module inputs, outputs and their gradients (families ``actv`` and ``actv_grad``).

Monitor samples of tensors whose values are still on their way (`AsyncCollectiveTensor`: what a tensor-parallel layer gives before
anybody has used it). Waiting in a hook would take away the overlap, so their statistics are put in at the next hook after the first
operation that has waited. See `unsettled` for records of dumps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import Sample, TensorRef
from msprobe_engine.core.statistics import histograms
from msprobe_integrations.common.hooks import gradient_watch
from msprobe_integrations.common.monitor.module_monitor import ModuleMonitor
from msprobe_integrations.common.monitor.module_tensors import Found, tensor_names
from msprobe_integrations.common.monitor.targets import Named, matches
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.recorder import MOST_OPEN, no_torch_function
from msprobe_integrations.torch.hooks.backward import Edge, GradientWatch, edge, sequence_number
from msprobe_integrations.torch.hooks.modules import ModuleHooks, Post, Pre
from msprobe_integrations.torch.tensors.containers import open_object

__all__ = ["TensorWatch", "matches"]

_modes = torch._C._len_torch_function_stack
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_new = tuple.__new__
_KIND = "log2"
_NO_EXTRA: dict[str, Any] = {}
_PART = "activation monitor"
inputs_of, outputs_of = tensor_names(torch.Tensor, open_object, (torch.dtype, torch.device, torch.Size))
_LOST = "activation gradients, too many calls without a backward pass"


class _Site:
    """One watched module.

    Attributes:
        inputs, outputs: full names by the end of the name, see `module_tensors`.
        started: calls in progress: names and edges of their inputs, the micro step, and the sequence number before them.
        without: micro steps of calls that were made without gradients: a recomputation may make them again, with gradients.
    """

    __slots__ = ("chunk", "inputs", "outputs", "root", "started", "without")

    def __init__(self, named: Named) -> None:
        self.chunk = named.chunk
        self.root = named.root
        self.inputs = _Names(f"{named.name}.input")
        self.outputs = _Names(f"{named.name}.output")
        self.started: list[tuple[list[str], list[Edge | None], int, int]] = []
        self.without: deque[int] = deque()


class _Names(dict[str, str]):
    """Full names by the end of the name, made once."""

    def __init__(self, base: str) -> None:
        self._base = base

    def __missing__(self, end: str) -> str:
        name = self[end] = self._base + end
        return name


class TensorWatch:
    """Activations and their gradients.

    Recomputations are not counted twice. A reentrant checkpoint runs without gradients first: there the gradients are those of the
    recomputation, and the activations those of the first run.
    """

    def __init__(self, side: ModuleMonitor) -> None:
        self._side = side
        self._probe = side.probe
        monitor = side.monitor
        self._forward = monitor.activations
        self._backward = monitor.activation_gradients
        self._rows: dict[int, dict[str, Any]] = {}
        self._sites: list[_Site] = []
        self._watches: list[GradientWatch] = []
        self._too_deep: RecursionError | None = None
        # without the look for modes on torch's stack, which are off where it is called
        backend: TorchBackend = self._probe.backend
        self._reduce = backend.reduce_unshielded
        self._late = DeferredSamples(backend.reduce)
        if "actv" in monitor.histograms:
            self._sample_tensors = self._sample_with_histogram  # type: ignore[method-assign]
        self._reduce_gradient: Callable[[torch.Tensor], TensorRef] = (
            self._gradient_with_histogram if "actv_grad" in monitor.histograms else self._late.reduce
        )

    def add(self, named: Named, hooks: ModuleHooks) -> None:
        site = _Site(named)
        self._sites.append(site)
        hooks.add(named, *self._hooks(site), self)

    def end_step(self) -> None:
        """Report gradients that came in part; what comes later is not looked at."""
        if self._too_deep is not None:
            self._fail(self._too_deep)
        self._late.end_step(self._probe.pipeline.samples)
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
        side, root, started, without, chunk = self._side, site.root, site.started, site.without, site.chunk
        forward, backward, take = self._forward, self._backward, self._sample_tensors
        input_names, output_names = site.inputs, site.outputs

        def pre(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                if not side.on or not root.training or _compiling():
                    return
                again = _graph_task() != -1
                if again and not without:
                    return
                if _modes():
                    with no_torch_function():
                        record_inputs(args, kwargs, again)
                else:
                    record_inputs(args, kwargs, again)
            except RecursionError as error:
                self._too_deep = error  # no call is left to tell of it here
                side.on = False
            except Exception as error:
                raise_of_training(error)
                self._fail(error)

        def record_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], again: bool) -> None:
            tensors = inputs_of(args, kwargs)
            names = [input_names[end] for end, _ in tensors]
            micro_step = side.micro_step(chunk)
            if forward and not again:
                take(chunk, micro_step, names, tensors)
            edges = [edge(tensor) for _, tensor in tensors] if backward and _grad_enabled() else []
            started.append((names, edges, micro_step, sequence_number()))

        def post(_module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
            if not started:
                return
            try:
                if _modes():
                    with no_torch_function():
                        record_outputs(result)
                else:
                    record_outputs(result)
            except RecursionError as error:
                self._too_deep = error
                side.on = False
            except Exception as error:
                raise_of_training(error)
                self._fail(error)

        def record_outputs(result: Any) -> None:
            names, edges, micro_step, since = started.pop()
            again = _graph_task() != -1
            tensors = outputs_of(result)
            ends = [output_names[end] for end, _ in tensors]
            if forward and not again:
                take(chunk, micro_step, ends, tensors)
            if backward:
                if not _grad_enabled():
                    without.append(micro_step)
                    return
                if again and without:
                    micro_step = without.popleft()
                self._watch_gradients(chunk, micro_step, names, edges, ends, tensors, since)

        return pre, post

    def _sample_tensors(self, chunk: int, micro_step: int, names: list[str], found: Found) -> None:
        reduce, append = self._reduce, self._probe.pipeline.samples.append
        for name, (_, tensor) in zip(names, found):
            ref = reduce(tensor)
            if ref[0] < 0:
                ref = self._late.reduce(tensor)
            append(_new(Sample, ("actv", name, ref, "", micro_step, chunk, _NO_EXTRA)))
        if self._late:
            self._late.reduce_finished(self._probe.pipeline.samples)

    def _sample_with_histogram(self, chunk: int, micro_step: int, names: list[str], found: Found) -> None:
        for name, (_, tensor) in zip(names, found):
            ref = self._reduce(tensor)
            extra = self._histogram(tensor) if ref.row >= 0 else _NO_EXTRA
            self._probe.pipeline.samples.append(Sample("actv", name, ref, "", micro_step, chunk, extra))

    def _watch_gradients(
        self, chunk: int, micro_step: int, names: list[str], edges: list[Edge | None], ends: list[str], found: Found, since: int
    ) -> None:
        if len(self._watches) >= MOST_OPEN:
            self._probe.pipeline.lose(_LOST)
            return
        tag = (chunk, micro_step, names, ends)
        watch = GradientWatch(tag, len(edges), len(found), self._reduce_gradient, self._gradients, self._fail)
        if watch.start(edges, [tensor for _, tensor in found], since):
            self._watches.append(watch)

    def _gradients(self, watch: gradient_watch.GradientWatch, inputs: gradient_watch.Refs, outputs: gradient_watch.Refs) -> None:
        chunk, micro_step, names, ends = watch.tag
        samples = self._probe.pipeline.samples
        for texts, refs in ((ends, outputs), (names, inputs)):
            for name, ref in zip(texts, refs):
                if ref is not None:
                    extra = self._rows.get(ref.row, _NO_EXTRA) if self._rows else _NO_EXTRA
                    samples.append(_new(Sample, ("actv_grad", name, ref, "", micro_step, chunk, extra)))
        if self._late:
            self._late.reduce_finished(samples)

    def _gradient_with_histogram(self, gradient: torch.Tensor) -> TensorRef:
        ref: TensorRef = self._late.reduce(gradient)
        if ref.row >= 0 and ref.row not in self._rows:
            self._rows[ref.row] = self._histogram(gradient)
        return ref

    def _histogram(self, tensor: torch.Tensor) -> dict[str, Any]:
        row = self._probe.backend.histogram(tensor, _KIND)
        return {"histogram": histograms.reference(row, _KIND)} if row >= 0 else _NO_EXTRA

    def _fail(self, error: Exception) -> None:
        self._too_deep = None
        self._probe.faults.fail(_PART, error)
        self._side.drop(self)


Reduce = Callable[[torch.Tensor], TensorRef]
_PENDING = ("pending", True)


class DeferredSamples:
    """Samples that wait for their tensor; empty nearly always."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._met: list[tuple[TensorRef, weakref.ref[torch.Tensor]]] = []
        self._waiting: list[tuple[list[Sample], int, weakref.ref[torch.Tensor]]] = []

    def __bool__(self) -> bool:
        return bool(self._met or self._waiting)

    def reduce(self, tensor: torch.Tensor) -> TensorRef:
        """The statistics; of a tensor that is still on its way a reference without a row, and the tensor is remembered, weakly."""
        ref = self._reduce(tensor)
        if ref[0] < 0 and _PENDING in ref.description.extra:
            self._met.append((ref, weakref.ref(tensor)))
        return ref

    def reduce_finished(self, samples: list[Sample]) -> None:
        """New samples were appended, and operations have ended that may have waited.

        Args:
            samples: those of the step so far.
        """
        if self._met:
            places = {id(sample.ref): index for index, sample in enumerate(samples) if sample.ref.row < 0}
            self._waiting += [(samples, places[id(ref)], tensor) for ref, tensor in self._met if id(ref) in places]
            self._met = [(ref, tensor) for ref, tensor in self._met if id(ref) not in places and tensor() is not None]
        waiting, self._waiting = self._waiting, []
        for place in waiting:
            own, index, reference = place
            tensor = reference()
            if tensor is None:
                continue
            if getattr(tensor, "completed", False):
                own[index] = own[index]._replace(ref=self._reduce(tensor))
            else:
                self._waiting.append(place)

    def end_step(self, samples: list[Sample]) -> None:
        """What is still on its way stays without numbers."""
        self.reduce_finished(samples)
        self._met.clear()
        self._waiting.clear()
