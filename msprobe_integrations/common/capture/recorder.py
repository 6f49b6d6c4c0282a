"""Turns calls into entries: what hooks on modules and the capture of APIs have in common, for every framework."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Protocol

from msprobe_engine.core.records import Entry, TensorRef
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_integrations.common.capture.call_hierarchy import CallHierarchy
from msprobe_integrations.common.capture.calls import Call, CallStack, Numbering, again, pass_of
from msprobe_integrations.common.capture.filters import BACKWARD, FORWARD, RecordFilter
from msprobe_integrations.common.capture.stacks import Stacks
from msprobe_integrations.common.hooks.gradient_watch import GradientWatch

Parameters = Mapping[str, Any]
Reduce = Callable[[Any], TensorRef]
ALL_READ = -2
_NO_EDGES: list[Any] = []
_NO_TAGS: Mapping[str, Any] = {}
_RECOMPUTE: Mapping[str, Any] = {"is_recompute": True}
_STOPPED = "_StopRecomputationError"  # raised by torch's and MindSpore's checkpoint out of a recomputation that has what it needs


class Keeps(Protocol):
    """What saves the tensors of a dump."""

    parameters: bool

    def is_wanted(self, name: str) -> bool: ...

    def reduce(self, tensor: Any) -> TensorRef: ...

    def hand_over(self, entry: Entry) -> Any: ...


class CallRecorder(ABC):
    """Appends entries to the pipeline's current step.

    Args:
        stacks: makes texts of call stacks; None: they are not recorded.
        data_mode: ``all`` or a subset of input, output, forward, backward, as the dump settings have it.
        kept: which records are kept; None keeps all.
        keeper: saves tensors; None: nothing does.
    """

    most_open: ClassVar[int] = 30_000
    """How many calls may wait for their gradients. Further calls have none recorded; the frame says how many (``lost``)."""

    watch: ClassVar[type[Any]] = GradientWatch
    """The framework's own kind."""

    tensor: ClassVar[type[Any]]
    """Class of the framework's tensors."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        stacks: Stacks | None,
        data_mode: Sequence[str] = ("all",),
        kept: RecordFilter | None = None,
        keeper: Keeps | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.keeper: Any = keeper
        self.reduce_gradient: Reduce = pipeline.backend.reduce
        self.stack = CallStack()
        self.numbers = Numbering()
        self.stacks = stacks
        self.micro_step = -1
        self.kept = kept
        self.range = kept.range if kept is not None else None
        everything = "all" in data_mode or not data_mode
        self.forward = everything or "forward" in data_mode or "backward" not in data_mode
        self.backward = everything or "backward" in data_mode or "forward" not in data_mode
        self.inputs = everything or "input" in data_mode or "output" not in data_mode
        self.outputs = everything or "output" in data_mode or "input" not in data_mode
        self.tree = CallHierarchy(pipeline)
        self._watches: list[GradientWatch] = []
        self._open = 0
        self._passed = False  # gradients were reported since the last call outside of a backward pass

    # what a framework says

    @abstractmethod
    def reduce(self, tensor: Any) -> TensorRef:
        """Statistics of a tensor."""

    @abstractmethod
    def convert(self, value: Any, reduce: Reduce, /) -> Any:
        """An argument or a result as a structure of entries; total."""

    @abstractmethod
    def graph_task(self) -> int:
        """Number of the backward pass that runs on this thread, -1 outside of one."""

    @abstractmethod
    def is_recording(self) -> bool:
        """Does autograd record what is called now?"""

    def recomputes(self, call: Call) -> bool:  # noqa: ARG002
        """Is a call inside a backward pass, and in no other call, made once more, and no code of the pass itself? That runs unrecorded."""
        return self.is_recording()

    @abstractmethod
    def sequence(self) -> int:
        """Sequence number that the next node of the graph can have; asked after `edges`."""

    @abstractmethod
    def edges(self, args: Sequence[Any], kwargs: Mapping[str, Any], every: bool, /) -> list[Any]:
        """Where the gradients of the inputs go, one place per tensor, None where it has no gradient.

        Args:
            every: also places for tensors that could have a gradient and need none (APIs).
        """

    @abstractmethod
    def differentiable(self, result: Any, /) -> list[Any]:
        """The tensors of a result that have a gradient."""

    def whole(self, result: Any) -> Any:  # noqa: ARG002
        """The structure of a result that is one object, or None; asked for what is neither a tensor nor a container."""
        return None

    def register_watch(self, watch: Any, outputs: Sequence[Any]) -> None:
        """The gradients of a call are waited for. Nothing more to do, unless a framework says so."""

    # what is the same for all

    def reduce_for(self, name: str) -> Reduce:
        """`reduce` for tensors of this record, which also saves them where that is wanted."""
        return self._save if self.keeper is not None and self.keeper.is_wanted(name) else self.reduce

    def reduce_gradient_for(self, name: str) -> Reduce:
        """The same for gradients: callable anywhere, and their memory always has values."""
        return self.keeper.reduce if self.keeper is not None and self.keeper.is_wanted(name) else self.reduce_gradient

    def record(self, entry: Entry) -> None:
        self.pipeline.entries.append(entry)
        if self.keeper is not None:
            self.keeper.hand_over(entry)

    def _save(self, tensor: Any) -> TensorRef:
        ref: TensorRef = self.keeper.reduce(tensor)
        return ref

    def begin_call(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], depth: int, ignored: int = -1) -> None:
        """Note the start of a call: inputs are reduced now, before an in-place operation can change them.

        Args:
            depth: frames between this function and the user's.
            ignored: position of an argument that the call does not read, -1 when there is none, `ALL_READ` when ``out=`` is read too.
        """
        call.micro_step = self.micro_step
        if self.graph_task() != -1:
            # what a function of autograd's own does is not recorded by autograd, wherever it is called again
            call.recompute = self.recomputes(call) or (call.parent is not None and call.parent.recompute)
            if call.parent is None:
                call.parent_name = self.tree.parent_in_backward(call)
        elif self._passed:
            self._end_pass()
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
        self._reduce_arguments(call, args, kwargs, ignored)
        call.since = self.sequence()
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

    def _reduce_arguments(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: int) -> None:
        if call.keep and self.inputs:
            reduce = self.reduce if self.keeper is None else self.reduce_for(call.name)
            convert, kind = self.convert, self.tensor
            read = args if ignored < 0 else [None if i == ignored else a for i, a in enumerate(args)]
            call.inputs = [reduce(a) if isinstance(a, kind) else convert(a, reduce) for a in read]
            if ignored >= 0 and isinstance(args[ignored], kind):
                call.inputs[ignored] = self.without_values(args[ignored], "ignored")
            out = self._describe_unread if ignored != ALL_READ else reduce
            call.keywords = {k: convert(v, reduce if k != "out" else out) for k, v in kwargs.items()} if kwargs else {}
        if call.watch and self.is_recording() and self._open < self.most_open:
            call.edges = self.edges(args, kwargs, not call.is_module)

    def end_call(self, call: Call, result: Any, parameters: Parameters | None, *, failed: bool = False) -> None:
        """Note the end of a call and watch its gradients."""
        self._conclude(call, result, parameters, failed)

    def _conclude(self, call: Call, result: Any, parameters: Parameters | None, failed: bool) -> None:
        if self.kept is None:
            if call.keep:
                self._emit(call, result, parameters, failed)
        else:
            ended = self.kept.ends(call.name)
            if call.keep or (call.wanted and ended):
                self._emit(call, result, parameters, failed, ended)
                self.tree.mark_parent(call)
            elif call.node or (self.kept.nodes and not call.wanted):
                self.tree.node(call)
        call.inputs = call.keywords = call.frame = None  # a frame would keep its variables alive
        edges, call.edges = call.edges, _NO_EDGES
        if failed or not call.watch or not self.backward or not self.is_recording():
            return
        outputs = self.differentiable(result)
        if not outputs:
            return
        watch = self.watch_of(call, len(edges), len(outputs))
        if watch is not None and watch.start(edges, outputs, call.since):
            self._waits(watch)
            self.register_watch(watch, outputs)

    def watch_of(self, call: Call, n_inputs: int, n_outputs: int) -> Any:
        """What collects the gradients of a call; None when too many wait already, which is counted."""
        if self._open >= self.most_open:
            self.pipeline.lose("gradients of calls, too many without a backward pass")
            return None
        reduce: Callable[[Any], TensorRef | None] = self.reduce_gradient
        if self.keeper is not None:
            reduce = self.reduce_gradient_for(call.backward_name)
        arriving = reduce if self.inputs else self.reduce_gradient  # what is not written is not saved
        reduce = reduce if self.outputs else self.reduce_gradient
        begun = self.tree.backward_begins if call.is_module else None
        if self.range is not None:
            reduce, arriving = partial(self._reduce_in_range, call, reduce), partial(self._reduce_in_range, call, arriving)
            begun = self._backward_begins
        return self.watch(call, n_inputs, n_outputs, reduce, self._gradients, self._stop_gradient_capture, begun, arriving)

    def _waits(self, watch: GradientWatch) -> None:
        self._watches.append(watch)
        self._open += 1

    def without_values(self, tensor: Any, why: str) -> TensorRef:
        """A tensor that is described and whose values are not looked at."""
        description = self.pipeline.backend.describe(tensor)
        return TensorRef(-1, description._replace(extra=(*description.extra, (why, True))))

    def _describe_unread(self, tensor: Any) -> TensorRef:
        return self.without_values(tensor, "ignored")  # what ``out=`` holds before is not read

    def where(self) -> tuple[str | None, int]:
        """Record name of the innermost call in progress on this thread, and the current micro batch. Inside a backward pass and outside
        all calls: the backward record of a module that is under way."""
        calls = self.stack.calls
        if calls:
            return calls[-1].name, self.micro_step
        return (self.tree.find_running() if self.graph_task() != -1 else None), self.micro_step

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
        self._end_pass()
        for watch in self._watches:
            watch.active = False
        self._watches, self._open = [], 0
        self.tree.end_step()
        if self.kept is not None:
            self.kept.end_step()
        self.numbers.reset()
        self.stack.calls.clear()

    def _end_pass(self) -> None:
        """Report gradients that came only in part (of what was written into a view): before the update and the next micro batch, so that
        records stand in the order of execution."""
        self._passed = False
        for watch in self._watches:
            if watch.unfinished:
                watch.report()

    def _emit(self, call: Call, result: Any, parameters: Parameters | None, failed: bool, ended: bool = True) -> None:
        sections: dict[str, Any] = {}
        if self.inputs and call.keep:
            sections["input_args"] = call.inputs
            sections["input_kwargs"] = call.keywords
        reduce = self.reduce if self.keeper is None else self.reduce_for(call.name)
        if self.outputs and ended:
            sections["output"] = None if failed else self._output(result, reduce, call.is_module)
        if parameters is not None and ended:
            take = self.reduce if self.keeper is not None and not self.keeper.parameters else reduce
            sections["parameters"] = {name: take(p) for name, p in parameters.items() if p is not None}
        tags: Mapping[str, Any] = {**call.tags, **_RECOMPUTE} if call.recompute else call.tags
        if failed:
            stopped = getattr(sys.exc_info()[0], "__name__", "") == _STOPPED
            tags = {**tags, "stopped_early" if stopped else "raised": True}
        self.record(Entry(call.name, sections, call.parent_name, call.stack, call.micro_step, tags))

    def _output(self, result: Any, reduce: Reduce, is_module: bool) -> Any:
        if isinstance(result, self.tensor):
            return [reduce(result)]
        structure = self.convert(result, reduce)
        if is_module and not isinstance(result, tuple):
            return [structure]  # of a module only a tuple is several outputs, in the existing format
        if isinstance(structure, list) or (isinstance(structure, dict) and isinstance(result, Mapping)):
            return structure
        whole = self.whole(result)
        return [structure] if whole is None else whole

    def _backward_begins(self, watch: GradientWatch) -> None:
        """The first gradient of a backward pass through a call has arrived, where a range decides what is kept."""
        assert self.kept is not None
        self.tree.backward_begins(watch)
        watch.tag.running = self.kept.starts(watch.tag.backward_name)

    def _gradients(self, watch: GradientWatch, inputs: list[TensorRef | None], outputs: list[TensorRef | None]) -> None:
        self._passed = True
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

    def _reduce_in_range(self, call: Call, reduce: Callable[[Any], TensorRef | None], gradient: Any) -> TensorRef | None:
        return reduce(gradient) if self.range is not None and self.range.holds(call) else None

    def _stop_gradient_capture(self, error: Exception) -> None:
        self.pipeline.faults.fail("gradient capture", error)
        self.backward = False
