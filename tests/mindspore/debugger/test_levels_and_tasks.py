"""`PrecisionDebugger`, level by level and task by task, and the settings of both versions of the existing tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, ops
from small_cells import Job, config, names, steps, train, written, x

from msprobe.mindspore import PrecisionDebugger, module_dump, module_dump_end
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.formats.dump.reader import open_dump

CELLS = ["Cell.a.Dense.forward.0", "Cell.b.0.Linear.forward.0", "Cell.b.1.ReLU.forward.0", "Cell.b.SequentialCell.forward.0"]
CELLS += ["Cell.a.Dense.forward.1", "Cell.pair.Pair.forward.0"]


@pytest.fixture(scope="module")
def plain() -> list[bytes]:
    """All bits of a training without a probe."""
    return train(None)


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_cells(tmp_path: Path, plain: list[bytes], task: str) -> None:
    """L0 has every Cell below the model with its parameters, forward and backward, gradients of parameters, and a tree; the training keeps
    its bits."""
    assert train(PrecisionDebugger(config(tmp_path, "L0", task))) == plain
    step = written(tmp_path)
    assert [n for n in step.entries if ".forward." in n] == CELLS
    assert {n.replace("forward", "backward") for n in CELLS} <= set(step.entries)
    assert {"Cell.a.Dense.parameters_grad.0", "Cell.b.0.Linear.parameters_grad.0"} <= set(step.entries)
    assert step.framework == "mindspore"
    assert {"parameters.weight", "parameters.bias"} <= dict(step.entries["Cell.a.Dense.forward.0"].tensors()).keys()
    assert bool(list((tmp_path / "dump").glob("step0/*/dump_tensor_data/*.npy"))) == (task == "tensor")


LEVELS_AND_TASKS = [(level, task) for level in ("L0", "L1", "mix") for task in ("statistics", "tensor", "structure", "overflow_check")]
FAST = [("L1", "tensor"), ("mix", "statistics"), ("L0", "structure"), ("L0", "overflow_check"), ("mix", "overflow_check")]


@pytest.mark.parametrize(
    ("level", "task"), [cell if cell in FAST else pytest.param(*cell, marks=pytest.mark.slow) for cell in LEVELS_AND_TASKS]
)
def test_the_training_keeps_its_bits(tmp_path: Path, plain: list[bytes], level: str, task: str) -> None:
    """Losses, gradients, weights and moments are the same with a dump of any level and task."""
    assert train(PrecisionDebugger(config(tmp_path, level, task))) == plain


@pytest.mark.parametrize("mode", ["md5", "xor", "digest"])
def test_checksums(tmp_path: Path, plain: list[bytes], mode: str) -> None:
    """A checksum is of the bytes that the tensor has: the same tensor in two steps has one, another tensor another."""
    assert train(PrecisionDebugger(config(tmp_path, "L0", section={"summary_mode": mode}))) == plain
    first, second = written(tmp_path, 0), written(tmp_path, 1)
    given, given_again = (dict(s.entries["Cell.a.Dense.forward.0"].tensors()) for s in (first, second))
    key = "md5" if mode != "digest" else "digest"
    assert getattr(given["input.0"], key) == getattr(given_again["input.0"], key)
    assert getattr(given["parameters.weight"], key) != getattr(given_again["parameters.weight"], key)


def test_statistics_and_files_are_of_the_tensors(tmp_path: Path) -> None:
    """Max, Min, Mean, Norm and the .npy file are what numpy has of the same tensor."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", "tensor"))
    job = Job()
    debugger.start(job.net)
    job.forward_backward()
    debugger.stop()
    debugger.step()
    step = written(tmp_path)
    found = dict(step.entries["Cell.a.Dense.parameters_grad.0"].tensors())["weight"]
    (gradient,) = (g.asnumpy() for p, g in zip(job.optimizer.parameters, job.gradients) if p.name == "a.weight")
    values = (gradient.max(), gradient.min(), gradient.mean(), np.linalg.norm(gradient))
    assert (found.max, found.min, found.mean, found.norm) == pytest.approx(tuple(map(float, values)))
    (file,) = (tmp_path / "dump").glob("step0/*/dump_tensor_data/Cell.a.Dense.parameters_grad.0.weight.npy")
    np.testing.assert_array_equal(np.load(file), gradient)


def test_structure(tmp_path: Path) -> None:
    """Task structure writes stacks and the tree, and no numbers."""
    train(PrecisionDebugger(config(tmp_path, "mix", "structure")))
    (place,) = (tmp_path / "dump/step0").iterdir()
    PrecisionDebugger._instance.run.files.wait()  # type: ignore[union-attr]
    assert json.loads((place / "dump.json").read_text())["data"] == {}
    assert set(CELLS) <= set(json.loads((place / "construct.json").read_text()))
    stacks = json.loads((place / "stack.json").read_text())
    assert any("in forward_backward" in line for _, lines in stacks.values() for line in lines)


def test_selection(tmp_path: Path) -> None:
    """scope is a range of records, list keeps names that contain a text, data_mode keeps directions and sides."""
    train(PrecisionDebugger(config(tmp_path, "L0", section={"scope": [CELLS[1], CELLS[2]], "data_mode": ["forward", "output"]})), 1)
    step = written(tmp_path)
    assert list(step.entries) == CELLS[1:3]
    assert not any(place.startswith("input") for place, _ in step.entries[CELLS[1]].tensors())


def test_list(tmp_path: Path) -> None:
    """list keeps records whose name contains one of its texts."""
    train(PrecisionDebugger(config(tmp_path, "L0", section={"list": ["pair"]})), 1)
    assert names(tmp_path) == ["Cell.pair.Pair.forward.0", "Cell.pair.Pair.backward.0"]


def test_steps_and_ranks(tmp_path: Path) -> None:
    """Only the listed steps are written, and after the last one nothing of the probe is left on the Cells."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", step=["1-2"], rank=[0]))
    job = Job()
    for _ in range(4):
        debugger.start(job.net)
        job.forward_backward()
        debugger.stop()
        debugger.step()
    assert open_dump(tmp_path / "dump").steps == [1, 2]
    assert debugger.run.ended
    assert (job.net.a._forward_hook, job.net.a._forward_pre_hook) == ({}, {})
    assert type(job.net.a).__call__.__module__.startswith("mindspore")


def test_a_call_of_the_model_by_number(tmp_path: Path) -> None:
    """token_range keeps the calls of the model that it counts."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Job().net
    debugger.start(net, token_range=[1, 1])
    for scale in (1.0, 2.0, 3.0):
        net(x() * scale)
    debugger.stop()
    debugger.step()
    entries = written(tmp_path).entries
    assert [n for n in entries if n.startswith("Cell.a.")] == ["Cell.a.Dense.forward.0", "Cell.a.Dense.forward.1"]
    assert dict(entries["Cell.a.Dense.forward.0"].tensors())["input.0"].max == 2.0


def test_one_cell_under_another_name(tmp_path: Path) -> None:
    """Between module_dump and its end only the chosen Cell is recorded, under the chosen name."""
    debugger = PrecisionDebugger(config(tmp_path, "mix"))
    job = Job()
    debugger.start(job.net)
    module_dump(job.net.b, "second")
    job.forward_backward()
    module_dump_end()
    debugger.stop()
    debugger.step()
    assert names(tmp_path)[0] == "Cell.second.SequentialCell.forward.0"
    assert not any(n.endswith(("forward.0", "backward.0")) for n in names(tmp_path) if "Dense" in n or "ReLU" in n)


def test_overflow(tmp_path: Path) -> None:
    """Task overflow_check writes the first call with Inf or NaN, with its tensors, and ends."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", "overflow_check", section={"overflow_nums": 1}))
    job = Job()
    for scale in (1.0, np.inf, 1.0):
        debugger.start(job.net)
        job.forward_backward(x() * float(scale))
        debugger.stop()
        debugger.step()
    dump = open_dump(tmp_path / "dump")
    assert dump.steps == [1]
    assert list(dump.load(1).entries) == ["Cell.a.Dense.forward.0"]
    assert list((tmp_path / "dump").glob("step1/*/dump_tensor_data/*.npy"))


def test_custom_api(tmp_path: Path) -> None:
    """A registered function has records of its own at level L1, and is itself again afterwards."""

    class Library:
        @staticmethod
        def twice(value: Any) -> Any:
            return ops.sin(value) * 2

    original = Library.twice
    debugger = PrecisionDebugger(config(tmp_path, "L1"))
    debugger.register_custom_api(Library, "twice", "my.lib")
    debugger.start()
    Library.twice(Tensor(np.ones((2, 2), np.float32)))
    debugger.stop()
    debugger.step()
    debugger.restore_custom_api(Library, "twice")
    assert Library.twice is original
    assert "my.lib.twice.0.forward" in names(tmp_path)


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


@pytest.mark.fast_cells("8.1.1 statistics", "8.1.1 statistics of a static graph")
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
