"""Level L2: MindSpore's own dump of the kernels of compiled graphs, as records of a step.

MindSpore writes a file per tensor, ``{dump_path}/rank_{R}/Net/{graph}/{run}/...``, as `kernel_config` tells it. When a step ends, its new
files are awaited and become records ``{op type}.{op name}.{n}.forward`` of the step's dump.json; statistics and checksums are ours. With
task statistics the files are removed then, with task tensor they stay where MindSpore's users look for them, until ``max_disk_gb``.

The configuration of MindSpore's own kernel dump: a file that ``MINDSPORE_DUMP_CONFIG`` names, read with the first compiled graph.

Keys as MindSpore's tutorial "Dump" (kernel by kernel) has them. On a CPU it writes tensors only, statistics on an Ascend and a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mindspore
from mindspore import nn

from msprobe_engine.core import log
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Entry, TensorRef
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.formats.tensors.blocks import open_file, whole
from msprobe_engine.formats.tensors.kernel_files import STATISTIC, KernelFile, in_order, kernel_calls, kernel_directories, kernel_files
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_integrations.common.dump.module_selection import ModuleRecords
from msprobe_integrations.mindspore.capture.cells import CellCapture
from msprobe_integrations.mindspore.capture.recorder import Recorder
from msprobe_integrations.mindspore.environment import api_module
from msprobe_integrations.mindspore.graph.calls import HostArray
from msprobe_integrations.mindspore.graph.compiles import CompileWatch
from msprobe_integrations.mindspore.hooks.autograd import wait_for_operators
from msprobe_integrations.mindspore.models import as_list
from msprobe_integrations.mindspore.ranks.job import Job

PART = "kernel dump"
_BFLOAT16 = "BFloat16"
_log = get_logger()
_PAUSE, _FIRST, _STILL, _LONGEST = 0.02, 0.5, 2.0, 60.0
"""Seconds: between two looks at the files; to wait for the first one; without a change, where files
are of a type that nobody can read; to wait for files that grow."""


class KernelCapture:
    """In the place of `Captures`, whose interface it has.

    Raises:
        UsageError: see `kernel_config.install`.
    """

    api = None

    def __init__(self, pipeline: Pipeline, dump: DumpSettings, root: Path) -> None:
        install(dump, root)
        self.on = False
        self._pipeline = pipeline
        self._keeps = dump.task == "tensor"
        self._quota = int(dump.max_disk_gb * 1e9)
        self._kept = 0
        self._root = root
        self._began = time.time_ns() // 1000
        self._open = False
        self._done: set[Path] = set()
        self._models: list[nn.Cell] = []
        self._watch = CompileWatch(self, (False,))
        self._recorder = Recorder(pipeline, stacks=False)

    def chosen_cells(self, is_on: Callable[[], bool]) -> ModuleRecords:
        """A dump of kernels has no Cells; `module_dump` says so."""
        return CellCapture(self._recorder, is_on, lambda: False)

    def attach(self, models: Any, anew: bool = False) -> None:  # noqa: ARG002  # one interface
        """The same as `prepare`."""
        self.prepare(models)

    def prepare(self, models: Any) -> None:
        """Have the names of kernels say the Cell that they belong to, also where nothing is around the model."""
        self._models = [model for model in as_list(models) if isinstance(model, nn.Cell)]
        self._watch.install()

    def open(self) -> None:
        """A wanted step begins, or goes on."""
        if not self._open:
            self._open = True
            self._collect_files(wanted=False)
        self.on = True
        self._pipeline.level = "L2"

    def pause(self) -> None:
        """Kernels are taken until the step ends."""
        self.on = False

    def rest(self) -> None:
        """The next step is not wanted."""
        self.on = False

    def close(self) -> None:
        """What came after the last wanted step is nobody's. MindSpore's dump itself cannot be switched off."""
        self.on = False
        self._watch.remove()
        if self._pipeline.faults.is_enabled(PART):
            with self._pipeline.faults.guard(PART):
                self._collect_files(wanted=False)

    def end_step(self) -> list[list[str]]:
        """Make the records of the step.

        Raises:
            Exception: of the training, see `autograd.wait_for_operators`.
        """
        self._open = False
        with self._pipeline.faults.guard(PART):
            wait_for_operators()
            self._wait()
            self._collect_files(wanted=True)
        return []

    # ---- `compiles.Instrument` ----

    def put_on(self, backward: bool) -> None:  # noqa: ARG002  # one interface
        """A graph is compiled. MindSpore names what is inside of another Cell itself, by the path in that one."""
        for model in self._models:
            if hasattr(model, "generate_scope") and not _is_held(model):
                model.generate_scope()

    def take_off(self) -> None:
        """Names stay."""

    def note_graph(self, has: Sequence[str], refused: Exception | None) -> None:
        """Nothing is in the graph."""

    # ---- files ----

    @property
    def _own(self) -> Path:
        return self._root / f"rank_{Job().rank() or 0}" / NET

    def _new(self) -> list[Path]:
        """Directories of runs that were not looked at."""
        return [path for path in kernel_directories(self._own) if path not in self._done] if self._own.is_dir() else []

    def _files(self, directory: Path) -> list[KernelFile]:
        """Those of this process: an earlier one may have used the same path."""
        return [file for file in kernel_files(directory)[0] if file.time >= self._began]

    def _wait(self) -> None:
        """Until all files are there as a whole: MindSpore writes them in threads of its own."""
        begin = time.monotonic()
        before: dict[str, int] = {}
        changed = 0.0
        while (waited := time.monotonic() - begin) < _LONGEST:
            now = {entry.path: entry.stat().st_size for path in self._new() for entry in os.scandir(path)}
            changed = waited if now != before else changed
            if now == before and (now or waited > _FIRST) and (waited - changed > _STILL or all(map(_whole, now))):
                return
            before = now
            time.sleep(_PAUSE)
        _log.warning("level L2: files of kernels still grow after %.0f s; what is not whole is left out", _LONGEST)

    def _collect_files(self, *, wanted: bool) -> None:
        files_of = {path: self._files(path) for path in self._new()}
        directories = [path for path, files in files_of.items() if files or _is_table_of(path, self._began)]
        self._done.update(directories)
        files = in_order(file for path in directories for file in files_of[path])
        if wanted:
            for call in kernel_calls(files):
                sections = {"input_args": [self._row(file) for file in call.inputs], "output": [self._row(file) for file in call.outputs]}
                self._pipeline.entries.append(Entry(call.name, {key: refs for key, refs in sections.items() if refs}))
            for path in directories:
                if (path / STATISTIC).is_file():
                    _log.info("level L2: statistics of kernels that MindSpore made are in %s", path / STATISTIC)
        self._remove_unkept(files, directories)

    def _row(self, file: KernelFile | None) -> TensorRef | None:
        if file is None:
            return None
        try:
            with open_file(file.path) as tensor:
                values = whole(tensor)
            dtype = _BFLOAT16 if _BFLOAT16 in (file.dtype, tensor.dtype.replace("bf", "BF")) else values.dtype.name.capitalize()
            return self._pipeline.backend.reduce(HostArray(values, dtype))
        except (DumpFormatError, ValueError, TypeError) as error:
            self._pipeline.lose(f"kernel tensors that cannot be read ({type(error).__name__})")
            log.warn_once(f"kernel file {type(error).__name__}", f"level L2: {file.path} cannot be read, its record has no values: {error}")
            return None

    def _remove_unkept(self, files: Iterable[KernelFile], directories: Iterable[Path]) -> None:
        """Remove what is not kept."""
        for file in files:
            size = file.path.stat().st_size
            if self._keeps and not (self._quota and self._kept + size > self._quota):
                self._kept += size
                continue
            if self._keeps:
                self._pipeline.lose("kernel tensors that max_disk_gb has no room for")
            file.path.unlink(missing_ok=True)
        if not self._keeps:
            for path in directories:
                with contextlib.suppress(OSError):  # something else is in it
                    path.rmdir()


def _whole(path: str) -> bool:
    """Has the file all elements that its head announces?"""
    if not path.endswith(".npy"):
        return True
    try:
        open_file(Path(path)).__exit__()
    except DumpFormatError:
        return False
    return True


def _is_table_of(directory: Path, began: int) -> bool:
    """Has MindSpore written statistics there since `began` (microseconds)?"""
    path = directory / STATISTIC
    return path.is_file() and path.stat().st_mtime_ns // 1000 >= began


def _is_held(model: Any) -> bool:
    """Is it part of another Cell?"""
    return any(any(cell is model for cell in made._cells.values()) for made in live_cells())


VARIABLE, FILE, NET = "MINDSPORE_DUMP_CONFIG", "kernel_kbyk_dump.json", "Net"
_PLACES = {"all": 0, "input": 1, "output": 2}
_DEVICES = 8


def content(dump: DumpSettings, root: Path) -> dict[str, Any]:
    """The configuration that does what `dump` asks for, below `root`."""
    target = str(mindspore.get_context("device_target"))
    steps = set(dump.step)
    if mindspore.get_context("mode") != mindspore.GRAPH_MODE:
        steps |= {step + 1 for step in steps}  # the backward graph of a jit function counts its runs from 1
    return {
        "common_dump_settings": {
            "op_debug_mode": 0,
            "dump_mode": 1 if dump.list else 0,
            "path": str(root),
            "net_name": NET,
            "iteration": "|".join(map(str, sorted(steps))) or "all",
            "saved_data": "statistic" if dump.task == "statistics" and target != "CPU" else "tensor",
            "input_output": _PLACES[dump.data_mode[0]],
            "kernels": list(dump.list),
            "support_device": list(dump.rank) or list(range(_DEVICES)),
        },
        "e2e_dump_settings": {
            "enable": target == "CPU" or not dump.async_dump,  # a CPU has no other dump
            "trans_flag": True,
            "stat_calc_mode": "host",
            "device_stat_precision_mode": "high",
        },
    }


def install(dump: DumpSettings, root: Path) -> None:
    """Write the file and name it to MindSpore.

    Raises:
        UsageError: MindSpore will not read it: a graph was compiled already, the variable names another file, or the compiler is set to O2.
    """
    path = root / FILE
    made = json.dumps(content(dump, root), indent=2).encode()
    configured = os.environ.get(VARIABLE)
    if configured and Path(configured) != path:
        raise UsageError(
            f"level L2 has MindSpore dump its kernels, and {VARIABLE} is set already, to {configured}: MindSpore reads one file only; "
            "unset it, or leave level L2"
        )
    if str(_jit_level()) == "O2":
        raise UsageError("level L2 works with jit_level O0 and O1; with O2 MindSpore's graphs have no kernels of their own")
    if graphs := compiled_graphs():
        if configured and path.is_file() and path.read_bytes() == made:
            return
        raise UsageError(
            f"level L2: {graphs} graphs were compiled already, and MindSpore reads {path} with the first one only; "
            "construct PrecisionDebugger before anything is compiled"
        )
    make_directories(str(root))
    write_file(path, [made])
    os.environ[VARIABLE] = str(path)


def _jit_level() -> Any:
    context = getattr(mindspore, "context", None)
    get = getattr(getattr(context, "_context", lambda: None)(), "get_jit_config", None)
    return get().get("jit_level") if get is not None else None


def compiled_graphs() -> int:
    """How many graphs this process has compiled that are still there."""
    count = len(getattr(api_module(), "ms_compile_cache", None) or ())
    return count + sum(len(getattr(cell, "compile_cache", None) or ()) for cell in live_cells())


def live_cells() -> Iterator[Any]:
    for made in gc.get_objects():
        if issubclass(type(made), nn.Cell) and "_cells" in vars(made):  # by its type: some objects fail when they are asked for their class
            yield made
