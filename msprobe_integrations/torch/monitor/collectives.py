"""Collectives of the monitor: one sample per tensor and call (family ``other``), or the call stacks of all of them in a file.

What is seen, and when outputs are complete, is `collectives.observer.CollectiveObserver`'s. Operations that
nobody called by a public function, as DDP's reducer, have ``c10d_`` and ``functional_`` before their name. Names and `extra` of a sample:
`collective_samples`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from msprobe_integrations.common.monitor.collective_samples import PART, CollectiveSamples, group_label
from msprobe_integrations.common.monitor.module_monitor import ModuleMonitor
from msprobe_integrations.torch.collectives.calls import DistributedCall
from msprobe_integrations.torch.collectives.kernels import kernels
from msprobe_integrations.torch.collectives.observer import CollectiveObserver
from msprobe_integrations.torch.collectives.work import Open, Operation

_BATCH = "batch_isend_irecv"


class CollectiveWatch(CollectiveSamples):
    """Nothing waits, and what a collective returns is what it returned before. Arguments and errors: `CollectiveSamples`."""

    def __init__(self, side: ModuleMonitor) -> None:
        super().__init__(side)
        monitor = side.monitor
        self._observer = _Observer(self, record=monitor.collectives or monitor.collective_inputs or monitor.collective_stacks)

    def install(self) -> None:
        """A step begins; without a process group there is nothing to see."""
        if torch.distributed.is_initialized():
            kernels.add(self._observer)

    def remove(self) -> None:
        """Nothing is seen any more, nothing is left behind."""
        kernels.discard(self._observer)

    def end_step(self) -> None:
        """Settle what was not waited for; write call stacks that are new."""
        self._observer.end_step()
        super().end_step()


class _Observer(CollectiveObserver):
    """Makes samples where the dump makes entries; everything else is the same."""

    def __init__(self, watch: CollectiveWatch, *, record: bool) -> None:
        probe = watch._probe
        super().__init__(
            probe.backend.reduce,
            _reduce_nothing,
            is_on=watch.on,
            forget=probe.backend.forget,
            outputs=watch.outputs,
            lose=probe.pipeline.lose,
            fail=lambda error: probe.faults.fail(PART, error),
            record=record,
        )
        self._watch = watch

    def _operator(self, operation: Operation) -> Open | None:
        return self._sample_tensors(operation.name, operation, operation.inputs)

    def _call(self, operation: Operation, call: DistributedCall, receives: int = 1) -> Open | None:
        inputs = operation.inputs
        if call.name == _BATCH:  # all messages of the call, not the first
            batch = call.args[0] if call.args else next(iter(call.kwargs.values()))
            inputs = [op.tensor for op in batch if op.op.__name__ == "isend"]
        return self._sample_tensors(call.name, operation, inputs, receives)

    def _sample_tensors(self, name: str, operation: Operation, inputs: Sequence[torch.Tensor], receives: int = 1) -> Open | None:
        watch, number = self._watch, self._number(name)
        site = watch.site(operation.caller if operation.caller is not None else sys._getframe())
        if not site.wanted:
            return self._open_unrecorded(operation, receives)
        tags = operation.tags()
        group = group_label(tags.get("group_ranks"))
        if watch.stacks:
            watch.note_stack(name, group, site)
            return self._open_unrecorded(operation, receives)
        micro_step, rank = watch.micro_step(), watch.rank()

        def add_sample(when: str, i: int, tensor: torch.Tensor) -> None:
            # a new object: rows are remembered per object and version, and what fills these buffers may raise no version
            ref = watch._probe.backend.reduce(tensor.detach())
            watch.add(ref, name, when, number, i, site, group, micro_step)

        # what lies in memory that another rank's broadcast comes to is no number of the training
        if watch.inputs and not ("broadcast" in name and tags.get("root", rank) != rank):
            for i, tensor in enumerate(inputs):
                add_sample("pre", i, tensor)
        if not watch.outputs:
            return self._open_unrecorded(operation, receives)
        outputs = operation.outputs
        if outputs is None:
            return _Results([], _reduce_nothing, {}, {}, put=partial(add_sample, "post"))
        if not outputs:
            return None

        def store() -> None:
            for i, tensor in enumerate(outputs):
                add_sample("post", i, tensor)

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


def _reduce_nothing(*_: Any) -> None:
    return None
