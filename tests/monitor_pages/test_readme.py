"""README.md: its examples of the monitor run as they stand, and its table of commands is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from page_blocks import ROOT, Tokens, batches, block, blocks, commands, loss_of, run

from msprobe_engine.cli.main import all_commands, main
from msprobe_engine.formats.monitor.reader import open_run

PAGE = "README.md"
MONITOR = "**The monitor, in your own loop**"


@pytest.mark.framework
def test_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loop and settings write what the commands below them read; a NaN in step 3 is where the last command looks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)
    Path("probe.yaml").write_text(block(PAGE, "yaml", MONITOR).replace("9464", "0"))
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    data = batches(7)
    data[3] = torch.full_like(data[3], float("nan"))
    loop, trainer = blocks(PAGE, "python", MONITOR)
    run(loop, PAGE, {"model": model, "optimizer": optimizer, "data": data, "train": train})
    (lines,) = [text for text in blocks(PAGE, "bash") if "monitor analyze" in text]
    assert [main(words) for words in commands(lines)] == [0, 1, 1, 1]

    def whole(_model: Tokens, _optimizer: torch.optim.Optimizer) -> None:
        for batch in batches(3):
            train(batch)

    Path("monitor_config.json").write_text('{"targets": {}, "wg_distribution": true}')
    run(trainer, PAGE, {"model": model, "optimizer": optimizer, "train": whole})
    assert set(open_run("monitor_output").table(0, "grad_reduced").steps.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_commands(page: str) -> None:
    """Both tables list every command there is, once."""
    rows = [line.split("|")[1] for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("| `msprobe ")]
    assert sorted(re.findall(r"`msprobe ([^`]+)`", " ".join(rows))) == all_commands()
