"""Two monitored runs whose optimizers are set otherwise: the setting is named, whatever it does to the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parameter_cases as pc
import pytest
import torch

from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.find.run import diagnose
from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


def train(directory: Path, **changes: Any) -> Path:
    model = pc.net().bfloat16()
    parameters = [p for p in model.parameters() if p.requires_grad]
    second = changes.pop("second", {})
    optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], **second}], **{**ADAMW, **changes})
    sinks, incident = SinkSettings(csv=CsvSettings(path=str(directory))), IncidentSettings(enabled=False)
    probe = TorchProbe(ProbeSettings(output_dir=str(directory), monitor=MonitorSettings(parameters=True), sinks=sinks, incident=incident))
    probe.attach(model, optimizer)
    for step in range(3):
        probe.begin_step(step)
        model(pc.data(step).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step()
    probe.close()
    return directory


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("learning_rate", {"lr": 1.02e-3}),
        ("weight_decay", {"weight_decay": 0.102}),
        ("beta1", {"betas": (0.918, 0.95)}),
        ("beta2", {"betas": (0.9, 0.969)}),
        ("eps", {"eps": 1.02e-8}),
    ],
)
def test_a_setting_of_the_optimizer_is_named(name: str, changes: dict[str, Any], golden: Path, tmp_path: Path) -> None:
    """2 % off, in bf16, where the weights do not show it within three steps."""
    first = diagnose(train(tmp_path / "run", **changes), golden).first_suspect
    assert first is not None
    assert (first.record, first.step) == (f"step/{name}", 0)


def test_a_setting_of_one_group_is_said(golden: Path, tmp_path: Path) -> None:
    """Weight decay of a group that should have that of the others."""
    found = diagnose(train(tmp_path / "run", second={"weight_decay": 0.0}), golden)
    assert found.finding != "none"
    assert "weight_decay_group_1" in str(found.suspects[0].record)


def test_equal_settings_are_no_finding(golden: Path, tmp_path: Path) -> None:
    assert diagnose(train(tmp_path / "run"), golden).finding == "none"


@pytest.mark.parametrize(
    ("decays", "said"),
    [
        ([0.1, 0.0], {1: 0.0}),
        ([0.1] * 20 + [0.0] * 20, {20: 0.0}),
        ([0.1, 0.0] * 20, dict.fromkeys(range(1, 16, 2), 0.0)),
        ([at / 100 for at in range(40)], {at: at / 100 for at in range(1, 17)}),
    ],
    ids=["two groups", "a value behind the sixteenth", "that others have", "one of each"],
)
def test_settings_of_many_groups(decays: list[float], said: dict[int, float]) -> None:
    """Behind the sixteenth group a value is said that no group before has, of at most sixteen values."""
    found = update_numbers([{"lr": 1e-3, "weight_decay": decay} for decay in decays])
    assert found == {"learning_rate": 1e-3, "weight_decay": decays[0], **{f"weight_decay_group_{at}": value for at, value in said.items()}}
