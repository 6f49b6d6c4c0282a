"""The texts of one step of a dump: dump.json (debug.json) with its header, stack.json, construct.json, shapes.json."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.core.names import direction
from msprobe_engine.core.records import Entry, Frame
from msprobe_engine.core.statistics.rows import WORDS, Rows
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.writing import text as _text
from msprobe_engine.formats.dump.writing.step_files import Saved
from msprobe_engine.formats.dump.writing.template import Flags, Layout, LayoutCache, Options
from msprobe_engine.formats.dump.writing.text import Float64, Int32

Parts = list[bytes | memoryview]
_NO_ROWS: Rows = np.zeros((0, WORDS), np.float64)


class Prepared(NamedTuple):
    """A frame that only needs its numbers filled in."""

    frame: Frame
    layout: Layout
    slots: Int32
    floats: Float64
    rows: Rows
    head: bytes
    saved: Saved | None


class StepText:
    """Makes the texts of steps. `prepare` may be called from several threads.

    Args:
        level, task, framework, extra_info, selection, construct_micro_steps, single_file:
            see `msprobe_engine.probe.sinks.dump.dump_files.DumpSink`.

    Attributes:
        world: keys of the header of steps that are prepared from now on, see `msprobe_engine.formats.dump.world`.
        began: when this process began to be watched, in seconds since 1970; 0: the header does not say it.
        lost: what the run has lost of steps before, reason to count.
    """

    def __init__(
        self,
        options: Options,
        *,
        level: str,
        task: str = "statistics",
        framework: str = "pytorch",
        extra_info: bool = True,
        selection: Mapping[str, Any] = MappingProxyType({}),
        construct_micro_steps: bool = False,
        single_file: bool = False,
    ) -> None:
        self.options = options
        self.level = level
        self.task = task
        self.framework = framework
        self._extra_info = extra_info
        self._single_file = single_file
        self._selection = dict(selection)
        self._cache = LayoutCache(options, construct_micro_steps)
        self._lock = threading.Lock()
        self._parallel_text: tuple[Mapping[str, Any], str] | None = None
        self.world: Mapping[str, object] = MappingProxyType({})
        self.began = 0.0
        self.lost: dict[str, int] = {}

    def prepare(self, frame: Frame, saved: Saved | None, where: Mapping[str, object]) -> Prepared:
        """Everything of the texts of `frame` but its numbers.

        Args:
            saved: which of its tensors are saved; None: tensors are not.
            where: keys of the header that say where saved tensors are: ``dump_data_dir``, ``tensor_format``.
        """
        level = frame.level or self.level
        header: dict[str, object] = {"task": self.task, "level": level, "framework": frame.framework or self.framework, **where}
        header["nonfinite_counts"] = True  # a tensor without nan_count or inf_count has none
        if self._has_companions(level):
            header[layout.INSIDE if self._single_file else layout.WRITTEN_WITH] = list(layout.COMPANIONS)
        header |= self.world
        if self.began:
            header |= {"run_began": round(self.began, 3), "step_ended": round(time.time(), 3)}
        if self.options.summary_mode != "statistics":
            header["summary_mode"] = self.options.summary_mode
        if self._selection:
            header["selection"] = self._selection
        if not frame.complete:
            header["complete"] = False
        behind = frame.entries[frame.updated :] if frame.updated >= 0 else ()
        if first := next((entry.name for entry in behind if direction(entry.name) == "forward" and "node_only" not in entry.tags), ""):
            header[layout.AFTER_UPDATE] = first
        lost = {**self.lost, **frame.lost}
        if saved is not None:
            lost |= {reason: lost.get(reason, 0) + count for reason, count in saved.late.items()}
            if saved.waited >= 0.001:
                header["tensor_wait_seconds"] = round(saved.waited, 3)
        if lost:
            header["lost"] = lost
        rows, names = (None, frozenset[str]()) if saved is None else (saved.rows, saved.lost_names)
        with self._lock:
            found, slots, floats = self._cache.find(frame.entries, level, rows, names)
        if found.micro_steps > 1:
            header["micro_steps"] = found.micro_steps
        head = (json.dumps(header, indent=1)[:-2] + self._parallel(frame) + ',\n "data": ').encode()
        return Prepared(frame, found, slots, floats, np.ascontiguousarray(frame.rows), head, saved)

    def _parallel(self, frame: Frame) -> str:
        """Key ``parallel`` of the header, on one line; made once for all frames of a model."""
        if not frame.parallel:
            return ""
        known = self._parallel_text
        if known is None or known[0] is not frame.parallel:
            known = self._parallel_text = (frame.parallel, f',\n "parallel": {json.dumps(frame.parallel)}')
        return known[1]

    def record(self, entry: Entry, rows: Flags) -> bytes:
        """One record as a member of ``data``, before its statistics are known: they are null. Empty when it is left out.

        Args:
            rows: [n] bool, which rows are saved; the last one False.
        """
        with self._lock:
            made = self._cache.entry(entry, rows)
        template = _text.Template(made.text.encode("ascii"), made.ops)
        return _text.render(template, np.full(len(made.slots), -1, np.int32), _NO_ROWS, np.array(made.floats, np.float64))

    def _has_companions(self, level: str) -> bool:
        return self._extra_info and level != "debug"

    def documents(self, ready: Prepared) -> list[tuple[str, Parts]]:
        """File names with their contents, dump.json (debug.json) last."""
        level = ready.frame.level or self.level
        structure = self.task == "structure"
        data = b"{}" if structure else _text.render(ready.layout.data, ready.slots, ready.rows, ready.floats)
        found: list[tuple[str, Parts]] = []
        if self._has_companions(level):
            found.append((layout.STACK, [ready.layout.stack(ready.frame.stacks).encode("ascii")]))
            found.append((layout.CONSTRUCT, [ready.layout.construct.encode("ascii")]))
        inside: Parts = []
        if self._single_file:
            # A text in JSON has no line break in it: without those between its parts each file is one line.
            for name, parts in found:
                inside += [b',\n "%s": ' % name.encode(), *(bytes(part).replace(b"\n", b"") for part in parts)]
            found = []
        if structure:
            found.append((layout.SHAPES, _shapes(ready)))
        found.append((layout.DEBUG if level == "debug" else layout.DUMP, [ready.head, data, *inside, b"\n}"]))
        return found


def _shapes(ready: Prepared) -> Parts:
    """The records with everything but statistics, and the row of each tensor in their order: equal rows are the same tensor. Task
    structure leaves dump.json without records, as the format wants it; this tells what the other tasks would cost."""
    data = _text.render(ready.layout.data, np.full_like(ready.slots, -1), ready.rows, ready.floats)
    tensors = ready.layout.data.ops[ready.layout.data.ops[:, 1] == _text.TAIL]
    rows = json.dumps(ready.slots[tensors[:, 3]].tolist(), separators=(",", ":"))
    return [f'{{\n "rows": {rows},\n "data": '.encode(), data, b"\n}"]
