"""`kill -9` of a training with a dump beside the monitor: every step that was finished a moment ago is in the files of both, and no command
takes what was written until then for the whole run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import probe_ranks as pr
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard  # takes seconds: once here, not in every forked rank

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.settings.schema import (
    CsvSettings,
    DumpSettings,
    IncidentSettings,
    JsonLinesSettings,
    MonitorSettings,
    ProbeSettings,
    SinkSettings,
    SqliteSettings,
)
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
STEPS = 12
STEPS_BEFORE_DEATH = 3
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


def make_probe(root: str, task: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> TorchProbe:
    probe = TorchProbe(
        ProbeSettings(
            output_dir=root,
            strict=True,
            monitor=MonitorSettings(),
            dump=DumpSettings(level="mix", task=task),
            incident=IncidentSettings(enabled=False),
        )
    )
    probe.attach(model, optimizer)
    return probe


def train(root: str, task: str) -> None:
    """Files of the dump are stuck from the first one on, as on a file system that hangs."""
    DumpSink.write = lambda *_: threading.Event().wait() and None
    job = pr.gpt.Job(pr.TINY)
    probe = make_probe(root, task, job.model, job.optimizer)
    for step in range(STEPS):
        probe.begin_step(step)
        job.forward().backward()
        job.update()
        probe.end_step()
    die_when(lambda: len(monitored(Path(root))) == len(dumped(Path(root), None)) == STEPS)


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.slow
def test_monitor_does_not_wait_for_dump(tmp_path: Path, task: str) -> None:
    """While no file of the dump gets on, the monitor's files get every finished step, and the dump's steps are in their logs."""
    (outcome,) = pr.run(train, str(tmp_path), task, directory=tmp_path, fails=True, timeout=2 * BOUND)
    assert outcome.code == -signal.SIGKILL, outcome.log
    assert monitored(tmp_path) == set(range(STEPS))
    assert dumped(tmp_path, None) == set(range(STEPS))


def train_sharded(root: str, late: bool) -> None:
    """FSDP2: rows of shards are merged over ranks. No step follows the last one; `late`: rank 1 does not come to the end of that one."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters())
    probe = make_probe(root, "statistics", model, optimizer)
    last = STEPS - 1

    def is_saved() -> bool:
        with suppress(ProbeError):  # a file that is being written
            dump = open_dump(Path(root, "dump"))
            return all(dump.load(last, r).entries for r in ((0,) if late else (0, 1)))
        return False

    for step in range(STEPS):
        probe.begin_step(step)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not (late and step == last and rank == 1):
            probe.end_step()
    die_when(is_saved)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.slow
def test_sharded_step_is_saved_without_the_next_one(tmp_path: Path, late: bool) -> None:
    """The dump of a finished step is whole before another one ends, on both ranks; where the rows of another rank do not come, the step is
    there without the numbers that need them, and says so."""
    outcomes = pr.run(train_sharded, str(tmp_path), late, ranks=2, directory=tmp_path, fails=True, timeout=3 * BOUND)
    assert [o.code for o in outcomes] == 2 * [-signal.SIGKILL], outcomes
    dump = open_dump(tmp_path / "dump")
    whole = set(range(STEPS - late))
    for rank in (0, 1):
        assert dumped(tmp_path, rank) == whole
        assert not any(dump.load(step, rank).header.get("lost") for step in whole)
    if late:
        before, last = dump.load(STEPS - 2, 0), dump.load(STEPS - 1, 0)
        assert set(last.entries) == set(before.entries)
        ((reason, count),) = last.header["lost"].items()
        assert reason == "statistics of sharded tensors, not merged over ranks 0-1"
        assert count > 0
        own = last.entries["Module.1.ReLU.forward.0"].tensors()
        assert [t.max is not None for _, t in own] == [True, True]


def train_replicated(root: str, killed: bool) -> None:
    """DDP; `killed`: rank 1 dies in step 3, which rank 0 comes to the end of; the next collective ends that one, too."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    probe = TorchProbe(ProbeSettings(output_dir=root, strict=True, monitor=MonitorSettings(), incident=IncidentSettings(enabled=False)))
    probe.attach(model, optimizer)
    torch.manual_seed(5)
    with suppress(RuntimeError), closing(probe):
        for step in range(6):
            probe.begin_step(step)
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            if killed and step == 3 and rank == 1:
                die_when(lambda: 2 in monitored(Path(root), 1) and 3 in monitored(Path(root), 0))
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step({"loss": loss})


def test_a_killed_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What rank 1 wrote until it was killed is not taken for the whole run, alone and beside the run that came to its end."""
    for name, codes in (("golden", [0, 0]), ("target", [0, -signal.SIGKILL])):
        (tmp_path / name).mkdir()
        outcomes = pr.run(
            train_replicated, str(tmp_path / name), name == "target", ranks=2, directory=tmp_path, fails=True, timeout=3 * BOUND
        )
        assert [o.code for o in outcomes] == codes, outcomes
    target, golden, page = (str(tmp_path / name) for name in ("target", "golden", "page"))
    assert main(["monitor", "analyze", golden]) == 0
    for words in (["diagnose", target, golden, "-o", page], ["diagnose", target, "-o", page], ["monitor", "analyze", target]):
        capfd.readouterr()
        assert main(words) == 3
        said = "".join(capfd.readouterr())
        assert f"{target}: rank 1 ended after step 2, others go on to step 3" in said
        assert (f"{golden}: steps 3-5 of rank 1 are not in {target}" in said) == (golden in words)


SINKS = {
    "csv": SinkSettings(),
    "jsonl": SinkSettings(csv=CsvSettings(enabled=False), jsonl=JsonLinesSettings(enabled=True)),
    "sqlite": SinkSettings(csv=CsvSettings(enabled=False), sqlite=SqliteSettings(enabled=True)),
}


def train_and_die(root: str, sinks: str, bad: int) -> None:
    """NaN goes into step `bad`; this process is killed as soon as `end_step` of the last step has returned, on a slow file system."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = ProbeSettings(output_dir=root, monitor=MonitorSettings(), sinks=SINKS[sinks], incident=IncidentSettings(enabled=False))
    probe = TorchProbe(settings)
    probe.attach(model, optimizer)
    for sink in probe.session.writer.sinks:
        sink.write = lambda *frame, write=sink.write: (time.sleep(0.3), write(*frame))  # type: ignore[misc]
    for step in range(STEPS_BEFORE_DEATH):
        probe.begin_step(step)
        model(torch.full((2, 8), float("nan") if step == bad else 1.0)).sum().backward()
        optimizer.step()
        probe.end_step()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.fast_cells("csv-0", "csv-2", "csv-9")
@pytest.mark.parametrize("bad", [0, 2, 9])
@pytest.mark.parametrize("sinks", SINKS)
def test_an_alert_that_was_printed_is_in_the_files(sinks: str, bad: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process that is killed right after it has printed an alert leaves the alert, and every command says that the run did not end."""
    out = str(tmp_path / "out")
    (outcome,) = pr.run(train_and_die, out, sinks, bad, directory=tmp_path, fails=True, group=False, timeout=2 * BOUND)
    assert outcome.code == -signal.SIGKILL, outcome.log
    assert bool(outcome.lines("ALERT nan_inf")) == (bad < STEPS_BEFORE_DEATH)
    code = 1 if bad < STEPS_BEFORE_DEATH else 3
    for words in (["monitor", "analyze", out], ["diagnose", out, "-o", str(tmp_path / "page")]):
        capfd.readouterr()
        assert main(words) == code
        said = "".join(capfd.readouterr())
        assert f"{out}: rank 0 did not end: the process was killed or has crashed;" in said
        assert (f"step {bad}" in said) == (code == 1)
