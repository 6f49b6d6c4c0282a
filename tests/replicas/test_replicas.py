"""The replica check in plain torch, DDP, FSDP2 and HSDP: what it finds, when, and that it costs the training not a bit."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks
from replica_cases import Ears, Said, Step, flip_a_bit, leaf, settings, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from msprobe_engine.core import log
from msprobe_engine.core.settings.schema import ReplicaCheckSettings, RuleSettings
from msprobe_integrations.common.shutdown import signal_shutdown
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.ranks.replica_channel import Channel

pytestmark = pytest.mark.framework
SMALL = "a.weight"


def name_of(kind: str) -> str:
    return f"module.{SMALL}" if kind == "ddp" else SMALL


def flipped(kind: str, at: int, steps: int, guilty: int, **how: Any) -> list[Said]:
    def fault(step: Step) -> None:
        if step.number == at and step.rank == guilty:
            flip_a_bit(leaf(step.model, name_of(kind)))

    return train(kind, steps, after_update=fault, **how)[0].said()


def test_a_flipped_bit_is_found_and_its_rank_named() -> None:
    """One bit of one of three DDP replicas flips after step 2: the check of step 4 names parameter and rank, on rank 0 only, once, with
    a frame of the next two steps at the latest."""
    first, *others = run_ranks(3, flipped, "ddp", 2, 8, 1)
    assert others == [[], []]
    (alert,) = first
    assert alert[:7] == (4, "param", SMALL, "dp", (0, 1, 2), (1,), False)
    assert alert.frame <= 6


def test_of_two_both_are_named() -> None:
    """With two replicas nobody knows which one is right."""
    first, second = run_ranks(2, flipped, "ddp", 0, 5, 1)
    assert [(a.step, a.minority) for a in first] == [(2, (0, 1))]
    assert second == []


@pytest.mark.slow
def test_copies_along_a_mesh_dimension() -> None:
    """HSDP: of 2 x 2 ranks the two that hold the same part are compared; the lower one of them speaks."""
    said = run_ranks(4, flipped, "hsdp", 0, 5, 3)
    assert [len(alerts) for alerts in said] == [0, 1, 0, 0]
    assert said[1][0][:6] == (2, "param", SMALL, "replica", (1, 3), (1, 3))


def test_the_last_check_of_a_run_is_heard() -> None:
    """What differs in the very last step is said before the files are closed."""
    (alert,) = run_ranks(2, flipped, "ddp", 1, 3, 1)[0]
    assert (alert.step, alert.name) == (2, SMALL)


def result_within_the_last_end_step() -> list[Said]:
    poll, submit = Channel.poll, Channel.submit

    def arrives(channel: Channel, step: int, *check: Any) -> None:
        if step == 2:
            Channel.poll = poll  # type: ignore[method-assign]
            while not channel.idle:
                channel.poll()
        submit(channel, step, *check)

    Channel.poll, Channel.submit = lambda _: None, arrives  # type: ignore[method-assign,assignment]
    return flipped("ddp", 0, 3, 1, replica_check=ReplicaCheckSettings(interval=1))


def test_a_result_that_arrives_when_no_step_follows() -> None:
    """What a check of an earlier step has found is said also when its result comes while the last step is being closed."""
    assert [(alert.step, alert.name) for alert in run_ranks(2, result_within_the_last_end_step)[0]] == [(1, SMALL)]


def close_without_an_answer() -> list[str]:
    lines: list[str] = []
    logger = log.get_logger()
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    close = Channel.close

    def stays(channel: Channel) -> None:
        dist.barrier()
        close(channel)

    if dist.get_rank() == 0:
        signal_shutdown.get_seconds_left = lambda: 1.0  # as when a signal has arrived
    else:
        Channel.submit, Channel.close = lambda *_: None, stays  # type: ignore[method-assign,assignment]
    train("ddp", 3, replica_check=ReplicaCheckSettings(interval=1))
    if dist.get_rank() == 0:
        dist.barrier()
    return [line for line in lines if "have no result" in line]


def test_checks_that_have_no_result_are_counted() -> None:
    """A close waits for the other ranks as long as it may, and then says how many checks of which ranks have no result."""
    first, second = run_ranks(2, close_without_an_answer)
    assert second == []
    assert len(first) == 1
    assert "replicas on ranks 0-1: 3 checks have no result" in first[0]


def start_apart(healed: bool) -> list[Said]:
    def apart(step: Step) -> None:
        if step.rank == 1:
            leaf(step.model, name_of("ddp")).add_(1.0)

    def heal(step: Step) -> None:
        if healed and step.number == 3:
            dist.broadcast(leaf(step.model, name_of("ddp")), 0)
            for state in step.optimizer.state.values():
                for tensor in state.values():
                    dist.broadcast(tensor, 0)

    return train("ddp", 9, after_build=apart, after_update=heal, replica_check=ReplicaCheckSettings(interval=4))[0].said()


@pytest.mark.parametrize("healed", [False, True])
def test_replicas_that_start_apart(healed: bool) -> None:
    """The first step is checked: what was broadcast wrongly is found there, said once, and that it is over is said too."""
    said = run_ranks(2, start_apart, healed)[0]
    assert [(a.step, a.over) for a in said if a.name == SMALL] == ([(0, False), (4, True)] if healed else [(0, False)])


def gradients(parameters: bool) -> list[Said]:
    def fault(step: Step) -> None:
        if step.number == 2 and step.rank == 1:
            flip_a_bit(dict(step.model.named_parameters())["module.b.bias"].grad)

    check = ReplicaCheckSettings(interval=2, parameters=parameters, gradients=True)
    return train("ddp", 5, after_backward=fault, replica_check=check)[0].said()


@pytest.mark.parametrize("parameters", [False, True])
def test_reduced_gradients(parameters: bool) -> None:
    """A gradient that differs after the reduction is found in its own step."""
    said = run_ranks(2, gradients, parameters)[0]
    assert said[0][:4] == (2, "grad", "b.bias", "dp")
    assert {a.kind for a in said} == {"grad"} | ({"param"} if parameters else set())
    assert [(a.step, a.kind) for a in said if a.over] == [(4, "grad")]


def with_interval(families: bool) -> list[Said]:
    more = {"gradients": True, "parameters": True, "digest": True} if families else {}
    return flipped("ddp", 2, 9, 1, interval=3, start_step=1, replica_check=ReplicaCheckSettings(interval=4), **more)


@pytest.mark.parametrize("families", [False, True])
def test_steps_do_not_depend_on_the_monitor(families: bool) -> None:
    """Its interval counts step numbers, whatever the families do; rows with digests are used again."""
    assert [(a.step, a.name) for a in run_ranks(2, with_interval, families)[0]] == [(4, SMALL)]


def chosen() -> list[Said]:
    return flipped("ddp", 0, 5, 2, rank=(1, 2))


def test_some_ranks_monitor() -> None:
    """With `monitor.rank` those ranks are compared."""
    said = run_ranks(3, chosen)
    assert [[a.ranks for a in alerts] for alerts in said] == [[], [(1, 2)], []]


def healthy(kind: str) -> tuple[list[Said], int]:
    check = ReplicaCheckSettings(interval=1, gradients=True)
    ears, bits = train(kind, 4, replica_check=check, rules=[RuleSettings(rule="recommended")])
    _, plain = train(kind, 4, probe=False)
    assert bits == plain, "the training is the same with the check and without"
    return ears.said(), len(ears.frames)


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)])
@pytest.mark.fast_cells("ddp-2")
def test_equal_replicas_are_silent(kind: str, ranks: int) -> None:
    """Nothing is said, every frame comes, and parameters are bitwise those of a run without the probe."""
    assert run_ranks(ranks, healthy, kind) == [([], 4)] * ranks


def nans() -> list[Said]:
    def fault(step: Step) -> None:
        tensor = leaf(step.model, name_of("ddp")).view(-1)
        tensor[0] = float("nan")
        if step.rank == 1 and step.number == 2:
            tensor.view(torch.int32)[0] ^= 1

    return train("ddp", 3, after_update=fault)[0].said()


def test_nan_is_compared_by_its_bits() -> None:
    """The same NaN on both ranks is no difference, another NaN is."""
    assert [a.step for a in run_ranks(2, nans)[0]] == []


def one_is_off() -> tuple[int, float]:
    """Rank 1 has no probe for the first steps' exchanges: it attaches, and never ends a step."""
    import time

    import parameter_cases as pc

    model = pc.wrapped("ddp", pc.net())
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    ears = Ears()
    with tempfile.TemporaryDirectory() as place:
        probe = TorchProbe(settings(place, replica_check=ReplicaCheckSettings(interval=1)), extra_sinks=[ears])
        probe.attach(model, optimizer)
        begin = time.monotonic()
        for number in range(20):
            if dist.get_rank() == 0:
                probe.begin_step(number)
            model(pc.data(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                probe.end_step()
        took = time.monotonic() - begin
        dist.barrier()
        probe.close()
    return len(ears.frames), took


def test_a_rank_without_a_probe() -> None:
    """Its absence costs the others the check and no time: frames come, the training goes on, closing is bounded."""
    frames, took = run_ranks(2, one_is_off)[0]
    assert frames == 20
    assert took < 10


def incident(place: str) -> None:
    def fault(step: Step) -> None:
        if step.number == 2 and step.rank == 1:
            flip_a_bit(leaf(step.model, name_of("ddp")))

    train("ddp", 40, after_update=fault, place=place, incident="critical", gradients=True)  # the other rank hears of it some steps later


def test_a_mismatch_is_an_incident_of_all_ranks(tmp_path: Path) -> None:
    """It is critical: the ring of every rank is written, and the summary names parameter, group and ranks."""
    run_ranks(2, incident, str(tmp_path))
    (directory,) = (tmp_path / "incidents").iterdir()
    assert directory.name == "step4-replica_mismatch"
    assert {path.name for path in directory.iterdir()} >= {"samples_rank0.jsonl", "samples_rank1.jsonl"}
    assert "parameter a.weight" in (directory / "summary.md").read_text()


def warning(place: str) -> None:
    def fault(step: Step) -> None:
        if step.number == 4 and step.rank == 1:
            step.optimizer.param_groups[0]["params"][0].grad[0, 0] = 1e12  # this rank's alone: after the reduction

    rules = [RuleSettings(rule="extreme_value")]
    everything: dict[str, Any] = dict.fromkeys(("gradients", "parameters", "optimizer_states", "updates", "activations"), True)
    everything["replica_check"] = ReplicaCheckSettings()  # it would say more, critically
    train("ddp", 24, after_backward=fault, place=place, incident="warning", rules=rules, **everything)


def test_any_rule_on_any_rank_writes_all_rings(tmp_path: Path) -> None:
    """With `incident.severity: warning` a warning of rank 1 makes rank 0, which saw nothing, write its last steps too: every family."""
    run_ranks(2, warning, str(tmp_path))
    directory = tmp_path / "incidents" / "step4-extreme_value"
    for rank in (0, 1):
        lines = [json.loads(line) for line in (directory / f"samples_rank{rank}.jsonl").read_text().splitlines()]
        families = {line["family"] for line in lines if "family" in line}
        assert families >= {"grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq", "update", "ratio", "actv"}
        assert {line["step"] for line in lines if "step" in line} >= {0, 1, 2, 3, 4}
    assert json.loads((directory / "incident.json").read_text())["began"]["ranks"] == [1]


def replicated_dtensors() -> list[Said]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def spread(_name: str, module: nn.Module, where: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), where, [Replicate()])))

    torch.manual_seed(0)
    model = distribute_module(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), mesh, spread)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ears = Ears()
    with tempfile.TemporaryDirectory() as place:
        probe = TorchProbe(settings(place), extra_sinks=[ears])
        probe.attach(model, optimizer)
        for step in range(4):
            probe.begin_step(step)
            x = distribute_tensor(torch.randn(8, 4, generator=torch.Generator().manual_seed(step)), mesh, [Replicate()])
            model(x).square().mean().backward()
            optimizer.step()
            if step == 1 and dist.get_rank() == 0:
                flip_a_bit(leaf(model, "1.weight"))
            optimizer.zero_grad()
            probe.end_step()
        probe.close()
    return ears.said()


@pytest.mark.slow
def test_replicated_dtensors() -> None:
    """Tensor parallel parameters that are placed as `Replicate` are compared along their dimension of the mesh."""
    first, second = run_ranks(2, replicated_dtensors)
    assert second == []
    assert ("1.weight", "tp", (0, 1)) in [(said.name, said.group, said.ranks) for said in first if said.step == 2]


def switched_on() -> list[Said]:
    def at_step(probe: TorchProbe, step: int) -> None:
        if step == 6:  # what the check of step 3 found has arrived, however slow this machine is: switched off, it would be dropped
            probe.drain()
            probe.parameters.replicas.finish(60.0)
        if step in (3, 6):
            assert probe.monitor is not None
            probe.apply_monitor_settings(replace(probe.monitor, replica_check=ReplicaCheckSettings(interval=100 if step == 3 else 0)))

    def fault(step: Step) -> None:
        if step.rank == 1 and step.number in (1, 7):
            flip_a_bit(leaf(step.model, name_of("ddp") if step.number == 1 else "module.b.weight"))

    return train("ddp", 10, after_update=fault, at_step=at_step, replica_check=ReplicaCheckSettings())[0].said()


def test_switched_on_while_the_training_runs() -> None:
    """The first step after the check is switched on is compared, none after it is switched off."""
    said = run_ranks(2, switched_on)[0]
    assert (3, SMALL) in [(a.step, a.name) for a in said]
    assert {a.step for a in said} == {3}
