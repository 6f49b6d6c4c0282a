"""docs/guide/alerts.md: its settings raise the alerts that it tells of, and what it says to run next runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from page_blocks import Tokens, batches, block, blocks, commands, loss_of

from msprobe.pytorch import TorchProbe
from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.rules.build import build_rules

PAGE = "docs/guide/alerts.md"
START, NOW, CONDITION, LEARNED = (
    "# Alerts: rules",
    "## One has fired: what now?",
    "## Conditions of your own",
    "## Learned from a healthy run",
)
pytestmark = pytest.mark.framework


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)


def train(settings: str, steps: int = 30, bad: int = -1, seed: int = 0) -> None:
    """A training under these settings whose loss becomes Inf in step `bad`."""
    Path("probe.yaml").write_text(settings)
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(1)[0].repeat(32, 1) + 0.1 * torch.randn(128, 6, generator=torch.Generator().manual_seed(seed))
    probe = TorchProbe.from_config("probe.yaml")
    probe.attach(model, optimizer)
    for step in range(steps):
        probe.begin_step(step)
        loss = loss_of(model, data) * (float("inf") if step == bad else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": loss})
    probe.close()


def test_the_recommended_set(capsys: pytest.CaptureFixture[str]) -> None:
    """The settings of the page raise, in the step of a loss that is Inf, the alert that it shows; an incident is there under the name it
    gives; all commands run."""
    train(block(PAGE, "yaml", START), 45, bad=40)
    shown = json.loads(block(PAGE, "json", "## Where an alert goes"))
    (alert,) = [a for a in open_run("runs/a").alerts(0) if a["rule"] == shown["rule"]]
    (line,) = [json.loads(text) for path in Path("runs/a").rglob("alerts.jsonl") for text in path.open() if '"loss_not_finite"' in text]
    assert line.items() >= {key: value for key, value in shown.items() if key != "extra"}.items()
    assert line["extra"].items() >= shown["extra"].items()
    assert alert["extra"]["next"]
    codes = [main(words) for words in commands(block(PAGE, "bash", NOW))]
    assert codes == [0, 1, 1]  # the page shows the alerts
    assert "First alert: step 40 in the loss" in capsys.readouterr().out
    assert main(["nan_analyze", "-i", "runs/a/incidents/step40-nan_inf"]) == 1


def test_settings_of_the_page_are_right() -> None:
    """Every list of rules builds; each keeps the number of rules it names."""
    for text in blocks(PAGE, "yaml"):
        if "learned" in text:
            continue  # needs its file: below
        rules = yaml.safe_load(text)["rules"]
        Path("probe.yaml").write_text(text if "monitor" in yaml.safe_load(text) else f"monitor: {{}}\n{text}")
        assert len(build_rules(load_settings("probe.yaml"))) >= len(rules)


def test_the_condition() -> None:
    """The condition of the page fires under its name when nearly all of the gradient is in one layer while the loss is high."""
    text = block(PAGE, "yaml", CONDITION)
    assert "layers.*.attn.*" in text
    train(
        "output_dir: runs/a\nmonitor: {gradients: true}\n"
        + text.replace("layers.*.attn.*", "2.*").replace("0.9", "0").replace("1.5", "0.5")
    )
    alerts = open_run("runs/a").alerts(0)
    assert {(a["rule"], a["severity"]) for a in alerts if not a["extra"].get("over")} == {("attention_takes_over", "critical")}
    assert alerts[0]["extra"]["next"] == "watch monitor.layer_features.attention"


def test_learned(capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy run teaches, a second one is silent under what was learned, a third whose loss is bad is not."""
    for seed, name in enumerate(["good", "good2"]):
        train(f"output_dir: runs/{name}\nmonitor: {{gradients: true, parameters: true}}\n", 60, seed=seed)
    (words,) = commands(block(PAGE, "", LEARNED))
    assert main(words) == 0
    assert "runs/good2: 0 false alarms" in capsys.readouterr().out
    train("output_dir: runs/b\nmonitor: {gradients: true, parameters: true}\n" + block(PAGE, "yaml", LEARNED), 40, bad=30)
    assert {a["rule"] for a in open_run("runs/b").alerts(0)} == {"learned"}
