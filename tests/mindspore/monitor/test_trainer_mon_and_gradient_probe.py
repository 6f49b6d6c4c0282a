"""`TrainerMon` and the gradient probe (`PrecisionDebugger.monitor`): the files of the existing tool."""

from __future__ import annotations

import csv
import json
import time
import zlib
from pathlib import Path
from typing import Any

import mindspore as ms
import monitor_programs as programs
import numpy as np
import pytest
from mindspore import nn

from msprobe.mindspore import TrainerMon
from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_engine.formats.grad_probe.compare import GradComparator
from msprobe_integrations.mindspore.dump.debugger import PrecisionDebugger
from msprobe_integrations.mindspore.gradient_probe.probe import count_below, pack_signs

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


@pytest.mark.fast_cells("Adam")
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
    assert Path(__file__).name in stacks.read_text()
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


def run(level: str, out: str = "out", **keys: Any) -> list[Any]:
    """Train three steps with the probe; gives what numpy has seen."""
    PrecisionDebugger._instance = None
    probe = {"grad_level": level, "param_list": [], "bounds": [-1, 0, 1], **keys}
    Path("config.json").write_text(json.dumps({"task": "grad_probe", "dump_path": out, "rank": [], "step": [], "grad_probe": probe}))
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    debugger = PrecisionDebugger("config.json")
    PrecisionDebugger.monitor(optimizer)
    seen: list[Any] = []
    result = programs.train(net, optimizer, None, seen=seen)
    debugger.stop()
    plain = programs.build(lambda p: nn.Adam(p, 1e-2))
    assert result == programs.train(*plain, None)
    return seen


def summary(path: str) -> list[dict[str, str]]:
    """Rows of a summary."""
    with open(path, encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_files(level: str) -> None:
    """Columns, numbers, checksums, shares and signs are those of the gradients; training has the same bits."""
    seen = run(level)
    names = [p.name for p in programs.build(lambda p: nn.SGD(p))[1].parameters]
    for step, (gradients, _, _) in enumerate(seen):
        rows = summary(f"out/rank0/grad_summary_{step}.csv")
        columns = {
            "L0": ["param_name", "MD5", "max", "min", "norm", "shape"],
            "L1": ["param_name", "max", "min", "norm", "shape"],
            "L2": ["param_name", "(-inf, -1]", "(-1, 0]", "(0, 1]", "(1, inf)", "=0", "max", "min", "norm", "shape"],
        }[level]
        assert list(rows[0])[: len(columns)] == columns
        assert [row["param_name"] for row in rows] == names
        for row, gradient in zip(rows, gradients):
            assert float(row["max"]) == pytest.approx(float(gradient.max()))
            assert float(row["norm"]) == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-6)
            assert row["shape"] == str(list(gradient.shape))
            if level == "L0":
                assert row["MD5"] == f"{zlib.crc32(gradient.tobytes()):08x}"
            else:
                sign = np.load(f"out/rank0/step{step}/{row['param_name']}.npy")
                assert np.array_equal(sign, gradient > 0)
            if level == "L2":
                assert float(row["(0, 1]"]) == pytest.approx(float(((gradient > 0) & (gradient <= 1)).mean()))


@pytest.mark.slow
def test_two_runs_are_compared() -> None:
    """The comparison of two runs reads the files; equal runs agree."""
    run("L1", "first")
    run("L1", "second")
    GradComparator.compare_distributed("first", "second", "compared")
    rows = list(csv.reader(open("compared/rank0/similarities.csv", encoding="utf-8-sig")))  # noqa: SIM115
    assert rows[-1][0] == "summary"
    assert {float(value) for value in rows[-1][1:]} == {1.0}


def test_chosen_parameters_and_steps() -> None:
    """param_list and step choose; a name that is not there is said with the nearest one."""
    PrecisionDebugger._instance = None
    run("L1", param_list=["first.weight"])
    assert [row["param_name"] for row in summary("out/rank0/grad_summary_0.csv")] == ["first.weight"]
    with pytest.raises(UsageError, match=r"first.weigt.*did you mean 'first.weight'"):
        run("L1", param_list=["first.weigt"])


def test_what_is_no_optimizer() -> None:
    """A network in the place of the optimizer is said."""
    Path("config.json").write_text(json.dumps({"task": "grad_probe", "dump_path": "out", "grad_probe": {"grad_level": "L0"}}))
    PrecisionDebugger("config.json")
    with pytest.raises(UsageError, match="Net is no optimizer"):
        PrecisionDebugger.monitor(programs.Net())


def test_short_floats_and_nan() -> None:
    """Signs and counts of bfloat16, of numbers that are none, and of a size that four does not divide."""
    values = np.array([0.0, -0.0, 1.5, -2.0, np.nan, np.inf, -np.inf], np.float32)
    assert [int(pack_signs(values)[i // 4] >> 2 * (i % 4) & 3) for i in range(7)] == [0, 0, 1, 2, 3, 1, 2]
    assert count_below(values, [-1, 0, 1]).tolist() == [2, 4, 4]
    assert pack_signs(values[:0]).size == 0
    net, optimizer = programs.build(lambda p: nn.SGD(p))
    del net
    Path("config.json").write_text(json.dumps({"task": "grad_probe", "dump_path": "out", "grad_probe": {"grad_level": "L0"}}))
    debugger = PrecisionDebugger("config.json")
    PrecisionDebugger.monitor(optimizer)
    optimizer(tuple(ms.Tensor(np.ones(p.shape, np.float32)).astype(ms.bfloat16).astype(ms.float32) for p in optimizer.parameters))
    debugger.stop()
    assert len(summary("out/rank0/grad_summary_0.csv")) == 6
