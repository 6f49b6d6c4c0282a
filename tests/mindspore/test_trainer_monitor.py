"""`TrainerMon` with the `monitor_config.json` of the existing tool, where the existing one ends the training too."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import mindspore as ms
import monitor_programs as programs
import pytest
from mindspore import nn

from msprobe.mindspore import TrainerMon
from msprobe_engine.errors import SettingsError, UsageError

EVERYTHING = {
    "targets": {},
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "mg_direction": True,
    "ops": ["norm", "min", "max", "mean", "nans", "zeros"],
    "step_count_per_record": 10,
}
FAMILIES = (
    "actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq", "other"
)  # fmt: skip


@pytest.fixture(autouse=True)
def _output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", "monitor_output")


def train(keys: dict[str, Any], optimizer: Any, steps: int = 3, seen: list[Any] | None = None, edit: Any = None) -> list[bytes]:
    """Train with a monitor; only the optimizer tells it of steps."""
    Path("monitor_config.json").write_text(json.dumps(keys))
    net, made = programs.build(optimizer)
    monitor = TrainerMon("monitor_config.json")
    monitor.set_monitor(net, made, grad_acc_steps=1)
    gradient = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, made.parameters)
    out = []
    for step, x in enumerate(programs.data(steps)):
        if edit is not None:
            edit(step)
        loss, gradients = gradient(x)
        made(gradients)
        out.append(loss.asnumpy().tobytes())
        if seen is not None:
            seen.append((monitor.generate_wgrad_metrics(), monitor.generate_xy_metrics()))
    monitor.stop()
    return out + [w.asnumpy().tobytes() for w in made.parameters]


def table(family: str) -> list[dict[str, str]]:
    """All rows of a family."""
    rows: list[dict[str, str]] = []
    for path in sorted(Path("monitor_output").glob(f"*-rank0-*/{family}_[0-9]*.csv")):
        with path.open(encoding="utf-8") as file:
            rows += csv.DictReader(file)
    return rows


@pytest.mark.parametrize("optimizer", [lambda p: nn.Adam(p, 1e-2), lambda p: nn.AdamWeightDecay(p, 1e-2)], ids=["Adam", "AdamWeightDecay"])
def test_everything_with_an_optimizer_that_is_compiled(optimizer: Any) -> None:
    """All families of the existing file come, once per step and tensor; the training has the same bits."""
    result = train(EVERYTHING, optimizer)
    net, made = programs.build(optimizer)
    assert programs.train(net, made, None) == result
    for family in FAMILIES:
        rows = table(family)
        assert {row["step"] for row in rows} == {"0", "1", "2"}, family
        keys = [(row["name"], row["step"], row.get("micro_step"), row.get("tag")) for row in rows]
        assert len(set(keys)) == len(keys), family
    assert {row["dtype"] for row in table("exp_avg")} == {"Float32"}
    # the state of a step is that before its update, as in the existing tool
    assert {row["norm"] for row in table("exp_avg") if row["step"] == "0"} == {"0.0"}


def test_targets_choose_whole_parts_of_names() -> None:
    """A target is a Cell and what is below it."""
    train({**EVERYTHING, "targets": {"first": {}}}, lambda p: nn.SGD(p, 1e-2))
    assert {row["name"] for row in table("grad_reduced")} == {"first.weight", "first.bias"}


def test_values_in_memory() -> None:
    """The calls of the existing tool give gradients and activations by tag, as tensors."""
    seen: list[Any] = []
    train({**EVERYTHING, "format": "api"}, lambda p: nn.SGD(p, 1e-2), steps=1, seen=seen)
    (reduced, unreduced), (activations, gradients) = seen[0]
    assert set(reduced) == {
        f"0:{name}/rank0/post_grad" for name in ("first.weight", "first.bias", "norm.gamma", "norm.beta", "second.weight", "second.bias")
    }
    norm = reduced["0:second.bias/rank0/post_grad"]["norm"]
    assert isinstance(norm, ms.Tensor)
    assert float(norm) > 0
    assert unreduced
    assert activations
    assert gradients


def test_dynamic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DYNAMIC_MONITOR nothing is watched until the file says so, and collect_times steps later nothing again."""
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    keys = {**EVERYTHING, "dynamic_on": False, "collect_times": 2}

    def edit(step: int) -> None:
        if step == 2:
            time.sleep(0.05)
            Path("monitor_config.json").write_text(json.dumps({**keys, "dynamic_on": True}))

    train(keys, lambda p: nn.SGD(p, 1e-2), steps=8, edit=edit)
    assert sorted({row["step"] for row in table("grad_reduced")}) == ["3", "4"]
    assert sorted({row["step"] for row in table("actv")}) == ["3", "4"]
    assert json.loads(Path("monitor_config.json").read_text())["dynamic_on"] is False


def test_alerts_of_the_existing_file() -> None:
    """The rules of the existing file write the existing anomaly.json."""
    alert = {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 1e-9}}], "dump": True}
    train({**EVERYTHING, "alert": alert}, lambda p: nn.SGD(p, 1e-2), steps=2)
    (path,) = Path("monitor_output").rglob("anomaly.json")
    assert json.loads(path.read_text())


def test_notes_of_the_first_step() -> None:
    """stack_info and print_struct write the existing files, with gradients, and the training goes on."""
    train({**EVERYTHING, "stack_info": True, "print_struct": True}, lambda p: nn.SGD(p, 1e-2), steps=2)
    (stacks,) = Path("monitor_output").rglob("stack_info.csv")
    assert "test_trainer_monitor.py" in stacks.read_text()
    assert "site-packages/mindspore" not in stacks.read_text()
    (structure,) = Path("monitor_output").rglob("module_struct.json")
    first = json.loads(structure.read_text())["0:second"]
    assert first == {
        "input": {"config": "list[1]", "0": "size=(5, 8), dtype=Float32"},
        "output": {"config": "tensor", "tensor": "size=(5, 3), dtype=Float32"},
        "input_grad": {"config": "tuple[1]", "0": "size=(5, 8), dtype=Float32"},
        "output_grad": {"config": "tuple[1]", "0": "size=(5, 3), dtype=Float32"},
    }


def test_mistakes() -> None:
    """Wrong arguments and keys are said before the training."""
    net, optimizer = programs.build(lambda p: nn.SGD(p, 1e-2))
    Path("monitor_config.json").write_text(json.dumps(EVERYTHING))
    monitor = TrainerMon("monitor_config.json")
    with pytest.raises(UsageError, match="model is a int"):
        monitor.set_monitor(3, optimizer)
    with pytest.raises(UsageError, match="optimizer is None"):
        monitor.set_monitor(net, None)
    monitor.stop()
    Path("monitor_config.json").write_text(json.dumps({"ops": "norm"}))
    with pytest.raises(SettingsError):
        TrainerMon("monitor_config.json")
