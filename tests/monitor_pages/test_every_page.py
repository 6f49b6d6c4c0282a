"""Code blocks of pages that have no test of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks

from msprobe_engine.core.settings.load import load_settings

FILES = re.compile(r"(?:benchmarks|tests|examples)/[\w./-]+")


@pytest.mark.parametrize("page", ["docs/evidence/benchmarks.md", "docs/evidence/hardware.md"])
def test_commands_name_what_is_there(page: str) -> None:
    """Scripts and tests in the shell lines of these pages exist, and every option of a script of ours is one it defines."""
    lines = [shlex.split(line, comments=True) for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
    named = [(line, place) for line in lines for word in line for place in FILES.findall(word)]
    assert len(named) >= 5
    for line, place in named:
        assert (ROOT / place).exists(), f"{page} names {place}"
        if not place.startswith("benchmarks/"):
            continue
        source = (ROOT / place).read_text(encoding="utf-8")
        for option in (word for word in line[line.index(place) :] if word.startswith("--")):
            assert f'"{option}"' in source, f"{page}: {place} has no {option}"


def test_settings(tmp_path: Path) -> None:
    """Both files of docs/reference/settings.md load without a mistake."""
    for language, name in (("json", "config.json"), ("yaml", "probe.yaml")):
        (text,) = blocks("docs/reference/settings.md", language)
        (tmp_path / name).write_text(text)
        settings = load_settings(tmp_path / name)
        assert settings.output_dir or settings.dump is not None


STAND_IN = "import torch\nfor kind in (torch.nn.Module, torch.Tensor):\n    kind.npu = lambda self: self\n"
BEFORE = "import torch\nNet = lambda: torch.nn.Linear(2, 2)\nx = torch.ones(1, 2)\n"


@pytest.mark.slow
def test_ascend(tmp_path: Path) -> None:
    """The calls of docs/frameworks/ascend.md make a dump; modules and tensors stay where they are."""
    (tmp_path / "torch_npu.py").write_text(STAND_IN)
    config = {"task": "statistics", "level": "mix", "dump_path": "dump", "step": [], "rank": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (text,) = blocks("docs/frameworks/ascend.md", "python")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    subprocess.run([sys.executable, "-c", BEFORE + text], cwd=tmp_path, env=environment, check=True, timeout=240)
    (file,) = (tmp_path / "dump").rglob("dump.json")
    assert "Functional.linear.0.forward" in json.loads(file.read_text())["data"]
