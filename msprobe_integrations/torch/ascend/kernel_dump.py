"""Level L2: the kernels that one API call runs on an Ascend NPU, dumped by the NPU's own tool.

The tool is switched on just before the call and off just after it. For a backward name the forward call is repeated on copies of its
arguments, and when the gradient of the real call arrives, it is sent through the copy: the tool sees the kernels of this call only,
and the training's own graph is left alone.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from msprobe_engine.core import names
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import Faults, raise_of_training
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.log import get_logger
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.common.capture.calls import Call
from msprobe_integrations.common.capture.filters import RecordFilter
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.api import ApiCapture
from msprobe_integrations.torch.capture.recorder import Recorder
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task

_log = get_logger()
_PART = "kernel dump"


class DeviceTool(Protocol):
    """What the dump needs of ``torch_npu.npu``."""

    def synchronize(self) -> None: ...

    def init_dump(self) -> None: ...

    def set_dump(self, config_path: str) -> None: ...

    def finalize_dump(self) -> None: ...


def npu_tool() -> DeviceTool:
    """``torch_npu.npu``.

    Raises:
        UsageError: torch_npu is not installed.
    """
    if find_spec("torch_npu") is None:
        raise UsageError(
            "level L2 dumps the kernels of an Ascend NPU and needs the package torch_npu, which is not installed; "
            "levels L0, L1 and mix work on every device"
        )
    tool: DeviceTool = importlib.import_module("torch_npu").npu
    return tool


class KernelDump:
    """Dumps the kernels of one named call in every wanted step. All methods are called on the training thread.

    Writes ``step{N}/kernel_config_{rank or pid}.json``; the NPU's tool reads it and writes
    ``step{N}/{time}/{device}/{op_type}.{op_name}.{task}.{stream}.{time}``.

    Args:
        name: full API name, ``Functional.linear.0.backward``.
        root: ``dump_path``.
        faults: an error in here ends the kernel dump, not the training.
        tool: the device's tool; None: `npu_tool`.

    Raises:
        UsageError: there is no NPU software, or `name` is no API name.
    """

    def __init__(self, name: str, root: Path, faults: Faults, tool: DeviceTool | None = None) -> None:
        parsed = names.parse(name)
        if not isinstance(parsed, names.ApiName):
            raise UsageError(f"level L2: {name!r} is no full API name; allowed: names like 'Functional.linear.0.backward'")
        self.name = name
        self.backward = parsed.direction == names.BACKWARD
        self._root = root
        self._faults = faults
        self._tool = npu_tool() if tool is None else tool
        self._calls = _Calls(str(parsed._replace(direction=names.FORWARD)), self, faults)
        self._config = ""
        self._step = -1
        self._seen = self._running = False
        self._handle: Any = None
        self._repeated: _Repeated | None = None

    def begin(self, step: int, rank: int | None) -> None:
        """Watch for the call from now on."""
        if not self._faults.is_enabled(_PART):
            return
        with self._faults.guard(_PART):
            if step != self._step:
                self._step, self._seen = step, False
                self._config = self._write_config(step, rank)
            self._calls.install()

    def pause(self) -> None:
        """Do not watch until the next `begin`; the gradient of a call that was seen still comes."""
        self._calls.remove()

    def end_step(self) -> None:
        self._calls.remove()
        self._calls.end_step()
        if self._step >= 0 and not self._seen and self._faults.is_enabled(_PART):
            _log.warning("level L2: %s was not called in step %d; is it called between start() and stop()?", self.name, self._step)
        self._step = -1
        self._repeated = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            self._warn_unsupported()  # no gradient came

    def close(self) -> None:
        self.end_step()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The named call begins."""
        self._seen = True
        with self._faults.guard(_PART):
            if self.backward:
                self._repeated = _repeat(func, args, kwargs)
            else:
                self._switch_on()

    def after(self, result: Any) -> None:
        """The named call has given `result`, or None: it has raised."""
        with self._faults.guard(_PART):
            if self.backward:
                self._await_gradient(result)
            else:
                self._switch_off()

    def _write_config(self, step: int, rank: int | None) -> str:
        directory = os.path.abspath(self._root / f"step{step}")
        make_directories(directory)
        path = f"{directory}/kernel_config_{os.getpid() if rank is None else rank}.json"
        config = {"dump": {"dump_list": [], "dump_path": directory, "dump_mode": "all", "dump_op_switch": "on"}}
        write_file(path, [json.dumps(config, indent=4).encode()])
        return path

    def _await_gradient(self, result: Any) -> None:
        repeated, self._repeated = self._repeated, None
        pairs = [] if repeated is None else zip(_tensors(result), repeated.outputs)
        pair = next(((real, copy) for real, copy in pairs if real.requires_grad and copy.requires_grad), None)
        if repeated is None or pair is None:
            self._warn_unsupported()
            return
        inputs, copy = repeated.inputs, pair[1]

        def dump_backward(gradient: torch.Tensor) -> None:
            self._handle.remove()
            self._handle = None
            with self._faults.guard(_PART), torch._C.DisableTorchFunction():
                self._switch_on()
                try:
                    torch.autograd.grad(copy, inputs, gradient, allow_unused=True)
                finally:
                    self._switch_off()

        self._handle = pair[0].register_hook(dump_backward)

    def _switch_on(self) -> None:
        self._tool.synchronize()
        self._tool.init_dump()
        self._running = True
        self._tool.set_dump(self._config)
        self._tool.synchronize()

    def _switch_off(self) -> None:
        if not self._running:
            return
        self._running = False
        self._tool.synchronize()
        self._tool.finalize_dump()
        self._tool.synchronize()
        _log.info("The kernel data of %s is dumped successfully.", self.name)

    def _warn_unsupported(self) -> None:
        _log.warning("The kernel dump does not support the %s API.", self.name)


class _Calls(ApiCapture):
    """Finds the named call as a dump at level L1 names calls; nothing of it is kept."""

    _caller = 2

    def __init__(self, forward: str, dump: KernelDump, faults: Faults) -> None:
        pipeline = Pipeline(TorchBackend(), [], Writer([], faults), faults)
        recorder = Recorder(
            pipeline, stacks=False, data_mode=("forward",), kept=RecordFilter((), (forward,), "L1", graph_task=current_graph_task)
        )
        super().__init__(recorder, lambda: True)
        self._forward = forward
        self._dump = dump
        self._made: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._made = func, args, kwargs or {}
        return super().__torch_function__(func, types, args, kwargs)

    def begin_call(self, prefix: str, api: str, args: Any, kwargs: dict[str, Any], ignored: int = -1) -> Call | None:
        made, self._made = self._made, None
        call = super().begin_call(prefix, api, args, kwargs, ignored)
        if call is not None and call.name == self._forward:
            self._dump.before(*(made or (None, (), {})))
        return call

    def end_call(self, call: Call | None, result: Any, failed: bool = False) -> None:
        if call is not None and call.name == self._forward:
            self._dump.after(result)
        super().end_call(call, result, failed)

    def end_step(self) -> None:
        """Forget the step's numbering, and what was seen of it."""
        self._recorder.end_step()
        self._recorder.pipeline.exchange()
        self._recorder.pipeline.backend.finish_step()


class _Repeated(NamedTuple):
    """A call on copies: what it gave, and the copies that need gradients."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Repeated | None:
    """The call on copies of its arguments, with the random numbers that the real one is going to draw; None: that is not possible."""
    inputs: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().clone()
        if not tensor.requires_grad:
            return made
        inputs.append(made.requires_grad_())
        return made.clone()  # no leaf, so that the call may write into it

    own = _map(args, copy), _map(kwargs, copy)
    if func is None or not inputs or any("float8" in str(t.dtype) for t in inputs):
        return None
    devices = sorted({t.device.index or 0 for t in inputs if t.device.type != "cpu"})
    kind = next((t.device.type for t in inputs if t.device.type != "cpu"), "cuda")
    try:
        with torch.random.fork_rng(devices, device_type=kind), torch.enable_grad():
            return _Repeated(_tensors(func(*own[0], **own[1])), inputs)
    except Exception as error:  # whatever the function has against a second call
        raise_of_training(error)
        _log.debug("%s cannot be repeated: %s", func, error)
        return None


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with its tensors changed, inside lists, tuples and dicts too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_map(v, change) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, change) for k, v in value.items()}
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []
