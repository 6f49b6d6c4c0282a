"""Loops of one's own around an `Accelerator`: faults stay inside, what a version lacks is named, a launch needs nothing else."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import accelerate.accelerator
import pytest
import torch
from harness.models import MODELS, OPTIMIZER
from harness.run import digest, ranks, write_settings

from msprobe_engine.core import log
from msprobe_integrations import requirements
from msprobe_integrations.accelerate import autoload
from msprobe_integrations.accelerate.reliance import TABLE
from msprobe_integrations.torch.training import owner

pytestmark = pytest.mark.framework


class Broken:
    """An observer of which everything raises."""

    in_step = True
    settings = type("S", (), {"strict": False})

    def evaluation(self) -> Any:
        raise RuntimeError("planted")

    note = evaluation

    def close(self) -> None: ...


def _bits(folder: Path) -> str:
    net: Any = MODELS["mlp"].make()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), **OPTIMIZER))
    loss = model(MODELS["mlp"].batch(0, 0, 0)).pow(2).mean()
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    accelerator.save_state(str(folder / "state"))
    return digest([*net.parameters(), norm, accelerator.gather(loss.detach())])


def test_faults_and_restoring(tmp_path: Path) -> None:
    """What raises in the observer does not come out of the Accelerator, whose results and parameters are the same bits; every method that
    is looked through is put back, and is the very same object as before."""

    def job() -> Any:
        before = dict(vars(accelerate.accelerator.Accelerator))
        undo = autoload.patch(accelerate.accelerator)
        replaced = {name for name, value in vars(accelerate.accelerator.Accelerator).items() if value is not before.get(name)}
        owner.own("user", Broken())  # type: ignore[arg-type]
        bits = _bits(tmp_path)
        for each in undo:
            each()
        after = dict(vars(accelerate.accelerator.Accelerator))
        return bits, replaced, [name for name in before | after if after.get(name) is not before.get(name)]

    ((bits, replaced, left),) = ranks(1, job)
    assert [bits] == ranks(1, _bits, tmp_path)
    assert replaced == {name for name in (*autoload.NOT_TRAINING, "clip_grad_norm_") if hasattr(accelerate.Accelerator, name)}
    assert left == []


def test_a_name_is_missing() -> None:
    """A version that lacks one of the names: the training goes on, and the message says which name and what is not there without it."""
    for row in TABLE:
        ((line,),) = ranks(1, lacking, row)
        assert line.endswith(f"has no {row.on}: without it: no {row.needed_for}")


def lacking(row: requirements.Requirement) -> list[str]:
    """In a rank: what is said."""

    module, _, path = row.on.partition(":")
    cls, _, name = path.partition(".")
    said: list[str] = []
    log.get_logger().addFilter(lambda record: said.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    holder = getattr(importlib.import_module(module), cls)
    if any(name in vars(base) for base in holder.__mro__[1:]):  # it would be inherited
        holder, name = importlib.import_module(module), cls
    delattr(holder, name)
    requirements.MISSING.clear()
    autoload._patch(accelerate.accelerator)
    accelerator = accelerate.Accelerator(cpu=True)
    net: Any = MODELS["mlp"].make()
    model = accelerator.prepare_model(net)
    accelerator.backward(model(MODELS["mlp"].batch(0, 0, 0)).pow(2).mean())
    return [line for line in said if "without it" in line]


SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(3)
net = torch.nn.Linear(8, 1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(256.0).view(32, 8) / 256), batch_size=4)
net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
for (x,) in data:
    accelerator.backward(net(x).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.print("WORLD", accelerator.num_processes)
accelerator.end_training()
"""


@pytest.mark.slow
def test_launch(tmp_path: Path) -> None:
    """`msprobe run -- accelerate launch` of a script that knows nothing of the probe: both ranks write all steps of their gradients."""
    (tmp_path / "train.py").write_text(SCRIPT)
    file = write_settings(tmp_path, monitor={"gradients": True}, sinks={"csv": {"enabled": True}})
    text = "accelerate launch --multi_gpu --num_machines 1 --num_processes 2 --main_process_port 0 --mixed_precision no train.py"
    binaries = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(binaries / "msprobe"), "run", "--config", str(file), "--", *text.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WORLD 2" in done.stdout
    norms = []
    for rank in (0, 1):
        (table,) = (tmp_path / "probe").glob(f"monitor/*-rank{rank}-*/grad_reduced_0-99.csv")
        head, *rows = (line.split(",") for line in table.read_text().splitlines())
        assert {row[head.index("step")] for row in rows} == {str(step) for step in range(4)}
        norms.append([row[head.index("norm")] for row in rows])
    assert norms[0] == norms[1]
