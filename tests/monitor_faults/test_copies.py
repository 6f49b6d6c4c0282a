"""Copies of a model that is watched."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path

import parameter_cases as pc
import pytest
import torch
from torch import nn

from msprobe.pytorch import TrainerMon

pytestmark = pytest.mark.framework
LOAD = """
import sys
sys.modules["msprobe"] = sys.modules["msprobe_integrations"] = sys.modules["msprobe_engine"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(repr(model(torch.ones(2, 8)).sum().item()))
"""


@pytest.mark.slow
def test_a_model_is_copied_and_saved_whole_while_it_is_watched(tmp_path: Path) -> None:
    """``copy.deepcopy`` and ``torch.save`` of the model work between two monitored steps and inside of one. What the copy does is not
    seen, and the file is loaded where there is no msprobe."""
    probe = pc.probe(activations=True, activation_gradients=True, gradients=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    path = tmp_path / "model.pt"
    with pc.closing(probe) as frames:
        probe.attach(model)
        for step in range(2):
            probe.begin_step(step)
            model(pc.data(step)).sum().backward()
            average = copy.deepcopy(model)
            torch.save(model, path)
            average(pc.data(step)).sum().backward()
            probe.end_step()
            torch.save(model, path)
            average(pc.data(step))
    assert [len(frame.samples) for frame in frames] == [len(pc.samples(frame)) for frame in frames] == [14, 14]
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert float(done.stdout) == model(torch.ones(2, 8)).sum().item()


def test_a_model_under_a_dynamic_monitor_is_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nothing is monitored and the monitor only waits for its file to change."""
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    path = tmp_path / "monitor_config.json"
    path.write_text('{"targets": {}, "dynamic_on": false, "xy_distribution": true}')
    model = pc.net()
    with TrainerMon(path) as monitor:
        monitor.set_monitor(model, pc.optimizer("adamw", model.parameters()))
        kept = io.BytesIO()
        torch.save(model, kept)
        copy.deepcopy(model)(pc.data(0))
    kept.seek(0)
    assert torch.equal(torch.load(kept, weights_only=False)(pc.data(0)), model(pc.data(0)))
