"""Ranks that disagree about the probe: it is on some of them only, comes late, leaves early, or is switched off by a fault.

The rule: a rank that takes no part costs the others what cannot be merged or compared without it, and one message that names it. No step
and no close of any rank waits for it, losses are those of a run without the probe, and rows say whether they are merged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import parameter_cases as pc
import pytest
import torch.distributed as dist
from forkpool import run_ranks

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import (
    CsvSettings,
    IncidentSettings,
    MonitorSettings,
    ProbeSettings,
    ReplicaCheckSettings,
    RuleSettings,
    SinkSettings,
)
from msprobe_engine.core.statistics import rows as R
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler
from msprobe_integrations.common.ranks.members import Members
from msprobe_integrations.common.ranks.step_exchange import ABSENT_AT_END
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.ranks.merge import RowExchange

pytestmark = pytest.mark.framework
STEPS = 16
ODD = 1
"""The rank that differs."""
BOUND = 5.0
"""Seconds, of the slowest step and of a close. Each waited a minute for the rank that was missing; without it they take some 0.1 s."""


class Plan(NamedTuple):
    """What the odd rank does.

    Attributes:
        attach: step before which its probe is attached; -1: never.
        close: step in which its probe is closed, after the backward pass; -1: at the end.
        between: it is closed as soon as that step has ended instead.
        fault: step in which a fault switches its parameter monitor off; -1: none.
        unreadable: its settings cannot be read.
    """

    attach: int = 0
    close: int = -1
    fault: int = -1
    between: bool = False
    unreadable: bool = False

    def merged(self) -> list[str]:
        """Of every step: ``whole``, ``unknown``, or ``?`` where it depends on when a rank hears of another."""
        first = STEPS if self.attach < 0 else self.attach
        last = min(step for step in (self.close + self.between, self.fault, STEPS) if step >= 0)
        between = "?" if self.attach > 0 else "whole"
        return ["unknown"] * first + [between] * (last - first) + ["unknown"] * (STEPS - max(first, last))


PLANS = {
    "healthy": Plan(),
    "no probe": Plan(attach=-1),
    "settings cannot be read": Plan(attach=-1, unreadable=True),
    "attaches late": Plan(attach=3),
    "closes in a step": Plan(close=5),
    "closes between steps": Plan(close=5, between=True),
    "fault": Plan(fault=3),
}
SAID = {
    "no probe": "it has no probe, or one whose settings leave this out",
    "settings cannot be read": "it has no probe, or one whose settings leave this out",
    "attaches late": "have nothing of this step",
    "closes in a step": "its probe was closed",
    "closes between steps": "its probe was closed",
    "fault": "a fault has switched its probe off",
}
"""In a message of the other ranks of its groups."""


class Seen(NamedTuple):
    """What came of one rank."""

    slowest: float
    close: float
    scopes: list[str]
    said: list[str]
    bits: list[bytes]


def _settings(place: str) -> ProbeSettings:
    return ProbeSettings(
        output_dir=place,
        monitor=MonitorSettings(gradients=True, parameters=True, replica_check=ReplicaCheckSettings(interval=1)),
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(enabled=False),
    )


def _new_probe(plan: Plan, place: str, sink: MemorySink) -> TorchProbe | None:
    if not plan.unreadable:
        return TorchProbe(_settings(place), extra_sinks=[sink])
    wrong = Path(place, "probe.yaml")
    wrong.write_text("monitor: [")
    with contextlib.suppress(SettingsError):
        return TorchProbe.from_config(wrong)
    return None


def train(kind: str, plan: Plan | None) -> Seen:
    """One rank's training; None: without the probe."""
    rank = dist.get_rank()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    mine = plan if rank == ODD and plan is not None else Plan()
    model = pc.wrapped(kind, pc.net())
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    sink, probe, bits, slowest, close = MemorySink(), None, [], 0.0, 0.0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for number in range(STEPS):
            began = time.monotonic()
            if (plan is not None and number == mine.attach) or (mine.unreadable and number == 0):
                probe = _new_probe(mine, place, sink)
                logging.getLogger("msprobe").addHandler(handler)
                if probe is not None:
                    probe.attach(model, optimizer)
            if probe is not None:
                probe.begin_step(number)
            loss = model(pc.data(number)).square().mean()
            loss.backward()
            if probe is not None and number == mine.close and not mine.between:
                close = _timed_close(probe)
            with _broken_monitor(number == mine.fault):
                optimizer.step()
                if probe is not None:
                    probe.end_step({"loss": loss})
                    if number == mine.close and not probe.closed:
                        close = _timed_close(probe)
            optimizer.zero_grad()
            bits.append(loss.detach().numpy().tobytes())
            slowest = max(slowest, time.monotonic() - began)
        if probe is not None and not probe.closed:
            close = _timed_close(probe)
    dist.barrier()
    logging.getLogger("msprobe").removeHandler(handler)
    bits += [pc.whole(p).tobytes() for p in model.parameters()]
    return Seen(slowest, close, [_scope(frame) for frame in sink.frames], said, bits)


def _timed_close(probe: TorchProbe) -> float:
    began = time.monotonic()
    probe.close()
    return time.monotonic() - began


@contextlib.contextmanager
def _broken_monitor(broken: bool) -> Any:
    end_step = ParameterSampler.end_step

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    if broken:
        ParameterSampler.end_step = fail  # type: ignore[method-assign]
    yield
    ParameterSampler.end_step = end_step  # type: ignore[method-assign]


def _scope(frame: Frame) -> str:
    """Of the frame's updated parameters; "" without any."""
    scopes = {str(s.extra.get("scope", "")) for s in frame.samples if s.family == "param_updated"}
    return "/".join(sorted(scopes))


@pytest.mark.fast_cells("ddp-2-healthy")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)])
@pytest.mark.fast_cells("ddp-2-closes in a step", "ddp-2-healthy", "ddp-2-settings cannot be read")
def test_ranks_that_disagree_about_the_probe(kind: str, ranks: int, plan: str) -> None:
    """The rule above, for each way to disagree. With all ranks healthy everything is merged from the first step on, without a word."""
    plain = run_ranks(ranks, train, kind, None, timeout=240)
    seen = run_ranks(ranks, train, kind, PLANS[plan], timeout=240)
    print(f"{kind}, {plan}: slowest step {max(s.slowest for s in seen):.2f} s, close {max(s.close for s in seen):.2f} s")
    for rank in range(ranks):
        assert seen[rank].bits == plain[rank].bits
        assert seen[rank].slowest < BOUND
        assert seen[rank].close < BOUND
    partners = {"ddp": [], "fsdp2": [0], "hsdp": [0]}[kind]  # share shards with the odd rank
    for rank in range(ranks):
        if rank == ODD:
            continue
        expected = PLANS[plan].merged() if rank in partners else (["whole"] if kind != "ddp" else [""]) * STEPS
        assert len(seen[rank].scopes) == STEPS
        assert all(got == want or (want == "?" and got in ("whole", "shard")) for got, want in zip(seen[rank].scopes, expected)), (
            rank,
            seen[rank].scopes,
        )
        about = [text for text in seen[rank].said if SAID.get(plan, "\0") in text]
        concerned = rank in partners or (kind == "ddp" or rank == ODD + 2)  # the other copy of its shard
        if plan == "healthy":
            assert not [text for text in seen[rank].said if "cannot merge" in text or "said once" in text or "not made" in text]
        elif concerned:
            kinds = ["merge" in text or "statistics of sharded" in text for text in about]
            assert len(about) == len(set(kinds)) > 0, seen[rank].said  # one of rows, one of replicas
            assert f"rank {ODD}:" in about[0] or plan == "attaches late"
        else:
            assert not about
    if PLANS[plan].attach > 0 and partners:
        assert seen[0].scopes[-1] == seen[ODD].scopes[-1] == "whole"


@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
@pytest.mark.slow
def test_a_rank_that_goes_without_a_word(tmp_path: Path, way: str) -> None:
    """A rank that is killed or stands still says nothing: what waits for it is in the background, and ends with the process in time."""
    program = Path(__file__).with_name("silent_rank.py")
    began = time.monotonic()
    with subprocess.Popen([sys.executable, program, way, tmp_path / "init"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        code = process.wait(60)
        os.kill(said["child"], signal.SIGKILL)
    assert code == 0
    assert said["slowest"] < 1.0
    assert said["close"] < BOUND
    assert time.monotonic() - began < 60


def _askers() -> tuple[int, int, float]:
    """Questions to the store on the thread of the training and on others, and milliseconds until the group is there."""
    asked: list[int] = []
    add = Members._add

    def note(members: Members, *args: Any) -> int:
        asked.append(threading.get_ident())
        return add(members, *args)

    Members._add = note  # type: ignore[method-assign]
    began = time.monotonic()
    exchange = RowExchange()
    while not exchange.connected and time.monotonic() < began + 30:
        time.sleep(0.0005)
    took = time.monotonic() - began
    for step in range(200):
        edit = exchange.merge(step, ["a"], [0])
        rows = R.empty(1)
        edit.start(rows)
        edit.wait(10)
        assert edit.merged is not None
    exchange.close()
    return asked.count(threading.get_ident()), len(asked), 1000 * took


def test_the_training_asks_nobody() -> None:
    """The training's thread makes no round trip at all, and while ranks answer nobody makes one: the questions of a healthy start and end
    are few, and do not grow with the steps."""
    for of_training, of_all, took in run_ranks(2, _askers):
        print(f"group there after {took:.1f} ms, {of_all} questions to the store")
        assert of_training == 0
        assert of_all < 60


def _attempts_of_one() -> tuple[float, list[int]]:
    """Rank 0 tries steps again, rank 1 has no probe: seconds of the slowest step, and attempts in all."""
    slowest, attempts = 0.0, []
    with tempfile.TemporaryDirectory() as place:
        probe = None
        if dist.get_rank() == 0:
            rules = (RuleSettings(rule="nan_inf"),)
            settings = ProbeSettings(output_dir=place, rules=rules, incident=IncidentSettings(enabled=True, capture_level=""))
            probe = TorchProbe(settings)
        model = pc.wrapped("ddp", pc.net())
        if probe is not None:
            probe.attach(model)
        for step in range(4):
            began = time.monotonic()
            for attempt in probe.attempts(step) if probe is not None else [0]:
                attempts.append(attempt)
                model(pc.data(step)).square().mean().backward()
            if probe is not None:
                probe.end_step()
            slowest = max(slowest, time.monotonic() - began)
        if probe is not None:
            probe.close()
    return slowest, attempts


def test_attempts_need_all_ranks() -> None:
    """Where not all ranks try steps again none does: the first step finds out in a few seconds, later ones do not look."""
    for slowest, attempts in run_ranks(2, _attempts_of_one):
        assert slowest < BOUND
        assert attempts == [0] * 4


def _close_beside(other: str) -> tuple[float, list[str]]:
    """Rank 0 has the replica check; rank 1 has `other`. Seconds of the close, and what was said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("msprobe").addHandler(handler)
    close = 0.0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        model = pc.wrapped("ddp", pc.net())
        optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
        probe = None
        if dist.get_rank() == 0:
            probe = TorchProbe(_settings(place))
        elif other == "a probe without the check":
            probe = TorchProbe(replace(_settings(place), monitor=MonitorSettings(gradients=True)))
        if probe is not None:
            probe.attach(model, optimizer)
        for step in range(4):
            if probe is not None:
                probe.begin_step(step)
            model(pc.data(step)).square().mean().backward()
            optimizer.step()
            if probe is not None:
                probe.end_step()
            optimizer.zero_grad()
            time.sleep(ABSENT_AT_END / 3)
        if probe is not None:
            close = _timed_close(probe)
        dist.barrier()
    logging.getLogger("msprobe").removeHandler(handler)
    return close, said


@pytest.mark.parametrize("other", ["no probe", "a probe without the check"])
def test_the_end_does_not_wait_for_ranks_that_had_time_to_come(other: str) -> None:
    """A rank that has taken no part for seconds of training is not waited for at the end, and what is said of it is true of both."""
    (close, said), _ = run_ranks(2, _close_beside, other, timeout=240)
    print(f"close {close:.2f} s")
    assert close < ABSENT_AT_END
    (about,) = [text for text in said if "replicas on ranks" in text]
    assert "rank 1: it has no probe, or one whose settings leave this out" in about
