"""A variable with a mistyped name is said in a training that has no other word to the probe, once per job, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import launching as ln
import pytest

SAID = "MSPROBE_CONFG is not known and has no effect; did you mean MSPROBE_CONFIG?"
START = f"import sys; sys.path.insert(0, {str(ln.ROOT)!r}); from msprobe_integrations.autoload import install; install()\n"
"""What the installed package has every interpreter do at its start."""
SPAWNS = """\
import multiprocessing, torch
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print, args=("child",))
    child.start()
    child.join()
"""


def train(program: str, where: Path, **variables: str | None) -> str:
    """What a program says of us, started as it would be in an environment with the probe."""
    (where / "torch.py").write_text("")  # any module of that name is a framework to us
    (where / "sitecustomize.py").write_text(START)
    (where / "train.py").write_text(program)
    given = {"RANK": None, "WORLD_SIZE": None, "MSPROBE_CONFIG": None, "MSPROBE_CONFG": "probe.yaml", **variables}
    environment = {**ln.environment(**given), "PYTHONPATH": str(where)}
    done = subprocess.run([sys.executable, "train.py"], cwd=where, env=environment, capture_output=True, text=True, check=True)
    return done.stderr


@pytest.mark.parametrize(
    ("program", "variables", "times"),
    [
        ("import torch", {}, 1),
        ("import torch", {"RANK": "0", "WORLD_SIZE": "2"}, 1),
        ("import torch", {"RANK": "1", "WORLD_SIZE": "2"}, 0),
        (SPAWNS, {}, 1),
        ("import json", {}, 0),
        ("import torch", {"MSPROBE_AUTOLOAD": "0"}, 0),
    ],
    ids=["one process", "rank 0", "rank 1", "spawned child", "no framework", "switched off"],
)
def test_it_is_said_once_in_a_job(program: str, variables: dict[str, str], times: int, tmp_path: Path) -> None:
    assert train(program, tmp_path, **variables).count(SAID) == times


@pytest.mark.parametrize("name", ["MSPROBE_HOME", "MSPROBE_LOG_LEVEL"])
def test_other_variables_are_left_alone(name: str, tmp_path: Path) -> None:
    """Names that are ours, or like none of ours."""
    assert train("import torch", tmp_path, MSPROBE_CONFG=None, **{name: "2"}) == ""


@pytest.mark.framework
@pytest.mark.slow
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    """The launcher imports torch too: it leaves the word to rank 0."""
    (tmp_path / "sitecustomize.py").write_text(START)
    (tmp_path / "train.py").write_text("import torch")
    environment = {**ln.environment(MSPROBE_CONFG="probe.yaml", MSPROBE_CONFIG=None), "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count(SAID) == 1
