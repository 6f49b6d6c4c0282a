"""Starts a program on two ranks, with msrun."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def run_ranks(program: Path, root: Path, ranks: int = 2, seconds: float = 200) -> None:
    """Run `program` in the directory `root` on some ranks. Each has to print ``FINISHED {rank}``; the test is skipped without msrun."""
    msrun = shutil.which("msrun", path=str(Path(sys.executable).parent))
    if msrun is None:
        pytest.skip("no msrun beside python")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    workers = [f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={port}"]
    command = [msrun, *workers, "--log_dir=log", "--join=True", str(program)]
    subprocess.run(command, cwd=root, env={**os.environ, "PATH": path}, timeout=seconds, capture_output=True, check=False)
    for rank in range(ranks):
        log = (root / f"log/worker_{rank}.log").read_text(errors="replace")
        assert f"FINISHED {rank}" in log, log[-3000:]
