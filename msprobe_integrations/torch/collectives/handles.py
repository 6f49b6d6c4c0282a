"""When the outputs of a collective are there.

Some backends have filled them when the operator returns and give no `Work`. Otherwise somebody waits: ``Work.wait``, its future
(``wait``, ``value``, ``then``), ``is_completed`` asked until it says yes, the work that ``_end_coalescing`` returns for a whole block,
or C++ code: DDP's broadcast of buffers before it returns, DDP's reducer at the end of the backward pass. These are watched here by
wrapping the methods of the classes, which gives the same results; they are put back with the last observer. Nothing is waited for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.patching import Patches
from msprobe_integrations.torch.collectives.calls import from_engine
from msprobe_integrations.torch.collectives.observer import CollectiveObserver
from msprobe_integrations.torch.collectives.work import Open, Operation, has_failed
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task

Begun = Sequence[tuple[CollectiveObserver, Open]]
_no_torch_function = torch._C.DisableTorchFunction


class Handles:
    """Follows work to its completion.

    Args:
        observers: those that are to be told.
        left_out: called when a public function returns because this rank is not in its group.
    """

    def __init__(self, observers: Callable[[], Sequence[CollectiveObserver]], left_out: Callable[[], None]) -> None:
        self._observers = observers
        self._left_out = left_out
        self._patches = Patches()
        self._blocks: dict[str, list[tuple[CollectiveObserver, Open]]] = {}
        self._backward: tuple[int, list[tuple[Any, Begun]]] = (-1, [])
        self._waited_for: list[Any] | None = None

    def install(self) -> None:
        """Wrap the methods."""
        for work in _with_subclasses(dist.Work):
            self._wrap(work, "wait", self._waits)
            self._wrap(work, "is_completed", self._asks)
            self._wrap(work, "get_future", self._gives)
        future = torch._C.Future
        self._wrap(future, "wait", self._waits)
        self._wrap(future, "value", self._waits)
        self._wrap(future, "then", self._calls_back)
        self._wrap(future, "add_done_callback", self._calls_back)
        self._wrap(dist.ProcessGroup, "_start_coalescing", self._opens)
        self._wrap(dist.ProcessGroup, "_end_coalescing", self._closes)
        self._wrap(dist.distributed_c10d, "_warn_not_in_group", self._warns)
        self._wrap(dist, "_broadcast_coalesced", self._waits_inside)

    def remove(self) -> None:
        """Put the methods back."""
        self._patches.undo()
        self._blocks.clear()
        self._backward = (-1, [])

    def track_operation(self, work: Any, group: Any, begun: Begun, operation: Operation) -> None:
        """An operation has been started.

        Args:
            work: what the caller gets; None: its outputs are there, in the order of the device's stream.
            group: the process group as operators get it; None: it was called on a backend.
        """
        block = self._blocks.get(dist.ProcessGroup.unbox(group).group_name) if self._blocks and group is not None else None
        if block is not None:
            block.extend(begun)
            return
        with _no_torch_function():
            for observer, open_ in begun:
                if work is None:
                    observer.complete(open_)
                else:
                    observer.awaits(work, open_)
            if work is not None and self._waited_for is not None:
                self._waited_for.append(work)
            elif work is not None and operation.call is None:
                self._maybe_of_reducer(work, begun, operation)

    def _maybe_of_reducer(self, work: Any, begun: Begun, operation: Operation) -> None:
        """DDP's reducer waits in a callback at the end of the backward pass, which it queues after its last bucket. A callback that
        queues another one while these run is behind it; then the bucket holds the result, and nothing has used it yet."""
        task = current_graph_task()
        source = from_engine(sys._getframe()) if task != -1 else ""
        on_host = all(t.device.type == "cpu" for t in operation.outputs or ())
        # gradients of a device come on a thread of the engine; Python below it means a backward pass within another one
        if source != ("engine" if on_host else "thread") and not (source == "thread" and on_host):
            return
        for _, open_ in begun:
            open_.versions = []  # gradients share the memory of a bucket without its version: later it may hold something else
        if self._backward[0] != task:
            self._backward = (task, [])
            engine: Any = torch.autograd.Variable._execution_engine
            reduced = functools.partial(self._report_reduced, self._backward[1])
            engine.queue_callback(lambda: engine.queue_callback(reduced))
        self._backward[1].append((work, begun))

    def _report_reduced(self, owned: list[tuple[Any, Begun]]) -> None:
        with _no_torch_function():
            for work, begun in owned:
                on_host = any(t.device.type == "cpu" for _, open_ in begun for t in open_.written)
                if not on_host or _is_done(work):
                    self._tell_state(work)

    def _wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        if name in vars(owner):  # what a class inherits is wrapped where it is defined
            self._patches.wrap(owner, name, wrapper)

    def _notify_observers(self, key: Any, failed: bool = False) -> None:
        with _no_torch_function():
            for observer in self._observers():
                with _guard_observer(observer):
                    (observer.fail_key if failed else observer.complete_key)(key)

    def _tell_state(self, key: Any) -> None:
        """It is complete, well or not."""
        self._notify_observers(key, has_failed(key))

    def _waits(self, original: Any) -> Any:
        def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(handle, *args, **kwargs)
            except Exception:
                self._notify_observers(handle, True)
                raise
            self._notify_observers(handle)
            return result

        return wait

    def _asks(self, original: Any) -> Any:
        def is_completed(handle: Any) -> Any:
            result = original(handle)
            if result:
                self._tell_state(handle)
            return result

        return is_completed

    def _gives(self, original: Any) -> Any:
        def get_future(handle: Any) -> Any:
            future = original(handle)
            for observer in self._observers():
                with _guard_observer(observer):
                    observer.also(handle, future)
            return future

        return get_future

    def _calls_back(self, original: Any) -> Any:
        def then(future: Any, callback: Any) -> Any:
            if not any(_waits_for(observer, future) for observer in self._observers()):
                return original(future, callback)

            def call(done: Any) -> Any:
                self._tell_state(future)  # before the callback can change what is there
                return callback(done)

            return original(future, call)

        return then

    def _opens(self, original: Any) -> Any:
        def start_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(group, *args, **kwargs)
            self._blocks[group.group_name] = []
            return result

        return start_coalescing

    def _closes(self, original: Any) -> Any:
        def end_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            block = self._blocks.pop(group.group_name, [])
            work = original(group, *args, **kwargs)
            with _no_torch_function():
                for observer, open_ in block:
                    with _guard_observer(observer):
                        if work is None:
                            observer.complete(open_)
                        else:
                            observer.awaits(work, open_)
            return work

        return end_coalescing

    def _waits_inside(self, original: Any) -> Any:
        def broadcast_coalesced(*args: Any, **kwargs: Any) -> Any:
            self._waited_for = []
            try:
                return original(*args, **kwargs)
            finally:
                works, self._waited_for = self._waited_for, None
                for work in works:
                    self._tell_state(work)

        return broadcast_coalesced

    def _warns(self, original: Any) -> Any:
        def warn_not_in_group(name: Any) -> Any:
            self._left_out()
            return original(name)

        return warn_not_in_group


@contextmanager
def _guard_observer(observer: CollectiveObserver) -> Iterator[None]:
    """A fault of this observer makes it quiet; the training and the other observers go on."""
    try:
        yield
    except Exception as error:
        raise_of_training(error)
        observer.fail(error)


def _waits_for(observer: CollectiveObserver, future: Any) -> bool:
    try:
        return bool(observer.waits_for(future))
    except Exception as error:
        raise_of_training(error)
        observer.fail(error)
        return False


def _is_done(work: Any) -> bool:
    """Are the results there? Gloo completes the future, which the reducer waits for, a moment before the work."""
    try:
        return bool(work.get_future().done())
    except Exception as error:  # not every backend has one
        raise_of_training(error)
        return bool(work.is_completed())


def _with_subclasses(cls: type[Any]) -> list[type[Any]]:
    """The class and those derived from it, as far as they are known now; backends in Python have work of their own kind."""
    found = [cls]
    for child in cls.__subclasses__():
        found += _with_subclasses(child)
    return found
