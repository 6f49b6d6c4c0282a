"""The existing tool's own compare takes our dumps and reads their tensor files."""

from __future__ import annotations

import json
from pathlib import Path

import existing_environment
import existing_tool
import pytest
import torch
from torch import nn

from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger


@pytest.mark.parametrize("kind", ["L0", "L1", "mix"])
@pytest.mark.existing_tool
@pytest.mark.parametrize("version", existing_environment.VERSIONS)
def test_compare_accepts_our_dump(tmp_path: Path, version: str, kind: str) -> None:
    """Our dump of the same data gives the rows that the existing dump gives against itself, as target and as golden, and no error."""
    figures = existing_tool.check(version, existing_environment.existing_tool(version).directory, kind, tmp_path)
    assert figures["rows"] > 40
    assert figures["ours_target_stacks"] > 0


def dump(directory: Path) -> Path:
    """dump.json of one step with tensors of several types."""
    directory.mkdir()
    config = directory / "config.json"
    config.write_text(json.dumps({"task": "tensor", "level": "mix", "dump_path": str(directory / "dump"), "tensor": {}}))
    PrecisionDebugger._instance = None
    debugger = PrecisionDebugger(str(config))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    debugger.start(model)
    model(torch.randn(5, 8)).square().mean().backward()
    torch.ones(3, dtype=torch.bfloat16) + torch.rand(4, 3).bfloat16()
    torch.arange(6).view(2, 3).t() * 2
    debugger.stop()
    debugger.step()
    debugger.run.at_exit()
    PrecisionDebugger._instance = None
    return open_dump(directory / "dump").path(0) / "dump.json"


@pytest.mark.existing_tool
@pytest.mark.parametrize("version", existing_environment.VERSIONS)
def test_compare_reads_our_tensors(tmp_path: Path, version: str) -> None:
    """Two dumps of the same run: every tensor of the sheet was read from our files and is the same."""
    existing = existing_environment.existing_tool(version)
    target, golden = dump(tmp_path / "a"), dump(tmp_path / "b")
    sheet = existing_tool.compare(version, existing.directory, target, golden, tmp_path / "out")
    numbers = [row["Cosine"] for row in sheet if row["Cosine"] not in ("N/A", "unsupported", "")]
    assert len(numbers) > 40
    assert all(float(n) > 0.999 for n in numbers)
    assert {row["MaxAbsErr"] for row in sheet if row["Cosine"] in numbers} <= {"0", "0.0"}
