"""The sink of the online pre-check: the end of each step goes to the benchmark host."""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_engine.accuracy.online import messages
from msprobe_engine.accuracy.online.sender import CallStore, SentStep
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.formats.dump import layout
from msprobe_engine.probe.sinks.base import Sink


class CallSink(Sink):
    """The sink that sends what is known when a step is over.

    Args:
        store: the calls of the step went through it.
    """

    name = "online"

    def __init__(self, store: CallStore) -> None:
        self._store = store
        self.steps = 0
        """Steps whose end was sent."""

    def write(self, frame: Frame, alerts: Sequence[Alert] = ()) -> None:  # noqa: ARG002 - no business of a pre-check
        """Send the files of a step."""
        step = self._store.step(frame.step)
        saved = self._store.finish(frame.step)
        assert isinstance(step, SentStep)
        ready = self._store.text.prepare(frame, saved, {"dump_data_dir": "", "tensor_format": "packed"})
        files: dict[str, list[bytes | memoryview]] = {messages.NAMES: [step.data_names()]}
        if listed := step.not_saved():
            files[layout.NOT_SAVED] = [listed]
        files |= self._store.text.documents(ready)
        header = {
            "kind": messages.STEP,
            "step": frame.step,
            "complete": frame.complete,
            "files": {name: sum(len(part) for part in parts) for name, parts in files.items()},
        }
        self.steps += self._store.send(header, [part for parts in files.values() for part in parts], important=True)
        self._store.over(frame.step)

    def drain(self) -> None:
        """Wait until all messages of calls are with the transport."""
        self._store.drain()

    def close(self) -> None:
        """Give memory back."""
        self._store.close()
