"""Turns calls into entries: what module hooks and API capture have in common."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from msprobe_engine.pipeline import Pipeline
from msprobe_engine.records import Entry, TensorRef
from msprobe_integrations.common.calls import Call, CallStack, Numbering, again, pass_of
from msprobe_integrations.common.filters import BACKWARD, FORWARD, RecordFilter
from msprobe_integrations.common.stacks import Stacks
from msprobe_integrations.torch import frames
from msprobe_integrations.torch.backward import Edge, GradientWatch, sequence_number
from msprobe_integrations.torch.graph_tasks import current_graph_task
from msprobe_integrations.torch.keep import Keeper
from msprobe_integrations.torch.raw import RawMemory
from msprobe_integrations.torch.slices import Slices
from msprobe_integrations.torch.slots import differentiable, edges_of
from msprobe_integrations.torch.structure import convert
from msprobe_integrations.torch.tree import CallTree
from msprobe_integrations.torch.unsettled import Unsettled

Parameters = Mapping[str, "torch.Tensor | None"]
no_torch_function = torch._C.DisableTorchFunction
_modes = torch._C._len_torch_function_stack
_NO_EDGES: list[Edge | None] = []
_NO_TAGS: Mapping[str, Any] = {}
_RECOMPUTE: Mapping[str, Any] = {"is_recompute": True}
_STOPPED = "_StopRecomputationError"  # raised by torch.utils.checkpoint out of a recomputation that has what it needs


def _most_open() -> int:
    """How many calls may wait for their gradients. Looking at a node of the graph gives it a Python object, and a chain of such
    nodes is released by recursion: 45,000 of them overflow a stack of 8 MiB (torch 2.13), where without the probe nothing happens."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return 30_000 if stack == resource.RLIM_INFINITY else min(30_000, stack // 300)


MOST_OPEN = _most_open()
"""Further calls have no gradients recorded; the frame says how many (``lost``)."""


class Recorder:
    """Appends entries to the pipeline's current step.

    Args:
        pipeline: where entries go.
        stacks: record call stacks.
        data_mode: ``all`` or a subset of input, output, forward, backward, as the dump settings have it.
        kept: which records are kept; None keeps all.
        slices: cuts of tensors before anything is taken of them; None: there are none.
        keeper: saves tensors; None: nothing does.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        stacks: bool = True,
        data_mode: Sequence[str] = ("all",),
        kept: RecordFilter | None = None,
        slices: Slices | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.keeper = keeper
        self.raw = RawMemory()
        self._raw = self.raw.known
        self.reduce_gradient = pipeline.backend.reduce
        # without the look for modes on torch's stack, which are off where `reduce` is called
        self._reduce = getattr(pipeline.backend, "reduce_unshielded", pipeline.backend.reduce)
        if slices is not None:
            self.reduce_gradient = self._reduce = slices.reduce
        self.stack = CallStack()
        self.numbers = Numbering()
        self.stacks = Stacks(frames.hides) if stacks else None
        self.micro_step = -1
        self.kept = kept
        self.range = kept.range if kept is not None else None
        everything = "all" in data_mode or not data_mode
        self.forward = everything or "forward" in data_mode or "backward" not in data_mode
        self.backward = everything or "backward" in data_mode or "forward" not in data_mode
        self.inputs = everything or "input" in data_mode or "output" not in data_mode
        self.outputs = everything or "output" in data_mode or "input" not in data_mode
        self.tree = CallTree(pipeline)
        self.unsettled = Unsettled()
        self._watches: list[GradientWatch] = []
        self._views: dict[int, tuple[weakref.ref[torch.Tensor], list[tuple[GradientWatch, int]]]] = {}
        self._open = 0

    def reduce(self, tensor: torch.Tensor) -> TensorRef:
        """Statistics of a tensor; row -1 for memory that holds no values yet."""
        if self._raw and self.raw.holds(tensor):
            return self._without_values(tensor, "uninitialised")
        ref = self._reduce(tensor)
        if ref[0] < 0:
            self.unsettled.met(tensor, ref)
        return ref

    def reduce_for(self, name: str) -> Callable[[torch.Tensor], TensorRef]:
        """`reduce` for tensors of this record, which also saves them where that is wanted."""
        return self._save if self.keeper is not None and self.keeper.wanted(name) else self.reduce

    def reduce_gradient_for(self, name: str) -> Callable[[torch.Tensor], TensorRef]:
        """The same for gradients: callable anywhere, and their memory always has values."""
        return self.keeper.reduce if self.keeper is not None and self.keeper.wanted(name) else self.reduce_gradient

    def record(self, entry: Entry) -> None:
        """A record is complete."""
        self.pipeline.entries.append(entry)
        if self.keeper is not None:
            self.keeper.hand_over(entry)

    def _save(self, tensor: torch.Tensor) -> TensorRef:
        if self._raw and self.raw.holds(tensor):
            return self._without_values(tensor, "uninitialised")
        assert self.keeper is not None
        ref = self.keeper.reduce(tensor)
        if ref[0] < 0:
            self.unsettled.met(tensor, ref)
        return ref

    def begin(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], depth: int, ignored: int = -1) -> None:
        """Note the start of a call: inputs are reduced now, before an in-place operation can change them.

        Args:
            depth: frames between this function and the user's.
            ignored: position of an argument that the call does not read, -1 when there is none.
        """
        call.micro_step = self.micro_step
        if current_graph_task() != -1:
            call.recompute = torch.is_grad_enabled()  # the code of a backward pass itself runs without
            if call.parent is None:
                call.parent_name = self.tree.parent_in_backward(call)
        if self.kept is None:
            call.wanted = call.keep = self.forward
            call.watch = self.backward
        elif not self._select(call, self.kept):
            self.stack.calls.append(call)
            return
        if call.keep and self.stacks is not None:
            call.frame = frame = sys._getframe(depth)
            parent = call.parent
            if parent is not None and parent.stack >= 0:
                call.stack = self.stacks.capture(frame, parent.frame, parent.stack)
            else:
                call.stack = self.stacks.capture(frame)
        if _modes():  # looking at a tensor would be a call of its own
            with no_torch_function():
                self._look(call, args, kwargs, ignored)
        else:
            self._look(call, args, kwargs, ignored)
        call.since = sequence_number()
        self.stack.calls.append(call)

    def _select(self, call: Call, kept: RecordFilter) -> bool:
        """Decide what of a call is kept. False: nothing but its place among the calls."""
        parent = call.parent
        inside = parent.inside if parent is not None else 0
        own = kept.directions(call.base, call.name, call.backward_name)
        if own and kept.expands and call.is_module:
            # what a listed module does, and in consequence what its backward pass does
            inside |= own | BACKWARD
        call.inside = inside
        own |= inside
        started = kept.starts(call.name)
        call.wanted = self.forward and bool(own & FORWARD)
        call.keep = call.wanted and started
        call.watch = self.backward and bool(own & BACKWARD)
        return call.wanted or call.watch

    def _look(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: int) -> None:
        if call.keep and self.inputs:
            reduce = self.reduce if self.keeper is None else self.reduce_for(call.name)
            read = args if ignored < 0 else [None if i == ignored else a for i, a in enumerate(args)]
            call.inputs = [reduce(a) if isinstance(a, torch.Tensor) else convert(a, reduce) for a in read]
            if ignored >= 0 and isinstance(args[ignored], torch.Tensor):
                call.inputs[ignored] = self._without_values(args[ignored], "ignored")
            call.keywords = {k: convert(v, reduce if k != "out" else self._ignored) for k, v in kwargs.items()} if kwargs else {}
            if self.unsettled.seen:
                self.unsettled.await_in((call.inputs, call.keywords), reduce)
        if call.watch and torch.is_grad_enabled() and self._open < MOST_OPEN:
            call.edges = edges_of(args, kwargs, every=not call.is_module)

    def end(self, call: Call, result: Any, parameters: Parameters | None, *, failed: bool = False) -> None:
        """Note the end of a call and watch its gradients."""
        if _modes():
            with no_torch_function():
                self._conclude(call, result, parameters, failed)
        else:
            self._conclude(call, result, parameters, failed)

    def _conclude(self, call: Call, result: Any, parameters: Parameters | None, failed: bool) -> None:
        if self.unsettled.waiting:
            self.unsettled.settle()
        if self.kept is None:
            if call.keep:
                self._emit(call, result, parameters, failed)
        else:
            ended = self.kept.ends(call.name)
            if call.keep or (call.wanted and ended):
                self._emit(call, result, parameters, failed, ended)
                self.tree.kept(call)
            elif call.node or (self.kept.nodes and not call.wanted):
                self.tree.node(call)
        call.inputs = call.keywords = call.frame = None  # a frame would keep its variables alive
        edges, call.edges = call.edges, _NO_EDGES
        if failed or not call.watch or not self.backward or not torch.is_grad_enabled():
            return
        if isinstance(result, torch.Tensor):
            if not result.requires_grad:
                return
            outputs: list[torch.Tensor | None] = [result]
        else:
            outputs = differentiable(result)
            if not outputs:
                return
        if self._open >= MOST_OPEN:
            self.pipeline.lose("gradients of calls, too many without a backward pass")
            return
        reduce: Callable[[torch.Tensor], TensorRef | None] = self.reduce_gradient
        if self.keeper is not None:
            reduce = self.reduce_gradient_for(call.backward_name)
        arriving = reduce if self.inputs else self.reduce_gradient  # what is not written is not saved
        reduce = reduce if self.outputs else self.reduce_gradient
        begun = self.tree.backward_begins if call.is_module else None
        if self.range is not None:
            reduce, arriving = partial(self._reduce_in_range, call, reduce), partial(self._reduce_in_range, call, arriving)
            begun = self._backward_begins
        watch = GradientWatch(call, len(edges), len(outputs), reduce, self._gradients, self._broken, begun, arriving)
        if watch.start(edges, outputs, call.since):
            self._watches.append(watch)
            self._open += 1
            for slot, output in enumerate(outputs):
                if output is not None and output._is_view():
                    self._view_made(watch, slot, output)

    def _view_made(self, watch: GradientWatch, slot: int, view: torch.Tensor) -> None:
        """A call has given a view, or has written to one: then the gradient of calls that gave it before comes from elsewhere."""
        known = self._views.get(id(view))
        if known is None or known[0]() is not view:
            self._views[id(view)] = known = (weakref.ref(view), [])
        elif watch.view is not None:
            for earlier, place in known[1]:
                if earlier.tag not in self.stack.calls:
                    earlier.redirect(place, watch.view)
            known[1].clear()
        known[1].append((watch, slot))

    def _without_values(self, tensor: torch.Tensor, why: str) -> TensorRef:
        description = self.pipeline.backend.describe(tensor)
        return TensorRef(-1, description._replace(extra=(*description.extra, (why, True))))

    def _ignored(self, tensor: torch.Tensor) -> TensorRef:
        return self._without_values(tensor, "ignored")  # what ``out=`` holds before is not read

    def where(self) -> tuple[str | None, int]:
        """Record name of the innermost call in progress on this thread, and the current micro batch. Inside a backward pass and outside
        all calls: the backward record of a module that is under way."""
        calls = self.stack.calls
        if calls:
            return calls[-1].name, self.micro_step
        return (self.tree.running() if current_graph_task() != -1 else None), self.micro_step

    def stack_at(self, frame: FrameType) -> int:
        """Number of the call stack that starts at `frame`, -1 when stacks are not recorded."""
        if self.stacks is None:
            return -1
        calls = self.stack.calls
        if calls and calls[-1].stack >= 0:
            return self.stacks.capture(frame, calls[-1].frame, calls[-1].stack)
        return self.stacks.capture(frame)

    def keeps(self, name: str) -> bool:
        """Is the forward record of this name, that of a collective, kept?"""
        if not self.forward or self.kept is None:
            return self.forward
        calls = self.stack.calls
        if not self.kept.wants(name, inside=bool(calls and calls[-1].inside & FORWARD)):
            return False
        if calls:
            calls[-1].node = True
        return True

    def end_step(self) -> None:
        """Report gradients that came only in part, forget the step's numbering."""
        watches, self._watches = self._watches, []
        for watch in watches:
            if watch.unfinished:
                watch.report()
            watch.active = False
        self._open = 0
        self._views.clear()
        self.unsettled.end_step()
        self.tree.end_step()
        if self.kept is not None:
            self.kept.end_step()
        self.numbers.reset()
        self.stack.calls.clear()

    def _emit(self, call: Call, result: Any, parameters: Parameters | None, failed: bool, ended: bool = True) -> None:
        sections: dict[str, Any] = {}
        if self.inputs and call.keep:
            sections["input_args"] = call.inputs
            sections["input_kwargs"] = call.keywords
        reduce = self.reduce if self.keeper is None else self.reduce_for(call.name)
        if self.outputs and ended:
            sections["output"] = None if failed else self._output(result, reduce, call.is_module)
            if self.unsettled.seen:
                self.unsettled.await_in(sections["output"], reduce)
        if parameters is not None and ended:
            take = self.reduce if self.keeper is not None and not self.keeper.parameters else reduce
            sections["parameters"] = {name: take(p) for name, p in parameters.items() if p is not None}
        tags: Mapping[str, Any] = _RECOMPUTE if call.recompute else _NO_TAGS
        if failed:
            stopped = getattr(sys.exc_info()[0], "__name__", "") == _STOPPED
            tags = {**tags, "stopped_early" if stopped else "raised": True}
        self.record(Entry(call.name, sections, call.parent_name, call.stack, call.micro_step, tags))

    def _output(self, result: Any, reduce: Callable[[torch.Tensor], TensorRef], is_module: bool) -> Any:
        if isinstance(result, torch.Tensor):
            return [reduce(result)]
        structure = convert(result, reduce)
        if is_module and not isinstance(result, tuple):
            return [structure]  # of a module only a tuple is several outputs, in the existing format
        if isinstance(structure, list) or (isinstance(structure, dict) and isinstance(result, Mapping)):
            return structure
        if isinstance(result, torch.Size):
            return structure.json
        return [structure]

    def _backward_begins(self, watch: GradientWatch) -> None:
        """The first gradient of a backward pass through a call has arrived, where a range decides what is kept."""
        assert self.kept is not None
        self.tree.backward_begins(watch)
        watch.tag.running = self.kept.starts(watch.tag.backward_name)

    def _gradients(self, watch: GradientWatch, inputs: list[TensorRef | None], outputs: list[TensorRef | None]) -> None:
        call: Call = watch.tag
        name = call.backward_name
        ended = True
        if self.range is not None:
            ended = self.range.ends(name, call) or self.range.holds(call)
            if not ended and not call.running:
                self.tree.backward_ends(call)
                return
        tags: Mapping[str, Any] = _NO_TAGS
        if not watch.passes:
            self._open -= 1
        number = pass_of(call, watch.task)
        if number in call.told:  # a pass inside this one has split it
            call.tasks = (*call.tasks, -2 - watch.passes)
            number = len(call.tasks) - 1
        call.told = (*call.told, number)
        if len(call.tasks) > 1:
            name = again(name, number)
        if number:
            tags = {"pass": number + 1, "of": again(name, 0)}
        if watch.shared:
            tags = {**tags, "one_tensor": [list(places) for places in watch.shared]}
        sections: dict[str, Any] = {}
        if self.inputs and (self.range is None or call.running):
            sections["input"] = outputs
        if self.outputs and ended:
            sections["output"] = inputs
        parent = self.tree.parent_of_pass(call, watch.task)
        self.record(Entry(name, sections, parent, -1, call.micro_step, tags))
        self.tree.backward_ends(call, name, self.kept is not None, last=bool(inputs))

    def _reduce_in_range(self, call: Call, reduce: Callable[[torch.Tensor], TensorRef | None], gradient: torch.Tensor) -> TensorRef | None:
        return reduce(gradient) if self.range is not None and self.range.holds(call) else None

    def _broken(self, error: Exception) -> None:
        self.pipeline.faults.fail("gradient capture", error)
        self.backward = False
