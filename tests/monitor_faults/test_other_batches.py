"""Two monitored runs of one training, one of which takes each batch in two micro batches: activations are of other parts and are not
compared, which is said; weights, gradients and updates of the whole batch are."""

from __future__ import annotations

from pathlib import Path

import parameter_cases as pc
import pytest
import torch

from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.find.run import diagnose
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework


def train(directory: Path, parts: int, factor: float = 1.0) -> Path:
    """`factor`: of the loss."""
    model = pc.net()
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    monitor = MonitorSettings(activations=True, gradients=True, parameters=True)
    sinks, incident = SinkSettings(csv=CsvSettings(path=str(directory))), IncidentSettings(enabled=False)
    probe = TorchProbe(ProbeSettings(output_dir=str(directory), monitor=monitor, sinks=sinks, incident=incident))
    probe.attach(model, optimizer)
    for step in range(3):
        probe.begin_step(step)
        for part in torch.cat([pc.data(step), pc.data(step + 7)]).chunk(parts):
            (model(part).square().mean() * factor / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step()
    probe.close()
    return directory


def test_other_micro_batches_are_no_difference(tmp_path: Path) -> None:
    """Exit code 3: activations could not be compared."""
    found = diagnose(train(tmp_path / "run", 2), train(tmp_path / "golden", 1))
    assert found.finding == "none", found.text()
    assert any("cut the batch in other ways" in problem for problem in found.problems)


def test_a_gradient_of_another_size_is_found_all_the_same(tmp_path: Path) -> None:
    first = diagnose(train(tmp_path / "run", 2, 1.01), train(tmp_path / "golden", 1)).first_suspect
    assert first is not None
    assert first.record.startswith("grad")
