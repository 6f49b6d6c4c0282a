"""The config.json files of both versions of the existing tool for MindSpore: each is accepted, dumps, and says what has no effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_cells import steps, train, written

from msprobe.mindspore import PrecisionDebugger
from msprobe_engine.errors import SettingsError

pytestmark = pytest.mark.usefixtures("own_debugger")

COMMON = {"rank": [], "step": [], "enable_dataloader": False, "async_dump": False}
STATISTICS = {"scope": [], "list": [], "tensor_list": [], "data_mode": ["all"], "summary_mode": "statistics"}
OVERFLOW = {"check_mode": "all", "overflow_nums": 1}
FILES: dict[str, dict[str, Any]] = {
    "8.1.1 statistics": {**COMMON, "task": "statistics", "level": "L1", "statistics": STATISTICS},
    "8.1.1 statistics of a static graph": {
        **COMMON,
        "task": "statistics",
        "level": "L0",
        "statistics": {
            "scope": [],
            "list": [],
            "device": "host",
            "precision": "high",
            "data_mode": ["all"],
            "summary_mode": ["max", "l2norm"],
        },
    },
    "8.1.1 tensor": {
        **COMMON,
        "task": "tensor",
        "level": "L1",
        "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy"},
    },
    "8.1.1 overflow": {**COMMON, "task": "overflow_check", "level": "L0", "overflow_check": OVERFLOW},
    "8.1.1 structure": {**COMMON, "task": "structure", "level": "mix", "structure": {"scope": [], "list": [], "data_mode": ["all"]}},
    "8.1.1 every section": {
        **COMMON,
        "task": "statistics",
        "level": "mix",
        "statistics": STATISTICS,
        "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
        "overflow_check": OVERFLOW,
        "free_benchmark": {"list": [], "fuzz_device": "npu", "pert_mode": "improve_precision", "handler_type": "check"},
        "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
        "run_ut": {"white_list": [], "black_list": []},
    },
    "26.2.0": {
        "task": "statistics",
        "dump_enable": None,
        "rank": [],
        "step": ["0-1"],
        "level": "mix",
        "async_dump": True,
        "extra_info": True,
        "precision": "low",
        "risk_level": "ALL",
        "statistics": {**STATISTICS, "summary_mode": "md5"},
        "tensor": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    },
    "26.2.0 tensor": {
        "task": "tensor",
        "level": "L0",
        "async_dump": True,
        "extra_info": False,
        "tensor": {"list": ["pair"], "data_mode": ["forward"], "summary_mode": "xor"},
    },
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_existing_tool(tmp_path: Path, name: str) -> None:
    """The file works as it is."""
    path = tmp_path / "config.json"
    document = FILES[name]
    path.write_text(json.dumps({**document, "dump_path": str(tmp_path / "dump")}))
    debugger = PrecisionDebugger(config_path=str(path))
    train(debugger, 2)
    if document["task"] == "overflow_check":
        return  # nothing overflows
    assert steps(tmp_path) == [0, 1]
    step = written(tmp_path)
    assert bool(step.entries) == (document["task"] != "structure")
    assert bool(step.stacks) == document.get("extra_info", True)


def test_arguments_override_the_file(tmp_path: Path) -> None:
    """The order of the constructor's arguments is that of the existing tool: file, task, dump_path, level, step."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FILES["8.1.1 statistics"]))
    debugger = PrecisionDebugger(str(path), "tensor", str(tmp_path / "dump"), "L0", [1])
    train(debugger, 3)
    assert (debugger.dump.task, debugger.dump.level, debugger.dump.step) == ("tensor", "L0", (1,))
    assert steps(tmp_path) == [1]


def test_tasks_that_are_something_else(tmp_path: Path) -> None:
    """exception_dump says what does its work here."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "exception_dump", "dump_path": str(tmp_path)}))
    with pytest.raises(SettingsError, match="task 'exception_dump' of the existing tool is no task here"):
        PrecisionDebugger(path)
