"""Communication: records ``MintDistributed.{op}.{N}.forward`` and ``Distributed.{op}.{N}.forward``, without backward.

What works in place (``mint.distributed``) has as output all its arguments after the operation, as in the existing format. An operation
that was started with ``async_op`` has its output when somebody waits for it; nothing waits earlier than without the probe.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from mindspore import mint
from mindspore.communication import comm_func

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import Entry
from msprobe_integrations.common.capture.calls import Call
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.capture.recorder import Recorder
from msprobe_integrations.patching import FunctionPatches

_MINT = "MintDistributed"

_WRITTEN = {
    **dict.fromkeys(("recv", "irecv", "all_gather", "scatter", "reduce_scatter", "all_to_all", "all_to_all_single"), 0),
    **dict.fromkeys(
        ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven"), 0
    ),
    "gather": 1,
}
"""Position of the argument of an in-place operation that is only written: what it holds before is not looked at."""


def in_place(prefix: str) -> bool:
    """Do operations with this prefix write into their arguments? Those of ``mint.distributed`` do, and torch's (MSAdapter)."""
    return prefix == _MINT or environment.adapter()


def find_unread_argument(prefix: str, api: str, count: int) -> int:
    """Position of an argument that is not read, -1 when there is none. `count`: of positional arguments."""
    place = _WRITTEN.get(api, -1) if in_place(prefix) else -1
    return place if place < count else -1


class Waiting:
    """Operations that are on their way.

    Args:
        fail: told of an error of the probe.
    """

    def __init__(self, recorder: Recorder, fail: Callable[[Exception], None]) -> None:
        self._recorder = recorder
        self._fail = fail
        self._patches = FunctionPatches()
        self._watched: set[type] = set()
        self._open: dict[int, list[tuple[Any, Entry, Any]]] = {}

    def finish(self, call: Call, prefix: str, api: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """The function has returned: note the output, now or when it is waited for."""
        handles = handles_in(result)
        call.tags = {**describe_operation(prefix, api, args, kwargs), "async": bool(handles)}
        output = (*args, *kwargs.values()) if in_place(prefix) else without_handles(result)
        if not handles:
            self._recorder.end_call(call, output, None)
            return
        entry = self._recorder.reserve_record(call)
        if entry is not None:
            handle = handles[-1]  # of several (batch_isend_irecv) the last one ends the operation
            self._look_at(type(handle))
            self._open.setdefault(id(handle), []).append((handle, entry, output))

    def end_step(self) -> None:
        """What nobody has waited for may still be on its way: it has no values."""
        left, self._open = self._open, {}
        for waiting in left.values():
            for _, entry, output in waiting:
                assert isinstance(entry.tags, dict)
                entry.tags["incomplete"] = True
                self._recorder.complete_record(entry, output, "in_flight")

    def close(self) -> None:
        """Look at nobody's handles any more."""
        self._patches.close()
        self._watched.clear()
        self._open.clear()

    def _look_at(self, kind: type) -> None:
        if kind not in self._watched:
            self._watched.add(kind)
            self._patches.add(next(c for c in kind.__mro__ if "wait" in vars(c)), "wait", self._complete_after_wait)

    def _complete_after_wait(self, following: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
        result = following(handle, *args, **kwargs)
        for _, entry, output in self._open.pop(id(handle), ()):
            try:
                self._recorder.complete_record(entry, output)
            except Exception as error:
                raise_of_training(error)
                self._fail(error)
        return result


def handles_in(result: Any) -> list[Any]:
    """Handles of what is on its way; synchronous functions give one that stands for nothing."""
    members = result if isinstance(result, (list, tuple)) else [result]
    return [m for m in members if _is_handle(m) and m is not getattr(comm_func, "default_handle", None)]


def _is_handle(value: Any) -> bool:
    return any(c.__name__ in ("CommHandle", "Work") for c in type(value).__mro__)


def without_handles(result: Any) -> Any:
    """A result without its handle: the tensor of ``(tensor, handle)``."""
    if isinstance(result, tuple):
        kept = tuple(member for member in result if not _is_handle(member))
        return kept[0] if len(kept) == 1 else kept
    return result


@lru_cache(maxsize=256)
def _signature(prefix: str, api: str) -> inspect.Signature:
    if environment.adapter():
        return inspect.signature(getattr(sys.modules["torch"].distributed, api))
    return inspect.signature(getattr(mint.distributed if prefix == _MINT else comm_func, api))


def describe_operation(prefix: str, api: str, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about an operation: ``group_ranks`` (global ranks), ``reduce``, ``root`` or ``peer``, as far as it has them."""
    try:
        bound = _signature(prefix, api).bind(*args, **kwargs)
        bound.apply_defaults()
        known = bound.arguments
    except (TypeError, ValueError):
        return {}
    facts: dict[str, Any] = {}
    ranks = _ranks(known.get("group"))
    if ranks:
        facts["group_ranks"] = list(ranks)
    if isinstance(known.get("op"), str):
        facts["reduce"] = known["op"].upper()
    for key in ("src", "dst"):
        if isinstance(known.get(key), int):
            facts["peer" if api in ("send", "recv", "isend", "irecv") else "root"] = known[key]
    return facts


@lru_cache(maxsize=256)
def _ranks(group: Any) -> tuple[int, ...]:
    try:
        return tuple(mint.distributed.get_process_group_ranks(group))
    except Exception as error:  # groups are not set up, or this version does not tell
        raise_of_training(error)
        return ()
