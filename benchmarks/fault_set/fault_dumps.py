"""Runs the trainings of the fault set and dumps two steps of each: ``{directory}/{name}/step{N}/rank{R}``."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_model import Shape, Training
from torch import nn


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory that is gone afterwards; not that of `tempfile.TemporaryDirectory`, which the first forked child that runs what is
    registered for the end would remove."""
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def directory_name(text: str) -> str:
    """A text as the name of a directory."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def ranks_of(shape: Shape) -> int:
    return 1 if shape.parallel == "single" else 2


@cache
def prepare() -> None:
    """Import what a training needs before processes are forked for it: a few seconds once instead of in each."""
    import msprobe.pytorch  # noqa: F401

    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()


def debugger_of(path: Path, level: str, task: str, steps: int) -> Any:
    """A debugger for all steps. `task` is one of the tool, or ``md5`` or ``digest``: statistics with that checksum."""
    from msprobe.pytorch import PrecisionDebugger

    if task not in ("md5", "digest"):
        return PrecisionDebugger(dump_path=str(path), task=task, level=level, step=list(range(steps)))
    settings = {"task": "statistics", "dump_path": str(path), "level": level, "step": list(range(steps)), "rank": []}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(settings | {"statistics": {"summary_mode": task}}, file)
        file.flush()
        return PrecisionDebugger(config_path=file.name)


def dump(path: Path, shape: Shape, plant: Callable[[Training], None], level: str = "mix", task: str = "statistics") -> None:
    """Train in processes of its own and leave the dump at `path`; an existing one is kept.

    Args:
        path: root of the dump.
        shape: what is trained.
        plant: changes the training before its first step.
        level: of the dump.
        task: ``statistics``, ``tensor``, ``md5`` or ``digest``.

    Raises:
        RuntimeError: a rank failed.
    """
    if (path / "done").exists():
        return
    prepare()
    shutil.rmtree(path, ignore_errors=True)
    on_ranks(path.name, ranks_of(shape), _rank, path, shape, plant, level, task)
    (path / "done").touch()


def on_ranks(name: str, ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call ``work(rank, ranks, scratch directory, *arguments)`` in a forked process for every rank, and wait.

    Raises:
        RuntimeError: a process of the training `name` failed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        processes = [context.Process(target=work, args=(rank, ranks, scratch, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        if any(process.exitcode != 0 for process in processes):
            for process in processes:
                process.kill()
            raise RuntimeError(f"{name}: exit codes {[process.exitcode for process in processes]}")


def _rank(rank: int, ranks: int, scratch: str, path: Path, shape: Shape, plant: Callable[[Training], None], level: str, task: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/init", rank=rank, world_size=ranks)
    training = Training(shape)
    plant(training)
    debugger = debugger_of(path, level, task, shape.steps)
    for number in range(shape.steps):
        debugger.start(model=training.model)
        training.step(number)
        debugger.stop()
        debugger.step()
    if ranks > 1:
        dist.barrier()
    atexit._run_exitfuncs()  # a forked child ends without them, and they finish the files
    if ranks > 1:
        dist.destroy_process_group()
