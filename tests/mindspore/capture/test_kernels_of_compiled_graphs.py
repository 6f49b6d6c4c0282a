"""The kernels of compiled graphs, dumped by MindSpore itself: level L2, and ``msprobe compare`` on what it wrote."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mindspore as ms
import ms_programs
import numpy as np
import pytest

from msprobe.mindspore import PrecisionDebugger
from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_engine.formats.tensors.kernel_files import kernel_directories, kernel_files
from msprobe_integrations.mindspore.graph import kernel_dump as kernel_config

PROGRAM = Path(__file__).parents[1] / "kernel_program.py"
PRODUCT = "MatMul.Default_network-WithLossCell__backbone-Net"
MATMUL = f"{PRODUCT}_out-Dense_MatMul-op0.0.forward"


def run(mode: str, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """The program to its end."""
    return ms_programs.run(PROGRAM, mode, json.dumps(settings), check=True)


def dump_of(path: Path, step: int) -> dict[str, Any]:
    """dump.json of a step."""
    found: dict[str, Any] = json.loads(next(path.glob(f"step{step}/*/dump.json")).read_text())
    return found


def test_a_training_with_model(tmp_path: Path) -> None:
    """Model.train in GRAPH_MODE, task statistics: records of the wanted steps by kernel, with the path of their Cell, in order; no tensor
    file stays; the training has its bits."""
    settings = {"task": "statistics", "level": "L2", "dump_path": str(tmp_path / "d"), "step": [1, 2], "rank": [0]}
    ran = run("graph", settings)
    assert ran.stdout.splitlines()[-1] == run("graph", {}).stdout.splitlines()[-1]
    assert sorted(p.name for p in (tmp_path / "d").glob("step*")) == ["step1", "step2"]
    config = json.loads((tmp_path / "d" / "kernel_kbyk_dump.json").read_text())
    assert config["common_dump_settings"]["iteration"] == "1|2"
    assert config["common_dump_settings"]["support_device"] == [0]
    first, second = dump_of(tmp_path / "d", 1), dump_of(tmp_path / "d", 2)
    assert (first["level"], first["framework"], set(first["data"])) == ("L2", "mindspore", set(second["data"]))
    assert "lost" not in first
    names = list(first["data"])
    parts = ("_block-Block_up-Dense_", "_block-Block_down-Dense_", "_out-Dense_")
    places = [i for part in parts for i, name in enumerate(names) if name.startswith(PRODUCT + part)]
    assert places == sorted(places)
    assert len(places) == 3
    types = {leaf["dtype"] for name in names if name.startswith("Cast.") for leaf in first["data"][name]["output"]}
    assert types == {"BFloat16", "Float32"}
    assert first["data"][MATMUL]["output"][0]["Norm"] != second["data"][MATMUL]["output"][0]["Norm"]
    assert not list((tmp_path / "d").rglob("*.npy"))
    assert "2 steps (1-2)" in ran.stderr


def test_a_jit_function_and_chosen_kernels(tmp_path: Path) -> None:
    """Task tensor in PyNative mode with jit: forward and backward kernels of the same step, chosen by type and by expression; the files
    stay in MindSpore's layout, until max_disk_gb; statistics are those of the files."""
    path = tmp_path / "d"
    tensor = {"list": ["MatMul", "name-regex(.+/BiasAdd-op.+)"], "data_mode": ["output"], "max_disk_gb": 1e-6}
    ran = run("jit", {"task": "tensor", "level": "L2", "dump_path": str(path), "step": [1], "tensor": tensor})
    data, lost = dump_of(path, 1)["data"], dump_of(path, 1)["lost"]
    assert {name.split(".")[0] for name in data} == {"MatMul", "BiasAdd"}
    assert any(".Gradients_" in name for name in data)
    assert all("input_args" not in record for record in data.values())
    assert lost["kernel tensors that max_disk_gb has no room for"] > 0
    assert "not everything is there" in ran.stderr
    files = [file for directory in kernel_directories(path / "rank_0") for file in kernel_files(directory)[0]]
    kept = {f"{file.op_type}.{file.op_name}.0.forward": file.path for file in files if file.path.parent.parent.name == "1"}
    checked = 0
    for name, file in kept.items():
        if name in data and file.parent.name == "1":
            values = np.load(file)
            assert data[name]["output"][0]["Max"] == values.max()
            checked += 1
    assert checked


def test_what_cannot_work_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set, O2, graphs that are there already, halves of training and scope: one error, and nothing is set."""
    settings: Any = {"task": "statistics", "level": "L2", "dump_path": str(tmp_path)}
    for section, why in (
        ({"data_mode": ["forward"]}, "allowed: \\['all'\\]"),
        ({"scope": ["a", "b"]}, "scope: is not possible at level L2"),
    ):
        with pytest.raises(SettingsError, match=why):
            PrecisionDebugger(settings | {"statistics": section})
    monkeypatch.setenv(kernel_config.VARIABLE, "/elsewhere.json")
    with pytest.raises(UsageError, match=r"is set already, to /elsewhere\.json"):
        PrecisionDebugger(settings)
    monkeypatch.delenv(kernel_config.VARIABLE)
    monkeypatch.setattr(kernel_config, "_jit_level", lambda: "O2")
    with pytest.raises(UsageError, match="O0 and O1"):
        PrecisionDebugger(settings)
    monkeypatch.setattr(kernel_config, "_jit_level", lambda: "O0")

    @ms.jit  # type: ignore[untyped-decorator]
    def double(x: Any) -> Any:
        return x * 2

    double(ms.ops.ones(2))
    with pytest.raises(UsageError, match=r"graphs? (was|were) compiled already"):
        PrecisionDebugger(settings)
    assert kernel_config.VARIABLE not in os.environ


NET = """
import json, os, sys
where, scale = os.path.abspath(sys.argv[1]), float(sys.argv[2])
os.makedirs(where)
config = {"common_dump_settings": {"op_debug_mode": 0, "dump_mode": 0, "path": where + "/dump", "net_name": "Net", "iteration": "all",
          "saved_data": "tensor", "input_output": 0, "kernels": [], "support_device": [0]},
          "e2e_dump_settings": {"enable": True, "trans_flag": True}}
with open(where + "/config.json", "w") as file:
    json.dump(config, file)
os.environ["MINDSPORE_DUMP_CONFIG"] = where + "/config.json"
import mindspore as ms, numpy as np
from mindspore import nn, ops
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(7)

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Dense(8, 8), nn.Dense(8, 4)
    def construct(self, x):
        x = ops.cast(ops.cast(self.fc1(x) * scale, ms.bfloat16), ms.float32)
        return self.fc2(ops.relu(x))

net = Net()
step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.1))
for _ in range(2):
    print(step(ms.Tensor(np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)), ms.Tensor(np.ones((2, 4), np.float32))))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden run, and one whose activations are scaled."""
    where = tmp_path_factory.mktemp("graphs")
    (where / "net.py").write_text(NET)
    for name, scale in (("golden", "1.5"), ("scaled", "1.51")):
        ms_programs.run(where / "net.py", name, scale, cwd=where, check=True)
    return where


@pytest.mark.slow
def test_a_run_agrees_with_itself(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every tensor of every kernel has its partner, in both iterations; bfloat16 too."""
    again = shutil.copytree(runs / "golden" / "dump", tmp_path / "again")
    assert main(["compare", str(again), str(runs / "golden" / "dump"), "-o", str(tmp_path / "out")]) == 0
    assert "No difference beyond round-off" in capsys.readouterr().out
    tables = sorted((tmp_path / "out").glob("compare_result_0_*.csv"))
    assert len(tables) == 2
    for path in tables:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert {row["Result"] for row in rows} == {"pass"}
        assert {"Float32", "BFloat16"} <= {row["NPU Dtype"] for row in rows}
        assert not any("N/A" in (row["NPU Name"], row["Bench Name"]) for row in rows)


@pytest.mark.slow
def test_the_scaled_kernel_is_the_first_suspect(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of some tens of kernels, forward, backward and optimizer, the multiplication is named."""
    settings = {"npu_path": str(runs / "scaled" / "dump"), "bench_path": str(runs / "golden" / "dump"), "rank_id": [], "step_id": [0]}
    (tmp_path / "compare.json").write_text(json.dumps(settings))
    assert main(["-f", "mindspore", "compare", "-i", str(tmp_path / "compare.json"), "-o", str(tmp_path / "out"), "--csv"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("First difference: step 0, rank 0, Mul.")


def test_single_points_of_the_framework(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TensorDump's own files, renamed by map_dict."""
    from mindspore import Tensor, ops

    for root, name, offset in (("t", "input", 1.0), ("g", "x", 1.5)):
        where = tmp_path / root / "step0"
        where.mkdir(parents=True)
        for turn in range(2):
            ops.TensorDump()(os.fspath(where / name), Tensor(np.arange(6, dtype=np.float32) + turn * offset))
            ops.TensorDump()(os.fspath(where / "mask"), Tensor(np.arange(6) > turn))
    while len(list(tmp_path.rglob("*.npy"))) < 8:
        pass
    settings = {"npu_path": str(tmp_path / "t"), "bench_path": str(tmp_path / "g"), "common": True, "map_dict": {"input": "x"}}
    (tmp_path / "compare.json").write_text(json.dumps(settings))
    assert main(["compare", "-i", str(tmp_path / "compare.json"), "-o", str(tmp_path / "out")]) == 1
    assert "step 0" in capsys.readouterr().out
    with open(tmp_path / "out" / "step0" / "result.csv", newline="", encoding="utf-8") as file:
        found = {row["NPU Name"]: (row["Bench Name"], row["Accuracy Reached or Not"]) for row in csv.DictReader(file)}
    assert found["input.0.debug"] == ("x.0.debug", "Yes")
    assert found["input.1.debug"] == ("x.1.debug", "No")
    assert found["mask.1.debug"][0] == "mask.1.debug"
