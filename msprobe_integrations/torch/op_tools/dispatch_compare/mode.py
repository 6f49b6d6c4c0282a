"""The mode that compares: ``with PtdbgDispatch(dump_path=...): loss = model(x); loss.backward()``.

Where the program called an operator. In the backward pass that is where its forward operator was called: nodes of the autograd graph
have the numbers that were counted when they were made.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_engine.accuracy.dispatch_table import SWITCHED_OFF, DispatchTables
from msprobe_engine.core.errors import SinkError, UsageError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.io.output_files import make_directory
from msprobe_engine.core.log import current_rank, get_logger, one_line
from msprobe_engine.core.process.cores import usable_cores
from msprobe_integrations.common.capture.nested import leaves_of
from msprobe_integrations.common.capture.stacks import Stacks
from msprobe_integrations.torch.hooks import frames
from msprobe_integrations.torch.hooks.backward import sequence_number
from msprobe_integrations.torch.op_tools.dispatch_compare.bench import NOT_PLAIN, Bench, hide_from_modes, is_plain, snapshot, tensors
from msprobe_integrations.torch.op_tools.dispatch_compare.compare import Calls, Seen
from msprobe_integrations.torch.op_tools.dispatch_compare.operators import describe_operator
from msprobe_integrations.torch.op_tools.dispatch_compare.tensor_files import TensorFiles
from msprobe_integrations.torch.tensors.devices import in_use

_log = get_logger()
_PART = "dispatch compare"
OFF, ALL, LIST, AUTO = MODES = ("OFF", "all", "list", "auto")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class PtdbgDispatch(TorchDispatchMode):
    """Compares every operator that runs inside, in forward and backward, with a benchmark that gets the same inputs.

    Each operator of the training runs once, on the training's own tensors; the benchmark works on copies, and random streams are left
    as they are. So the training computes the same bits as without it. What is written is in `DispatchTables`.

    Args:
        dump_mode: tensors to save: ``"OFF"`` none, ``"all"`` of every operator compared, ``"list"`` of those in `api_list`,
            ``"auto"`` of calls with the verdict error or Warning.
        api_list: names of operators without name space, ``["addmm", "native_layer_norm"]``.
        debug: log a line with the times of each call.
        dump_path: existing directory; a new one for this run is made in it.
        tag: part of the name of that directory.
        process_num: processes that compare results while the training goes on; at most a quarter of the cores that this process may use.
        bench: device of the benchmark.
        bench_dtype: ``"float64"``; ``"raised"``: one step up, as the existing tool's pre-check does; ``"same"``: the types of the
            training, for two devices or settings against each other.
        bench_context: entered around every run of the benchmark: ``lambda: torch.backends.mkldnn.flags(enabled=False)``.
        max_elements: calls with a larger tensor are left out, and counted.
        strict: raise where the comparison itself fails, in place of switching it off.

    Raises:
        UsageError: an argument is of the wrong type, out of range, or names what is not there.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        dump_mode: str = OFF,
        api_list: Sequence[str] | None = None,
        debug: bool = False,
        dump_path: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        process_num: int = 0,
        *,
        bench: str = "cpu",
        bench_dtype: str = "float64",
        bench_context: Callable[[], AbstractContextManager[Any]] | None = None,
        max_elements: int = 2**27,
        strict: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _check(dump_mode, api_list, debug, dump_path, tag, process_num, max_elements)
        self._names = frozenset(_operators(api_list)) if dump_mode == LIST else frozenset()
        self._mode, self._debug, self._limit = dump_mode, debug, max_elements
        self._bench = Bench(bench, bench_dtype, bench_context)
        stamp = time.strftime("%Y%m%d%H%M%S")
        self.directory = _directory(Path(os.fspath(dump_path or "")).resolve(), tag, stamp)
        """Where the files of this run are."""
        self.tables = DispatchTables(self.directory, stamp)
        """Results so far."""
        self._calls = Calls(self.tables, TensorFiles(self.directory), process_num)
        self._faults = Faults(strict)
        self._sources = Sources()
        self._counts: dict[str, int] = {}
        self._lock = threading.RLock()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run compiled, as without the mode; of what they do only calls of ATen operators are seen. (Versions
        of torch that do not ask run them uncompiled inside of any mode.)"""
        return True

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with self._faults.guard(_PART):
            self._calls.finish()
            _log.info("%s", self.tables.text())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(kind in _PLAIN for kind in types):
            if all(kind in _PLAIN or hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented  # a DTensor and its like: what they call inside is seen
            return func(*args, **kwargs)  # fake and functional tensors: no values yet
        part, seen = f"{_PART} of {describe_operator(func).name}", None
        if self._works(part):
            with self._faults.guard(part), self._lock:
                seen = self._before(func, args, kwargs)
        start = time.perf_counter()
        result = func(*args, **kwargs)
        if seen is not None:
            with self._faults.guard(part), self._lock:
                try:
                    self._after(seen, func, args, kwargs, result, time.perf_counter() - start)
                except (OSError, SinkError) as error:
                    self._faults.fail(_PART, error)
        if not self._works(part):
            reason = self._faults.disabled.get(part) or self._faults.disabled.get(_PART, "")
            with self._lock:
                self.tables.operator(describe_operator(func).name).skip(f"{SWITCHED_OFF} ({one_line(reason)[:200]})")
        return result

    def _works(self, part: str) -> bool:
        return self._faults.is_enabled(_PART) and self._faults.is_enabled(part)

    def _before(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Seen | None:
        """What has to be kept of a call that is to be compared; None: it is not."""
        operator = describe_operator(func)
        skip = operator.skip or self._left_out(args, kwargs)
        self._sources.forward()
        if skip:
            self.tables.operator(operator.name).skip(skip)
            return None
        kept = snapshot(operator, args, kwargs) if operator.writes or operator.foreign else (list(args), dict(kwargs))
        drawn = _streams(kwargs) if operator.random or operator.foreign else None
        number = self._counts[operator.name] = self._counts.get(operator.name, 0) + 1
        direction, source = self._sources.of(sys._getframe(2))
        return Seen(operator, f"{operator.name}_{number}", direction, source, *kept, drawn)

    def _left_out(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        """Why a call with these arguments is not compared; empty: it is."""
        given = list(tensors([args, dict(kwargs)]))
        if not given:
            return "makes a tensor of none"
        if any(tensor.numel() > self._limit for tensor in given):
            return f"tensors of more than {self._limit} elements (max_elements)"
        return "" if all(map(is_plain, given)) else NOT_PLAIN

    def _after(self, seen: Seen, func: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        start = time.perf_counter()
        random = seen.drawn is not None and seen.drawn != _streams(kwargs)
        wanted = self._mode == ALL or seen.operator.name in self._names
        with hide_from_modes():
            self._calls.add(seen, func, args, kwargs, result, self._bench, random, ALL if wanted else self._mode)
        if self._debug:
            spent = time.perf_counter() - start
            _log.info("dispatch compare: %s %s: operator %.3f ms, compare %.3f ms", seen.name, seen.direction, seconds * 1e3, spent * 1e3)


def _streams(kwargs: Mapping[str, Any]) -> list[bytes]:
    """State of every generator a call may draw from."""
    generators = [torch.default_generator, *(leaf for leaf in leaves_of(dict(kwargs)) if isinstance(leaf, torch.Generator))]
    generators += [module.default_generators[module.current_device()] for _, module in in_use()]
    with hide_from_modes():
        return [generator.get_state().numpy().tobytes() for generator in generators]


def _directory(parent: Path, tag: str | None, stamp: str) -> Path:
    rank = current_rank()
    if rank is None:
        rank = next((int(module.current_device()) for _, module in in_use()), 0)
    stem = f"msprobe_{tag}_rank{rank}_{stamp}" if tag else f"msprobe_rank{rank}_{stamp}"
    path, n = parent / stem, 1
    while os.path.lexists(path):  # a second one in the same second
        n += 1
        path = parent / f"{stem}_{n}"
    make_directory(path, _PART)
    return path


def _operators(names: Sequence[str] | None) -> list[str]:
    """Those of `names` that are operators; others are said."""
    found = [name for name in names or () if hasattr(torch.ops.aten, name)]
    if wrong := sorted(set(names or ()) - set(found)):
        _log.warning(
            "PtdbgDispatch: api_list has %s, which torch.ops.aten does not have: nothing is saved for it", ", ".join(map(repr, wrong))
        )
    return found


def _check(mode: Any, names: Any, debug: Any, path: Any, tag: Any, processes: Any, elements: Any) -> None:
    def wrong(name: str, value: Any, allowed: str) -> UsageError:
        return UsageError(f"PtdbgDispatch: {name}={value!r}; allowed is {allowed}")

    if mode not in MODES:
        raise wrong("dump_mode", mode, "one of " + ", ".join(map(repr, MODES)))
    if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(n, str) and n.isidentifier() for n in names)):
        raise wrong("api_list", names, "a list of operator names without name space, ['addmm']")
    if not isinstance(debug, bool):
        raise wrong("debug", debug, "True or False")
    if path is None or not Path(os.fspath(path)).is_dir():
        raise wrong("dump_path", path, "an existing directory")
    if tag is not None and not (isinstance(tag, str) and tag and tag.replace("-", "_").replace(".", "_").isidentifier()):
        raise wrong("tag", tag, "a name of letters, digits, '_', '-' and '.'")
    most = max((usable_cores() + 1) // 4, 1)
    if isinstance(processes, bool) or not isinstance(processes, int) or not 0 <= processes <= most:
        raise wrong("process_num", processes, f"0 to {most}, a quarter of the cores that this process may use")
    if isinstance(elements, bool) or not isinstance(elements, int) or elements < 1:
        raise wrong("max_elements", elements, "a number from 1")


_TORCH = f"File {os.path.dirname(torch.__file__)}{os.sep}"
_LIMIT = 1 << 20
_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node


class Sources:
    """Lines of the program, by the numbers of autograd nodes."""

    def __init__(self) -> None:
        self._stacks = Stacks(frames.hides)
        self._of_node: dict[int, int] = {}
        self._last = -1
        self._made = -1

    def forward(self) -> None:
        """An operator is called: autograd has made the node of it just before, if it makes one."""
        number = sequence_number()
        self._made = number - 1 if _task() < 0 and number != self._last else -1
        self._last = number

    def of(self, frame: FrameType) -> tuple[str, str]:
        """(``"forward"`` or ``"backward"``, ``"train.py:12 in step: loss = f(x)"``); the text is empty when it is not known."""
        if _task() >= 0:
            node = _node()
            if node is not None and (stack := self._of_node.get(node._sequence_nr())) is not None:
                return "backward", self._text(stack)
            return "backward", self._text(self._stacks.capture(frame))
        stack = self._stacks.capture(frame)
        if self._made >= 0:
            if len(self._of_node) >= _LIMIT:
                self._of_node.clear()
            self._of_node[self._made] = stack
        return "forward", self._text(stack)

    def _text(self, stack: int) -> str:
        lines = self._stacks.texts()[stack]
        if not lines:
            return ""
        line = next(
            (line for line in lines if not line.startswith(_TORCH)), lines[0]
        )  # rather where a module is called than torch's own line
        file, _, rest = line.removeprefix("File ").partition(", line ")
        number, _, rest = rest.partition(", in ")
        function, _, code = rest.partition(", \n ")
        return f"{file}:{number} in {function}: {code}"
