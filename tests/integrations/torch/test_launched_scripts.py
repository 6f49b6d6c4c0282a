"""Whole scripts, unchanged, started by ``msprobe run -- torchrun``."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.launch.run import prepare_environment

pytestmark = pytest.mark.framework
PAGE = Path(__file__).parents[3] / "docs" / "frameworks" / "pytorch.md"
EXAMPLE = Path(__file__).parents[3] / "examples" / "fsdp"
DDP = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8, num_workers=1)
for batch in loader:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), file=open(f"losses{dist.get_rank()}", "a"))
dist.destroy_process_group()
"""


def launch(directory: Path, config: Path, *script: str, environment: bool = False) -> str:
    """Run it in `directory` with two ranks; returns what it said."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *script]
    probe = [] if environment else [sys.executable, "-m", "msprobe_engine.cli.main", "run", "--config", str(config), "--"]
    # without the command this environment, which has the packages but not their .pth, needs what the command adds to the path
    added = {name: prepare_environment(str(config), [])[name] for name in ("MSPROBE_CONFIG", "PYTHONPATH")} if environment else {}
    done = subprocess.run([*probe, *torchrun], cwd=directory, env={**os.environ, **added}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def frames(file: Path) -> list[dict[str, Any]]:
    return [record for line in file.read_text().splitlines() if "step" in (record := json.loads(line))]


@pytest.mark.slow
def test_example_of_fsdp(tmp_path: Path) -> None:
    """examples/fsdp as it is: every step with the losses that the script prints, whole parameters on both ranks, one dumped step, and
    no step for the evaluation."""
    said = launch(tmp_path, EXAMPLE / "probe.yaml", str(EXAMPLE / "train.py"), "--steps", "10")
    assert "is switched off" not in said
    steps = [frames(tmp_path / "msprobe_output" / "jsonl" / f"rank{rank}.jsonl") for rank in (0, 1)]
    for rank in (0, 1):
        assert [frame["step"] for frame in steps[rank]] == list(range(10))
        assert all(frame["complete"] for frame in steps[rank])
        assert (tmp_path / "msprobe_output" / "dump" / "step3" / f"rank{rank}" / "dump.json").is_file()
    assert f"loss {steps[0][-1]['scalars']['loss']:.4f}" in said
    assert [len(list((tmp_path / "msprobe_output" / "monitor").glob(f"*rank{r}*"))) for r in (0, 1)] == [1, 1]
    norms = []
    for rank in (0, 1):
        (file,) = (tmp_path / "msprobe_output" / "monitor").glob(f"*rank{rank}*/param_updated_0-99.csv")
        rows = list(csv.DictReader(file.open()))
        assert {row["name"] for row in rows} >= {"layers.0.qkv.weight", "tokens.weight", "head.weight"}
        norms.append([(row["name"], row["norm"]) for row in rows])
    assert norms[0] == norms[1]  # whole parameters: the same on all ranks


@pytest.mark.slow  # DDP is among the training cases, what a launched process finds among tests/launch
def test_script_with_ddp(tmp_path: Path) -> None:
    """A script with DDP and a data loader of processes, with MSPROBE_CONFIG alone and the settings that docs/frameworks/pytorch.md starts
    with: losses and steps of both ranks, nothing of workers."""
    (tmp_path / "train.py").write_text(DDP)
    config = tmp_path / "probe.yaml"
    (start,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    config.write_text(f"{start}sinks: {{jsonl: {{enabled: true}}}}\n")
    launch(tmp_path, config, "train.py", environment=True)
    assert sorted(path.name for path in (tmp_path / "msprobe_output" / "jsonl").glob("*.jsonl")) == ["rank0.jsonl", "rank1.jsonl"]
    for rank in (0, 1):
        losses = [float(line) for line in (tmp_path / f"losses{rank}").read_text().split()]
        found = frames(tmp_path / "msprobe_output" / "jsonl" / f"rank{rank}.jsonl")
        assert [frame["scalars"]["loss"] for frame in found] == pytest.approx(losses)
        assert len(losses) == 4
