"""Calls of a training on their way to a benchmark host: what a dump of task ``tensor`` would write, sent call by call.

Hooks put copies of tensors into a `CallStore` as they would for files (`msprobe_engine.formats.dump.writing.tensors`). Its one writer
thread makes messages (`messages`) of finished records and of the contents that they name for the first time; `CallSink` sends what is
known when a step is over. Memory of a copy comes free when the other end has it. What does not fit is counted: dump.json of the other end
names it in not_saved.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from msprobe_engine.accuracy.online import messages
from msprobe_engine.accuracy.online.events import Counts
from msprobe_engine.accuracy.precheck.summary import source_line
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry
from msprobe_engine.formats.dump.writing import packed_files
from msprobe_engine.formats.dump.writing.step_files import LOST, WRITTEN, Flags, Format, Payload, StepFiles
from msprobe_engine.formats.dump.writing.step_text import StepText
from msprobe_engine.formats.dump.writing.tensor_names import tensor_files
from msprobe_engine.formats.dump.writing.tensors import TensorStore

TOGETHER = 4 << 20
"""Bytes of contents after which a message is sent."""
MOST_CALLS = 1024
"""Records of one message."""
MOST_OPEN = 64
"""Steps whose end was not sent; of more the oldest has none."""
NOT_SENT = "calls not sent"
WITHOUT_TENSORS = "calls not sent, for a tensor that could not be kept"
_WHY_NOT_SENT = "the benchmark host was too slow or could not be reached"
_WITH_ITS_CALL = "its call was not sent"


class Transport(Protocol):
    """`msprobe_engine.accuracy.online.tcp.client.Client` or `msprobe_engine.accuracy.online.directory.client.DirectoryClient`."""

    def send(
        self,
        header: Mapping[str, Any],
        buffers: Sequence[bytes | memoryview],
        done: Callable[[], None] | None = None,
        *,
        important: bool = False,
    ) -> bool: ...

    def counts(self) -> Counts: ...

    def close(self, timeout: float) -> Counts: ...


class SentStep(StepFiles):
    """The account of a step that has no directory."""

    def write_not_saved(self) -> None:
        """It is sent with the other files of the step."""

    def not_saved(self) -> bytes:
        """What ``not_saved.json`` would hold; empty when everything is saved."""
        listed = [{"name": name, "bytes": nbytes, "reason": reason} for name, nbytes, reason in self.unsaved]
        return json.dumps({"not_saved": listed}, indent=1).encode() if listed else b""

    def data_names(self) -> bytes:
        """What ``names.json`` holds: the key of each data name."""
        return json.dumps({name: p.key for p in self.kept.values() if p.state == WRITTEN for name in p.names}).encode()


class SentCalls:
    """The calls of one step. All methods run on the store's one writer thread but `finish` and `settle`, which come when that rests."""

    def __init__(self, files: StepFiles, store: CallStore) -> None:
        self._files = files
        self._store = store
        self._unnamed: dict[int, Payload] = {}
        self._have: Flags = np.zeros(1024, np.bool_)
        self._records: list[bytes] = []
        self._names: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._new: list[Payload] = []
        self._bytes = 0
        self._number = 0

    def contents(self, payloads: list[Payload]) -> None:
        """The bytes of these are there; they are sent with the first record that names them."""
        for payload in payloads:
            if payload.row + 1 >= len(self._have):
                self._have = np.concatenate([self._have, np.zeros(max(len(self._have), payload.row + 2), np.bool_)])
            self._have[payload.row] = True
            self._unnamed[payload.row] = payload

    def add_name(self, payload: Payload, name: str) -> None:
        payload.key = payload.key or name
        payload.names.append(name)

    def withdraw(self, payload: Payload, name: str) -> None:
        """`name` belongs to another payload; the caller holds the lock of the step."""
        payload.names.remove(name)

    def record(self, entry: Entry) -> None:
        """A record is complete, and its tensors have their names."""
        options = self._store.text.options
        tensors = [(name, self._files.kept.get(ref.row)) for _, name, ref in tensor_files(entry, options.sections(entry), options.suffix)]
        if any(payload is not None and payload.state == LOST for _, payload in tensors):
            self._files.count(WITHOUT_TENSORS)
            return
        text = self._store.text.record(entry, self._have)
        if not text:
            return
        for name, payload in tensors:
            if payload is None or name is None:
                continue
            payload.key = payload.key or f"unnamed.{payload.row}"  # its name has another content up to now
            self._names[name] = payload.key
            if self._unnamed.pop(payload.row, None) is not None:
                self._new.append(payload)
                self._bytes += payload.nbytes
        if source := self._store.source(entry.stack):
            self._sources[entry.name] = source
        self._records.append(text)
        if self._bytes >= TOGETHER or len(self._records) >= MOST_CALLS:
            self.flush()

    def flush(self) -> None:
        """Send what is here."""
        if not self._records:
            return
        records, self._records = self._records, []
        names, self._names = self._names, {}
        sources, self._sources = self._sources, {}
        payloads, self._new, self._bytes = sorted(self._new, key=packed_files.alignment, reverse=True), [], 0
        found = f'"names": {json.dumps(names)}, "sources": {json.dumps(sources)}'.encode()
        text = b'{"calls": {' + b",".join(records) + b"}, " + found + b"}"
        shard: list[bytes | memoryview] = []
        if payloads:
            shard = [packed_files.header(payloads, self._files.step), *packed_files.pieces(payloads)]
        header = {"kind": messages.CALLS, "step": self._files.step, "number": self._number, "open": self._store.oldest, "calls": len(text)}
        self._number += 1

        def release_payloads() -> None:
            for payload in payloads:
                self._store.release(payload)

        sent = self._store.send(header, [text, *shard], release_payloads)
        self._store.calls += sent * len(records)
        with self._files.lock:
            for payload in payloads:
                payload.state = WRITTEN if sent else LOST
                if not sent:
                    self._lose(payload, _WHY_NOT_SENT)
            if not sent:
                for _ in records:
                    self._files.count(NOT_SENT)

    def finish(self) -> None:
        """All records were seen. What none of them names, or only one that was not sent, stays here."""
        self.flush()
        for payload in self._unnamed.values():
            self._store.release(payload)
            with self._files.lock:
                payload.state = LOST
                self._lose(payload, _WITH_ITS_CALL)
        self._unnamed.clear()

    def _lose(self, payload: Payload, why: str) -> None:
        self._have[payload.row] = False
        payload.why = why
        names, payload.names = payload.names, []
        for name in names:
            self._files.lose(name, payload.nbytes, why)


class CallStore(TensorStore):
    """Keeps copies of tensors until the other end has them.

    Args:
        text: makes the text of records.
        transport: where messages go.
        stacks: texts of the call stacks that entries refer to.
        budget: bytes of host memory for copies that wait.
        count: told of what is lost.
        patience: see `TensorStore`.
    """

    step_type = SentStep
    waits = False  # nothing outlives this process that a wait would save

    def __init__(
        self,
        text: StepText,
        transport: Transport,
        rank: int,
        stacks: Callable[[], list[list[str]]],
        faults: Faults,
        *,
        budget: int,
        count: Callable[[str, int], None],
        patience: float,
    ) -> None:
        # one thread: messages are in the order of the calls
        super().__init__(text.options, _no_template, faults, packed=True, budget=budget, count=count, threads=1, patience=patience)
        self.text = text
        self.calls = 0
        """Records that were sent."""
        self._transport = transport
        self._rank = rank
        self._stacks = stacks
        self._lines: dict[int, str] = {}
        self._open: list[int] = []
        self.oldest = 0
        """The first step whose end was not sent. The thread that sends calls is not the one that sends ends, and may be ahead of it."""

    def begin_step(self, number: int, path: str) -> None:
        self._set_open([*self._open[1 - MOST_OPEN :], number])
        super().begin_step(number, path)

    def over(self, number: int) -> None:
        """Everything of this step is sent, its end too."""
        self._set_open([n for n in self._open if n != number])

    def _set_open(self, numbers: list[int]) -> None:
        self._open = numbers
        self.oldest = min(numbers, default=self.oldest)

    def source(self, stack: int) -> str:
        """The line of the user's program that made a call; empty when it is not known."""
        if stack < 0:
            return ""
        found = self._lines.get(stack)
        if found is None:
            texts = self._stacks()
            found = self._lines[stack] = source_line(texts[stack]) if stack < len(texts) else ""
        return found

    def make_format(self, files: StepFiles, fail: Callable[[Payload, Exception], None]) -> Format:  # noqa: ARG002 - nothing is written
        """What makes messages of the calls of a step."""
        return SentCalls(files, self)

    def send(
        self,
        header: dict[str, Any],
        buffers: Sequence[bytes | memoryview],
        done: Callable[[], None] | None = None,
        *,
        important: bool = False,
    ) -> bool:
        """Give one message to the transport; False when it was given up."""
        return self._transport.send({**header, "rank": self._rank}, buffers, done, important=important)

    def release(self, payload: Payload) -> None:
        """The bytes of a payload are not needed any more; any thread."""
        self._release(payload)

    def _work(self, files: StepFiles, batch: list[Payload | tuple[int, Entry]]) -> None:
        super()._work(files, batch)
        calls = files.format
        assert isinstance(calls, SentCalls)
        for item in batch:
            if not isinstance(item, Payload):
                try:
                    calls.record(item[1])
                except Exception as error:
                    files.count(NOT_SENT)
                    self._fail(error, files.tensors)
        if self.memory.waiting:
            calls.flush()


def _no_template(_dtype: str, _shape: tuple[int, ...]) -> Any:
    raise AssertionError("nothing is written to files")
