"""A run that writes where another one has written says so when it begins, once and on rank 0; files of the first stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from msprobe.pytorch import TorchProbe

pytestmark = pytest.mark.framework

SINKS = {
    "csv": "csv: {enabled: true}",
    "csv elsewhere": "csv: {enabled: true, path: tables}",
    "jsonl": "csv: {enabled: false}, jsonl: {enabled: true}",
    "sqlite": "csv: {enabled: false}, sqlite: {enabled: true}",
}


def train() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe.from_config("probe.yaml")
    probe.attach(model, optimizer)
    for step in range(2):
        probe.begin_step(step)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        probe.end_step()
    probe.close()


def tables() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*.csv")}


@pytest.mark.parametrize("sinks", SINKS.values(), ids=SINKS)
def test_a_used_directory_is_said(sinks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A launcher that starts the job again makes it a remark."""

    def said() -> list[str]:
        train()
        return [line for line in capsys.readouterr().err.splitlines() if "holds another run" in line]

    monkeypatch.chdir(tmp_path)
    Path("probe.yaml").write_text(f"output_dir: out\nmonitor: {{gradients: true}}\nsinks: {{{sinks}}}\n")
    assert said() == []
    before = tables()
    (line,) = said()
    assert "[WARNING]" in line
    assert tables().items() >= before.items()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (line,) = said()
    assert "[INFO]" in line
