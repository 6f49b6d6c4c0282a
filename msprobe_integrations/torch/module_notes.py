"""What the first monitored step shows of the modules: the call stack of each, and shapes and dtypes of what goes in and out.

Files of the existing tool, written at the end of that step while the training goes on::

    stack_info.csv                               module_name,stack_info
    module_struct/rank{R}/module_struct.json     {"0:mlp": {"input": {"config": "list[1]", "0": "size=(2, 8), dtype=torch.float32"}, ...}}
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from msprobe_engine.records import TensorDescription, TensorRef
from msprobe_engine.sinks.files import make_directory, replace_file
from msprobe_engine.sinks.names import safe_cell
from msprobe_integrations.common.monitor_files import monitor_root, rank_directory
from msprobe_integrations.common.stacks import Stacks
from msprobe_integrations.common.targets import Named
from msprobe_integrations.torch import frames
from msprobe_integrations.torch.backward import GradientWatch, edge, sequence_number
from msprobe_integrations.torch.module_hooks import ModuleHooks, Post, Pre
from msprobe_integrations.torch.recorder import no_torch_function

if TYPE_CHECKING:
    from msprobe_integrations.torch.module_side import ModuleSide

_PART = "notes of modules"
Shown = dict[str, str]


class ModuleNotes:
    """Notes of the first step that is due; afterwards its hooks are gone.

    Args:
        side: what this is a part of.
    """

    def __init__(self, side: ModuleSide) -> None:
        self._side = side
        self._probe = side.probe
        self._stacks = Stacks(frames.hides)
        self._stack_of: dict[str, int] = {}
        self._structs: dict[str, dict[str, Shown]] = {}
        self._started: list[tuple[str, list[Any], int]] = []
        self._watches: list[GradientWatch] = []

    def add(self, named: Named, hooks: ModuleHooks, *, struct: bool) -> None:
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

    def _write_stacks(self, path: Path) -> None:
        texts = self._stacks.texts()
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["module_name", "stack_info"])
        for name, stack in self._stack_of.items():
            writer.writerow([safe_cell(name), "".join(f"{line} \n" for line in texts[stack])])
        replace_file(path, out.getvalue().encode("utf-8", "backslashreplace"))

    def _pre(self, named: Named, name: str, stack: bool, struct: bool) -> Pre:
        def pre(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or not self._side.sees(named.root) or torch._C._current_graph_task_id() != -1:
                return
            try:
                with no_torch_function():
                    if stack and name not in self._stack_of:
                        self._stack_of[name] = self._stacks.capture(sys._getframe(1))
                    if struct:
                        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
                        self._structs.setdefault(name, {})["input"] = self._shown(tensors)
                        self._started.append((name, [edge(t) for t in tensors], sequence_number()))
            except Exception as error:
                self._fail(error)

        return pre

    def _struct_post(self, name: str) -> Post:
        def post(_module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
            started = self._started
            while started and started[-1][0] != name:
                started.pop()  # of calls that raised
            if not started:
                return
            try:
                with no_torch_function():
                    _, edges, since = started.pop()
                    self._structs[name]["output"] = self._shown(result)
                    if torch.is_grad_enabled():
                        outputs = [v for v in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(v, torch.Tensor)]
                        watch = GradientWatch(name, len(edges), len(outputs), self._describe, self._gradients, self._fail)
                        if watch.start(edges, outputs, since):
                            self._watches.append(watch)
            except Exception as error:
                self._fail(error)

        return post

    def _describe(self, tensor: torch.Tensor) -> TensorRef:
        return TensorRef(-1, self._probe.backend.describe(tensor))

    def _gradients(self, watch: GradientWatch, inputs: Sequence[TensorRef | None], outputs: Sequence[TensorRef | None]) -> None:
        found = self._structs.setdefault(watch.tag, {})
        for key, refs in (("input_grad", inputs), ("output_grad", outputs)):
            shown = {str(i): _size(ref.description) if ref is not None else "<class 'NoneType'>" for i, ref in enumerate(refs)}
            found[key] = {"config": f"tuple[{len(refs)}]", **shown}

    def _shown(self, value: Any) -> Shown:
        if isinstance(value, torch.Tensor):
            return {"config": "tensor", "tensor": _size(self._probe.backend.describe(value))}
        if isinstance(value, (list, tuple)):
            items = [_size(self._probe.backend.describe(v)) if isinstance(v, torch.Tensor) else str(type(v)) for v in value]
            return {"config": f"{type(value).__name__}[{len(value)}]", **{str(i): text for i, text in enumerate(items)}}
        return {"config": str(type(value))}

    def _fail(self, error: Exception) -> None:
        self._probe.faults.fail(_PART, error)
        self._side.drop(self)


def _size(description: TensorDescription) -> str:
    shape = description.shape
    return f"size={shape}, dtype={description.dtype}"
