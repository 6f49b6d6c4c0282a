"""Turns calls of MindSpore into entries: what Cells, APIs, primitives and compiled functions have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mindspore

from msprobe_engine.core.guard import is_of_training, raise_of_training
from msprobe_engine.core.records import Entry, TensorRef
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_integrations.common.capture.calls import Call
from msprobe_integrations.common.capture.filters import RecordFilter
from msprobe_integrations.common.capture.gradient_layout import finders
from msprobe_integrations.common.capture.recorder import CallRecorder, Keeps, Parameters
from msprobe_integrations.common.capture.stacks import Stacks
from msprobe_integrations.mindspore.capture.structure import convert, tensors_in
from msprobe_integrations.mindspore.hooks import autograd, frames, identity_ops

Tensor: Any = mindspore.Tensor
_edges_of, _differentiable = finders(Tensor, tensors_in, autograd.edge, autograd.needs, autograd.place)
_edges_of_cell, _ = finders(Tensor, tensors_in, autograd.edge, autograd.needs, lambda _: True)


def _floats(value: Any) -> list[Any]:
    """The tensors in `value` that can have a gradient, each once; before 2.10 MindSpore does not tell which ones will."""
    tensors: list[Any] = []
    tensors_in(value, tensors)
    return [t for t in {id(t): t for t in tensors}.values() if t.dtype in autograd.TYPES]


class Recorder(CallRecorder):
    """Appends entries to the pipeline's current step.

    Args:
        stacks: record call stacks.
        pipeline, data_mode, kept, keeper: see `CallRecorder`.
    """

    watch = autograd.Watch if autograd.available else identity_ops.TapWatch
    tensor = Tensor
    convert = staticmethod(convert)
    graph_task = staticmethod(autograd.graph_task if autograd.available else identity_ops.TapWatch.graph_task)
    differentiable = staticmethod(_differentiable)

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        stacks: bool = True,
        data_mode: Sequence[str] = ("all",),
        kept: RecordFilter | None = None,
        keeper: Keeps | None = None,
    ) -> None:
        super().__init__(pipeline, stacks=Stacks(frames.hides) if stacks else None, data_mode=data_mode, kept=kept, keeper=keeper)
        self._reduce = pipeline.backend.reduce
        self._newest = -1
        self._passes: dict[int, list[Any]] = {}
        self.taps = self.backward and not autograd.available
        """Gradients of Cells come from operators around them, and those of other calls do not come."""
        self._tapped: dict[Call, identity_ops.TapWatch] = {}
        self.backward = self.backward and autograd.available

    def reduce(self, tensor: Any) -> TensorRef:
        return self._reduce(tensor)

    def is_recording(self) -> bool:
        """Asked of the tensors themselves: a Cell that is differentiated has its recording switched on inside its call."""
        return True

    def recomputes(self, call: Call) -> bool:
        """Is a call inside a backward pass made once more?"""
        return autograd.recording() or (call.is_module and getattr(call.owner.module, "requires_grad", False) is True)

    def edges(self, args: Sequence[Any], kwargs: Any, every: bool, /) -> list[Any]:
        """Where the gradients of the inputs go, see `CallRecorder.edges`. As in the existing format a Cell has, as soon as one of its
        inputs needs a gradient, a place for each of its tensors, whatever their type."""
        edges = _edges_of(args, kwargs, every)
        if edges and not every:
            edges = _edges_of_cell(args, kwargs, True)
        newest = autograd.newest(edges)
        if newest > self._newest:
            self._newest = newest
        return edges

    def sequence(self) -> int:
        """A sequence number that no node known so far has. MindSpore does not tell the one that is next."""
        return self._newest + 1

    def register_watch(self, watch: Any, outputs: Sequence[Any]) -> None:  # noqa: ARG002
        """The gradients of a call are waited for; its nodes are known now."""
        watch.reached = self._note_pass
        if watch.made > self._newest:
            self._newest = watch.made

    def _note_pass(self, watch: Any) -> None:
        """A backward pass reaches a call. What leads only to inputs of which nobody wants the gradient is left out of the pass, so some
        calls never have all of theirs: they are reported when the pass ends."""
        task = watch.task
        watches = self._passes.get(task)
        if watches is None:
            watches = self._passes[task] = []
            if task != -1:
                at_end = (
                    autograd.executor.queue_backward_final_callback if autograd.available else partial(identity_ops.PASSES.at_end, task)
                )
                at_end(partial(self._pass_ends, task))
        watches.append(watch)

    def _pass_ends(self, task: int) -> None:
        try:
            left = [watch for watch in self._passes.pop(task, ()) if watch.active and watch.unfinished and watch.task == task]
            for watch in sorted(left, key=lambda w: -w.tag.since):  # what is inside a call has begun after it
                watch.report()
        except Exception as error:
            raise_of_training(error)
            self._stop_gradient_capture(error)

    def end_step(self) -> None:
        self._passes.clear()
        self._tapped.clear()
        super().end_step()

    def end_call(self, call: Call, result: Any, parameters: Parameters | None, *, failed: bool = False) -> None:
        """Note the end of a call and watch its gradients. An operator that has failed meanwhile (they run asynchronously) has its record
        too, and the error goes on to the training."""
        try:
            super().end_call(call, result, parameters, failed=failed)
        except Exception as error:
            if is_of_training(error) and not failed:
                super().end_call(call, None, None, failed=True)
            raise

    def reserve_record(self, call: Call) -> Entry | None:
        """An operation that returns before it has an output: its record has its place now. None: it is not kept."""
        if not call.keep:
            self.end_call(call, None, None)
            return None
        if self.kept is not None:
            self.kept.ends(call.name)
            self.tree.mark_parent(call)
        sections: dict[str, Any] = {"input_args": call.inputs, "input_kwargs": call.keywords} if self.inputs else {}
        entry = Entry(call.name, sections, call.parent_name, call.stack, call.micro_step, dict(call.tags))
        self.pipeline.entries.append(entry)
        call.inputs = call.keywords = call.frame = None
        return entry

    def complete_record(self, entry: Entry, output: Any, why: str = "") -> None:
        """Its output is there; `why`: it is not, and never will be looked at."""
        reduce = self.reduce if self.keeper is None else self.reduce_for(entry.name)
        if self.outputs:
            entry.sections["output"] = self._output(output, reduce if not why else lambda t: self.without_values(t, why), False)
        if self.keeper is not None:
            self.keeper.hand_over(entry)

    def tap_inputs(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call, with operators behind them that show their gradients."""
        if not autograd.recording():
            return args, kwargs
        places = _floats((args, kwargs))
        watch = self.watch_of(call, len(places), 0)
        if watch is None:
            return args, kwargs
        watch.reached = self._note_pass
        self._tapped[call] = watch
        tapped: tuple[Any, Any] = watch.tap((args, kwargs), places, is_output=False)
        return tapped

    def tap_output(self, call: Call, result: Any) -> Any:
        """The result of a call, with operators in front of it that show its gradients."""
        watch = self._tapped.pop(call, None)
        if watch is None:
            return result
        places = _floats(result)
        if not places:
            watch.active = False
            return result
        self._waits(watch)
        return watch.tap(result, places, is_output=True)

    def pop(self, call: Call) -> None:
        """The call ends: it and what an exception has left inside it are no longer in progress."""
        calls = self.stack.calls
        if calls and calls[-1] is call:
            calls.pop()
        elif call in calls:
            del calls[calls.index(call) :]
