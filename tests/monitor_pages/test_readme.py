"""README.md and the pages that lead from a situation to a command: every command they name is one, with these options; the loop runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from page_blocks import ROOT, Tokens, batches, block, loss_of, run

from msprobe_engine.cli.main import all_commands, sub_parser
from msprobe_engine.formats.monitor.reader import open_run

LEADING = (
    "README.md",
    "README.zh.md",
    "docs/index.md",
    *(f"docs/quickstart/{name}.md" for name in ("index", "symptoms", "already-happened", "zh")),
)
"""Pages that only name commands."""


@pytest.mark.framework
def test_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes every step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)
    Path("probe.yaml").write_text("output_dir: runs/a\nmonitor: true\n")
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    code = block("README.md", "python", "In a loop of your own")
    run(code, "README.md", {"model": model, "optimizer": optimizer, "data": batches(3), "train": train})
    assert open_run("runs/a").scalars(0)["loss"].steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize("page", LEADING)
def test_commands(page: str) -> None:
    """Of each command in the code of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"(?:^|`|&& )msprobe ((?!run\b.*MSPROBE)[a-z_]+[^`\n#]*)", text, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        words = line.split(" -- ")[0].split()
        if words[0] == "help":
            continue
        name = " ".join(words[:2]) if " ".join(words[:2]) in all_commands() else words[0]
        assert name in all_commands(), line
        known = set(sub_parser(name)._option_string_actions)
        assert {word for word in words if word.startswith("-") and word != "-"} <= known, line
