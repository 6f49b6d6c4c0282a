"""Turns calls into entries: what module hooks and API capture have in common."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from msprobe_engine.pipeline import Pipeline
from msprobe_engine.records import Entry, TensorRef
from msprobe_integrations.torch.backward import Edge, GradientWatch, edge, sequence_number
from msprobe_integrations.torch.calls import Call, CallStack, Numbering, current_graph_task
from msprobe_integrations.torch.raw import RawMemory
from msprobe_integrations.torch.slices import Slices
from msprobe_integrations.torch.stacks import Stacks
from msprobe_integrations.torch.structure import convert

Filter = Callable[[str], bool]
no_torch_function = torch._C.DisableTorchFunction
_modes = torch._C._len_torch_function_stack
_NO_EDGES: list[Edge | None] = []
_NO_TAGS: Mapping[str, Any] = {}
_RECOMPUTE: Mapping[str, Any] = {"is_recompute": True}


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
        wanted: says whether a record of this name is kept; None keeps all.
        slices: cuts of tensors before anything is taken of them; None: there are none.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        stacks: bool = True,
        data_mode: Sequence[str] = ("all",),
        wanted: Filter | None = None,
        slices: Slices | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.raw = RawMemory()
        self.reduce_gradient = pipeline.backend.reduce
        # without the look for modes on torch's stack, which are off where `reduce` is called
        self._reduce = getattr(pipeline.backend, "reduce_unshielded", pipeline.backend.reduce)
        if slices is not None:
            self.reduce_gradient = self._reduce = slices.reduce
        self.stack = CallStack()
        self.numbers = Numbering()
        self.stacks = Stacks() if stacks else None
        self.micro_step = -1
        self.wanted = wanted
        everything = "all" in data_mode or not data_mode
        self.forward = everything or "forward" in data_mode or "backward" not in data_mode
        self.backward = everything or "backward" in data_mode or "forward" not in data_mode
        self.inputs = everything or "input" in data_mode or "output" not in data_mode
        self.outputs = everything or "output" in data_mode or "input" not in data_mode
        self._watches: list[GradientWatch] = []
        self._open = 0

    def reduce(self, tensor: torch.Tensor) -> TensorRef:
        """Statistics of a tensor; row -1 for memory that holds no values yet."""
        if self.raw and self.raw.holds(tensor):
            return self._without_values(tensor, "uninitialised")
        return self._reduce(tensor)

    def begin(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], depth: int, ignored: int = -1) -> None:
        """Note the start of a call: inputs are reduced now, before an in-place operation can change them.

        Args:
            depth: frames between this function and the user's.
            ignored: position of an argument that the call does not read, -1 when there is none.
        """
        call.recompute = current_graph_task() != -1
        call.micro_step = self.micro_step
        call.keep = self.forward and (self.wanted is None or self.wanted(call.name))
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

    def _look(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: int) -> None:
        if call.keep and self.inputs:
            reduce = self.reduce
            read = args if ignored < 0 else [None if i == ignored else a for i, a in enumerate(args)]
            call.inputs = [reduce(a) if isinstance(a, torch.Tensor) else convert(a, reduce) for a in read]
            if ignored >= 0 and isinstance(args[ignored], torch.Tensor):
                call.inputs[ignored] = self._without_values(args[ignored], "ignored")
            call.keywords = {k: convert(v, reduce if k != "out" else self._ignored) for k, v in kwargs.items()} if kwargs else {}
        if self.backward and torch.is_grad_enabled() and self._open < MOST_OPEN:
            call.edges = _edges(args, kwargs)

    def end(self, call: Call, result: Any, parameters: Mapping[str, torch.Tensor] | None, *, failed: bool = False) -> None:
        """Note the end of a call and watch its gradients."""
        if _modes():
            with no_torch_function():
                self._conclude(call, result, parameters, failed)
        else:
            self._conclude(call, result, parameters, failed)

    def _conclude(self, call: Call, result: Any, parameters: Mapping[str, torch.Tensor] | None, failed: bool) -> None:
        if call.keep:
            self._emit(call, result, parameters, failed)
        call.inputs = call.keywords = call.frame = None  # a frame would keep its variables alive
        edges, call.edges = call.edges, _NO_EDGES
        if failed or not self.backward or not torch.is_grad_enabled():
            return
        if isinstance(result, torch.Tensor):
            if not result.requires_grad:
                return
            outputs: list[torch.Tensor | None] = [result]
        else:
            outputs = _tensors(result)
            if not any(o is not None and o.requires_grad for o in outputs):
                return
        if self._open >= MOST_OPEN:
            self.pipeline.lose("gradients of calls, too many without a backward pass")
        elif self.wanted is None or self.wanted(call.backward_name):
            watch = GradientWatch(call, len(edges), len(outputs), self.reduce_gradient, self._gradients, self._broken)
            if watch.start(edges, outputs, call.since):
                self._watches.append(watch)
                self._open += 1

    def _without_values(self, tensor: torch.Tensor, why: str) -> TensorRef:
        description = self.pipeline.backend.describe(tensor)
        return TensorRef(-1, description._replace(extra=(*description.extra, (why, True))))

    def _ignored(self, tensor: torch.Tensor) -> TensorRef:
        return self._without_values(tensor, "ignored")  # what ``out=`` holds before is not read

    def where(self) -> tuple[str | None, int]:
        """Record name of the innermost call in progress on this thread, and the current micro batch."""
        calls = self.stack.calls
        return (calls[-1].name if calls else None), self.micro_step

    def end_step(self) -> None:
        """Report gradients that came only in part, forget the step's numbering."""
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.report()
            watch.active = False
        self._open = 0
        self.numbers.reset()
        self.stack.calls.clear()

    def _emit(self, call: Call, result: Any, parameters: Mapping[str, torch.Tensor] | None, failed: bool) -> None:
        sections: dict[str, Any] = {}
        if self.inputs:
            sections["input_args"] = call.inputs
            sections["input_kwargs"] = call.keywords
        if self.outputs:
            sections["output"] = None if failed else self._output(result)
        if parameters is not None:
            sections["parameters"] = {name: self.reduce(p) for name, p in parameters.items()}
        tags: Mapping[str, Any] = _RECOMPUTE if call.recompute else _NO_TAGS
        if failed:
            tags = {**tags, "raised": True}
        self.pipeline.entries.append(Entry(call.name, sections, call.parent_name, call.stack, call.micro_step, tags))

    def _output(self, result: Any) -> Any:
        reduce = self.reduce
        if isinstance(result, torch.Tensor):
            return [reduce(result)]
        structure = convert(result, reduce)
        if isinstance(structure, list) or (isinstance(structure, dict) and isinstance(result, Mapping)):
            return structure
        if isinstance(result, torch.Size):
            return structure.json
        return [structure]

    def _gradients(self, watch: GradientWatch, inputs: list[TensorRef | None], outputs: list[TensorRef | None]) -> None:
        call: Call = watch.tag
        name = call.backward_name
        tags: Mapping[str, Any] = _NO_TAGS
        if not watch.passes:
            self._open -= 1
        else:
            tags = {"pass": watch.passes + 1, "of": name}
            name = self._numbered_again(name)
        sections: dict[str, Any] = {}
        if self.inputs:
            sections["input"] = outputs
        if self.outputs:
            sections["output"] = inputs
        parent = call.parent.backward_name if call.parent is not None else None
        self.pipeline.entries.append(Entry(name, sections, parent, -1, call.micro_step, tags))

    def _numbered_again(self, name: str) -> str:
        parts = name.split(".")
        place = -1 if parts[-1].isdigit() else -2  # modules have the number last, APIs before the direction
        base = ".".join(parts[:-2])
        parts[place] = str(self.numbers.again(base))
        return ".".join(parts)

    def _broken(self, error: Exception) -> None:
        self.pipeline.faults.fail("gradient capture", error)
        self.backward = False


def _edges(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Edge | None]:
    """One slot per positional argument (lists of tensors: one per element) and per keyword tensor that needs a gradient."""
    found: list[Edge | None] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(edge(value))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            found.extend(edge(v) if isinstance(v, torch.Tensor) else None for v in value)
        else:
            found.append(None)
    for value in kwargs.values():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            found.append(edge(value))
    return found


def _tensors(result: Any) -> list[torch.Tensor | None]:
    """The outputs, flat; None for what is no tensor."""
    if isinstance(result, torch.Tensor):
        return [result]
    flat: list[torch.Tensor | None] = []
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, (list, tuple)) else ()
    for value in values:
        if isinstance(value, torch.Tensor):
            flat.append(value)
        elif isinstance(value, (list, tuple, Mapping)):
            flat.extend(_tensors(value))
        else:
            flat.append(None)
    return flat
