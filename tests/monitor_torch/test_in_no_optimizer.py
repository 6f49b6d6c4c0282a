"""A parameter that is in no optimizer has no update, and nothing of the run was lost for it: the run and the commands say both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.schema import CsvSettings, DumpSettings, JsonLinesSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
SINKS = {"csv": SinkSettings(), "jsonl": SinkSettings(csv=CsvSettings(enabled=False), jsonl=JsonLinesSettings(enabled=True))}


class Scaled(nn.Module):
    def __init__(self, scales: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.ParameterList(torch.ones(4) for _ in range(scales))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        for scale in self.scale:
            out = out * scale
        return out


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize(
    ("scales", "words"), [(0, ""), (1, "1 parameter of rank 0 is in no optimizer"), (5, "5 parameters of rank 0 are in no optimizer")]
)
def test_what_is_said(scales: int, words: str, sinks: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The log names the first three, once; every command notes it and ends with 0, of the dump beside the monitor, too."""
    model = Scaled(scales)
    optimizer = torch.optim.AdamW(model.inner.parameters())
    monitor = MonitorSettings(updates=True)
    settings = ProbeSettings(output_dir=str(tmp_path), strict=True, monitor=monitor, dump=DumpSettings(), sinks=SINKS[sinks])
    probe = TorchProbe(settings)
    probe.attach(model, optimizer)
    for step in range(3):
        probe.begin_step(step)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step()
    probe.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if "in no optimizer" in line]
    assert len(lines) == min(scales, 3)
    assert all(f"parameter scale.{i} is in no optimizer; it has no update statistics" in line for i, line in enumerate(lines))
    dump = open_dump(tmp_path / "dump")
    assert not any(dump.load(step).header.get("lost") for step in dump.steps)
    for command in (["monitor", "analyze"], ["diagnose", "-o", str(tmp_path / "page")]):
        assert main([*command, str(tmp_path)]) == 0
        assert ("in no optimizer" in (said := capfd.readouterr().out)) == bool(words)
        assert words in said
        assert not words or "scale.0" in said
    assert main(["diagnose", str(tmp_path / "dump"), "-o", str(tmp_path / "page")]) == 0
