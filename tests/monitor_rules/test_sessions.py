"""Rules inside a session: steps that are not due, and alerts that do not wait for a step."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rule_trainings import Gpt, Recorder, Step, settings, train
from torch import nn

from msprobe_engine.core.settings.schema import MonitorSettings, RuleSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe

EVERY = 3


def test_history_survives_steps_that_are_not_due(tmp_path: Path) -> None:
    """With an interval of 3 the frames between hold no tensors: levels and running means go on where they were, and a fault is caught
    in the next monitored step."""

    def fault(step: Step) -> None:
        if step.number == 90:
            for parameter in step.model.layers[0].parameters():
                parameter.grad.mul_(500.0)

    rules = (RuleSettings(rule="exploding_gradient", kinds=("grad",)), RuleSettings(rule="turbulence", kinds=("grad",)))
    recorder = train(tmp_path, 92, model=Gpt(1), rules=rules, monitor=MonitorSettings(interval=EVERY), after_backward=fault)
    assert {(a.rule, a.step) for a in recorder.alerts} == {("exploding_gradient", 90), ("turbulence", 90)}


def test_a_stall_is_written_while_it_lasts(tmp_path: Path) -> None:
    """The alert of a stalled training reaches the sinks before the next step ends, and the end of the stall after it."""
    rules = (RuleSettings(rule="stalled", args={"minimum": 0.2, "warmup": 2}),)
    recorder = Recorder()
    model = nn.Linear(2, 2)
    probe = TorchProbe(settings(tmp_path, rules, MonitorSettings()), extra_sinks=[recorder])
    try:
        for step in range(4):
            probe.begin_step(step)
            model(torch.ones(1, 2)).sum().backward()
            probe.end_step()
        probe.begin_step(4)
        until = time.monotonic() + 60.0
        while not recorder.alerts and time.monotonic() < until:
            time.sleep(0.05)
        (alert,) = recorder.alerts
        assert (alert.rule, alert.name, bool(alert.extra["stack"])) == ("stalled", "steps", True)
        probe.end_step()
    finally:
        probe.close()
    assert [bool(a.extra.get("over")) for a in recorder.alerts] == [False, True]


def test_a_critical_stall_starts_an_incident(tmp_path: Path) -> None:
    """With severity critical the last steps are written to an incident directory while the training stands."""
    import dataclasses

    from msprobe_engine.core.settings.schema import IncidentSettings

    rules = (RuleSettings(rule="stalled", severity="critical", args={"minimum": 0.2, "warmup": 2}),)
    given = dataclasses.replace(settings(tmp_path, rules, MonitorSettings()), incident=IncidentSettings())
    probe = TorchProbe(given)
    try:
        for step in range(4):
            probe.begin_step(step)
            probe.end_step({"loss": 1.0 + step})
        until = time.monotonic() + 60.0
        while not list(tmp_path.glob("incidents/*/*")) and time.monotonic() < until:
            time.sleep(0.05)
        assert list(tmp_path.glob("incidents/*stalled*"))
    finally:
        probe.close()
