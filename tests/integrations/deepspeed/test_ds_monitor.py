"""DeepSpeed's monitor, both ways: its events are scalars of the step, and our scalars and alerts reach the user's writers."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
from forkpool import run_ranks

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import CsvSettings, DeepSpeedMonitorSettings, MonitorSettings, SinkSettings
from msprobe_integrations.deepspeed import monitor

SINKS = SinkSettings(csv=CsvSettings(enabled=False), memory=True, deepspeed=DeepSpeedMonitorSettings(enabled=True))


def written(directory: str) -> Any:
    conf = harness.config(1, "fp16", 2, 0.05, csv_monitor={"enabled": True, "output_path": directory, "job_name": "job"}, steps_per_print=1)
    run = jobs.train(conf, "fp16", 3, {"monitor": MonitorSettings(), "sinks": SINKS})
    return [f.scalars for f in run.frames]


def rows(file: Path) -> list[tuple[int, float]]:
    return [(int(step), float(value)) for step, value in list(csv.reader(file.open()))[1:]]


@pytest.mark.framework
def test_both_ways() -> None:
    """The real csv_monitor has our numbers of every step, at that step's number of samples, once, written by rank 0; what DeepSpeed wrote
    itself is untouched."""
    with tempfile.TemporaryDirectory() as directory:
        scalars = run_ranks(2, written, directory)[0]
        files = {file.name: rows(file) for file in Path(directory).glob("job/*.csv")}
        samples = [16, 32, 48]  # 4 per micro batch, 2 micro batches, 2 ranks
        assert [step for step, _ in files["Train_Samples_lr.csv"]] == samples
        for name in ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped"):
            got = files[f"msprobe_{name}.csv"]
            assert [step for step, _ in got] == samples
            assert [value for _, value in got] == [pytest.approx(frame[name]) for frame in scalars]


def frame(step: int, **scalars: float) -> Frame:
    import numpy as np

    return Frame(step, 0, np.zeros((0, 16)), scalars=scalars)


class Writers:
    def __init__(self, wandb: bool = False) -> None:
        self.enabled = True
        self.wandb_monitor = object() if wandb else None
        self.events: list[Any] = []

    def write_events(self, events: Any) -> None:
        self.events.extend(events)


class Engine:
    def __init__(self, wandb: bool = False) -> None:
        self.monitor = Writers(wandb)
        self.global_steps = self.global_samples = 0


def alert(rule: str) -> Alert:
    return Alert(rule, "critical", "grad", "w", 0, 0, 1.0, "less", "text")


def test_alerts_and_bounds() -> None:
    """Alerts are counted by rule and come first; a step has so many events at most, and steps that nobody fetches are forgotten."""
    sink, engine = monitor.MonitorSink(), Engine()
    sink.attach(engine)
    for step in range(monitor.STEPS + 10):
        sink.write(frame(step, **{f"s{i}": float(i) for i in range(100)}), [alert("nan_inf"), alert("nan_inf"), alert("extreme_value")])
    sink.hand_over(engine.monitor.write_events)
    events = engine.monitor.events
    assert len(events) == monitor.STEPS * monitor.PER_STEP
    assert events[:2] == [("msprobe/alerts/extreme_value", 1.0, 0), ("msprobe/alerts/nan_inf", 2.0, 0)]


@pytest.mark.parametrize("wandb", [False, True])
def test_the_axis(wandb: bool) -> None:
    """A frame that comes late is written at its own number of samples, but where a writer's axis has to grow at that of now."""
    sink, engine = monitor.MonitorSink(), Engine(wandb)
    sink.attach(engine)
    for step in range(3):
        engine.global_steps, engine.global_samples = step + 1, 8 * (step + 1)
        if step == 2:
            sink.write(frame(0, loss=1.0, bad=float("nan")), [])
        sink.hand_over(engine.monitor.write_events)
    assert engine.monitor.events == [("msprobe/loss", 1.0, 24 if wandb else 8)]


def test_events_of_deepspeed_are_scalars() -> None:
    """Names of the probe for DeepSpeed's own events; an evaluation's loss and what is no number are none."""
    events = [
        ("Train/Samples/lr", 0.1, 8),
        ("Train/Samples/train_loss", 2, 8),
        ("Train/Samples/eval_loss", 3.0, 8),
        ("mine/x", 1.0, 8),
        ("bad",),
    ]
    assert monitor.scalars_of(events) == {"learning_rate": 0.1, "loss": 2.0}
    assert monitor.scalars_of(None) == {}
