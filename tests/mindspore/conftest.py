"""Tests inside MindSpore's own environment: each in a directory of its own (MindSpore litters), seeded, in PyNative mode, on the CPU.

Without mindspore the directory is skipped as a whole (`tests/conftest.py`), so nothing here imports it before a test runs.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")  # errors only; read once, when mindspore is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
for place in (HERE.parent / "frameworks", HERE):  # programs and helpers that several tests share
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
RANKS_PROGRAM = HERE / "ranks_program.py"


@pytest.fixture(scope="session", autouse=True)
def _litter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What fixtures of a module or of the session run leaves its files here."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("litter"))
    yield
    os.chdir(before)


def _msrun(root: Path, port: int) -> list[str]:
    """By MindSpore's own launcher: it, the scheduler and the ranks all import MindSpore anew."""
    msrun = shutil.which("msrun", path=str(Path(sys.executable).parent))
    if msrun is None:
        pytest.skip("no msrun beside python")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    workers = ["--worker_num=2", "--local_worker_num=2", f"--master_port={port}"]
    command = [msrun, *workers, "--log_dir=log", "--join=True", str(RANKS_PROGRAM)]
    subprocess.run(command, cwd=root, env={**os.environ, "PATH": path}, timeout=800, capture_output=True, check=False)
    return [(root / f"log/worker_{rank}.log").read_text(errors="replace") for rank in range(2)]


def _forked(root: Path, port: int) -> list[str]:
    """In processes that find MindSpore imported, each with the environment that msrun gives to it."""
    import warm

    job = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
    roles = [{"MS_ROLE": "MS_WORKER", "MS_NODE_ID": rank, "RANK_ID": rank} for rank in "01"]
    environments = [{**os.environ, **job, **role} for role in ({"MS_ROLE": "MS_SCHED"}, *roles)]
    done = warm.together(environments, warm.script(RANKS_PROGRAM), cwd=root, timeout=800)
    return [one.stdout + one.stderr for one in done[1:]]


@pytest.fixture(scope="session", params=[_forked, pytest.param(_msrun, marks=pytest.mark.slow)])
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what they have seen in ranks_program.py."""
    root = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank, log in enumerate(request.param(root, port)):
        assert f"FINISHED {rank}" in log, log[-3000:]
    return root


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Own directory, seed 1234, PyNative mode before and after; no debugger, as in a new process, and no trace of the test's own."""
    import mindspore

    from msprobe.core import SingleSave
    from msprobe_engine.core import log
    from msprobe_integrations.common.shutdown import at_exit
    from msprobe_integrations.mindspore.dump.debugger import PrecisionDebugger
    from msprobe_integrations.mindspore.graph import single as single_files
    from msprobe_integrations.mindspore.randomness.seeds import undo_seed_all

    monkeypatch.chdir(tmp_path)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
    mindspore.set_seed(1234)
    PrecisionDebugger._instance = None
    log.forget_warnings()
    monkeypatch.setattr(SingleSave, "_instance", None)
    monkeypatch.setattr(single_files, "_step", 0)
    monkeypatch.setattr(single_files, "_ids", itertools.count())
    yield
    made = PrecisionDebugger._instance
    if made is not None and made._built:
        if made._run is not None:
            made._run.at_exit()
        at_exit.unregister(made._at_exit)
    PrecisionDebugger._instance = None
    log.set_rank(None)
    undo_seed_all()
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
