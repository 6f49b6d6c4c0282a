"""Kernels of the dispatcher that look at communication operators and call through.

They are registered at the key ``BackendSelect`` of the ``c10d`` and ``_c10d_functional`` operators: below autograd, whose kernels
make the gradients of functional collectives and must run, below modes and tensor subclasses, which then have been unwrapped, and
above the backends. The key is there for every device and under `torch.inference_mode`. Other operations never come here.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.torch.collectives.backends import METHODS, Backends, facts, tensors_of
from msprobe_integrations.torch.collectives.calls import OF_OBJECTS, distributed_call, visible
from msprobe_integrations.torch.collectives.handles import Handles
from msprobe_integrations.torch.collectives.observer import CollectiveObserver
from msprobe_integrations.torch.collectives.work import Open, Operation, flat

_BARRIER = "barrier"
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
    "barrier": (_BARRIER, None, None),
}
_FUNCTIONAL = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor",
    "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_out",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_", "isend", "irecv", "batch_p2p_ops",
)  # fmt: skip
_TENSORS = ("input", "inputs", "self", "tensor", "tensors")
_ROOTS = {"root_rank": "root", "dst": "peer", "src": "peer"}
_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_KEY = torch._C.DispatchKey.BackendSelect
_below = torch._C._dispatch_keyset_full_after(_KEY)
_no_torch_function = torch._C.DisableTorchFunction


class _Inside(threading.local):
    """Functional collectives and some backends call ``c10d`` operators of their own."""

    now = False


class Kernels:
    """The registered kernels: there while there is an observer."""

    def __init__(self) -> None:
        self._observers: tuple[CollectiveObserver, ...] = ()
        self._libraries: list[Any] = []
        self._inside = _Inside()
        self._handles = Handles(self.list_observers, self._left_out)
        self._backends = Backends(self._on_backend)

    def add(self, observer: CollectiveObserver) -> None:
        """Begin to tell `observer`."""
        if observer in self._observers:
            return
        self._observers = (*self._observers, observer)
        if not self._libraries and dist.is_available():
            self._install()

    def discard(self, observer: CollectiveObserver) -> None:
        """Tell `observer` no more; with the last one the kernels go too, and nothing is left behind."""
        observer.let_go()
        self._observers = tuple(o for o in self._observers if o is not observer)
        if not self._observers and self._libraries:
            for library in self._libraries:
                library._destroy()
            self._libraries = []
            self._handles.remove()
            self._backends.remove()

    def list_observers(self) -> tuple[CollectiveObserver, ...]:
        return self._observers

    def _install(self) -> None:
        library: Any = torch.library.Library  # has no type information
        plain, functional = library("c10d", "IMPL"), library("_c10d_functional", "IMPL")
        self._libraries = [plain, functional]
        for op in _OPS:
            if hasattr(torch.ops.c10d, op):
                _register(plain, op, self._kernel(op))
        for op in _FUNCTIONAL:
            if hasattr(torch.ops._c10d_functional, op):
                _register(functional, op, self._functional(op))
        _register(functional, "wait_tensor", self._wait_tensor())
        self._handles.install()
        self._backends.install()

    def _kernel(self, operator: str) -> Callable[..., Any]:
        op = getattr(torch.ops.c10d, operator).default
        name, at_in, at_out = _OPS[operator]
        arguments = [argument.name for argument in op._schema.arguments]
        at_group = arguments.index("process_group")

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            begun: list[tuple[CollectiveObserver, Open]] = []
            operation: Operation | None = None
            try:
                if not self._inside.now and (observers := [o for o in self._observers if o.on()]) and not _is_traced(args):
                    with _no_torch_function():
                        recorded = any(o.record for o in observers)
                        operation = self._operation(name, args, kwargs, arguments, at_group, at_in, at_out, recorded)
                        begun = _start(observers, operation)
            except Exception as error:
                raise_of_training(error)
                begun = self._disable_observers(error)
            result = self._call(op, keys, args, kwargs, begun)
            if begun and operation is not None:
                try:
                    work = result[1] if isinstance(result, tuple) else result
                    # a Work unboxed is the very object the caller gets
                    self._handles.track_operation(None if work is None else dist.Work.unbox(work), args[at_group], begun, operation)
                except Exception as error:
                    raise_of_training(error)
                    self._disable_observers(error)
            return result

        return kernel

    def _operation(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: list[str],
        at_group: int,
        at_in: int | None,
        at_out: int | None,
        recorded: bool,
    ) -> Operation | None:
        """What is about to run; None when nobody knows its group. Without `recorded` only what it writes to."""
        try:
            group = dist.ProcessGroup.unbox(args[at_group])
        except Exception as error:
            raise_of_training(error)
            return None
        outputs = flat(args[at_out]) if at_out is not None else []
        if not recorded:
            return Operation(name, None, True, [], outputs, dict, None)

        def tags() -> dict[str, Any]:
            ranks = list(dist.get_process_group_ranks(group))
            described: dict[str, Any] = {"group_ranks": ranks}
            for i, key in enumerate(arguments):
                value = args[i] if i < len(args) else kwargs.get(key)
                if key == "async_op":
                    described["async"] = True if value is None else bool(value)
                elif key in _ROOTS and isinstance(value, int):
                    described[_ROOTS[key]] = ranks[value] if 0 <= value < len(ranks) else value
                elif key == "reduce_op":
                    described["reduce"] = _reduce_name(value)
            return described

        call = distributed_call(sys._getframe())  # a frame kept in a variable of its own would keep all of them alive
        inputs = flat(args[at_in]) if at_in is not None else []
        if call is None:
            return Operation(f"c10d_{name}", None, name == _BARRIER, inputs, outputs, tags, visible(sys._getframe()))
        if call.name == "batch_isend_irecv":
            return Operation(
                call.name, call, False, inputs, outputs, lambda: {"group_ranks": list(dist.get_process_group_ranks(group))}, call.caller
            )
        # new_group and others end in a barrier of their own
        return Operation(call.name, call, name == _BARRIER or call.name in OF_OBJECTS, inputs, outputs, tags, call.caller)

    def _functional(self, operator: str) -> Callable[..., Any]:
        op = getattr(torch.ops._c10d_functional, operator).default
        arguments = [argument.name for argument in op._schema.arguments]
        name = f"functional_{operator.removesuffix('_').removesuffix('_out')}"
        receives, sends = operator == "irecv", operator == "isend"
        several = operator == "batch_p2p_ops"
        position = next((i for i, name in enumerate(arguments) if name in _TENSORS), 0)

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            begun: list[tuple[CollectiveObserver, Open]] = []
            try:
                if not self._inside.now and (observers := [o for o in self._observers if o.on()]) and not _is_traced(args):
                    group = args[-1] if "group_name" not in kwargs else kwargs["group_name"]

                    def tags() -> dict[str, Any]:
                        ranks = _find_group_ranks(group)
                        described: dict[str, Any] = {"group_ranks": ranks, "async": True}
                        for key, value in zip(arguments, args):
                            if key == "reduce_op":
                                described["reduce"] = str(value)
                            elif key in ("src", "dst") and isinstance(value, int):
                                described["peer" if receives or sends else "root"] = value
                        return described

                    with _no_torch_function():
                        inputs = [] if receives else flat(args[position])
                        if several:  # what is received is no input
                            inputs = [t for t, kind_of_operation in zip(inputs, args[0]) if kind_of_operation == "isend"]
                        nothing = sends or (several and "irecv" not in args[0])
                        operation = Operation(name, None, False, inputs, [] if nothing else None, tags, visible(sys._getframe()))
                        begun = _start(observers, operation)
            except Exception as error:
                raise_of_training(error)
                begun = self._disable_observers(error)
            result = self._call(op, keys, args, kwargs, begun)
            for observer, open_ in begun:
                made = [t for t, kind_of_operation in zip(result, args[0]) if kind_of_operation == "irecv"] if several else flat(result)
                observer.returns(open_, made)
            return result

        return kernel

    def _on_backend(self, backend: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """A method of a backend was called, by nobody who was seen."""
        begun: list[tuple[CollectiveObserver, Open]] = []
        operation: Operation | None = None
        try:
            if not self._inside.now and (observers := [o for o in self._observers if o.on()]):
                with _no_torch_function():
                    operation = _of_backend(backend, method, args, kwargs)
                    begun = _start(observers, operation)
        except Exception as error:
            raise_of_training(error)
            begun = self._disable_observers(error)
        work = self._run_original(run, begun)
        if begun and operation is not None:
            try:
                self._handles.track_operation(work, None, begun, operation)
            except Exception as error:
                raise_of_training(error)
                self._disable_observers(error)
        return work

    def _disable_observers(self, error: Exception) -> list[tuple[CollectiveObserver, Open]]:
        """A fault in here: all observers are quiet from now on. Gives what has begun then: nothing."""
        for observer in self._observers:
            observer.fail(error)
        return []

    def _call(
        self, op: Any, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any], begun: Sequence[tuple[CollectiveObserver, Open]]
    ) -> Any:
        """The operator itself."""
        return self._run_original(lambda: op.redispatch(keys & _below, *args, **kwargs), begun)

    def _run_original(self, run: Callable[[], Any], begun: Sequence[tuple[CollectiveObserver, Open]]) -> Any:
        within, self._inside.now = self._inside.now, True
        try:
            return run()
        except BaseException:
            for observer, open_ in begun:
                observer.fail_operation(open_)
            raise
        finally:
            self._inside.now = within

    def _wait_tensor(self) -> Callable[..., Any]:
        op = torch.ops._c10d_functional.wait_tensor.default

        def kernel(keys: Any, tensor: torch.Tensor) -> Any:
            result = op.redispatch(keys & _below, tensor)
            with _no_torch_function():
                for observer in self._observers:
                    observer.complete_key(tensor)
            return result

        return kernel

    def _left_out(self) -> None:
        """A public function returns because this rank is not in its group."""
        if self._inside.now:
            return
        observers = [o for o in self._observers if o.on()]
        try:
            call = distributed_call(sys._getframe()) if observers else None
        except Exception as error:
            raise_of_training(error)
            self._disable_observers(error)
            return
        if call is not None and call.name != _BARRIER and call.name not in OF_OBJECTS:
            for observer in observers:
                with _no_torch_function():
                    observer.left_out(call, call.caller)


def _of_backend(backend: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation | None:
    values = (*args, *kwargs.values())  # whoever names the tensors gives them in the order of the parameters
    try:
        inputs, outputs = (flat(tensors) for tensors in tensors_of(method, values))
    except IndexError:
        return None  # the backend will say what it misses

    def tags() -> dict[str, Any]:
        described = facts(backend, method, args, kwargs)
        if "reduce" in described:
            described["reduce"] = _reduce_name(described["reduce"])
        return described

    frame = sys._getframe()
    if method == "batch_isend_irecv" and (call := distributed_call(frame)) is not None:  # what torch_npu puts in place of torch's function
        return Operation(f"c10d_{call.name}", call, False, inputs, outputs, tags, call.caller)
    return Operation(f"c10d_{METHODS[method][0]}", None, False, inputs, outputs, tags, visible(frame))


def _find_group_ranks(group: Any) -> list[int] | None:
    """Global ranks of a group that a functional collective is given, by name or boxed."""
    try:
        if isinstance(group, str):
            return list(dist.get_process_group_ranks(torch._C._distributed_c10d._resolve_process_group(group)))  # type: ignore[arg-type]
        return list(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
    except Exception as error:
        raise_of_training(error)
        return None


def _is_traced(args: tuple[Any, ...]) -> bool:
    """Is this no call but a compiler that looks what one would give?"""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and any(isinstance(t, fake.FakeTensor) for t in flat(args))


def _register(library: Any, operator: str, kernel: Callable[..., Any]) -> None:
    """`kernel` gets the keys of the call first, also where torch cannot hand them over (before 2.5)."""
    if "with_keyset" in inspect.signature(torch.library.Library.impl).parameters:
        library.impl(operator, kernel, _KEY.name, with_keyset=True)
    else:
        library.impl(operator, lambda *args, **kwargs: kernel(torch._C._dispatch_keys(flat(args)[0]), *args, **kwargs), _KEY.name)


def _start(observers: Sequence[CollectiveObserver], operation: Operation | None) -> list[tuple[CollectiveObserver, Open]]:
    if operation is None:
        return []
    begun = [(observer, observer.start_operation(operation)) for observer in observers]
    return [(observer, open_) for observer, open_ in begun if open_ is not None]


def _reduce_name(value: Any) -> str:
    try:
        if isinstance(value, dist.ReduceOp.RedOpType):
            return _REDUCE_OPS[int(value)]  # type: ignore[call-overload]  # pybind enumerations are numbers
        plain = isinstance(value, dist.ReduceOp) or not hasattr(value, "op")  # else boxed
        return _REDUCE_OPS[int(value.__getstate__()[0] if plain else value.op())]
    except Exception as error:
        raise_of_training(error)
        return "unknown"


kernels = Kernels()
