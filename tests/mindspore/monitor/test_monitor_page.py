"""docs/frameworks/mindspore-monitor.md: its programs and settings run as they stand, and what it says of families and optimizers is so."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import monitor_programs as programs
import numpy as np
import pytest
from mindspore import mint, nn

from msprobe_engine.core.settings.load import load_settings
from msprobe_integrations.common.parameters.update_pairs import KNOWN
from msprobe_integrations.mindspore.dump.debugger import PrecisionDebugger
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe
from msprobe_integrations.mindspore.parameters import optimizers

ROOT = Path(__file__).parents[3]
PAGE = "docs/frameworks/mindspore-monitor.md"
LOOP = "A loop of your own"


def block(title: str, language: str) -> str:
    """The only block of a language in a section."""
    section = (ROOT / PAGE).read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)
    Path("probe.yaml").write_text(block(LOOP, "yaml"))


@pytest.mark.slow
def test_loop_and_trainer_mon() -> None:
    """The loop writes every family that its settings name; TrainerMon goes on with the same network."""
    Path("train.py").write_text(block(LOOP, "python") + block("TrainerMon", "python"))
    Path("monitor_config.json").write_text('{"targets": {}, "wg_distribution": true}')
    runpy.run_path("train.py")
    (csv,) = Path("runs/a/monitor").glob("*-rank0-*")
    families = {path.name.rpartition("_")[0] for path in csv.glob("*.csv")}
    expected = {"actv", "actv_grad", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq", "scalars"}
    assert families == expected
    assert list(Path("runs/a/tensorboard").rglob("events.*"))
    assert list(Path("monitor_output").rglob("grad_reduced_2-2.csv"))


def test_model_train() -> None:
    """The callback writes the same files."""
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    numbers = np.random.RandomState(0).randn(8, 6).astype(np.float32)
    dataset = ds.NumpySlicesDataset((numbers, np.zeros((8, 3), np.float32)), ["a", "b"], shuffle=False).batch(4)
    exec(block("Model.train", "python"), {"net": net, "optimizer": optimizer, "loss_fn": nn.MSELoss(), "dataset": dataset})
    (table,) = Path("runs/a/monitor").glob("*-rank0-*/grad_reduced_0-99.csv")
    assert "second.bias,3," in table.read_text()


def test_gradient_probe() -> None:
    """The probe of the gradients writes its tables."""
    PrecisionDebugger._instance = None
    settings = (ROOT / "docs/guide/grad-probe.md").read_text(encoding="utf-8").partition("```json\n")[2].partition("```")[0]
    Path("config.json").write_text(settings)
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    names: dict[str, Any] = {"optimizer": optimizer}
    exec(block("The gradient probe", "python"), names)
    programs.train(net, optimizer, None, 2)
    names["debugger"].stop()
    PrecisionDebugger._instance = None
    assert sorted(path.name for path in Path("run_a/rank0").glob("*.csv")) == ["grad_summary_0.csv", "grad_summary_1.csv"]


def test_settings_of_several_ranks() -> None:
    """They are settings."""
    Path("ranks.yaml").write_text(block("Several ranks", "yaml"))
    monitor = load_settings("ranks.yaml").monitor
    assert monitor is not None
    assert monitor.replica_check.interval == 100


def test_the_message_of_weights_that_do_not_move() -> None:
    """It is the one on the page."""
    shown = block("An optimizer that moves no weight", "").replace("\n", " ").strip()
    alerts: list[Any] = []
    net = nn.SequentialCell(nn.Dense(4, 4))
    optimizer = mint.optim.Adam(net.trainable_params(), 1e-2)
    probe = MindSporeProbe(programs.settings())
    probe.pipeline.listeners.append(lambda _, found: alerts.extend(found))
    probe.attach(net, optimizer)
    for step in range(2):
        probe.begin_step(step)
        optimizer(tuple(ms.ops.ones_like(p) for p in optimizer.parameters))
        probe.end_step()
    probe.close()
    said = alerts[0].message
    assert said.partition("(")[0] in shown
    assert said.partition("first): ")[2] in shown


def test_optimizers_with_updates() -> None:
    """The table names those whose update is known."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| `update`")]
    for name, algorithm in optimizers._ALGORITHMS.items():
        assert name in row
        assert algorithm in KNOWN
