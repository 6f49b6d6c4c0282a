"""Trainings in processes of their own, with what was collected of them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from msprobe_engine.config.collect import packages

SCRIPT = Path(__file__).with_name("checked_training.py")


@pytest.fixture(scope="session")
def train() -> Callable[..., str]:
    """``train(pack, ranks=1, python=..., environment=..., **given)``: runs the script; the hash of what came out (of all ranks)."""

    def run(pack: Path | str, ranks: int = 0, python: str = sys.executable, environment: dict[str, str] | None = None, **given: str) -> str:
        words = [str(SCRIPT), str(pack), *(f"{key}={value}" for key, value in given.items())]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
        inherited = dict(os.environ)
        if given.get("tool") == "existing":  # its package has the name of one of ours
            inherited.pop("PYTHONPATH", None)
        done = subprocess.run(
            [python, *launcher, *words],
            env={**inherited, "OMP_NUM_THREADS": "1", **(environment or {})},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        run.said = done.stderr  # type: ignore[attr-defined]
        return "".join(sorted(line for line in done.stdout.split() if len(line) == 64))

    return run


def _become(words: list[str], environment: Mapping[str, str], said: Path) -> None:
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
        packages.list_installed.cache_clear()  # what is on this path, not what an earlier test of the parent saw on its own
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


@pytest.fixture(scope="session")
def fork() -> Callable[[list[str], Mapping[str, str], Path], BaseProcess]:
    """``fork([program, ...], environment, said)``: starts a program of torch in a process that has torch already; what it prints is in
    the file `said`."""
    importlib.import_module("torch._dynamo")  # every optimizer imports it: once, before programs are forked

    def start(words: list[str], environment: Mapping[str, str], said: Path) -> BaseProcess:
        process = multiprocessing.get_context("fork").Process(target=_become, args=(words, environment, said), daemon=True)
        process.start()
        return process

    return start
