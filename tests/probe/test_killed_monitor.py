"""`kill -9` of a training with a dump beside the monitor: every step that was finished a moment ago is in the files of both."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import probe_ranks as pr
import pytest

from msprobe_engine.dump.reader import open_dump
from msprobe_engine.dump.writer import DumpSink
from msprobe_engine.settings.schema import DumpSettings, IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_integrations.torch.probe import TorchProbe

pytestmark = pytest.mark.framework
STEPS = 12
BOUND = 30.0
"""Seconds within which a file system that works has taken what a step has shown; it takes milliseconds."""


def die_when(done: Callable[[], bool]) -> None:
    """Kill this process as soon as `done`, or when it has not come true within `BOUND`: the files tell."""
    end = time.monotonic() + BOUND
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def monitored(root: Path, rank: int = 0) -> set[int]:
    """Steps that the monitor's file of gradients has."""
    lines = [line for file in root.glob(f"monitor/*rank{rank}-*/grad_reduced_*.csv") for line in file.read_text().splitlines()[1:]]
    return {int(line.split(",")[2]) for line in lines}


def dumped(root: Path, rank: int | None) -> set[int]:
    """Steps whose dump is whole, from dump.json or from the log of the frame, and tensors from their own files."""
    dump = open_dump(root / "dump")
    name = next(iter(dump.ranks(0)), None) if rank is None else rank
    return {step for step in dump.steps if dump.load(step, name).complete}


def train(root: str, task: str) -> None:
    """Files of the dump are stuck from the first one on, as on a file system that hangs."""
    DumpSink.write = lambda *_: threading.Event().wait() and None
    job = pr.gpt.Job(pr.TINY)
    probe = TorchProbe(
        ProbeSettings(
            output_dir=root,
            strict=True,
            monitor=MonitorSettings(),
            dump=DumpSettings(level="mix", task=task),
            incident=IncidentSettings(enabled=False),
        )
    )
    probe.attach(job.model, job.optimizer)
    for step in range(STEPS):
        probe.begin_step(step)
        job.forward().backward()
        job.update()
        probe.end_step()
    die_when(lambda: len(monitored(Path(root))) == len(dumped(Path(root), None)) == STEPS)


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_monitor_does_not_wait_for_dump(tmp_path: Path, task: str) -> None:
    """While no file of the dump gets on, the monitor's files get every finished step, and the dump's steps are in their logs."""
    (outcome,) = pr.run(train, str(tmp_path), task, directory=tmp_path, fails=True, timeout=2 * BOUND)
    assert outcome.code == -signal.SIGKILL, outcome.log
    assert monitored(tmp_path) == set(range(STEPS))
    assert dumped(tmp_path, None) == set(range(STEPS))
