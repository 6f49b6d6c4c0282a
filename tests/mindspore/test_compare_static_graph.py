"""``msprobe compare`` on what MindSpore itself wrote of compiled graphs."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import ms_programs
import numpy as np
import pytest

from msprobe_engine.cli.main import main

PROGRAM = """
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
    (where / "net.py").write_text(PROGRAM)
    for name, scale in (("golden", "1.5"), ("scaled", "1.51")):
        ms_programs.run(where / "net.py", name, scale, cwd=where, check=True)
    return where


def test_a_run_agrees_with_itself(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every tensor of every kernel has its partner, in both iterations; bfloat16 too."""
    assert main(["compare", str(runs / "golden" / "dump"), str(runs / "golden" / "dump"), "-o", str(tmp_path)]) == 0
    assert "No difference beyond round-off" in capsys.readouterr().out
    tables = sorted(tmp_path.glob("compare_result_0_*.csv"))
    assert len(tables) == 2
    for path in tables:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert {row["Result"] for row in rows} == {"pass"}
        assert {"Float32", "BFloat16"} <= {row["NPU Dtype"] for row in rows}
        assert not any("N/A" in (row["NPU Name"], row["Bench Name"]) for row in rows)


def test_the_scaled_kernel_is_the_first_suspect(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of some tens of kernels, forward, backward and optimizer, the multiplication is named."""
    settings = {"npu_path": str(runs / "scaled" / "dump"), "bench_path": str(runs / "golden" / "dump"), "rank_id": [], "step_id": [0]}
    (tmp_path / "compare.json").write_text(json.dumps(settings))
    assert main(["-f", "mindspore", "compare", "-i", str(tmp_path / "compare.json"), "-o", str(tmp_path / "out"), "--csv"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("The numbers part: step 0, rank 0, Mul.")


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
