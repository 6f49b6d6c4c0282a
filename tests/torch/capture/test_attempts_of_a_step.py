"""`TorchProbe.attempts`: the very step is captured, and the training does not notice."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, RuleSettings, SinkSettings
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.torch.monitor.probe import TorchProbe

BAD = 3
STEPS = 6


class Sick(nn.Module):
    """Divides zero by zero as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.times:
            self.times -= 1
            zeros = torch.zeros_like(x)
            return x + zeros / zeros
        return x


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Sick(), nn.Linear(8, 2))


def settings(path: Path, level: str = "", **incident: Any) -> ProbeSettings:
    return ProbeSettings(
        output_dir=str(path),
        strict=True,
        monitor=MonitorSettings(),
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(level=level, **incident),
    )


def train(probe: TorchProbe | None, *, sick: int = 0, rank: int = 0, body: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """A loop as the page has it; returns what must not depend on the probe, and how often the body ran in each step."""
    net = network()
    model: nn.Module = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if probe is not None:
        probe.attach(model, optimizer)
    data = [torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * s + rank)) for s in range(STEPS)]
    runs, losses = [0] * STEPS, []
    torch.manual_seed(100 + rank)
    for step, batch in enumerate(data):
        net[3].times = sick if step == BAD else 0
        for attempt in [0] if probe is None else probe.attempts(step, reset=optimizer.zero_grad):
            runs[step] += 1
            body(attempt)
            loss = model(batch).square().mean()
            loss.backward()
        if step == BAD and sick:
            for p in model.parameters():  # the job's own way to go on after a bad step
                torch.nan_to_num_(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if probe is not None:
            probe.end_step({"loss": loss})
    if probe is not None:
        probe.close()
    return {
        "losses": torch.stack(losses).numpy().tobytes(),
        "weights": {n: t.numpy().tobytes() for n, t in net.state_dict().items()},
        "random": torch.get_rng_state().numpy().tobytes(),
        "runs": runs,
    }


def incident(path: Path) -> Path:
    (found,) = (p for p in (path / "incidents").iterdir() if p.name.startswith("step"))
    return found


@pytest.mark.parametrize("level", ["", "L0", "mix"])
@pytest.mark.parametrize("sick", [0, 2])
def test_same_training(tmp_path: Path, level: str, sick: int) -> None:
    """Losses, weights, running statistics and random state are bitwise those of the plain loop, with a fault and without; only
    the bad step runs twice."""
    plain = train(None, sick=sick)
    probed = train(TorchProbe(settings(tmp_path, level)), sick=sick)
    runs = probed.pop("runs")
    assert runs == [2 if sick and step == BAD else 1 for step in range(STEPS)]
    plain.pop("runs")
    assert probed == plain


def test_a_good_step_writes_nothing(tmp_path: Path) -> None:
    """Without an alert there is no incident directory."""
    train(TorchProbe(settings(tmp_path)))
    assert not list((tmp_path / "incidents").glob("step*"))


@pytest.mark.parametrize("level", ["", "L0", "L1", "mix"])
def test_the_very_step_is_named(tmp_path: Path, level: str) -> None:
    """Whatever is always on, also the monitor alone, the incident names step, module and operator, and says that it reproduced."""
    sink = MemorySink()
    train(TorchProbe(settings(tmp_path, level), extra_sinks=[sink]), sick=2)
    directory = incident(tmp_path)
    assert directory.name == f"step{BAD}-nan_inf"
    assert open_dump(directory / "rerun").steps == [BAD]
    found = nan_analyze(directory)
    first = found.findings[0]
    assert (first["step"], first["module"], first["cause"]) == (BAD, "3", "operator")
    assert "div" in first["operator"]
    assert f"second run of step {BAD}" in found.text
    facts = json.loads((directory / "incident.json").read_text())["rerun"]["0"]
    assert (facts["verdict"], facts["different"], facts["random_equal"]) == ("reproduced", 0, True)
    assert facts["compared"] >= 6
    assert "**reproduced**" in (directory / "summary.md").read_text()
    assert [frame.step for frame in sink.frames] == list(range(STEPS))


@pytest.mark.parametrize("level", ["", "L0"])
def test_one_record_per_step(tmp_path: Path, level: str) -> None:
    """The frame of a step that ran twice has the samples and calls of one run, and its alert once."""
    clean, bad = MemorySink(), MemorySink()
    monitor = MonitorSettings(activations=True, unreduced_gradients=True)
    for sink, sick in ((clean, 0), (bad, 2)):
        train(
            TorchProbe(ProbeSettings(**{**vars(settings(tmp_path / str(sick), level)), "monitor": monitor}), extra_sinks=[sink]), sick=sick
        )
    for a, b in zip(clean.frames, bad.frames, strict=True):
        assert [(s.family, s.name, s.phase) for s in a.samples] == [(s.family, s.name, s.phase) for s in b.samples]
        assert sorted(e.name for e in a.entries) == sorted(e.name for e in b.entries)
        assert a.level == b.level == level
    assert not clean.alerts
    assert {alert.step for alert in bad.alerts} == {BAD}
    names = [(alert.rule, alert.name, alert.extra.get("phase"), alert.extra.get("family")) for alert in bad.alerts]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("level", ["", "L0"])
def test_a_transient_fault_is_called_so(tmp_path: Path, level: str) -> None:
    """A fault that only the first run had is called transient; the training goes on with the second run's values; the alert stays."""
    sink = MemorySink()
    state = train(TorchProbe(settings(tmp_path, level), extra_sinks=[sink]), sick=1)
    clean = train(None)
    state.pop("runs"), clean.pop("runs")
    assert state == clean
    directory = incident(tmp_path)
    facts = json.loads((directory / "incident.json").read_text())["rerun"]["0"]
    assert facts["verdict"] == "transient"
    assert facts["different"] > 0
    assert "did not reproduce: transient" in (directory / "summary.md").read_text()
    assert any(alert.step == BAD and alert.severity == "critical" for alert in sink.alerts)
    text = nan_analyze(directory).text
    assert "did not reproduce" in text
    if level:
        assert text.startswith("First NaN: ")
        assert f"(step {BAD}, rank 0" in text.splitlines()[0]


def test_a_body_that_draws_on_other_chance(tmp_path: Path) -> None:
    """When the second run draws other random numbers, that is said with the first record that differs, and the training goes on with
    the first run's random state."""

    def body(attempt: int) -> None:
        if attempt:
            torch.rand(3)  # what dropout gets is not what it got

    probed = train(TorchProbe(settings(tmp_path, "L0")), sick=2, body=body)
    plain = train(None, sick=2)
    assert probed["random"] == plain["random"]
    facts = json.loads((incident(tmp_path) / "incident.json").read_text())["rerun"]["0"]
    assert facts["random_equal"] is False
    assert facts["verdict"] == "reproduced"
    assert facts["differences"][0].startswith("Module.2.Dropout")


class Stop(Exception):
    pass


@pytest.mark.parametrize("when", [0, 1])
def test_an_exception_in_the_body(tmp_path: Path, when: int) -> None:
    """An exception of either attempt reaches the loop, hooks come off, and what was captured until then is readable."""
    probe = TorchProbe(settings(tmp_path, "L0"))
    net = network()
    probe.attach(net)

    def loop() -> None:
        for step in range(2):
            net[3].times = 2
            for attempt in probe.attempts(step):
                net(torch.ones(6, 4))
                if attempt == when:
                    raise Stop
            probe.end_step()

    with pytest.raises(Stop):
        loop()
    probe.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    if when:
        dump = open_dump(incident(tmp_path) / "rerun").load(0, 0)
        assert not dump.complete
        assert any("div" in name for name in dump.entries)
        assert "did not reach its end" in (incident(tmp_path) / "summary.md").read_text()


def test_once_per_incident(tmp_path: Path) -> None:
    """While the fault lasts, steps within the cool-down of the incident run once."""
    probe = TorchProbe(settings(tmp_path, cooldown_steps=3))
    net = network()
    probe.attach(net)
    runs = []
    for step in range(9):
        net[3].times = 2
        runs.append(0)
        for _ in probe.attempts(step, reset=net.zero_grad):
            runs[-1] += 1
            net(torch.ones(6, 4)).sum().backward()
        net.zero_grad()
        probe.end_step()
    probe.close()
    assert runs == [2, 1, 1, 1, 2, 1, 1, 1, 2]


@pytest.mark.parametrize(("severity", "runs"), [("critical", 2), ("warning", 1)])
def test_extreme_values(tmp_path: Path, severity: str, runs: int) -> None:
    """A rule without history makes the step run again when its alert is critical."""
    rules = (RuleSettings(rule="extreme_value", severity=severity, args={"threshold": 1e3}),)
    probe = TorchProbe(ProbeSettings(**{**vars(settings(tmp_path)), "rules": rules}))
    net = network()
    probe.attach(net)
    seen = 0
    for _ in probe.attempts(0, reset=net.zero_grad):
        seen += 1
        (net(torch.ones(6, 4)) * 1e6).sum().backward()
    probe.end_step()
    probe.close()
    assert seen == runs


def test_without_incidents(tmp_path: Path) -> None:
    """With incidents switched off `attempts` is `begin_step`."""
    state = train(TorchProbe(settings(tmp_path, enabled=False)), sick=2)
    assert state["runs"] == [1] * STEPS


def on_ranks(box: Path, function: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """Fork gloo ranks; what `function(rank)` returned on each."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
                torch.set_num_threads(1)
                dist.init_process_group("gloo", init_method=f"file://{box}/meet", rank=rank, world_size=ranks)
                (box / f"{rank}.answer").write_bytes(pickle.dumps(function(rank)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    end = time.monotonic() + 60
    left = list(pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert not left, "a rank hangs"
    return [pickle.loads((box / f"{rank}.answer").read_bytes()) for rank in range(ranks)]


@pytest.mark.framework
@pytest.mark.parametrize("level", ["", "mix"])
def test_all_ranks_run_again(tmp_path: Path, level: str) -> None:
    """A fault on one of two ranks makes both run the step again, both write, the origin is named with its rank, and the training
    is that of the plain loop on both."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    plain = on_ranks(tmp_path / "a", lambda rank: train(None, sick=2 * rank, rank=rank))
    probed = on_ranks(tmp_path / "b", lambda rank: train(TorchProbe(settings(tmp_path / "out", level)), sick=2 * rank, rank=rank))
    for a, b in zip(plain, probed, strict=True):
        a.pop("runs")
        assert b.pop("runs") == [2 if step == BAD else 1 for step in range(STEPS)]
        assert a == b
    directory = incident(tmp_path / "out")
    assert open_dump(directory / "rerun").ranks(BAD) == [0, 1]
    merged = json.loads((directory / "incident.json").read_text())
    assert merged["ranks_complete"] == [0, 1]
    assert {facts["verdict"] for facts in merged["rerun"].values()} == {"reproduced"}
    (first,) = nan_analyze(directory).findings[:1]
    assert (first["step"], first["rank"], first["module"], first["cause"]) == (BAD, 1, "module.3", "operator")
    dump = open_dump(directory / "rerun").load(BAD, 0)
    assert all("all_reduce" not in name or "Distributed" in name for name in dump.entries)


def test_state_of_numpy_and_python_is_put_back(tmp_path: Path) -> None:
    """Python's and numpy's random numbers are the same in both runs."""
    import random

    drawn: list[tuple[float, float]] = []
    train(TorchProbe(settings(tmp_path)), sick=2, body=lambda _: drawn.append((random.random(), float(np.random.rand()))))
    assert len(drawn) == STEPS + 1
    assert drawn[BAD] == drawn[BAD + 1]
    assert len(set(drawn)) == STEPS
