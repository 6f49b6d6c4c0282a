"""Runs a training of the set in processes of its own, watched as a case asks for, and asks ``msprobe diagnose`` about it."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.training import Program, Setting

Plant = Callable[[Program], None]


def nothing(_program: Program) -> None:
    """No fault."""


def program_of(setting: Setting, rank: int = 0) -> Program:
    """The program that trains a setting."""
    from reported_bugs.libraries.programs import PROGRAMS

    kind = PROGRAMS.get(setting.family, Program)
    if setting.wrap.startswith("deepspeed"):
        from reported_bugs.faults.in_deepspeed import DeepSpeedProgram

        kind = type(f"{kind.__name__}OfAnEngine", (DeepSpeedProgram, kind), {}) if kind is not Program else DeepSpeedProgram
    return kind(setting, rank)


@cache
def prepare(wrap: str, family: str) -> None:
    """Import what a training needs before processes are forked for it: a few seconds once instead of in each."""
    import msprobe.pytorch  # noqa: F401

    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()
    if family != "gpt":
        program_of(Setting(family)).build()
    if wrap.startswith("deepspeed"):
        from reported_bugs.faults import in_deepspeed

        in_deepspeed.library()
    if wrap == "fsdp":
        from torch.distributed import fsdp  # noqa: F401


def run(path: Path, setting: Setting, plant: Plant = nothing, level: str = "mix") -> None:
    """Train, and leave what was watched at `path`; an existing run is kept.

    Args:
        path: directory of the run.
        setting: what is trained.
        plant: makes the fault.
        level: ``mix``, ``L1``, ``L0``: statistics; ``md5``, ``digest``: with checksums at ``mix``; ``monitor``: no dump.

    Raises:
        RuntimeError: a rank failed.
    """
    if (path / "done").exists():
        return
    prepare(setting.wrap, setting.family)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [context.Process(target=_rank, args=(rank, scratch, path, setting, plant, level)) for rank in range(setting.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(280)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            if process.is_alive():
                process.kill()
    if any(codes):
        raise RuntimeError(f"{path.name}: exit codes {codes}; see {path}/error*.txt")
    (path / "done").touch()


def _rank(rank: int, scratch: str, path: Path, setting: Setting, plant: Plant, level: str) -> None:
    warnings.simplefilter("ignore")
    output = os.open(path / f"log{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(setting.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(setting.ranks))
    if setting.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/init", rank=rank, world_size=setting.ranks)
    program = program_of(setting, rank)
    plant(program)
    program.build()
    (_monitor if level == "monitor" else _dump)(program, path, level)
    (path / f"losses{rank}.json").write_text(json.dumps(program.losses))
    if setting.ranks > 1:
        dist.barrier()
    atexit._run_exitfuncs()  # a forked child ends without them, and they finish the files
    if setting.ranks > 1:
        dist.destroy_process_group()


def _dump(program: Program, path: Path, level: str) -> None:
    from msprobe.pytorch import PrecisionDebugger

    mode = {"md5": "md5", "digest": "digest"}.get(level, "statistics")
    settings: dict[str, Any] = {
        "task": "statistics",
        "dump_path": str(path / "dump"),
        "level": "mix" if mode != "statistics" else level,
        "step": [],
        "rank": [],
        "statistics": {"summary_mode": mode},
    }
    file = path / f"config{program.rank}.json"
    file.write_text(json.dumps(settings))
    debugger = PrecisionDebugger(config_path=str(file))
    for number in range(program.setting.steps):
        debugger.start(model=program.net)
        program.step(number)
        debugger.stop()
        debugger.step()


def _monitor(program: Program, path: Path, _level: str) -> None:
    from msprobe.pytorch import TorchProbe

    file = path / f"probe{program.rank}.json"
    families = dict.fromkeys(("gradients", "parameters", "optimizer_states", "updates", "activations", "activation_gradients"), True)
    file.write_text(
        json.dumps(
            {
                "output_dir": str(path / "monitor"),
                "monitor": families,
                "rules": [{"rule": "recommended"}],
                "sinks": {"csv": {"enabled": True}},
            }
        )
    )
    probe = TorchProbe.from_config(str(file))
    probe.attach(program.net, program.optimizer) if not hasattr(program, "engine") else probe.attach(program.engine)
    for number in range(program.setting.steps):
        probe.begin_step(number)
        loss = program.step(number)
        probe.end_step({"loss": loss})
    probe.close()


def diagnose(run_path: Path, golden: Path | None, report: Path) -> tuple[int, str, dict[str, Any], float]:
    """Exit code, what was printed, what is in diagnosis.json, seconds."""
    shutil.rmtree(report, ignore_errors=True)
    begin = time.perf_counter()
    command = [
        str(Path(sys.executable).with_name("msprobe")),
        "diagnose",
        str(run_path),
        *([str(golden)] if golden else []),
        "-o",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    found = report / "diagnosis.json"
    return done.returncode, done.stdout + done.stderr, json.loads(found.read_text()) if found.exists() else {}, time.perf_counter() - begin
