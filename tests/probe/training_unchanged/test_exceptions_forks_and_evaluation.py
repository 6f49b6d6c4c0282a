"""`TorchProbe` where the training does not go by the book: exceptions, forks, late process groups, evaluation, use after close."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import probe_ranks as pr
import pytest
import torch
import warm
from torch import nn

from msprobe_engine.core.settings.schema import DumpSettings, IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.capture.level import Capture
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework


def settings(output: Path, level: str = "mix") -> ProbeSettings:
    dump = DumpSettings(level=level)
    return ProbeSettings(
        output_dir=str(output), strict=True, monitor=MonitorSettings(), dump=dump, incident=IncidentSettings(enabled=False)
    )


SCRIPT = """
import sys
sys.path[:0] = {here!r}
from pathlib import Path
import probe_ranks as pr, test_exceptions_forks_and_evaluation as own
from msprobe_integrations.torch.monitor.probe import TorchProbe
probe = TorchProbe(own.settings(Path({output!r})))
job = pr.gpt.Job(pr.TINY)
probe.attach(job.model, job.optimizer)
for step in range(2):
    probe.begin_step(step)
    loss = job.forward()
    if step == 1:
        raise RuntimeError("the training broke")
    loss.backward()
    job.update()
    probe.end_step({{"loss": loss}})
"""


def test_exception_in_the_training(tmp_path: Path) -> None:
    """The step in which the training broke is written as far as it came and is marked as not complete; the exception is its own."""
    text = textwrap.dedent(SCRIPT).format(here=[str(Path(__file__).parent), str(Path(__file__).parents[1])], output=str(tmp_path))
    ran = warm.run(text, timeout=240)
    assert ran.returncode == 1
    assert "the training broke" in ran.stderr
    dump = open_dump(tmp_path / "dump")
    assert [dump.load(s).complete for s in dump.steps] == [True, False]
    assert "Functional.cross_entropy.0.forward" in dump.load(1).entries


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Says in which process it was read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((4,), float(i)) * 2


def with_workers(output: Path) -> int:
    net = nn.Sequential(nn.Linear(4, 4))
    probe = TorchProbe(settings(output))
    probe.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    probe.begin_step(0)
    step = 0
    for step, batch in enumerate(torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2)):  # forks inside the step
        net(batch).sum().backward()
        probe.end_step()
        probe.begin_step(step + 1)
    probe.end_step()
    child = os.fork()
    if child == 0:
        probe.begin_step(9)
        net(torch.ones(1, 4))
        probe.end_step()
        probe.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    probe.close()
    return step


def test_forks_inside_a_step(tmp_path: Path) -> None:
    """Workers forked inside a step, and any other child, see and write nothing; their parent goes on."""
    assert pr.run(with_workers, tmp_path, directory=tmp_path)[0].value == 1
    dump = open_dump(tmp_path / "dump")
    assert set(dump.steps) <= {0, 1, 2}
    assert all(len(dump.ranks(s)) == 1 for s in dump.steps)
    assert not [n for n in dump.load(0).entries if "mul" in n]
    assert "Module.0.Linear.forward.0" in dump.load(1).entries


def late_group(output: Path, box: Path) -> int:
    where = {k: os.environ.pop(k) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    probe = TorchProbe(settings(output / where["RANK"], level="L0"))
    net = nn.Sequential(nn.Linear(4, 4))
    probe.attach(net)
    for step in range(3):
        if step == 1:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{box}/late", rank=int(where["RANK"]), world_size=int(where["WORLD_SIZE"])
            )
        probe.begin_step(step)
        net(torch.ones(1, 4)).sum().backward()
        probe.end_step()
    probe.close()
    from msprobe_engine.core import log

    rank = log.current_rank()
    assert rank is not None
    return rank


def test_group_after_the_probe(tmp_path: Path) -> None:
    """A process group that comes up later is noticed: messages show the rank, and one of them says what to change."""
    done = pr.run(late_group, tmp_path, tmp_path, ranks=2, group=False, directory=tmp_path)
    assert [o.value for o in done] == [0, 1]
    assert len(done[1].lines("[rank 1]", "build the probe after joining them")) == 1


def evaluation(output: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    probe = TorchProbe(settings(output, level="L0"))
    probe.attach(net)
    probe.begin_step(0)
    net(torch.ones(1, 4)).sum().backward()
    probe.pause()
    net(torch.ones(1, 4))
    probe.resume()
    probe.end_step()
    probe.close()
    probe.close()
    probe.begin_step(1)
    net(torch.ones(1, 4))
    probe.end_step()


def test_pause_and_close(tmp_path: Path) -> None:
    """Between pause and resume nothing is seen; after close every call is harmless."""
    pr.run(evaluation, tmp_path, directory=tmp_path)
    dump = open_dump(tmp_path / "dump")
    assert dump.steps == [0]
    assert sorted(dump.load(0).entries) == ["Module.0.Linear.backward.0", "Module.0.Linear.forward.0", "Module.0.Linear.parameters_grad.0"]


def broken_debugger(config: Path) -> int:
    calls = 0

    def attach(_self: Capture, _models: object, anew: bool = False) -> None:  # noqa: ARG001
        nonlocal calls
        calls += 1
        raise RuntimeError("planted fault")

    Capture.attach = attach  # type: ignore[method-assign, assignment]
    debugger = PrecisionDebugger(str(config))
    net = nn.Sequential(nn.Linear(4, 4))
    for _ in range(3):
        debugger.start(net)
        net(torch.ones(1, 4))
        debugger.stop()
        debugger.step()
    return calls


def test_debugger_that_fails_is_off(tmp_path: Path) -> None:
    """When the message says that the dump is switched off, it is."""
    done = pr.run(broken_debugger, pr.write_config(tmp_path, "L0"), directory=tmp_path)[0]
    assert done.value == 1
    assert len(done.lines("dump is switched off", "planted fault")) == 1
