"""`TrainerMonitorV2`: configuration, files, steps."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch
from monitored import build, loop

from msprobe.core.monitor_v2 import TrainerMonitorV2
from msprobe_engine.core.errors import SettingsError, UsageError

pytestmark = pytest.mark.framework
ALL: dict[str, Any] = {name: {"enabled": True} for name in ("module", "weight_grad", "optimizer", "param", "cc")}


def write(directory: Path, **keys: Any) -> Path:
    path = directory / "v2.json"
    path.write_text(json.dumps({"output_dir": str(directory / "out"), **keys}))
    return path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_files_and_columns(tmp_path: Path) -> None:
    """One file per monitor and block of steps, counted from start_step up to stop_step; scopes and names are those of monitor_v2."""
    net, optimizer = build()
    path = write(tmp_path, start_step=1, stop_step=5, step_interval=2, step_count_per_record=3, monitors=ALL)
    with TrainerMonitorV2(path, fr="pt") as monitor:
        monitor.start(model=net, optimizer=optimizer, grad_acc_steps=2)
        loop(net, optimizer, 7, 2)
        monitor.step()  # without effect: the optimizer ends the steps
        assert monitor.current_step == 7
    files = sorted(p.name for p in (tmp_path / "out/rank_0").iterdir())
    assert files == [f"{name}_step1-3.csv" for name in ("module", "optimizer", "param", "weight_grad")]
    found = {name: rows(tmp_path / f"out/rank_0/{name}_step1-3.csv") for name in ("module", "optimizer", "param", "weight_grad")}
    assert list(found["module"][0]) == ["vpp_stage", "step", "module_name", "scope", "min", "max", "mean", "norm", "nans"]
    assert list(found["weight_grad"][0])[:5] == ["vpp_stage", "step", "module_name", "scope", "micro_step"]
    assert {row["step"] for table in found.values() for row in table} == {"1", "3"}
    assert {row["vpp_stage"] for table in found.values() for row in table} == {"-1"}
    scopes = {name: {row["scope"] for row in table} for name, table in found.items()}
    assert scopes == {
        "module": {"forward", "backward"},
        "optimizer": {"exp_avg", "exp_avg_sq"},
        "param": {"param_origin", "param_updated"},
        "weight_grad": {"unreduced", "reduced"},
    }
    names = {row["module_name"] for row in found["module"]}
    assert {"embed.input.0", "layers.0.output.0", "head.grad_input.0", "head.grad_output.0"} <= names
    assert {row["micro_step"] for row in found["weight_grad"]} == {"2"}
    assert "head.weight.exp_avg" in {row["module_name"] for row in found["optimizer"]}


def test_steps_by_hand_and_chunks(tmp_path: Path) -> None:
    """Without an optimizer, steps are calls of step(); a list of models has stages and prefixes; targets are parts of names."""
    torch.manual_seed(0)
    chunks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)]
    monitor = TrainerMonitorV2(write(tmp_path, monitors={"module": {"targets": ["0"], "ops": ["norm"]}}))
    monitor.start(model=chunks)
    for _ in range(2):
        chunks[1](chunks[0](torch.randn(2, 4))).sum().backward()
        monitor.step()
    monitor.stop()
    assert sorted(p.name for p in (tmp_path / "out/rank_0").iterdir()) == ["module_step0-0.csv", "module_step1-1.csv"]
    found = rows(tmp_path / "out/rank_0/module_step1-1.csv")
    assert {(row["vpp_stage"], row["module_name"]) for row in found if row["scope"] == "forward"} == {
        (str(i), f"{i}:0.{place}.0") for i in range(2) for place in ("input", "output")
    }


def test_collectives_and_ranks(tmp_path: Path) -> None:
    """cc: outputs of collectives with scope comm and an empty stage; only the listed ranks write."""

    def job() -> None:
        net, optimizer = build()
        monitors = {"cc": {"enabled": True, "ops": ["norm"], "cc_distribution": {"cc_pre_hook": True}}}
        path = write(tmp_path / str(torch.distributed.get_rank()), output_dir=str(tmp_path / "out"), rank=1, monitors=monitors)
        with TrainerMonitorV2(path) as monitor:
            monitor.start(model=net, optimizer=optimizer)
            torch.distributed.all_reduce(torch.ones(4))
            loop(net, optimizer, 1)

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    pr.run(job, ranks=2, directory=tmp_path)
    assert [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith("rank_")] == ["rank_1"]
    found = rows(tmp_path / "out/rank_1/cc_step0-0.csv")
    assert {(row["module_name"], row["norm"]) for row in found} == {
        ("all_reduce/rank1/pre_0_0", "2.0"),
        ("all_reduce/rank1/post_0_0", "4.0"),
    }
    assert {(row["vpp_stage"], row["scope"]) for row in found} == {("", "comm")}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"monitor": {}}, "did you mean 'monitors'"),
        ({"monitors": {"modul": {}}}, "did you mean 'module'"),
        ({"monitors": {"module": {"target": []}}}, "did you mean 'targets'"),
        ({"monitors": {"module": {"ops": ["nrom"]}}}, "monitors.module.ops[0]: 'nrom'"),
        ({"format": "tensorboard"}, "allowed: 'csv'"),
        ({"framework": "mindspore"}, "'mindspore' is not watched"),
        ({"framework": "jax"}, "framework: 'jax'"),
        ({"start_step": 3, "stop_step": 2}, "stop_step: 2"),
        ({"rank": "x"}, "rank[0]: 'x'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    """Unknown keys and wrong values are one line each."""
    with pytest.raises(SettingsError) as caught:
        TrainerMonitorV2(write(tmp_path, **keys))
    assert says in str(caught.value)


def test_wrong_use(tmp_path: Path) -> None:
    """A monitor that needs an optimizer says so; it is started once."""
    net, optimizer = build()
    monitor = TrainerMonitorV2(write(tmp_path, monitors=ALL))
    with pytest.raises(UsageError, match="no optimizer"):
        monitor.start(model=net)
    with pytest.raises(UsageError, match="model is a"):
        monitor.start()
    monitor.start(model=net, optimizer=optimizer)
    with pytest.raises(UsageError, match="started already"):
        monitor.start(model=net, optimizer=optimizer)
    monitor.stop()
    monitor.stop()
