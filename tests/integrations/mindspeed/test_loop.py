"""The feature on Megatron's real training loop, with the stand-in for MindSpeed's managers: the launch line as users have it, two ranks."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
CONFIG = """
output_dir: {output}
strict: true
monitor: {{gradients: true, parameters: true, optimizer_states: true, activations: true, collectives: true}}
"""
FAMILIES = {"grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq", "actv", "other", "scalars"}
SCRIPT = """
import os, sys, typing, typing_extensions
typing.override = typing_extensions.override  # Python 3.12
sys.path[:0] = [{examples!r}, {pool!r}]
import cpu_shim
cpu_shim.install()
{adaptor}
import pretrain_loop
if "RANK" in os.environ:
    pretrain_loop.main(sys.argv[1:])
    import torch.distributed as dist
    dist.barrier()
    dist.destroy_process_group()
else:
    import forkpool
    forkpool.run_ranks(2, pretrain_loop.main, sys.argv[1:])
"""
LOADER = "from msprobe_integrations import autoload; autoload.install()"
ADAPTOR = "import mindspeed.megatron_adaptor"


@pytest.fixture
def place() -> str:
    found = os.environ.get("MSPROBE_MCORE19", "")
    if not found:
        pytest.skip("MSPROBE_MCORE19 does not say where megatron-core 0.19 is installed (make venv-mcore19)")
    return found


def launch(tmp_path: Path, place: str, name: str, arguments: list[str], *, adaptor: str = ADAPTOR, by: list[str] | None = None) -> str:
    """Run the loop in two ranks of tensor parallelism, which one process forks, or torchrun `by` our command starts; what they print."""
    script = tmp_path / f"train_{name}.py"
    examples, pool = str(ROOT / "examples" / "megatron"), str(ROOT / "tests" / "frameworks")
    script.write_text(SCRIPT.format(examples=examples, pool=pool, adaptor=adaptor))
    path = os.pathsep.join((str(HERE / "stand_in"), place, str(ROOT)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MSPROBE_CONFIG": ""}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*by, sys.executable, *torchrun, str(script)] if by else [sys.executable, str(script)]
    command += ["--tensor-model-parallel-size", "2", *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:6000]
    return done.stdout + done.stderr


def logged(text: str) -> list[tuple[str, str]]:
    return re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", text)


def values(output: Path) -> dict[str, list[dict[str, str]]]:
    """Rows of all monitor files by rank and family, without what differs from run to run."""
    found = {}
    for file in sorted((output / "monitor").glob("*/*.csv")):
        rank = re.search(r"rank(\d+)", file.parent.name)
        with file.open() as stream:
            rows = [row for row in csv.DictReader(stream) if row["name"] != "step_seconds"]
        found[f"{rank and rank[1]} {file.name}"] = rows
    return found


def config(tmp_path: Path, name: str) -> Path:
    file = tmp_path / f"{name}.yaml"
    file.write_text(CONFIG.format(output=tmp_path / name))
    return file


@pytest.mark.framework
def test_as_the_megatron_integration(tmp_path: Path, place: str, cells: Any) -> None:
    """With MindSpeed's train_step in place of Megatron's, every value of every step on both ranks is what the Megatron integration gives
    without MindSpeed, and the training logs what it logs without the probe."""
    plain = launch(tmp_path, place, "plain", ["--own-step"])
    megatron = launch(tmp_path, place, "megatron", ["--msprobe-config", str(config(tmp_path, "megatron"))], adaptor=LOADER)
    by = [sys.executable, "-m", "msprobe_engine.cli.main", "run", "--config", str(config(tmp_path, "run")), "--"]
    run = launch(tmp_path, place, "run", ["--own-step"], by=by)
    assert len(logged(plain)) == 4
    assert logged(megatron) == logged(run) == logged(plain)
    expected = values(tmp_path / "megatron")
    assert {name.split()[1].rpartition("_")[0] for name in expected} >= FAMILIES
    assert {name[0] for name in expected} == {"0", "1"}
    assert {row["step"] for row in expected["0 grad_reduced_0-99.csv"]} == {"0", "1", "2", "3"}
    assert values(tmp_path / "run") == expected
    assert len(list((tmp_path / "run" / "monitor").iterdir())) == 2, "one probe per rank"
    version = "stand-in, Megatron 0.19.2"
    families = ("monitor: activations", "monitor: gradients", "monitor: parameters", "monitor: optimizer", "collectives")
    cells.ran("MindSpeed", "TP 2, 2 ranks", *families, "same bits", version=version)
