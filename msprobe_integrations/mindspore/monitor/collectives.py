"""Communication in the monitor: functions of ``mint.distributed`` and ``communication.comm_func``, and operators (``ops.AllReduce()``).

What runs inside of compiled code is not seen. Names and `extra` of a sample: `common.collective_samples`. The output of an operation that
was started with ``async_op`` is taken when somebody waits for it; nothing waits earlier than without the probe.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, NamedTuple

import mindspore

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.common.monitor.collective_samples import PART, CollectiveSamples, Site, group_label
from msprobe_integrations.common.monitor.module_monitor import ModuleMonitor
from msprobe_integrations.mindspore.capture.api_names import COLLECTIVES
from msprobe_integrations.mindspore.capture.collectives import (
    describe_operation,
    find_unread_argument,
    handles_in,
    in_place,
    without_handles,
)
from msprobe_integrations.mindspore.capture.structure import tensors_in
from msprobe_integrations.mindspore.hooks import frames
from msprobe_integrations.mindspore.hooks.wrappers import WRAPPERS
from msprobe_integrations.mindspore.ranks import job
from msprobe_integrations.patching import FunctionPatches
from msprobe_integrations.requirements import need

OPERATORS = (
    *("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "AlltoAll", "AlltoAllV", "AllGatherV", "ReduceScatterV"),
    *("Reduce", "CollectiveScatter", "CollectiveGather", "NeighborExchange", "NeighborExchangeV2", "Send", "Receive"),
)
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_UNWANTED = object()
"""A function of which no sample is wanted: its operators are not looked at either."""


class _Call(NamedTuple):
    """A call in progress.

    Attributes:
        written: position of the argument that is only written, -1: none.
        in_place: the outputs are the arguments.
    """

    name: str
    number: int
    site: Site
    group: str
    micro_step: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    in_place: bool


class CollectiveWatch(CollectiveSamples):
    """What a collective returns is what it returned before. Arguments and errors: `CollectiveSamples`."""

    def __init__(self, side: ModuleMonitor) -> None:
        super().__init__(side)
        self._patches = FunctionPatches()
        self._waits = FunctionPatches()
        self._watched: set[type] = set()
        self._numbers: dict[str, int] = {}
        self._open: dict[int, list[tuple[Any, _Call, Any]]] = {}
        self._inside = False
        self._installed = False

    def hides(self, code: CodeType) -> bool:
        """Frames of MindSpore and of the probe are left out."""
        return frames.hides(code)

    def install(self) -> None:
        """A step begins; before the communication is started there is nothing to see."""
        if self._installed or not job.is_initialized():
            return
        self._installed = True
        WRAPPERS.add(self)
        for name in OPERATORS:
            operator = getattr(mindspore.ops, name, None)
            if isinstance(operator, type):
                entrance = next(c for c in operator.__mro__ if "__call__" in vars(c))
                self._patches.add(entrance, "__call__", self._watch_call)

    def remove(self) -> None:
        """Nothing is seen any more, nothing is left behind."""
        if self._installed:
            self._installed = False
            WRAPPERS.discard(self)
            self._patches.close()
            self._waits.close()
            self._watched.clear()
            self._open.clear()

    def end_step(self) -> None:
        """What nobody has waited for has no values; write call stacks that are new."""
        lost = sum(map(len, self._open.values()))
        if lost:
            self._probe.pipeline.lose("outputs of collectives that nobody has waited for", lost)
        self._open.clear()
        self._numbers.clear()
        super().end_step()

    # functions, see `wrappers.Sees`

    def sees(self) -> bool:
        """Is a call made now to be looked at?"""
        return self._installed and not self._inside and self.on()

    def begin_call(self, prefix: str, api: str, args: Any, kwargs: Mapping[str, Any], /) -> Any:
        """A function is called. None: it is not looked at, and `end_call` has nothing to do."""
        if prefix not in COLLECTIVES or not self.sees():
            return None
        try:
            facts = describe_operation(prefix, api, args, kwargs)
            call = self._begin_collective(api, facts, args, kwargs, find_unread_argument(prefix, api, len(args)), in_place(prefix))
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
            return None
        self._inside = True  # functions are made of operators
        return _UNWANTED if call is None else call

    def end_call(self, note: Any, result: Any, /, failed: bool = False) -> None:
        if note is None:
            return
        self._inside = False
        if not failed and note is not _UNWANTED:
            self._finish(note, result)

    # operators

    def _watch_call(self, following: Callable[..., Any], operator: Any, *args: Any, **kwargs: Any) -> Any:
        name = type(operator).__name__
        if name not in OPERATORS or not self.sees():
            return following(operator, *args, **kwargs)
        call = self._begin_operator(operator, _WORD.sub("_", name).lower(), args, kwargs)
        self._inside = True
        try:
            result = following(operator, *args, **kwargs)
        finally:
            self._inside = False
        if call is not None:
            self._finish(call, result)
        return result

    def _begin_operator(self, operator: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> _Call | None:
        try:
            ranks = self._probe.parameters.ranks.members(need(operator, "group", for_="which ranks take part in a communication operator"))
            return self._begin_collective(name, {"group_ranks": ranks}, args, kwargs, -1, False)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
            return None

    # both

    def _begin_collective(
        self, name: str, facts: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], left_out: int, writes: bool
    ) -> _Call | None:
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        site = self.site(sys._getframe(2))
        if not site.wanted:
            return None
        group = group_label(facts.get("group_ranks"))
        if self.stacks:
            self.note_stack(name, group, site)
            return None
        call = _Call(name, number, site, group, self.micro_step(), args, kwargs, writes)
        # what lies in memory that another rank's broadcast comes to is no number of the training
        if self.inputs and not (name == "broadcast" and facts.get("root", self.rank()) != self.rank()):
            given = [argument for i, argument in enumerate(args) if i != left_out]
            self._add_samples(call, "pre", [*given, *kwargs.values()])
        return call

    def _finish(self, call: _Call, result: Any) -> None:
        try:
            if not self.outputs:
                return
            outputs = [*call.args, *call.kwargs.values()] if call.in_place else without_handles(result)
            handles = handles_in(result)
            if not handles:
                self._add_samples(call, "post", outputs)
                return
            handle = handles[-1]  # of several the last one ends the operation
            kind = type(handle)
            if kind not in self._watched:
                self._watched.add(kind)
                self._waits.add(next(c for c in kind.__mro__ if "wait" in vars(c)), "wait", self._sample_after_wait)
            self._open.setdefault(id(handle), []).append((handle, call, outputs))
        except Exception as error:
            raise_of_training(error)
            self._fail(error)

    def _sample_after_wait(self, following: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
        result = following(handle, *args, **kwargs)
        for _, call, outputs in self._open.pop(id(handle), ()):
            try:
                self._add_samples(call, "post", outputs)
            except Exception as error:
                raise_of_training(error)
                self._fail(error)
        return result

    def _add_samples(self, call: _Call, when: str, values: Any) -> None:
        tensors: list[Any] = []
        tensors_in(values, tensors)
        for i, tensor in enumerate(tensors):
            ref = self._probe.backend.reduce(tensor)
            self.add(ref, call.name, when, call.number, i, call.site, call.group, call.micro_step)

    def _fail(self, error: Exception) -> None:
        self.remove()
        self._probe.faults.fail(PART, error)
