"""What the first monitored step shows of the modules: the call stack of each, and shapes and dtypes of what goes in and out.

Files of the existing tool, written at the end of that step while the training goes on::

    stack_info.csv                               module_name,stack_info
    module_struct/rank{R}/module_struct.json     {"0:mlp": {"input": {"config": "list[1]", "0": "size=(2, 8), dtype=torch.float32"}, ...}}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.io.csv_text import format_rows
from msprobe_engine.core.io.output_files import make_directory, replace_file
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.core.records import TensorDescription, TensorRef
from msprobe_integrations.common.capture.stacks import Stacks
from msprobe_integrations.common.hooks.gradient_watch import GradientWatch
from msprobe_integrations.common.monitor.files import monitor_root, rank_directory
from msprobe_integrations.common.monitor.module_monitor import Hooks, Post, Pre
from msprobe_integrations.common.monitor.targets import Named

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.module_monitor import ModuleMonitor

_PART = "notes of modules"
Shown = dict[str, str]


class ModuleNotes:
    """Notes of the first step that is due; afterwards its hooks are gone."""

    tensor: type
    """Class of the framework's tensors."""

    def __init__(self, side: ModuleMonitor) -> None:
        self._side = side
        self._probe = side.probe
        self._stacks = Stacks(self.hides)
        self._stack_of: dict[str, int] = {}
        self._structs: dict[str, dict[str, Shown]] = {}
        self._started: list[tuple[str, list[Any], int]] = []
        self._watches: list[Any] = []

    def add(self, named: Named, hooks: Hooks, *, struct: bool) -> None:
        """Note one module; `struct`: its shapes too, when they are asked for."""
        monitor = self._side.monitor
        name = f"{named.chunk}:{named.name}"
        post = self._struct_post(name) if struct and monitor.print_struct else None
        hooks.add(named, self._pre(named, name, monitor.stack_info, post is not None), post, self)

    def end_step(self) -> None:
        """Write the files, if something was seen."""
        for watch in self._watches:
            watch.report()
            watch.active = False
        if not self._stack_of and not self._structs:
            return  # a step without a forward pass: the next one is taken
        self._side.drop(self)
        with self._probe.guard(_PART):
            if self._stack_of:
                self._write_stacks(rank_directory(self._probe) / "stack_info.csv")
            if self._structs:
                directory = monitor_root(self._probe) / "module_struct" / f"rank{self._probe.backend.rank() or 0}"
                make_directory(directory, "module_struct")
                replace_file(directory / "module_struct.json", json.dumps(self._structs, indent=2).encode())

    # what a framework brings along

    def hides(self, code: CodeType) -> bool:
        """Is this frame left out of stacks?"""
        raise NotImplementedError

    def _first_run(self) -> bool:
        """Is a call that begins now neither compiled nor a recomputation?"""
        raise NotImplementedError

    def _is_recording(self) -> bool:
        raise NotImplementedError

    def _edges(self, tensors: Sequence[Any]) -> tuple[list[Any], int]:
        """Where the gradients of the inputs go, and a sequence number that no node before has."""
        raise NotImplementedError

    def _make_watch(self, name: str, inputs: int, outputs: int) -> Any:
        """What waits for the gradients of a call."""
        raise NotImplementedError

    def _write_stacks(self, path: Path) -> None:
        texts = self._stacks.texts()
        rows = [[safe_cell(name), "".join(f"{line} \n" for line in texts[stack])] for name, stack in self._stack_of.items()]
        replace_file(path, format_rows([["module_name", "stack_info"], *rows]).encode("utf-8", "backslashreplace"))

    def _pre(self, named: Named, name: str, stack: bool, struct: bool) -> Pre:
        def pre(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._side.sees(named.root) or not self._first_run():
                return
            try:
                with self._probe.unseen():
                    if stack and name not in self._stack_of:
                        self._stack_of[name] = self._stacks.capture(sys._getframe(1))
                    if struct:
                        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, self.tensor)]
                        self._structs.setdefault(name, {})["input"] = self._describe_value(tensors)
                        self._started.append((name, *self._edges(tensors)))
            except Exception as error:
                raise_of_training(error)
                self._fail(error)

        return pre

    def _struct_post(self, name: str) -> Post:
        def post(_module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
            started = self._started
            while started and started[-1][0] != name:
                started.pop()  # of calls that raised
            if not started:
                return
            try:
                with self._probe.unseen():
                    _, edges, since = started.pop()
                    self._structs[name]["output"] = self._describe_value(result)
                    if self._is_recording():
                        outputs = [v for v in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(v, self.tensor)]
                        watch = self._make_watch(name, len(edges), len(outputs))
                        if watch.start(edges, outputs, since):
                            self._watches.append(watch)
            except Exception as error:
                raise_of_training(error)
                self._fail(error)

        return post

    def _describe(self, tensor: Any) -> TensorRef:
        return TensorRef(-1, self._probe.backend.describe(tensor))

    def _gradients(self, watch: GradientWatch, inputs: Sequence[TensorRef | None], outputs: Sequence[TensorRef | None]) -> None:
        found = self._structs.setdefault(watch.tag, {})
        for key, refs in (("input_grad", inputs), ("output_grad", outputs)):
            shown = {str(i): _size(ref.description) if ref is not None else "<class 'NoneType'>" for i, ref in enumerate(refs)}
            found[key] = {"config": f"tuple[{len(refs)}]", **shown}

    def _describe_value(self, value: Any) -> Shown:
        if isinstance(value, self.tensor):
            return {"config": "tensor", "tensor": _size(self._probe.backend.describe(value))}
        if isinstance(value, (list, tuple)):
            items = [_size(self._probe.backend.describe(v)) if isinstance(v, self.tensor) else str(type(v)) for v in value]
            return {"config": f"{type(value).__name__}[{len(value)}]", **{str(i): text for i, text in enumerate(items)}}
        return {"config": str(type(value))}

    def _fail(self, error: Exception) -> None:
        self._probe.faults.fail(_PART, error)
        self._side.drop(self)


def _size(description: TensorDescription) -> str:
    shape = description.shape
    return f"size={shape}, dtype={description.dtype}"
