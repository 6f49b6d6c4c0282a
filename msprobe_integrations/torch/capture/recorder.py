"""Turns calls of torch into entries: what module hooks and API capture have in common.

Tensors whose values are not there, or not known to be there, when a record is made; their statistics are put in later.

Results of functional collectives that nobody has waited for (`AsyncCollectiveTensor`, tensor parallelism): waiting in a hook would take
away the overlap, so their statistics are put in when the first operation that uses them has waited. Memory of the host that a device
still fills (`host_copies`): they are put in at the first operation after the bytes have arrived. Arguments of memory without values
(`raw`): whether the operation has read them is known when it has ended.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from msprobe_engine.core.records import TensorRef
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_integrations.common.capture.calls import Call
from msprobe_integrations.common.capture.descriptions import intern
from msprobe_integrations.common.capture.filters import RecordFilter
from msprobe_integrations.common.capture.gradient_layout import finders
from msprobe_integrations.common.capture.recorder import CallRecorder, Parameters, Reduce
from msprobe_integrations.common.capture.stacks import Stacks
from msprobe_integrations.torch.dump.tensor_saver import TensorSaver
from msprobe_integrations.torch.hooks import frames
from msprobe_integrations.torch.hooks.backward import GradientWatch, edge, sequence_number
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task
from msprobe_integrations.torch.tensors.containers import tensors_in
from msprobe_integrations.torch.tensors.host_copies import HostCopies
from msprobe_integrations.torch.tensors.slices import Slices
from msprobe_integrations.torch.tensors.structure import convert
from msprobe_integrations.torch.tensors.uninitialized_memory import UninitializedMemory, leaves_unread, share_memory, writes_in_place
from msprobe_integrations.torch.tensors.unversioned_mutations import version_of


# Which gradients a backward record has a place for, see `msprobe_integrations.common.capture.gradient_layout`.
def _can(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


edges_of, differentiable = finders(torch.Tensor, tensors_in, edge, attrgetter("requires_grad"), _can)


no_torch_function = torch._C.DisableTorchFunction
_modes = torch._C._len_torch_function_stack


def _most_open() -> int:
    """How many calls may wait for their gradients. Looking at a node of the graph gives it a Python object, and a chain of such
    nodes is released by recursion: 45,000 of them overflow a stack of 8 MiB (torch 2.13), where without the probe nothing happens."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return 30_000 if stack == resource.RLIM_INFINITY else min(30_000, stack // 300)


MOST_OPEN = _most_open()
"""Further calls have no gradients recorded; the frame says how many (``lost``)."""


class Recorder(CallRecorder):
    """Appends entries to the pipeline's current step.

    Args:
        stacks: record call stacks.
        slices: cuts of tensors before anything is taken of them; None: there are none.
        pipeline, data_mode, kept, keeper: see `CallRecorder`.
    """

    most_open = MOST_OPEN
    watch = GradientWatch
    tensor = torch.Tensor
    convert = staticmethod(convert)
    graph_task = staticmethod(current_graph_task)
    is_recording = staticmethod(torch.is_grad_enabled)
    sequence = staticmethod(sequence_number)
    edges = staticmethod(edges_of)
    differentiable = staticmethod(differentiable)

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        stacks: bool = True,
        data_mode: Sequence[str] = ("all",),
        kept: RecordFilter | None = None,
        slices: Slices | None = None,
        keeper: TensorSaver | None = None,
    ) -> None:
        super().__init__(pipeline, stacks=Stacks(frames.hides) if stacks else None, data_mode=data_mode, kept=kept, keeper=keeper)
        self.raw = UninitializedMemory()
        self._raw = self.raw.known
        self._forget = pipeline.backend.forget
        self._beginning: Call | None = None
        self._beginning_api = ""
        self._unread: list[torch.Tensor] = []
        # without the look for modes on torch's stack, which are off where `reduce` is called
        self._reduce = getattr(pipeline.backend, "reduce_unshielded", pipeline.backend.reduce)
        if slices is not None:
            self.reduce_gradient = self._reduce = slices.reduce
        self.copies = HostCopies()
        self._copied = self.copies.known
        self.unsettled = DeferredStatistics(self._is_there)
        self._views: dict[int, tuple[weakref.ref[torch.Tensor], list[tuple[GradientWatch, int]]]] = {}

    def reduce(self, tensor: torch.Tensor) -> TensorRef:
        """Statistics of a tensor; row -1 for memory that holds no values yet."""
        if self._raw and self.raw.holds(tensor) and self._without_values(tensor):
            return self.without_values(tensor, UNINITIALISED[0])
        if not tensor.is_cpu:  # no sample of its memory tells here whether a kernel that nobody saw has written to it since it was read
            self._forget(tensor, views=False)
        elif self._copied and self.copies.holds(tensor):
            return self._of_copy(tensor, self.reduce)
        ref: TensorRef = self._reduce(tensor)
        if ref[0] < 0:
            self.unsettled.note_tensor(tensor, ref)
        return ref

    def _of_copy(self, tensor: torch.Tensor, reduce: Reduce) -> TensorRef:
        """Of memory of the host that a device still fills: the row of what is copied, else one that is put in later."""
        source = self.copies.source_of(tensor)
        if source is not None:
            row, shown = reduce(source)
            if row >= 0:
                return TensorRef(row, intern(*shown._replace(device=str(tensor.device), requires_grad=tensor.requires_grad)))
        ref = self.without_values(tensor, PENDING[0])
        self.unsettled.note_tensor(tensor, ref)
        return ref

    def _is_there(self, tensor: torch.Tensor) -> bool:
        completed: bool | None = getattr(tensor, "completed", None)  # of an `AsyncCollectiveTensor`
        return not self.copies.holds(tensor) if completed is None else completed

    def _save(self, tensor: torch.Tensor) -> TensorRef:
        if self._raw and self.raw.holds(tensor) and self._without_values(tensor):
            return self.without_values(tensor, UNINITIALISED[0])
        if not tensor.is_cpu:
            self._forget(tensor, views=False)
        elif self._copied and self.copies.holds(tensor):
            return self._of_copy(tensor, self._save)
        ref: TensorRef = self.keeper.reduce(tensor)
        if ref[0] < 0:
            self.unsettled.note_tensor(tensor, ref)
        return ref

    def _without_values(self, tensor: torch.Tensor) -> bool:
        """Is raw memory, met as an argument of the call that begins or as a result, to have no numbers?"""
        call, api = self._beginning, self._beginning_api
        if call is None:  # a result: of ``torch.empty``, or a view of such memory
            return True
        if leaves_unread(api):
            return True
        custom = call.name.startswith("Autograd.")
        if call.is_module or writes_in_place(api) or (custom and not self.raw.maker_runs(tensor)):
            self.raw.forget(tensor)
            return False
        if not custom:
            self._unread.append(tensor)
        return True

    def forget_written(self, tensors: Any) -> None:
        """All tensors in `tensors` may have been written to by code that raises no versions."""
        found: list[torch.Tensor] = []
        tensors_in(tensors, found)
        for tensor in found:
            self.raw.forget(tensor)
            self._forget(tensor, views=False)

    def _read_late(self, call: Call, result: Any) -> None:
        """Arguments without values that the call has neither written nor given views of were read: they have numbers."""
        places, call.unread = call.unread, None
        results: list[torch.Tensor] = []
        tensors_in(result, results)
        for structure, key, reference, reduce in places:
            tensor = reference()
            if tensor is not None and self.raw.holds(tensor) and not share_memory(tensor, results):
                self.raw.forget(tensor)
                structure[key] = reduce(tensor)

    def _reduce_arguments(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: int) -> None:
        if _modes():  # looking at a tensor would be a call of its own
            with no_torch_function():
                self._reduce_without_modes(call, args, kwargs, ignored)
        else:
            self._reduce_without_modes(call, args, kwargs, ignored)

    def _reduce_without_modes(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: int) -> None:
        if self.unsettled.waiting:
            self.unsettled.fill_arrived()  # before the call can write to what has arrived
        if self._raw:
            self._beginning, self._beginning_api = call, call.name.split(".", 2)[1]
            try:
                super()._reduce_arguments(call, args, kwargs, ignored)
            finally:
                self._beginning, unread, self._unread = None, self._unread, []
            if unread:
                reduce = self.reduce if self.keeper is None else self.reduce_for(call.name)
                call.unread = list(find_places((call.inputs, call.keywords), UNINITIALISED, iter(unread), reduce))
        else:
            super()._reduce_arguments(call, args, kwargs, ignored)
        if self.unsettled.seen and call.inputs is not None:
            self.unsettled.await_in((call.inputs, call.keywords), self.reduce if self.keeper is None else self.reduce_for(call.name))

    def end_call(self, call: Call, result: Any, parameters: Parameters | None, *, failed: bool = False) -> None:
        if _modes():
            with no_torch_function():
                self._conclude(call, result, parameters, failed)
        else:
            self._conclude(call, result, parameters, failed)

    def _conclude(self, call: Call, result: Any, parameters: Parameters | None, failed: bool) -> None:
        if self.unsettled.waiting:
            self.unsettled.fill_arrived()
        if self._raw:
            if call.unread and not failed:
                self._read_late(call, result)
            if call.is_module:
                self.forget_written(result)
        super()._conclude(call, result, parameters, failed)
        if self.unsettled.seen and (entry := self.pipeline.entries[-1]).name == call.name:
            made = entry.sections.get("output"), entry.sections.get("parameters")
            self.unsettled.await_in(made, self.reduce if self.keeper is None else self.reduce_for(call.name))

    def whole(self, result: Any) -> Any:
        """A size is its own object in the existing format."""
        return convert(result, self.reduce).json if isinstance(result, torch.Size) else None

    def register_watch(self, watch: GradientWatch, outputs: Sequence[torch.Tensor | None]) -> None:
        """The gradients of a call are waited for."""
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

    def end_step(self) -> None:
        super().end_step()
        self._views.clear()
        self.unsettled.end_step()
        self.copies.drop_arrived()


Place = tuple[Any, Any, weakref.ref[torch.Tensor], Reduce]
"""List or dict, key in it, the tensor, its reduction."""
PENDING = ("pending", True)
UNINITIALISED = ("uninitialised", True)


def find_places(structure: Any, mark: tuple[str, bool], seen: Iterator[torch.Tensor], reduce: Reduce) -> Iterator[Place]:
    """Places in `structure` whose reference has no row and bears `mark`, with the tensors `seen` there in the same order."""
    if not isinstance(structure, (list, dict)) and type(structure) is not tuple:
        return
    for key, member in structure.items() if isinstance(structure, dict) else enumerate(structure):
        if not isinstance(member, TensorRef):
            yield from find_places(member, mark, seen, reduce)
        elif member.row < 0 and mark in member.description.extra:
            tensor = next(seen, None)
            if tensor is not None:
                yield structure, key, weakref.ref(tensor), reduce


class DeferredStatistics:
    """Places in records that wait for a tensor.

    Args:
        is_there: can the values of a tensor be read by now?

    Attributes:
        seen: tensors met since the last `await_in`, in order; empty nearly always.
        waiting: the places, and the version whose values they are to have.
    """

    def __init__(self, is_there: Callable[[torch.Tensor], bool]) -> None:
        self._is_there = is_there
        self.seen: list[torch.Tensor] = []
        self.waiting: list[tuple[Place, int | None]] = []

    def note_tensor(self, tensor: torch.Tensor, ref: TensorRef) -> None:
        """The reduction of `tensor` has given a reference without a row."""
        if PENDING in ref.description.extra:
            self.seen.append(tensor)

    def await_in(self, structure: Any, reduce: Reduce) -> None:
        """The references of what was seen are in this structure, in the same order."""
        seen, self.seen = self.seen, []
        for place in find_places(structure, PENDING, iter(seen), reduce):
            tensor = place[2]()
            self.waiting.append((place, None if tensor is None else version_of(tensor)))

    def fill_arrived(self) -> None:
        """The values of some tensors may have arrived. What has been written to meanwhile has lost those that it was to show."""
        waiting, self.waiting = self.waiting, []
        for place, version in waiting:
            structure, key, reference, reduce = place
            tensor = reference()
            if tensor is None or version_of(tensor) != version:
                continue
            if self._is_there(tensor):
                structure[key] = reduce(tensor)
            else:
                self.waiting.append((place, version))

    def end_step(self) -> None:
        """What is still on its way stays without statistics."""
        self.fill_arrived()
        self.waiting.clear()
        self.seen.clear()
