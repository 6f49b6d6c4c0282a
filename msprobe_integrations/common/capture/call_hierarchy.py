"""Where records stand among each other: parents inside a backward pass, nodes without a record, children before their parents."""

from __future__ import annotations

from msprobe_engine.core.records import NODE_ONLY, Entry
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_integrations.common.capture.calls import Call, again, pass_of
from msprobe_integrations.common.hooks.gradient_watch import GradientWatch

_NEAR = 24
"""So many records from the end a record is looked for."""


class CallHierarchy:
    """The tree of one step's calls, as far as it is not said by ``Call.parent``.

    Args:
        pipeline: holds the entries of the step.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._running: dict[Call, None] = {}
        self._late: list[tuple[str, list[str]]] = []
        self._nodes: set[str] = set()
        self._further: dict[str, Entry] = {}

    def mark_parent(self, call: Call) -> None:
        """The forward record of a call is kept: the enclosing call is a node."""
        if call.parent is not None:
            call.parent.node = True

    def node(self, call: Call) -> None:
        """The call has no record, but a place in construct.json."""
        self._pipeline.entries.append(Entry(call.name, {}, call.parent_name, -1, call.micro_step, NODE_ONLY))
        self.mark_parent(call)

    def parent_in_backward(self, call: Call) -> str | None:
        """The backward record during which a call without enclosing call runs: recomputation, backward code of the user."""
        path = f"{call.owner.path}." if call.is_module else None
        for running in reversed(self._running):
            if path is None or path.startswith(f"{running.owner.path}."):
                return running.backward_name
        return None

    def find_running(self) -> str | None:
        """Record name of the module's backward pass that began last and has not ended, None when there is none."""
        return next((call.backward_name for call in reversed(self._running)), None)

    def backward_begins(self, watch: GradientWatch) -> None:
        """A backward pass through a call begins. Calls with a common result begin together, the inner one first."""
        call: Call = watch.tag
        if not call.is_module:
            return
        pass_of(call, watch.task)
        running = self._running
        if not running or next(reversed(running)).since < call.since:  # what encloses a call has started before it
            running[call] = None
            return
        inner = []
        while running and _encloses(call, next(reversed(running))):
            inner.append(running.popitem()[0])
        running[call] = None
        running.update(dict.fromkeys(reversed(inner)))

    def backward_ends(self, call: Call, name: str = "", filtered: bool = False, last: bool = True) -> None:
        """It has ended.

        Args:
            name: of its record, which has just been appended; empty: there is none.
            filtered: records of enclosing calls may be missing.
            last: it is behind the records of what it encloses. Without gradients of inputs it ends with its first one, and stands
                where the existing tool has it.
        """
        if call.is_module:
            self._running.pop(call, None)
        if not name:
            return
        call.reported = last
        if call.is_module:
            call.owner.last = call
        parent = call.parent
        if parent is not None and parent.reported:
            self.follows(name, parent)
        while filtered and parent is not None and not parent.watch:
            if parent.backward_name not in self._nodes:
                self._nodes.add(parent.backward_name)
                above = parent.parent.backward_name if parent.parent is not None else parent.parent_name
                self._pipeline.entries.append(Entry(parent.backward_name, {}, above, -1, parent.micro_step, NODE_ONLY))
            parent = parent.parent

    def parent_of_pass(self, call: Call, task: int) -> str | None:
        """Name of the record around that of a backward pass through `call`. The calls around it are nodes of a further pass, also where
        nothing comes through them: the gradient of a gradient reaches weights and not the module's inputs."""
        parent = call.parent
        if parent is None:
            return call.parent_name
        if len(parent.tasks) < 2:
            return parent.backward_name
        number = pass_of(parent, task)
        name = again(parent.backward_name, number)
        if number and name not in self._further:
            self._further[name] = Entry(name, {}, self.parent_of_pass(parent, task), -1, parent.micro_step, NODE_ONLY)
        return name

    def follows(self, name: str, parent: Call | None) -> None:
        """The record `name`, which has just been appended, belongs before the backward record of `parent` and of those around it."""
        chain = []
        while parent is not None and parent.reported:
            moved = parent.backward_name
            if not self._move_last(moved):
                chain.append(moved)
            parent = parent.parent
        if chain:
            self._late.append((name, chain))

    def _move_last(self, name: str) -> bool:
        """Put a record at the end of all; False when it is not near it."""
        entries = self._pipeline.entries
        for i in range(len(entries) - 1, max(len(entries) - _NEAR, 0) - 1, -1):
            if entries[i][0] == name:
                entries.append(entries.pop(i))
                return True
        return False

    def gradients_of(self, name: str, call: Call | None) -> None:
        """The parameter gradients `name` of a module have just been appended; they stand before its backward record, as in the existing
        format, when nothing else has come between: `call` is the module's last call that has one."""
        if call is None:
            return
        entries, around = self._pipeline.entries, [call.backward_name]
        above = call.parent
        while above is not None:
            around.append(above.backward_name)
            above = above.parent
        for i in range(len(entries) - 2, max(len(entries) - _NEAR, -1), -1):
            entry = entries[i]
            if entry.name == around[0]:
                self.follows(name, call)
                return
            if entry.name not in around and entry.parent not in around:
                return

    def end_step(self) -> None:
        """Put records that came before records of what they enclose behind these. Gradients of weights arrive after those of inputs,
        so the backward record of a linear layer would stand before that of the multiplication inside it."""
        late, self._late = self._late, []
        further, self._further = self._further, {}
        if further:
            recorded = {entry[0] for entry in self._pipeline.entries}
            self._pipeline.entries.extend(entry for name, entry in further.items() if name not in recorded)
        self._running.clear()
        self._nodes.clear()
        if not late:
            return
        entries = self._pipeline.entries
        behind = {moved: name for name, chain in late for moved in chain}  # the last one counts
        following: dict[str, list[str]] = {}
        for name, chain in late:
            following.setdefault(name, []).extend(moved for moved in chain if behind[moved] == name)
        waiting: dict[str, Entry] = {}
        ordered: list[Entry] = []
        for entry in entries:
            name = entry[0]
            if name in behind:  # it came before what it goes behind
                waiting[name] = entry
            else:
                ordered.append(entry)
            if name in following:
                self._place(name, following, waiting, ordered)
        entries[:] = [*ordered, *waiting.values()]

    def _place(self, name: str, following: dict[str, list[str]], waiting: dict[str, Entry], ordered: list[Entry]) -> None:
        for moved in following.pop(name):
            if moved in waiting:
                ordered.append(waiting.pop(moved))
                if moved in following:
                    self._place(moved, following, waiting, ordered)


def _encloses(call: Call, inner: Call) -> bool:
    above = inner.parent
    while above is not None and above is not call:
        above = above.parent
    return above is call
