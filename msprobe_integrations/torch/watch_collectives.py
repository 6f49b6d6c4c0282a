"""Collectives of the monitor: one sample per tensor and call (family ``other``), or the call stacks of all of them in a file.

What is seen, and when outputs are complete, is `collectives.CollectiveObserver`'s. A sample is named after the operation
(``all_reduce``; ``c10d_`` and ``functional_`` before it where nobody called a public function, as DDP's reducer) and says in `extra`::

    tag     all_reduce/rank0/post_3_0    operation, rank, pre or post, number of the call in the step, number of the tensor
    call    3
    site    /home/me/train.py[118]       where the user's code was
    group   0,1                          global ranks
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from msprobe_engine.errors import SettingsError
from msprobe_engine.records import Sample
from msprobe_engine.settings.sites import problem
from msprobe_engine.sinks.files import AppendFile
from msprobe_engine.sinks.names import safe_cell
from msprobe_integrations.common.monitor_files import rank_directory
from msprobe_integrations.common.stacks import line_number, walk
from msprobe_integrations.torch.collective_work import Open, Operation
from msprobe_integrations.torch.collectives import CollectiveObserver
from msprobe_integrations.torch.distributed_calls import DistributedCall

if TYPE_CHECKING:
    from msprobe_integrations.torch.module_side import ModuleSide

_PART = "collective monitor"
_BATCH = "batch_isend_irecv"
_MOST_RUNS = 8
"""Runs of neighbouring ranks that the label of a group names."""


class _Site(NamedTuple):
    """A call stack that a collective came from.

    Attributes:
        wanted: the settings ask for it.
        place: ``path[line]`` of the innermost frame.
        stack: all frames, ``path[line] function``, innermost first.
    """

    wanted: bool
    place: str
    stack: str


class CollectiveWatch:
    """Samples of collectives, while the step is due. Nothing waits, and what a collective returns is what it returned before.

    Args:
        side: what this is a part of.

    Raises:
        SettingsError: a pattern of ``collective_sites`` is no regular expression.
    """

    def __init__(self, side: ModuleSide) -> None:
        self._side = side
        self._probe = side.probe
        monitor = side.monitor
        for pattern in monitor.collective_sites:
            if flaw := problem(pattern):
                raise SettingsError(f"monitor.collective_sites: {pattern!r} {flaw}")
        self._patterns = [re.compile(pattern) for pattern in monitor.collective_sites]
        self.inputs = monitor.collective_inputs and not monitor.collective_stacks
        self.outputs = monitor.collectives and not monitor.collective_stacks
        self.stacks = monitor.collective_stacks
        self._observer = _Observer(self, record=monitor.collectives or monitor.collective_inputs or monitor.collective_stacks)
        self._sites: dict[tuple[Any, ...], _Site] = {}
        self._hidden: dict[CodeType, bool] = {}
        self._new: dict[tuple[str, str, str], None] = {}
        self._written: set[tuple[str, str, str]] = set()

    def install(self) -> None:
        """A step begins; without a process group there is nothing to see."""
        if torch.distributed.is_initialized():
            self._observer.install()

    def remove(self) -> None:
        """Nothing is seen any more, nothing is left behind."""
        self._observer.remove()

    def end_step(self) -> None:
        """Settle what was not waited for; write call stacks that are new."""
        self._observer.end_step()
        if self._new:
            with self._probe.guard(_PART):
                self._write()

    def site(self, frame: FrameType | None) -> _Site:
        """Where a collective was called; what was met before is known by its frames."""
        key = walk(frame, None, self._hidden, _hides, -1)[0]
        found = self._sites.get(key)
        if found is None:
            lines = [(f"{code.co_filename}[{line_number(code, at)}]", code.co_name) for code, at in key]
            wanted = not self._patterns or any(pattern.search(line) for pattern in self._patterns for line, _ in lines)
            found = _Site(wanted, lines[0][0] if lines else "", "\n".join(f"{line} {function}" for line, function in lines))
            self._sites[key] = found
        return found

    def note(self, name: str, group: str, site: _Site) -> None:
        """A call stack for the file."""
        key = (name, group, site.stack)
        if key not in self._written:
            self._written.add(key)
            self._new[key] = None

    def put(self, tensor: torch.Tensor, name: str, micro_step: int, extra: Mapping[str, Any]) -> None:
        """One tensor of a call."""
        # a new object: rows are remembered per object and version, and what fills these buffers may raise no version
        ref = self._probe.backend.reduce(tensor.detach())
        self._probe.pipeline.samples.append(Sample("other", name, ref, "", micro_step, 0, extra))

    def on(self) -> bool:
        """Do calls count now?"""
        return self._side.on

    def micro_step(self) -> int:
        """Current micro batch."""
        return self._side.micro_step()

    def rank(self) -> int:
        """Global rank."""
        return self._probe.backend.rank() or 0

    def _write(self) -> None:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        path = rank_directory(self._probe) / "collective_stacks.csv"
        file = AppendFile(path)
        try:
            if not file.size:
                writer.writerow(["op", "group", "site", "stack"])
            for name, group, stack in self._new:
                writer.writerow([safe_cell(name), group, stack.partition(" ")[0], stack])
            file.append(out.getvalue().encode("utf-8", "backslashreplace"))
        finally:
            file.close()
        self._new.clear()


class _Observer(CollectiveObserver):
    """Makes samples where the dump makes entries; everything else is the same."""

    def __init__(self, watch: CollectiveWatch, *, record: bool) -> None:
        probe = watch._probe
        super().__init__(
            probe.backend.reduce,
            _nothing,
            is_on=watch.on,
            forget=probe.backend.forget,
            outputs=watch.outputs,
            lose=probe.pipeline.lose,
            fail=lambda error: probe.faults.fail(_PART, error),
            record=record,
        )
        self._watch = watch

    def _operator(self, operation: Operation) -> Open | None:
        return self._sampled(operation.name, operation, operation.inputs)

    def _call(self, operation: Operation, call: DistributedCall, receives: int = 1) -> Open | None:
        inputs = operation.inputs
        if call.name == _BATCH:  # all messages of the call, not the first
            batch = call.args[0] if call.args else next(iter(call.kwargs.values()))
            inputs = [op.tensor for op in batch if op.op.__name__ == "isend"]
        return self._sampled(call.name, operation, inputs, receives)

    def _sampled(self, name: str, operation: Operation, inputs: Sequence[torch.Tensor], receives: int = 1) -> Open | None:
        watch, number = self._watch, self._number(name)
        site = watch.site(operation.caller if operation.caller is not None else sys._getframe())
        if not site.wanted:
            return self._unrecorded(operation, receives)
        tags = operation.tags()
        group = group_label(tags.get("group_ranks"))
        if watch.stacks:
            watch.note(name, group, site)
            return self._unrecorded(operation, receives)
        micro_step, rank = watch.micro_step(), watch.rank()

        def put(when: str, i: int, tensor: torch.Tensor) -> None:
            tag = f"{name}/rank{rank}/{when}_{number}_{i}"
            watch.put(tensor, name, micro_step, {"tag": tag, "call": number, "site": site.place, "group": group})

        # what lies in memory that another rank's broadcast comes to is no number of the training
        if watch.inputs and not ("broadcast" in name and tags.get("root", rank) != rank):
            for i, tensor in enumerate(inputs):
                put("pre", i, tensor)
        if not watch.outputs:
            return self._unrecorded(operation, receives)
        outputs = operation.outputs
        if outputs is None:
            return _Results([], _nothing, {}, {}, put=partial(put, "post"))
        if not outputs:
            return None

        def store() -> None:
            for i, tensor in enumerate(outputs):
                put("post", i, tensor)

        return Open(outputs, store, {}, {}, receives)

    def returns(self, open_: Open, results: list[torch.Tensor]) -> None:
        """Each result will be complete when ``wait_tensor`` was called with it."""
        if not isinstance(open_, _Results):
            super().returns(open_, results)
            return
        for i, tensor in enumerate(results):
            self.awaits(tensor, Open([tensor], partial(open_.put, i, tensor), open_.tags, open_.sections))


class _Results(Open):
    """Outputs of a functional collective."""

    def __init__(self, *args: Any, put: Any) -> None:
        super().__init__(*args)
        self.put = put


def group_label(ranks: Sequence[int] | None) -> str:
    """Global ranks as text: ``0-7``, ``0,8,16``; of many runs the first ones. ``""`` when they are not known."""
    runs: list[list[int]] = []
    for rank in ranks or ():
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:_MOST_RUNS])
    return text if len(runs) <= _MOST_RUNS else f"{text},... ({len(ranks or ())})"


def _hides(code: CodeType) -> bool:
    return "msprobe_integrations/" in code.co_filename.replace("\\", "/")


def _nothing(*_: Any) -> None:
    return None
