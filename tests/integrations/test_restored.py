"""Detaching puts back every name of torch, every kernel and every handler of the process, by identity."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_family import EVERY_FAMILY
from forkpool import run_ranks
from harness.restored import snapshot
from torch import nn

from msprobe_engine.core.settings.schema import (
    CsvSettings,
    IncidentSettings,
    ProbeSettings,
    ReplicaCheckSettings,
    RuleSettings,
    SinkSettings,
)

pytestmark = pytest.mark.framework
EVERYTHING = replace(
    EVERY_FAMILY,
    collectives=True,
    collective_inputs=True,
    ops=("norm", "min", "max", "mean", "nans", "zeros", "underflow"),
    replica_check=ReplicaCheckSettings(interval=2),
)


class Training:
    """A model and its optimizer; `step` is one update with a collective in it."""

    def __init__(self, sharded: bool = False) -> None:
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        if sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.net(torch.ones(3, 4)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        dist.all_reduce(loss.detach(), async_op=True).wait()
        self.optimizer.step()


def left(use: Callable[[Training, Path], None], place: str, sharded: bool = False) -> list[str]:
    """What `use` has left behind of a training that was under way."""
    training = Training(sharded)
    training.step()  # what torch makes at its first use is there
    before = snapshot(training.net, training.optimizer)
    generator = torch.get_rng_state()
    use(training, Path(place))
    assert torch.equal(generator, torch.get_rng_state())
    return before.changed(lambda place: place == "process.threads" and use is tensors)  # its writers are there until the process ends


def settings(place: Path, **keys: Any) -> ProbeSettings:
    given: dict[str, Any] = {"monitor": EVERYTHING, "rules": (RuleSettings(rule="recommended"),), **keys}
    return ProbeSettings(output_dir=str(place), strict=True, log_level="silent", sinks=SinkSettings(csv=CsvSettings(enabled=True)), **given)


def probe(training: Training, place: Path) -> None:
    from msprobe_integrations.torch.monitor.probe import TorchProbe

    one = TorchProbe(settings(place, incident=IncidentSettings(enabled=True, level="mix")))
    one.attach(training.net, training.optimizer)
    for step in range(3):
        one.begin_step(step)
        training.step()
        one.end_step({"loss": 1.0})
    one.close()


def loop(training: Training, place: Path) -> None:
    from msprobe_integrations.torch.training.loop import LoopObserver

    observer = LoopObserver(settings(place))
    observer.setup(training.net, training.optimizer)
    for _ in range(3):
        observer.begin()
        training.step()
        observer.end()
    observer.close()


def debugger(training: Training, place: Path, task: str = "statistics", level: str = "mix", **keys: Any) -> None:
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

    one = PrecisionDebugger({"task": task, "level": level, "dump_path": str(place), task: {}, **keys})
    for _ in range(2):
        one.start(training.net)
        training.step()
        one.stop()
        one.step()
    one._at_exit()  # a debugger ends with the process
    atexit.unregister(one._at_exit)
    PrecisionDebugger._instance = None


def modules(training: Training, place: Path) -> None:
    debugger(training, place, level="L0")


def functions(training: Training, place: Path) -> None:
    debugger(training, place, level="L1")


def mixed(training: Training, place: Path) -> None:
    debugger(training, place)


def tensors(training: Training, place: Path) -> None:
    debugger(training, place, task="tensor")


def grad_probe(training: Training, place: Path) -> None:
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

    one = PrecisionDebugger({"task": "grad_probe", "dump_path": str(place), "grad_probe": {"grad_level": "L2"}})
    one.monitor(training.net)
    training.step()
    training.step()
    one.stop()
    one._at_exit()
    atexit.unregister(one._at_exit)
    PrecisionDebugger._instance = None


def trainer_mon(training: Training, place: Path) -> None:
    from msprobe.pytorch import TrainerMon

    keys = ("xy_distribution", "wg_distribution", "param_distribution", "mv_distribution", "ur_distribution")
    (place / "monitor.json").write_text(json.dumps({"targets": {}, "cc_distribution": {"enable": True}, **dict.fromkeys(keys, True)}))
    one = TrainerMon(place / "monitor.json")
    one.set_monitor(training.net, training.optimizer, grad_acc_steps=1)
    training.step()
    training.step()
    one.stop()


@pytest.mark.fast_cells("loop")
@pytest.mark.parametrize("use", [probe, loop, modules, functions, mixed, tensors, grad_probe, trainer_mon])
def test_plain(use: Callable[[Training, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank nothing is left behind."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    assert run_ranks(1, left, use, str(tmp_path)) == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("use", [probe, mixed, trainer_mon])
def test_fsdp2(use: Callable[[Training, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FSDP2 on two ranks nothing is left behind."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    assert run_ranks(2, left, use, str(tmp_path), True) == [[], []]


def test_the_picture_sees_what_changes() -> None:
    """A replaced function, a replaced method, a hook in a global table, a hook of a module, a kernel of an operator and a handler are each
    named; when they are put back there is nothing to say."""
    run_ranks(1, picture)


def picture() -> None:
    net = nn.Linear(2, 2)
    before = snapshot(net)
    original, method = dist.all_reduce, torch.optim.Optimizer.step
    dist.all_reduce = torch.optim.Optimizer.step = print  # type: ignore[assignment,method-assign]
    handles = [nn.modules.module.register_module_forward_hook(print), net.register_forward_hook(print), net.weight.register_hook(print)]
    library = torch.library.Library("c10d", "IMPL")
    library.impl("barrier", lambda *_: None, "BackendSelect")
    found = before.changed()
    for place in (
        "torch.distributed.all_reduce: replaced",
        "torch.optim.optimizer.Optimizer.step: replaced",
        "torch.nn.modules.module._global_forward_hooks",
        "object 0 (Linear)._forward_hooks",
        "object 0 (Linear).weight._backward_hooks",
        "kernel.c10d::barrier",
    ):
        assert any(line.startswith(place) for line in found), (place, found)
    dist.all_reduce, torch.optim.Optimizer.step = original, method  # type: ignore[method-assign]
    for handle in handles:
        handle.remove()
    library._destroy()
    assert before.changed() == []
