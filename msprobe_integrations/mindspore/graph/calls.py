"""Makes records of what a running graph tells (`probes.Listener`): the same records that the dynamic graph makes of the same calls.

Events of one graph come on threads of MindSpore's runtime: those of the forward pass in the order of the program, gradients as they are
computed. So a forward record is complete when its call ends, and backward records are made when the step is over, in the order in which
they must have been complete: the reverse of that in which the calls began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import Entry, TensorRef
from msprobe_integrations.common.capture.calls import Call
from msprobe_integrations.common.capture.descriptions import intern
from msprobe_integrations.common.capture.filters import BACKWARD, FORWARD
from msprobe_integrations.mindspore.capture.cells import CellInfo
from msprobe_integrations.mindspore.capture.recorder import Recorder
from msprobe_integrations.mindspore.graph import notes
from msprobe_integrations.mindspore.graph.notes import ContainerNode, TensorNode
from msprobe_integrations.mindspore.graph.probes import NO_TOKEN
from msprobe_integrations.mindspore.tensors.memory import TYPE

PART = "static graph"


class GraphCall(Call):
    """A call inside a graph.

    Attributes:
        token: its number in the graph.
        values: tensors that have come, by part and path.
        gradients: those that are gradients.
        merged: a record of it is made where Python called the Cell.
    """

    __slots__ = ("arguments", "gradients", "merged", "token", "values")

    def __init__(self, token: int, info: CellInfo, number: int, parent: Call | None, arguments: int) -> None:
        super().__init__(f"{info.base}.forward.{number}", f"{info.base}.backward.{number}", info, parent, info.kind, True)
        self.token = token
        self.arguments = arguments
        self.values: dict[tuple[int, notes.Path], TensorRef] = {}
        self.gradients: dict[tuple[int, notes.Path], TensorRef] = {}
        self.merged = False


class GraphCalls:
    """The calls of one step.

    Args:
        recorder: of the dynamic graph; numbers and filters are common.
        is_on: is the step being captured?
    """

    def __init__(self, recorder: Recorder, is_on: Callable[[], bool]) -> None:
        self._recorder = recorder
        self._pipeline = recorder.pipeline
        self._on = is_on
        self._lock = threading.RLock()
        self._outer: list[Call] = recorder.stack.calls
        self.cells: list[CellInfo] = []
        self.parameters: list[tuple[CellInfo, str]] = []
        self._calls: dict[int, GraphCall] = {}
        self._open: list[GraphCall] = []
        self._last = NO_TOKEN
        self._parameter_gradients: dict[tuple[int, int], tuple[CellInfo, dict[str, TensorRef]]] = {}
        self._passes: dict[int, int] = {}

    def begin_window(self) -> None:
        """Called on the thread of the training, when it begins to be seen."""
        with self._lock:
            self._outer = self._recorder.stack.calls
            self._open = []

    # ---- the listener ----

    def begin_call(self, cell: int, arguments: int) -> int:
        """See `probes.Listener`."""
        try:
            with self._lock:
                return self._begin_call(self.cells[cell], arguments) if self._on() else NO_TOKEN
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
            return NO_TOKEN

    def add_tensor(self, token: int, place: int, value: Any) -> None:
        """See `probes.Listener`."""
        try:
            with self._lock:
                call = self._calls.get(token)
                if call is not None:
                    self._add_tensor(call, notes.place_of(place), value)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)

    def end_call(self, token: int, result: int) -> None:
        """See `probes.Listener`."""
        try:
            with self._lock:
                call = self._calls.get(token)
                if call is not None:
                    self._end_call(call, result)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)

    def parameter_gradient(self, parameter: int, value: Any) -> None:
        """See `probes.Listener`."""
        try:
            with self._lock:
                if self._calls and self._recorder.backward:
                    self._parameter(parameter, value)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)

    def _begin_call(self, info: CellInfo, arguments: int) -> int:
        recorder = self._recorder
        while self._open and any(call.owner is info for call in self._open):  # a graph that was cut off has left it
            self._open.pop()
        outer = self._outer[-1] if self._outer else None
        self._last += 1
        parent: Call | None = self._open[-1] if self._open else outer
        seen = _python_call(outer, info) if parent is outer else None
        if seen is not None:
            call = GraphCall(self._last, info, 0, seen.parent, arguments)
            call.name, call.backward_name, call.merged = seen.name, seen.backward_name, True
        else:
            call = GraphCall(self._last, info, recorder.numbers.take_number(info.base), parent, arguments)
            self._select(call)
        self._calls[call.token] = call
        self._open.append(call)
        return call.token

    def _select(self, call: GraphCall) -> None:
        recorder = self._recorder
        kept = recorder.kept
        if kept is None:
            call.wanted = call.keep = recorder.forward
            call.watch = recorder.backward
            return
        own = kept.directions(call.base, call.name, call.backward_name)
        inside = call.parent.inside if call.parent is not None else 0
        if own and kept.expands:
            inside |= own | BACKWARD
            call.owner.inside = True
        call.inside = inside
        own |= inside
        started = kept.starts(call.name)
        call.wanted = recorder.forward and bool(own & FORWARD)
        call.keep = call.wanted and started
        call.watch = recorder.backward and bool(own & BACKWARD)

    def _add_tensor(self, call: GraphCall, place: notes.Place, value: Any) -> None:
        recorder = self._recorder
        if place.part in (notes.GRAD_OF_INPUT, notes.GRAD_OF_OUTPUT):
            is_wanted = recorder.inputs if place.part == notes.GRAD_OF_OUTPUT else recorder.outputs
            if call.watch and is_wanted:
                call.gradients[place.part, place.path] = self._row(_restore_shape(value, place), place.dtype, call.backward_name)
            return
        is_wanted = call.keep and recorder.inputs if place.part == notes.INPUT else call.wanted
        if place.part == notes.OUTPUT:
            is_wanted = is_wanted and recorder.outputs
        if is_wanted and (place.part, place.path) not in call.values:
            call.values[place.part, place.path] = self._row(_restore_shape(value, place), place.dtype, call.name)

    def _end_call(self, call: GraphCall, result: int) -> None:
        while self._open:
            if self._open.pop() is call:
                break
        recorder = self._recorder
        ended = recorder.kept is None or recorder.kept.ends(call.name)
        if not (call.keep or (call.wanted and ended)):
            if call.node or (recorder.kept is not None and recorder.kept.nodes and not call.wanted and not call.merged):
                recorder.tree.node(call)
            return
        sections: dict[str, Any] = {}
        if recorder.inputs and call.keep:
            arguments = self._structure(call.arguments, call, notes.INPUT, ())
            sections["input_args"], sections["input_kwargs"] = arguments
        if recorder.outputs and ended:
            output = self._structure(result, call, notes.OUTPUT, ())
            sections["output"] = output if isinstance(notes.node(result), ContainerNode) else [output]
        if ended:
            sections["parameters"] = {path[0]: ref for (part, path), ref in call.values.items() if part == notes.PARAMETER}
        recorder.record(Entry(call.name, sections, call.parent_name, -1, recorder.micro_step))
        if recorder.kept is not None:
            recorder.tree.mark_parent(call)

    def _structure(self, number: int, call: GraphCall, part: int, path: notes.Path) -> Any:
        node = notes.node(number)
        if isinstance(node, TensorNode):
            value = call.values.get((part, path))
            if value is not None or not node.missing:
                return value
            if node.missing != "empty":
                self._pipeline.lose(f"tensors inside compiled graphs: {node.missing}")
                return TensorRef(-1, intern(TYPE, node.dtype, node.shape, None, "cpu"))
            return self._row(np.empty(node.shape, np.uint8), node.dtype, call.name)
        if not isinstance(node, ContainerNode):
            return node
        keys: list[Any] = list(node.keys) if node.keys is not None else list(range(len(node.members)))
        members = [self._structure(member, call, part, (*path, key)) for key, member in zip(keys, node.members)]
        return members if node.keys is None else dict(zip(keys, members))

    def _row(self, value: Any, dtype: str, name: str) -> TensorRef:
        """Statistics of a tensor that a graph has given, and a copy where the record `name` is saved."""
        return self._recorder.reduce_for(name)(HostArray(value, dtype))

    def _parameter(self, number: int, value: Any) -> None:
        info, name = self.parameters[number]
        kept = self._recorder.kept
        if kept is not None and not info.kind.possible and not info.inside:
            return
        passes = self._passes.get(number, 0)
        self._passes[number] = passes + 1
        record = f"{info.base}.parameters_grad.{passes}"
        if kept is not None and not info.inside and not info.kind.certain and kept.names is not None and not kept.names(record):
            return
        grads = self._parameter_gradients.setdefault((id(info), passes), (info, {}))[1]
        parameter = info.module._params[name]
        grads[name] = self._row(value, str(parameter.dtype), record)

    # ---- the end of a step ----

    def end_step(self) -> None:
        """Make the backward records of the step, and forget its calls."""
        with self._lock:
            calls, self._calls, self._open = self._calls, {}, []
            gradients, self._parameter_gradients = self._parameter_gradients, {}
            self._passes = {}
        grads = self._eager_gradients({id(call.owner): call.owner for call in calls.values()})
        made: set[str] = set()
        for (key, passes), (info, by_name) in gradients.items():
            names = [name for name in info.module._params if name in by_name]
            sections: dict[str, Any] = {name: [by_name[name]] for name in names}
            name = f"{info.base}.parameters_grad.{passes}"
            made.add(name)
            grads.setdefault(key, []).append(Entry(name, sections, None, -1, self._recorder.micro_step))
        range_ = self._recorder.range
        first = {id(call.owner): call for call in reversed(list(calls.values()))}
        for call in reversed(list(calls.values())):
            # gradients of weights are complete when the backward pass gets to the first call of their Cell
            entries = grads.pop(id(call.owner), []) if first[id(call.owner)] is call else []
            entry = self._backward(call)
            inside = range_ is None or (range_.starts(entry.name) if entry is not None else range_.open)
            if not inside:
                entries = [entry for entry in entries if entry.name not in made]
            if entry is not None and inside:
                entries.insert(len(entries) if any(part == notes.GRAD_OF_INPUT for part, _ in call.gradients) else 0, entry)
            for entry in entries:
                self._insert(entry, call)
            if range_ is not None:
                range_.ends(call.backward_name, call)
        for rest in grads.values():
            for entry in rest:
                if range_ is None or entry.name not in made:
                    self._recorder.record(entry)

    def _eager_gradients(self, infos: dict[int, CellInfo]) -> dict[int, list[Entry]]:
        """Records of parameters' gradients that came outside of a graph (a ``jit`` function in PyNative mode) before the backward records
        that they stand beside; they are taken out of the records, to be put in again."""
        bases = {f"{info.base}.parameters_grad": key for key, info in infos.items()}
        gradients: dict[int, list[Entry]] = {}
        rest = []
        for entry in self._pipeline.entries:
            key = bases.get(entry.name.rpartition(".")[0])
            if key is None:
                rest.append(entry)
            else:
                gradients.setdefault(key, []).append(entry)
        self._pipeline.entries[:] = rest
        return gradients

    def _backward(self, call: GraphCall) -> Entry | None:
        if not call.gradients:
            return None
        sections: dict[str, Any] = {}
        given = self._gradients(call, notes.GRAD_OF_OUTPUT, notes.OUTPUT)
        made = self._gradients(call, notes.GRAD_OF_INPUT, notes.INPUT)
        if self._recorder.inputs:
            sections["input"] = given
        if self._recorder.outputs:
            sections["output"] = made
        parent = call.parent
        while isinstance(parent, GraphCall) and not parent.gradients and parent.parent is not None:
            parent = parent.parent
        name = parent.backward_name if parent is not None and (not isinstance(parent, GraphCall) or parent.gradients) else None
        return Entry(call.backward_name, sections, name, -1, self._recorder.micro_step)

    def _gradients(self, call: GraphCall, part: int, forward: int) -> list[TensorRef | None]:
        """One place per tensor that the call was given, or gave, and that can have a gradient; None where none has come."""
        places = {path for call_part, path in call.gradients if call_part == part}
        places |= {
            path for (call_part, path), ref in call.values.items() if call_part == forward and ref.description.dtype in notes.WITH_GRADIENT
        }
        return [call.gradients.get((part, path)) for path in sorted(places, key=_order)]

    def _insert(self, entry: Entry, call: GraphCall) -> None:
        """Before the backward record of the eager call around it, when there is one."""
        recorder = self._recorder
        outer: Call | None = call
        while isinstance(outer, GraphCall):
            outer = outer.parent
        if outer is not None:
            entries = self._pipeline.entries
            position = next((i for i in range(len(entries) - 1, -1, -1) if entries[i].name == outer.backward_name), None)
            if position is not None:
                recorder.record(entry)
                entries.insert(position, entries.pop())
                return
        recorder.record(entry)

    def _fail(self, error: Exception) -> None:
        self._pipeline.faults.fail(PART, error, disable=False, hint="records of this call may be missing")


class HostArray:
    """An array that a graph has handed to Python, with what backend and keeper ask of a tensor. No tensor of MindSpore is made of it: on
    a thread of the runtime that may wait for the graph itself, which waits for us.

    Args:
        value: array of that type, float32 for bfloat16; a number for a tensor without dimensions.
        dtype: as dump files have it, ``BFloat16``.
    """

    __slots__ = ("_array", "device", "dtype", "shape")

    def __init__(self, value: Any, dtype: str) -> None:
        array: npt.NDArray[Any] = value if isinstance(value, np.ndarray) else np.array(value)
        self.dtype, self.shape, self.device = dtype, array.shape, "CPU"
        if dtype == "BFloat16":
            wide = np.ascontiguousarray(array, np.float32).view(np.uint32)
            self._array = np.right_shift(wide, 16).astype(np.uint16)
        else:
            self._array = np.ascontiguousarray(array, dtype.lower())

    def data_ptr(self) -> int:
        """Address of the first element."""
        address: int = self._array.ctypes.data
        return address

    def is_contiguous(self) -> bool:
        """The elements follow each other."""
        return True

    def stride(self) -> tuple[int, ...]:
        """Counted in elements."""
        return tuple(step // self._array.itemsize for step in self._array.strides)


def _python_call(outer: Call | None, info: CellInfo) -> Call | None:
    """The call that Python makes of the same Cell when its ``construct`` is a compiled function, which may have a record of its own."""
    while outer is not None and outer.name.startswith("Jit."):
        outer = outer.parent
    return outer if outer is not None and getattr(outer.owner, "module", None) is info.module else None


def _restore_shape(value: Any, place: notes.Place) -> Any:
    """The value with the dimensions that the program's tensor has."""
    return value.reshape(()) if place.scalar and isinstance(value, np.ndarray) else value


def _order(path: notes.Path) -> tuple[Any, ...]:
    return tuple((isinstance(key, str), key) for key in path)
