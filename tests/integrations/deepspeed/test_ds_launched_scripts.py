"""Whole scripts, unchanged, by the real launchers: the key of ds_config.json alone, and ``msprobe run``."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed_harness as harness
import pytest
import torch
from forkpool import run_ranks

from msprobe_engine.cli.launch.run import prepare_environment

pytestmark = pytest.mark.framework
EXAMPLE = Path(__file__).parents[3] / "examples" / "deepspeed"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
TRAIN = [*TORCHRUN, "train.py", "--deepspeed_config", "ds_config.json"]
PROBE = [sys.executable, "-m", "msprobe_engine.cli.main", "run", "--config", "probe.yaml", "--"]
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
NO_SHARED_MEMORY = str(Path(__file__).parent / "no_shared_memory")
LOSSES = "step "


def environment(directory: Path) -> dict[str, str]:
    """That of a user who has the package installed with its .pth, and no variable of ours; programs of this interpreter come first."""
    (directory / "probe_only.yaml").write_text("{}")
    path = prepare_environment(str(directory / "probe_only.yaml"), [])["PYTHONPATH"]
    found = {k: v for k, v in os.environ.items() if not k.startswith("MSPROBE_")}
    programs = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", "")])
    return {**found, "PYTHONPATH": os.pathsep.join([path, NO_SHARED_MEMORY]), "PATH": programs, "DS_ACCELERATOR": "cpu"}


def example(directory: Path, stage: int = 2, key: Any = None) -> Path:
    """A copy of the example; the configuration has another stage and another key of ours."""
    place = directory / "example"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("output"))
    conf = json.loads((place / "ds_config.json").read_text())
    conf["zero_optimization"]["stage"] = stage
    conf.pop("msprobe")
    if key is not None:
        conf["msprobe"] = key
    (place / "ds_config.json").write_text(json.dumps(conf))
    return place


def run(place: Path, *line: str, code: int = 0) -> str:
    """What the line prints."""
    done = subprocess.run(line, cwd=place, env=environment(place), capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def bare(place: Path) -> str:
    """What the script prints in this rank, which the test has forked, without a probe."""
    os.chdir(place)
    sys.argv = ["train.py", *TRAIN[-2:]]
    torch.distributed.destroy_process_group = lambda: None  # by who has made the rank
    harness.deepspeed.init_distributed("gloo", verbose=False)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path("train.py", run_name="__main__")
    return said.getvalue()


def losses(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(LOSSES)]


def frames(file: Path) -> list[dict[str, Any]]:
    return [record for line in file.read_text().splitlines() if "step" in (record := json.loads(line))]


def check_output(output: Path) -> None:
    for rank in (0, 1):
        steps = frames(output / "jsonl" / f"rank{rank}.jsonl")
        assert [frame["step"] for frame in steps] == list(range(6))
        assert all(frame["complete"] for frame in steps)
        dump = json.loads((output / "dump" / "step1" / f"rank{rank}" / "dump.json").read_text())["data"]
        assert "Module.middle.Linear.forward.0" in dump
        assert "Module.middle.Linear.backward.1" in dump


@pytest.mark.slow
def test_example(tmp_path: Path) -> None:
    """examples/deepspeed/run.sh as it is: the DeepSpeed launcher, two ranks, nothing but the key. Every step is there, and the user's csv
    monitor has our numbers."""
    place = tmp_path / "deepspeed"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("output"))
    said = run(place, "sh", "run.sh")
    assert "is switched off" not in said
    check_output(place / "output" / "probe")
    with (place / "output" / "csv" / "msprobe_loss.csv").open() as file:
        assert [row[0] for row in csv.reader(file)][1:] == [str(32 * (step + 1)) for step in range(6)]
    first, second = run_ranks(2, bare, example(tmp_path))
    assert losses(said) == losses(first)
    assert (len(losses(said)), losses(second)) == (6, [])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_msprobe_run(stage: int, tmp_path: Path) -> None:
    """``msprobe run`` before the user's line: script and configuration know nothing of the probe."""
    place = example(tmp_path, stage)
    said = run(place, *PROBE, *TRAIN)
    assert "is switched off" not in said
    check_output(place / "output" / "probe")


@pytest.mark.slow
def test_a_mistake_ends_the_job(tmp_path: Path) -> None:
    """A wrong key: `deepspeed.initialize` ends with one line that says what is wrong, before anything is trained."""
    place = example(tmp_path, key={"config": "probe.yaml", "moniter": True})
    one = ["env", *(f"{name}={value}" for name, value in ALONE.items()), "MASTER_PORT=29713", sys.executable]
    said = run(place, *one, "train.py", "--deepspeed_config", "ds_config.json", code=1)
    assert "ds_config.json: msprobe.moniter: unknown key; did you mean 'monitor'?" in said
    assert not losses(said)
    assert not (place / "output").exists()


@pytest.mark.slow
def test_a_job_that_is_ended(tmp_path: Path) -> None:
    """``msprobe run`` before the line of a script that knows nothing of the probe. SIGTERM in the middle: the process dies of it, and what
    was seen is complete."""
    place = example(tmp_path, 3)
    env = {**environment(place), **ALONE, "MASTER_PORT": "29711"}
    line = [*PROBE, sys.executable, "train.py", "--deepspeed_config", "ds_config.json", "--steps", "100000"]
    with subprocess.Popen(line, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            assert job.stdout is not None
            for said in job.stdout:
                if said.startswith("step 3 "):
                    break
            job.send_signal(signal.SIGTERM)
            job.stdout.read()
            assert job.wait(timeout=240) == -signal.SIGTERM
        finally:
            job.kill()
    output = place / "output" / "probe"
    assert [frame["step"] for frame in frames(output / "jsonl" / "rank0.jsonl")][:4] == [0, 1, 2, 3]
    dump = json.loads((output / "dump" / "step1" / "rank0" / "dump.json").read_text())["data"]
    assert "Module.middle.Linear.forward.0" in dump
