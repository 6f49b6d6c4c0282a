"""Calls in progress: names, numbering, parents. Shared by module hooks and API capture."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from msprobe_engine.core.names import PASS

_NO_TAGS: Mapping[str, Any] = {}


class Base(NamedTuple):
    """What a filter knows of all calls of one module or API, before any of them.

    Attributes:
        possible: a call can be kept for its own name.
        certain: every call is, so names need not be looked at.
    """

    possible: bool
    certain: bool


ALWAYS, NEVER = Base(True, True), Base(False, False)


class Call:
    """One call of a module or an API between its start and the end of the step.

    Attributes:
        owner: whose call it is: a `ModuleInfo`, or the capture that saw it.
        backward_name: of its backward record, of the last one when several backward passes go through it.
        base: what the filter knows of all calls like this one, see `Base`.
        inside: `filters` directions that are kept because an enclosing call was asked for.
        wanted: its forward record is kept (if the range allows).
        keep: its inputs are kept.
        watch: its backward record is kept.
        node: something inside it is kept, so that it is a node of construct.json.
        is_module: it is a call of a module.
        tags: further facts for its forward record.
        tasks: graph tasks of the backward passes through it, see `pass_of`.
        running: its backward pass has begun inside the range that is kept.
        reported: its backward record is out.
        unread: arguments of memory without values, as far as is known when the call begins (torch).
    """

    __slots__ = (
        "backward_name", "base", "edges", "frame", "inputs", "inside", "is_module", "keep", "keywords", "micro_step", "name",
        "node", "owner", "parent", "parent_name", "recompute", "reported", "running", "since", "stack", "tags", "tasks", "told",
        "unread", "wanted", "watch",
    )  # fmt: skip

    def __init__(
        self, name: str, backward_name: str, owner: Any, parent: Call | None, base: Base = ALWAYS, is_module: bool = False
    ) -> None:
        self.name = name
        self.backward_name = backward_name
        self.owner = owner
        self.parent = parent
        self.base = base
        self.is_module = is_module
        self.parent_name = parent.name if parent is not None else None
        self.inputs: list[Any] | None = None
        self.keywords: dict[str, Any] | None = None
        self.edges: list[Any] = []
        self.frame: FrameType | None = None
        self.since = 0
        self.inside = 0
        self.wanted = self.keep = self.watch = self.node = self.running = self.reported = False
        self.stack = -1
        self.tags: Mapping[str, Any] = _NO_TAGS
        self.recompute = False
        self.micro_step = -1
        self.tasks: tuple[int, ...] = ()
        self.told: tuple[int, ...] = ()
        self.unread: Any = None


class CallStack(threading.local):
    """The calls in progress on this thread (backward passes of accelerators run on threads of their own)."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def pop(self, owner: Any) -> Call | None:
        """Remove the innermost call of `owner` and whatever an exception left above it; None when there is none."""
        calls = self.calls
        for i in range(len(calls) - 1, -1, -1):
            if calls[i].owner is owner:
                call = calls[i]
                del calls[i:]
                return call
        return None


def again(name: str, passes: int) -> str:
    """Name of the backward record of one more pass through a call that has had `passes` of them. Numbers of later calls are not known
    yet, and those of two runs must agree: so the number of the call plus a million for each pass, ``Functional.linear.1000002.backward``
    for the second pass through call 2. `name`: of any of its backward records."""
    parts = name.split(".")
    place = -1 if parts[-1].isdigit() else -2  # modules have the number last, APIs before the direction
    parts[place] = str(int(parts[place]) % PASS + passes * PASS)
    return ".".join(parts)


def pass_of(call: Call, task: int) -> int:
    """Which backward pass through `call` a pass of the autograd engine (its graph task) is, 0 for the first. A pass through what a call
    has made is a pass through the calls around it, so records of one pass belong to each other."""
    tasks = call.tasks
    if tasks and tasks[-1] == task:
        return len(tasks) - 1
    if task in tasks:  # an outer pass goes on after one inside it
        return tasks.index(task)
    call.tasks = (*tasks, task)
    if tasks:
        call.reported = False
        call.backward_name = again(call.backward_name, len(tasks))
    if call.parent is not None:
        pass_of(call.parent, task)
    return len(tasks)


class Numbering:
    """Call numbers within a step, from 0 per base name."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._lock = threading.Lock()  # a model may be called by several threads at once; two calls of one number would be one record

    def take_number(self, base: str) -> int:
        """Number of the next call of `base`."""
        with self._lock:
            n = self._next.get(base, 0)
            self._next[base] = n + 1
            return n

    def reset(self) -> None:
        """A new step begins."""
        self._next.clear()
