"""The configuration of MindSpore's own kernel dump: a file that ``MINDSPORE_DUMP_CONFIG`` names, read with the first compiled graph.

Keys as MindSpore's tutorial "Dump" (kernel by kernel) has them. On a CPU it writes tensors only, statistics on an Ascend and a GPU.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore
from mindspore import nn

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_integrations.mindspore.environment import api_module

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
    there = os.environ.get(VARIABLE)
    if there and Path(there) != path:
        raise UsageError(
            f"level L2 has MindSpore dump its kernels, and {VARIABLE} is set already, to {there}: MindSpore reads one file only; "
            "unset it, or leave level L2"
        )
    if str(_jit_level()) == "O2":
        raise UsageError("level L2 works with jit_level O0 and O1; with O2 MindSpore's graphs have no kernels of their own")
    if graphs := compiled_graphs():
        if there and path.is_file() and path.read_bytes() == made:
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
    found = len(getattr(api_module(), "ms_compile_cache", None) or ())
    return found + sum(len(getattr(cell, "compile_cache", None) or ()) for cell in live_cells())


def live_cells() -> Iterator[Any]:
    for made in gc.get_objects():
        if issubclass(type(made), nn.Cell) and "_cells" in vars(made):  # by its type: some objects fail when they are asked for their class
            yield made
