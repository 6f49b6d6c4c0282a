"""Sees every collective and message of the process: calls of `torch.distributed`, FSDP2, DDP's reducer, coalesced and functional ones.

Operators are seen by kernels of the dispatcher (`collectives.kernels`), whoever calls them. A call that came through a public
function is told by the frames below it (`collectives.calls`), and its entry is that of the existing tool: named after the function,
``input_args`` and ``input_kwargs`` as the user passed them, buffers that are only written to as null, and ``output`` = all
positional arguments followed by all keyword values, after completion. Everything else has the operator's tensors only, and ``c10d_``
or ``functional_`` before its name, so that the numbers of ``all_reduce`` do not depend on what DDP does.

* One call is one entry: ``batch_isend_irecv`` holds its list of `P2POp`, complete when all its receives are.
* Functions that send objects (``all_gather_object``) have no entry: the bytes of a pickle have no statistics worth a record. The
  calls they make count in the numbers, as they do in the existing tool. ``barrier`` moves no data and has none either.
* On a rank outside the group the function returns at once. The existing tool has an entry for that, so it is here too, with
  ``group_ranks`` empty.

Asynchronous work is followed to its completion (`collectives.handles`) and never waited for here. What was not waited for within the
step is recorded at its end if it is complete and nothing has written to it since; otherwise its output stays null, the entry says
``incomplete`` and the frame counts it as lost.

A collective writes into its buffers without raising their version counters. Whoever remembers tensors by version has to be told:
see `forget`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.operator_traits import normal_op
from msprobe_engine.core.records import Entry, Opaque, TensorRef
from msprobe_engine.find.nonfinite.trace import WRITE_ONLY
from msprobe_integrations.torch.collectives.calls import DistributedCall
from msprobe_integrations.torch.collectives.work import Open, Operation, Waiting, identity, storage
from msprobe_integrations.torch.tensors.describe import describe
from msprobe_integrations.torch.tensors.structure import convert

__all__ = ["FAILED", "LOST", "CollectiveObserver"]

LOST = "outputs of collectives, not complete when the step ended"
FAILED = "outputs of collectives that failed"
_BATCH = "batch_isend_irecv"
_NOT_OUTPUT = ("isend",)  # its tensor is the sender's again only when it was waited for

Reduce = Callable[[torch.Tensor], TensorRef]
Place = Callable[[], "tuple[str | None, int]"]


def _contain_faults(method: Callable[..., Any]) -> Callable[..., Any]:
    """A fault in the method makes the observer quiet and does not reach the collective."""

    @functools.wraps(method)
    def call(self: CollectiveObserver, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            raise_of_training(error)
            self.fail(error)
            return None

    return call


class CollectiveObserver:
    """Turns collectives into entries ``Distributed.{function}.{N}.forward``, in the order in which they were started.

    An entry's tags are ``group_ranks`` (global ranks), ``async``, ``reduce`` (where it applies), ``root`` or ``peer`` (global
    rank).

    Args:
        reduce: starts the reduction of one tensor; must not wait.
        read: the same for a tensor that the operation reads and does not write: it holds values, whatever is known of its memory.
        emit: receives each entry. Its ``output`` is filled in later.
        is_on: asked per call; while False nothing is looked at.
        forget: told about every tensor a collective has written; default: ``forget`` of the object `reduce` is a method of.
        where: record name of the enclosing call and current micro batch.
        stack: number of the call stack that starts at a frame.
        wanted: says whether an entry of this name is made; its call counts in any case.
        inputs, outputs: which sections entries have.
        lose: counts what could not be recorded.
        fail: told about a fault in here, after which the observer is quiet; default: raise nothing, be quiet.
        record: make entries at all; False only tells `forget`.
        takers: what is used in place of `reduce` and `read` for a record of this name.
    """

    def __init__(
        self,
        reduce: Reduce,
        emit: Callable[[Entry], None],
        *,
        read: Reduce | None = None,
        is_on: Callable[[], bool] = lambda: True,
        forget: Callable[[torch.Tensor], None] | None = None,
        where: Place | None = None,
        stack: Callable[[FrameType], int] | None = None,
        wanted: Callable[[str], bool] = lambda _: True,
        inputs: bool = True,
        outputs: bool = True,
        lose: Callable[[str, int], None] | None = None,
        fail: Callable[[Exception], None] | None = None,
        record: bool = True,
        takers: Callable[[str], tuple[Reduce, Reduce]] | None = None,
    ) -> None:
        self._reduce = reduce
        self._takers = takers or (lambda _: (reduce, read or reduce))
        self._emit = emit
        self._is_on = is_on
        self._forget = forget or getattr(getattr(reduce, "__self__", None), "forget", None)
        self._where = where
        self._stack = stack
        self._wanted = wanted
        self._inputs = inputs
        self._outputs = outputs
        self._lose = lose
        self._told = fail
        self.record = record
        self._numbers: dict[str, int] = {}
        self._pending: dict[int, Waiting] = {}
        self._batch: tuple[list[Any], list[Any], Open | None] | None = None
        self._lock = threading.RLock()  # callbacks of futures come on threads of the backend
        self.broken: Exception | None = None

    def let_go(self) -> None:
        """Nothing is waited for any more."""
        self._pending.clear()

    def on(self) -> bool:
        """Does it look at what is called now?"""
        return self.broken is None and self._is_on()

    @_contain_faults
    def end_step(self) -> None:
        """Close the step's numbering and settle what was not waited for."""
        with self._lock:
            waiting = list({id(w): w for w in self._pending.values()}.values())
            self._pending.clear()
            self._numbers.clear()
            self._batch = None
        if self.broken is not None:
            return
        missing = {id(open_): open_ for w in waiting if not w.is_complete() for open_ in w.opens}
        for open_ in (open_ for w in waiting for open_ in w.opens if id(open_) not in missing):
            self._complete(open_)
        cut = {id(open_.sections): open_ for open_ in missing.values() if open_.sections is not None and open_.left > 0}
        for open_ in cut.values():
            assert open_.tags is not None
            open_.tags["incomplete"] = True
        if cut and self._outputs and self._lose is not None:
            self._lose(LOST, len(cut))

    @_contain_faults
    def start_operation(self, operation: Operation) -> Open | None:
        """An operation is about to start. Returns what waits for its completion, if anything does."""
        if not self.record:
            return self._open_unrecorded(operation)
        call = operation.call
        if operation.silent:
            if call is not None and call.inner != call.name:
                self._number(call.inner)
            return self._open_unrecorded(operation)
        if call is None:
            return self._operator(operation)
        # HCCL has one operation for a whole batch, other backends one for each message
        return self._message(operation, call) if call.name == _BATCH == operation.name else self._call(operation, call)

    @_contain_faults
    def left_out(self, call: DistributedCall, caller: FrameType | None) -> None:
        """A public function was called on a rank outside its group: it will do nothing."""
        if self.record and call.name != _BATCH:
            self._call(Operation(call.name, call, False, [], [], lambda: {"group_ranks": []}, caller), call)

    @_contain_faults
    def awaits(self, key: Any, open_: Open) -> None:
        """One operation of `open_` will be complete when `key` has been waited for: a `Work`, or a tensor that ``wait_tensor`` is
        called with (or a view of it)."""
        open_.remember()
        with self._lock:
            waiting = self._pending.get(identity(key))
            if waiting is None:
                waiting = self._pending[identity(key)] = Waiting([key], [])
            waiting.opens.append(open_)

    @_contain_faults
    def returns(self, open_: Open, results: list[torch.Tensor]) -> None:
        """The operation of `open_` has made `results`; each will be complete when ``wait_tensor`` was called with it."""
        outputs: list[Any] = [None] * len(results)

        def part(i: int, tensor: torch.Tensor) -> None:
            def store() -> None:
                if open_.sections is not None and self._outputs:
                    outputs[i] = (open_.reduce or self._reduce)(tensor.detach())
                    open_.sections["output"] = outputs

            self.awaits(tensor, Open([tensor], store, open_.tags, open_.sections))

        for i, tensor in enumerate(results):
            part(i, tensor)

    @_contain_faults
    def also(self, key: Any, other: Any) -> None:
        """Whoever waits for `other` has waited for `key`."""
        with self._lock:
            waiting = self._pending.get(identity(key))
            if waiting is not None:
                waiting.keys.append(other)
                self._pending[identity(other)] = waiting

    @_contain_faults
    def waits_for(self, key: Any) -> bool:
        """Does anything wait for the completion of `key`?"""
        return identity(key) in self._pending

    @_contain_faults
    def complete_key(self, key: Any) -> None:
        if not self._pending:
            return
        with self._lock:
            for open_ in self._pop_waiting(key):
                self.complete(open_)

    @_contain_faults
    def fail_key(self, key: Any) -> None:
        """The operation of `key` has ended with an error: what its outputs hold is undefined, so they have no statistics."""
        with self._lock:
            opens = self._pop_waiting(key)
            lost = {id(open_.sections): None for open_ in opens if open_.sections is not None and open_.left > 0}
            for open_ in opens:
                self.fail_operation(open_)
            if lost and self._outputs and self._lose is not None:
                self._lose(FAILED, len(lost))

    def _pop_waiting(self, key: Any) -> Sequence[Open]:
        """What waits for the completion of `key`; it waits no longer. The caller has the lock."""
        waiting = self._pending.get(identity(key))
        if waiting is None:
            return ()
        for one in waiting.keys:
            self._pending.pop(identity(one), None)
        return waiting.opens

    @_contain_faults
    def complete(self, open_: Open) -> None:
        """One operation of `open_` is complete."""
        if self.broken is None:
            self._complete(open_)

    @_contain_faults
    def fail_operation(self, open_: Open) -> None:
        """The operation of `open_` has failed."""
        open_.left = 0
        if open_.tags is not None:
            open_.tags["raised"] = True

    def _complete(self, open_: Open) -> None:
        open_.left -= 1
        if open_.left == 0:
            if self._forget is not None:
                for tensor in open_.written:
                    self._forget(tensor)
            open_.store()
            open_.written, open_.store = [], _store_nothing

    def _open_unrecorded(self, operation: Operation, left: int = 1) -> Open | None:
        outputs = operation.outputs
        return Open(outputs or [], _store_nothing, left=left) if outputs is None or outputs else None

    def _number(self, name: str) -> int:
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        return number

    def _entry(self, name: str, operation: Operation, sections: dict[str, Any]) -> dict[str, Any]:
        parent, micro_step = self._where() if self._where is not None else (None, -1)
        stack = self._stack(operation.caller) if self._stack is not None and operation.caller is not None else -1
        tags = operation.tags()
        self._emit(Entry(name, sections, parent, stack, micro_step, tags))
        return tags

    def _operator(self, operation: Operation) -> Open | None:
        """An operator that no public function was called for."""
        name = f"Distributed.{operation.name}.{self._number(operation.name)}.forward"
        if not self._wanted(name):
            return self._open_unrecorded(operation)
        reduce = self._takers(name)[0]
        sections: dict[str, Any] = {}
        if self._inputs:
            # a new object: rows are remembered per object and version, and what fills these buffers may raise no version
            sections |= {"input_args": [reduce(t.detach()) for t in operation.inputs], "input_kwargs": {}}
        outputs = operation.outputs
        if self._outputs:
            sections["output"] = None if outputs is None or outputs else []
        tags = self._entry(name, operation, sections)

        def store() -> None:
            if self._outputs:
                sections["output"] = [reduce(t.detach()) for t in outputs or ()]

        return Open(outputs or [], store, tags, sections, reduce=reduce) if outputs is None or outputs else None

    def _call(self, operation: Operation, call: DistributedCall, receives: int = 1) -> Open | None:
        """A call of a public function."""
        name = f"Distributed.{call.name}.{self._number(call.name)}.forward"
        if not self._wanted(name):
            return self._open_unrecorded(operation, receives)
        args, kwargs = call.args, call.kwargs
        place, keyword = WRITE_ONLY.get(normal_op(call.name), (-1, ""))
        outputs = operation.outputs or []
        written = {storage(t) for t in outputs}
        inputs = {id(t) for t in operation.inputs} - {id(t) for t in outputs}
        # a tensor over an array of numpy is gone after its turn, and another one may get its id
        kept: dict[int, tuple[weakref.ref[torch.Tensor], TensorRef]] = {}
        reduce, take = self._takers(name)

        def before(tensor: torch.Tensor) -> TensorRef:
            ref = take(tensor) if id(tensor) in inputs else reduce(tensor)
            if storage(tensor) not in written:
                kept[id(tensor)] = (weakref.ref(tensor), ref)
            return ref

        def after(tensor: torch.Tensor) -> TensorRef:
            known = kept.get(id(tensor))
            return known[1] if known is not None and known[0]() is tensor else reduce(tensor)

        sections: dict[str, Any] = {}
        given: list[Any] = [None] * (len(args) + len(kwargs))
        if self._inputs:
            look = _without(before, outputs) if call.name == _BATCH else before
            read = [None if i == place else convert(value, look) for i, value in enumerate(args)]
            named = {key: None if key == keyword else convert(value, look) for key, value in kwargs.items()}
            sections |= {"input_args": read, "input_kwargs": named}
            given = [*read, *named.values()]

        def store() -> None:
            if self._outputs:
                values = zip((*args, *kwargs.values()), given)
                output = [known if isinstance(known, Opaque) else convert(value, after) for value, known in values]
                if call.name in _NOT_OUTPUT:
                    output[0] = None
                sections["output"] = output

        if self._outputs:
            sections["output"] = None
        if not outputs:
            store()
        tags = self._entry(name, operation, sections)
        return Open(outputs, store, tags, sections, receives, reduce=reduce) if outputs else None

    def _message(self, operation: Operation, call: DistributedCall) -> Open | None:
        """One message of a batch; the first makes the entry."""
        batch = call.args[0] if call.args else next(iter(call.kwargs.values()))
        tensors = operation.inputs + (operation.outputs or [])
        if self._batch is None or self._batch[0] is not batch or not _same(self._batch[1][0].tensor, tensors):
            members = [op for op in batch if (op.group is None or isinstance(op.group, torch.distributed.ProcessGroup))]
            receives = [op.tensor for op in members if op.op.__name__ == "irecv"]
            self._batch = (batch, members, self._call(operation._replace(outputs=receives), call, len(receives)))
        _, left, open_ = self._batch
        self._batch = (batch, left[1:], open_) if len(left) > 1 else None
        return open_ if operation.outputs else None

    def fail(self, error: Exception) -> None:
        """Something has failed: nothing more is looked at."""
        self.broken = error
        self.let_go()
        if self._told is not None:
            self._told(error)


def _store_nothing() -> None:
    return None


def _same(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other or storage(tensor) == storage(other) for other in others)


def _without(reduce: Reduce, ignored: list[torch.Tensor]) -> Reduce:
    """`reduce` that does not look at the values of `ignored`: receive buffers hold nothing yet."""
    known = {id(t) for t in ignored}

    def reduce_unless_ignored(tensor: torch.Tensor) -> TensorRef:
        if id(tensor) not in known:
            return reduce(tensor)
        description = describe(tensor)
        return TensorRef(-1, description._replace(extra=(*description.extra, ("ignored", True))))

    return reduce_unless_ignored
