"""Monitor samples of inputs, outputs and their gradients of Cells (families ``actv`` and ``actv_grad``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore

from msprobe_engine.core.guard import is_of_training, raise_of_training
from msprobe_engine.core.log import warn_once
from msprobe_engine.core.records import Sample, TensorRef
from msprobe_engine.core.statistics import histograms
from msprobe_integrations.common.capture.containers import open_object
from msprobe_integrations.common.hooks.gradient_watch import GradientWatch
from msprobe_integrations.common.monitor.module_monitor import Hooks, ModuleMonitor, Post, Pre
from msprobe_integrations.common.monitor.module_tensors import Found, tensor_names
from msprobe_integrations.common.monitor.targets import Named
from msprobe_integrations.mindspore.hooks import autograd

_KIND = "log2"
_PART = "activation monitor"
_LOST = "activation gradients, too many calls without a backward pass"
MOST_OPEN = 20_000
"""Calls that wait for their gradients."""
inputs_of, outputs_of = tensor_names(mindspore.Tensor, open_object)
_new = tuple.__new__


def _ignore_order(_watch: autograd.Watch) -> None:
    """A backward pass has come to a call: samples have no order among the calls."""


class _Site:
    """One watched Cell.

    Attributes:
        started: calls in progress: ends of the names of their inputs, edges, the micro step, and a sequence number that is newer than all
            nodes before.
    """

    __slots__ = ("chunk", "name", "root", "started")

    def __init__(self, named: Named) -> None:
        self.chunk = named.chunk
        self.root = named.root
        self.name = named.name
        self.started: list[tuple[list[str], list[Any], int, int]] = []


class CellWatch:
    """Activations and their gradients. What runs a second time in the backward pass (`Cell.recompute`) is not counted again."""

    def __init__(self, side: ModuleMonitor) -> None:
        self._side = side
        self._probe = side.probe
        monitor = side.monitor
        self._forward = monitor.activations
        self._backward = monitor.activation_gradients and autograd.available
        self._drawn = "actv" in monitor.histograms
        self._gradients_drawn = "actv_grad" in monitor.histograms
        self._sites: list[_Site] = []
        self._watches: list[autograd.Watch] = []
        self._rows: dict[int, dict[str, Any]] = {}
        self._newest = -1
        if monitor.activation_gradients and not autograd.available:
            warn_once("monitor.activation_gradients", "monitor.activation_gradients: gradients of activations need MindSpore 2.10 or later")

    def add(self, named: Named, hooks: Hooks) -> None:
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
        self._newest = -1
        for site in self._sites:
            site.started.clear()  # of calls that raised

    def _hooks(self, site: _Site) -> tuple[Pre, Post]:
        side = self._side

        def pre(_cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if side.sees(site.root) and autograd.graph_task() == -1:
                try:
                    self._begin_call(site, args, kwargs)
                except Exception as error:
                    raise_of_training(error)
                    self._fail(error)

        def post(_cell: Any, _args: Any, _kwargs: Any, result: Any) -> None:
            if site.started and autograd.graph_task() == -1:
                try:
                    self._end_call(site, result)
                except Exception as error:
                    raise_of_training(error)
                    self._fail(error)

        return pre, post

    def _begin_call(self, site: _Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = inputs_of(args, kwargs)
        names = [f"{site.name}.input{end}" for end, _ in tensors]
        micro_step = self._side.micro_step(site.chunk)
        if self._forward:
            self._add_samples(site.chunk, micro_step, names, tensors)
        edges = [autograd.edge(tensor) for _, tensor in tensors] if self._backward and autograd.recording() else []
        self._newest = max(self._newest, autograd.newest(edges))
        site.started.append((names, edges, micro_step, self._newest + 1))

    def _end_call(self, site: _Site, result: Any) -> None:
        names, edges, micro_step, since = site.started.pop()
        tensors = outputs_of(result)
        ends = [f"{site.name}.output{end}" for end, _ in tensors]
        if self._forward:
            self._add_samples(site.chunk, micro_step, ends, tensors)
        if self._backward and autograd.recording():
            self._watch_gradients((site.chunk, micro_step, names, ends), edges, [tensor for _, tensor in tensors], since)

    def _add_samples(self, chunk: int, micro_step: int, names: list[str], tensors: Found) -> None:
        backend, append = self._probe.backend, self._probe.pipeline.samples.append
        for name, (_, tensor) in zip(names, tensors):
            ref = backend.reduce(tensor)
            extra = self._histogram(tensor) if self._drawn and ref.row >= 0 else {}
            append(_new(Sample, ("actv", name, ref, "", micro_step, chunk, extra)))

    def _watch_gradients(self, tag: Any, edges: Sequence[Any], outputs: Sequence[Any], since: int) -> None:
        if len(self._watches) >= MOST_OPEN:
            self._probe.pipeline.lose(_LOST)
            return
        watch = autograd.Watch(tag, len(edges), len(outputs), self._reduce_gradient, self._gradients, self._fail)
        watch.reached = _ignore_order
        if watch.start(edges, outputs, since):
            self._watches.append(watch)
            self._newest = max(self._newest, watch.made)

    def _reduce_gradient(self, gradient: Any) -> TensorRef:
        ref: TensorRef = self._probe.backend.reduce(gradient)
        if self._gradients_drawn and ref.row >= 0 and ref.row not in self._rows:
            self._rows[ref.row] = self._histogram(gradient)
        return ref

    def _gradients(self, watch: GradientWatch, inputs: Sequence[TensorRef | None], outputs: Sequence[TensorRef | None]) -> None:
        chunk, micro_step, names, ends = watch.tag
        samples = self._probe.pipeline.samples
        for texts, refs in ((ends, outputs), (names, inputs)):
            for name, ref in zip(texts, refs):
                if ref is not None:
                    samples.append(Sample("actv_grad", name, ref, "", micro_step, chunk, self._rows.get(ref.row, {})))

    def _histogram(self, tensor: Any) -> dict[str, Any]:
        row = self._probe.backend.histogram(tensor, _KIND)
        return {"histogram": histograms.reference(row, _KIND)} if row >= 0 else {}

    def _fail(self, error: Exception) -> None:
        if not is_of_training(error):
            self._side.drop(self)
        self._probe.faults.fail(_PART, error)
