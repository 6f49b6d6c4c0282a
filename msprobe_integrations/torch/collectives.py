"""Sees every collective of the process: calls through `torch.distributed`, FSDP2, DDP's reducer, coalesced and functional ones.

How: a kernel at the Autograd dispatch key of the ``c10d`` and ``_c10d_functional`` operators that looks and calls through. Other
operations never come here, and names imported early do not escape. Outputs of a call are read when its `Work` is waited for (that
is when they are complete); nothing here waits by itself. Not seen: collectives under `torch.inference_mode`, and outputs that only
C++ code waits for (DDP's reducer, functional collectives awaited through `AsyncCollectiveTensor`), whose entries have no output.

A collective writes into its buffers without raising their version counters. Whoever remembers tensors by version has to be told:
see `forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from msprobe_engine.records import Entry, Opaque, TensorRef

_OPS: dict[str, tuple[str, int | None, int | None]] = {
    # operator: (name as users know it, position of the inputs, position of the outputs)
    "allreduce_": ("all_reduce", 0, 0),
    "allreduce_coalesced_": ("all_reduce_coalesced", 0, 0),
    "reduce_": ("reduce", 0, 0),
    "broadcast_": ("broadcast", 0, 0),
    "allgather_": ("all_gather", 1, 0),
    "_allgather_base_": ("all_gather_into_tensor", 1, 0),
    "allgather_coalesced_": ("all_gather_coalesced", 1, 0),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", 1, 0),
    "reduce_scatter_": ("reduce_scatter", 1, 0),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", 1, 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", 1, 0),
    "alltoall_base_": ("all_to_all_single", 1, 0),
    "alltoall_": ("all_to_all", 1, 0),
    "gather_": ("gather", 1, 0),
    "scatter_": ("scatter", 1, 0),
    "send": ("send", 0, None),
    "recv_": ("recv", None, 0),
    "recv_any_source_": ("recv_any_source", None, 0),
    "barrier": ("barrier", None, None),
}
_FUNCTIONAL = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
)
_ROOTS = {"root_rank": "root", "dst": "peer", "src": "peer"}
_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")

own_groups: set[str] = set()
"""Names of process groups of the probe itself; their collectives are left out."""

Reduce = Callable[[torch.Tensor], TensorRef]
Place = Callable[[], "tuple[str | None, int]"]


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flat(v)]
    return []


class CollectiveObserver:
    """Turns collectives into entries ``Distributed.{op}.{N}.forward``, in the order in which they were started.

    An entry's tags are ``group_ranks`` (global ranks), ``async``, ``reduce`` (where it applies), ``root`` or ``peer`` (global
    rank). Its ``input_args`` are the input tensors before the call, its ``output`` the output tensors when it was complete;
    ``output`` is None until then, and stays None when nobody waits within the step.

    Args:
        reduce: starts the reduction of one tensor; must not wait.
        emit: receives each entry.
        is_on: asked per call; while False nothing is looked at.
        forget: told about every tensor a collective has written; default: ``forget`` of the object `reduce` is a method of.
        where: record name of the enclosing call and current micro batch.
        fail: told about a fault in here, after which the observer is quiet; default: raise nothing, be quiet.
    """

    def __init__(
        self,
        reduce: Reduce,
        emit: Callable[[Entry], None],
        *,
        is_on: Callable[[], bool] = lambda: True,
        forget: Callable[[torch.Tensor], None] | None = None,
        where: Place | None = None,
        fail: Callable[[Exception], None] | None = None,
    ) -> None:
        self._reduce = reduce
        self._emit = emit
        self._is_on = is_on
        self._forget = forget or getattr(getattr(reduce, "__self__", None), "forget", None)
        self._where = where
        self._fail = fail
        self._numbers: dict[str, int] = {}
        self._pending: dict[int, tuple[Any, list[torch.Tensor], dict[str, Any]]] = {}
        self.broken: Exception | None = None

    def install(self) -> None:
        """Start seeing collectives."""
        _kernels.add(self)

    def remove(self) -> None:
        """Stop; with the last observer the kernels go too, and nothing is left behind."""
        self._pending.clear()
        _kernels.discard(self)

    def end_step(self) -> None:
        """Close the step's numbering. What was not waited for in the step stays without output."""
        self._numbers.clear()
        self._pending.clear()

    def started(self, name: str, inputs: Sequence[torch.Tensor], tags: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """A collective is about to start. Returns the sections of its entry."""
        if self.broken is not None or not self._is_on():
            return None
        try:
            number = self._numbers.get(name, 0)
            self._numbers[name] = number + 1
            sections: dict[str, Any] = {"input_args": [self._one(t) for t in inputs], "input_kwargs": {}, "output": None}
            parent, micro_step = self._where() if self._where is not None else (None, -1)
            self._emit(Entry(f"Distributed.{name}.{number}.forward", sections, parent, -1, micro_step, tags()))
            return sections
        except Exception as error:
            self._break(error)
            return None

    def finishes_at(self, key: Any, outputs: list[torch.Tensor], sections: dict[str, Any]) -> None:
        """Outputs will be complete when `key` (a `Work`, or the output of a functional collective) has been waited for."""
        self._pending[id(key)] = (key, outputs, sections)

    def waited(self, key: Any) -> None:
        """`key` has been waited for."""
        found = self._pending.pop(id(key), None)
        if found is None or self.broken is not None:
            return
        try:
            for tensor in found[1]:
                if self._forget is not None:
                    self._forget(tensor)
            found[2]["output"] = [self._one(t) for t in found[1]]
        except Exception as error:
            self._break(error)

    def _one(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch._subclasses.FakeTensor):
            return Opaque({"type": "FakeTensor"})
        return self._reduce(tensor.detach())

    def _break(self, error: Exception) -> None:
        self.broken = error
        self._pending.clear()
        if self._fail is not None:
            self._fail(error)


class _Kernels:
    """The registered kernels: there while there is an observer."""

    def __init__(self) -> None:
        self._observers: tuple[CollectiveObserver, ...] = ()
        self._libraries: list[Any] = []
        self._wait: Any = None
        self._ranks: dict[str, list[int]] = {}

    def add(self, observer: CollectiveObserver) -> None:
        if observer in self._observers:
            return
        self._observers = (*self._observers, observer)
        if not self._libraries and dist.is_available():
            self._register()

    def discard(self, observer: CollectiveObserver) -> None:
        self._observers = tuple(o for o in self._observers if o is not observer)
        if not self._observers and self._libraries:
            self._unregister()

    def _register(self) -> None:
        keys = ["AutogradCPU"]
        if torch.cuda.is_available():
            keys.append("AutogradCUDA")
        if torch._C._get_privateuse1_backend_name() != "privateuseone":
            keys.append("AutogradPrivateUse1")
        library: Any = torch.library.Library  # has no type information
        plain, functional = library("c10d", "IMPL"), library("_c10d_functional", "IMPL")
        self._libraries = [plain, functional]
        for key in keys:
            for op in _OPS:
                if hasattr(torch.ops.c10d, op):
                    plain.impl(op, self._kernel(op), key)
            for op in _FUNCTIONAL:
                if hasattr(torch.ops._c10d_functional, op):
                    functional.impl(op, self._functional(op), key)
            functional.impl("wait_tensor", self._wait_tensor(), key)
        self._patch_wait()

    def _patch_wait(self) -> None:
        original = self._wait = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            for observer in self._observers:
                observer.waited(work)
            return result

        dist.Work.wait = wait  # type: ignore[method-assign,assignment]

    def _unregister(self) -> None:
        for library in self._libraries:
            library._destroy()
        self._libraries = []
        self._ranks.clear()
        dist.Work.wait = self._wait  # type: ignore[method-assign]

    def _kernel(self, operator: str) -> Callable[..., Any]:
        op = getattr(torch.ops.c10d, operator).default
        name, at_in, at_out = _OPS[operator]
        arguments = [a.name for a in op._schema.arguments]
        at_group = arguments.index("process_group")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            begun = self._begin(name, args, kwargs, arguments, at_group, at_in)
            with torch._C._AutoDispatchBelowAutograd():
                result = op(*args, **kwargs)
            if begun and at_out is not None:
                work = result[1] if isinstance(result, tuple) else result
                if work is not None:
                    handle = dist.Work.unbox(work)  # the very object the caller gets
                    for observer, sections in begun:
                        observer.finishes_at(handle, flat(args[at_out]), sections)
            return result

        return kernel

    def _begin(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: list[str], at_group: int, at_in: int | None
    ) -> list[tuple[CollectiveObserver, dict[str, Any]]]:
        try:
            group = dist.ProcessGroup.unbox(args[at_group])
            if group.group_name in own_groups:
                return []
        except Exception:
            return []

        def tags() -> dict[str, Any]:
            ranks = self._members(group)
            found: dict[str, Any] = {"group_ranks": ranks}
            for i, key in enumerate(arguments):
                value = args[i] if i < len(args) else kwargs.get(key)
                if key == "async_op":
                    found["async"] = True if value is None else bool(value)
                elif key in _ROOTS and isinstance(value, int):
                    found[_ROOTS[key]] = ranks[value] if 0 <= value < len(ranks) else value
                elif key == "reduce_op":
                    found["reduce"] = _reduce_name(value)
            return found

        inputs = flat(args[at_in]) if at_in is not None else []
        sections = [(observer, observer.started(name, inputs, tags)) for observer in self._observers]
        return [(observer, s) for observer, s in sections if s is not None]

    def _functional(self, operator: str) -> Callable[..., Any]:
        op = getattr(torch.ops._c10d_functional, operator).default
        arguments = [a.name for a in op._schema.arguments]
        name = operator.rstrip("_")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            group = args[-1] if not kwargs else kwargs.get("group_name", args[-1])
            begun = []
            if str(group) not in own_groups:

                def tags() -> dict[str, Any]:
                    found: dict[str, Any] = {"group_ranks": self._named(group), "async": True}
                    for i, key in enumerate(arguments):
                        if key == "reduce_op":
                            found["reduce"] = str(args[i])
                        elif key == "src" and isinstance(args[i], int):
                            found["root"] = args[i]
                    return found

                inputs = flat(args[0])
                started = [(observer, observer.started(name, inputs, tags)) for observer in self._observers]
                begun = [(observer, s) for observer, s in started if s is not None]
            with torch._C._AutoDispatchBelowAutograd():
                result = op(*args, **kwargs)
            for observer, sections in begun:
                for i, tensor in enumerate(flat(result)):
                    sections["output"] = None if i == 0 else sections["output"]
                    observer.finishes_at(tensor, [tensor], _Part(sections, i, len(flat(result))))
            return result

        return kernel

    def _wait_tensor(self) -> Callable[..., Any]:
        op = torch.ops._c10d_functional.wait_tensor.default

        def kernel(tensor: torch.Tensor) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                result = op(tensor)
            for observer in self._observers:
                observer.waited(tensor)
            return result

        return kernel

    def _members(self, group: Any) -> list[int]:
        name = group.group_name
        if name not in self._ranks:
            self._ranks[name] = list(dist.get_process_group_ranks(group))
        return self._ranks[name]

    def _named(self, group: Any) -> list[int] | None:
        try:
            if not isinstance(group, str):
                return self._members(dist.ProcessGroup.unbox(group))
            return self._members(torch._C._distributed_c10d._resolve_process_group(group))  # type: ignore[arg-type]
        except Exception:
            return None


class _Part(dict[str, Any]):
    """The output section of one of several outputs that complete one by one."""

    def __init__(self, sections: dict[str, Any], at: int, of: int) -> None:
        super().__init__()
        self._sections, self._at, self._of = sections, at, of

    def __setitem__(self, key: str, value: Any) -> None:
        outputs = self._sections[key]
        if outputs is None:
            outputs = self._sections[key] = [None] * self._of
        outputs[self._at] = value[0]


def _reduce_name(value: Any) -> str:
    try:
        number = int(value.op()) if hasattr(value, "op") else int(value.__getstate__()[0])
        return _REDUCE_OPS[number]
    except Exception:
        return "unknown"


_kernels = _Kernels()
