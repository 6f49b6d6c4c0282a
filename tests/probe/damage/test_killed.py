"""`kill -9` in the middle of a step: finished steps are whole, the unfinished one says so."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch.distributed as dist

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.schema import DumpSettings, IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
DEATH = 4


def die(step: int) -> None:
    """Rank 1 is killed between the forward and the backward pass of one step."""
    if step == DEATH:
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)  # the other rank's collective would fail; how it ends is not the subject here


def with_debugger(config: Path) -> None:
    debugger = PrecisionDebugger(str(config))
    job = pr.gpt.Job(pr.TINY)
    for step in range(DEATH + 1):
        debugger.start(job.model)
        loss = job.forward()
        die(step)
        loss.backward()
        job.update()
        debugger.stop()
        debugger.step()


def with_probe(output: str, level: str) -> None:
    probe = TorchProbe(
        ProbeSettings(
            output_dir=output,
            strict=True,
            monitor=MonitorSettings(),
            dump=DumpSettings(level=level),
            incident=IncidentSettings(enabled=False),
        )
    )
    job = pr.gpt.Job(pr.TINY)
    probe.attach(job.model, job.optimizer)
    for step in range(DEATH + 1):
        probe.begin_step(step)
        loss = job.forward()
        die(step)
        loss.backward()
        job.update()
        probe.end_step()


def check_dump(root: Path) -> None:
    dump = open_dump(root)
    assert dump.steps == list(range(DEATH + 1))
    for step in range(DEATH):
        one = dump.load(step, 1)
        assert one.complete, f"step {step} was finished"
        assert {"Module.norm.LayerNorm.backward.0", "Functional.cross_entropy.0.forward"} <= set(one.entries)
        assert all(t.max is not None for _, t in one.entries["Module.norm.LayerNorm.forward.0"].tensors())
    assert not dump.load(DEATH, 1).complete


def test_debugger(tmp_path: Path) -> None:
    """Level mix: every step before the kill is read whole, with gradients; the step of the kill is marked."""
    codes = [o.code for o in pr.run(with_debugger, pr.write_config(tmp_path, "mix"), ranks=2, directory=tmp_path, fails=True)]
    assert codes == [3, -signal.SIGKILL]
    check_dump(tmp_path / "dump")


def test_probe(tmp_path: Path) -> None:
    """The same with TorchProbe's dump section, and the CSV rows of what was written are whole lines of whole steps."""
    codes = [o.code for o in pr.run(with_probe, str(tmp_path), "mix", ranks=2, directory=tmp_path, fails=True)]
    assert codes == [3, -signal.SIGKILL]
    check_dump(tmp_path / "dump")
    (directory,) = (d for d in (tmp_path / "monitor").iterdir() if "-rank1-" in d.name)
    text = (directory / "grad_reduced_0-99.csv").read_text()
    assert text.endswith("\n")
    lines = [line.split(",") for line in text.splitlines()[1:]]
    per_step = [sum(line[2] == str(step) for line in lines) for step in range(DEATH)]
    assert set(per_step[:-1]) == {per_step[0]}  # the last step may have been on its way
    assert per_step[0] > 20
    assert per_step[-1] in (0, per_step[0])


def with_slow_tensors(config: Path, steps: int, killed: bool) -> None:
    """Writer threads get the processor late, as beside a training that leaves none free; the kill comes right behind the last step."""
    work = TensorStore._work

    def late(*args: Any) -> None:
        time.sleep(0.02)
        work(*args)

    TensorStore._work = late  # type: ignore[method-assign]
    debugger = PrecisionDebugger(str(config))
    job = pr.gpt.Job(pr.TINY)
    for _ in range(steps):
        debugger.start(job.model)
        job.step()
        debugger.stop()
        debugger.step()
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    debugger.writer.close()


@pytest.mark.parametrize("form", [pytest.param("files", marks=pytest.mark.slow), "packed"])
@pytest.mark.slow
def test_tensors_of_finished_steps(tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Tensors of one finished step at most may be on their way; where they are, the step does not look whole. What is there is the same as
    without the kill."""
    for name, killed in (("golden", False), ("target", True)):
        config = pr.write_config(tmp_path / name, "mix", task="tensor")
        config.write_text(json.dumps({**json.loads(config.read_text()), "tensor": {"tensor_format": form}}))
        (outcome,) = pr.run(with_slow_tensors, config, DEATH, killed, directory=tmp_path, fails=True)
        assert outcome.code == (-signal.SIGKILL if killed else 0), outcome.log
    dump = open_dump(tmp_path / "target/dump")
    assert dump.steps == list(range(DEATH))
    assert [dump.load(step).complete for step in range(DEATH - 1)] == [True] * (DEATH - 1)
    last = dump.load(DEATH - 1)
    named = {tensor.data_name for entry in last.entries.values() for _, tensor in entry.tensors()} - {None}
    assert last.complete == (named <= set(last.files.names()))
    target, golden = (str(tmp_path / name / "dump") for name in ("target", "golden"))
    compare = ["compare", "-tp", target, "-gp", golden, "-o", str(tmp_path / "out")]
    for words in (compare, ["diagnose", target, golden, "-o", str(tmp_path / "page")]):
        capfd.readouterr()
        assert main(words) == 3
        said = "".join(capfd.readouterr())
        assert f"{last.directory}/dump.json: the process was killed before it wrote this file" in said
        if words is compare and not last.complete:
            assert f"{last.directory}/dump_tensor_data: there is no tensor" in said
