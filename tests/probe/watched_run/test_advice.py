"""A loop that forgets something is told what, once; one that does not is told nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.settings.schema import DumpSettings, IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe


def train(case: str, directory: Path, monitor: MonitorSettings) -> None:
    """Five steps of a loop that forgets what `case` says."""
    probe = TorchProbe(ProbeSettings(output_dir=str(directory), monitor=monitor))
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"optimizer": (model,), "the right one": (model, torch.optim.SGD(other.parameters(), lr=0.1)), "order": (optimizer, model)}
    if case != "attach":
        probe.attach(*given.get(case, (model, optimizer)))  # type: ignore[arg-type]
    for step in range(5):
        if case != "begin_step":
            probe.begin_step(step)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if case != "end_step":
            probe.end_step({"loss": 1.0})
    probe.close()


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("attach", "no model is watched: call attach(model, optimizer)"),
        ("optimizer", "monitor.gradients, monitor.parameters: attach was given no optimizer"),
        ("the right one", "no update by SGD was seen in 3 steps"),
        ("begin_step", "end_step was called without begin_step"),
    ],
)
def test_what_was_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, text: str) -> None:
    """One warning names it and what to do."""
    train(case, tmp_path, MonitorSettings(parameters=True))
    assert [text in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [True]


@pytest.mark.parametrize("case", ["nothing", "end_step"])
def test_nothing_was_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    """A right loop has no warning; nor has one whose steps end where the next one begins."""
    train(case, tmp_path, MonitorSettings(parameters=True, activations=True))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_optimizer_that_cannot_be_watched_was_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When watching it fails, the fault is said, and not that no optimizer was given."""

    def find(*_: object) -> None:
        raise RuntimeError("planted")

    probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), monitor=MonitorSettings()))
    model = nn.Linear(2, 2)
    probe.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), find=find)
    for step in range(5):
        probe.begin_step(step)
        probe.end_step({"loss": 1.0})
    probe.close()
    assert ["planted" in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [True]


def test_a_step_that_nobody_ends_is_over_when_the_next_begins(tmp_path: Path) -> None:
    """Every step has its own rows under its own number; the last one ends with the probe."""
    train("end_step", tmp_path, MonitorSettings())
    (table,) = tmp_path.glob("monitor/*/grad_reduced_*.csv")
    assert [(line.split(",")[1], line.split(",")[2]) for line in table.read_text().splitlines()[1:]] == [
        (name, str(step)) for step in range(5) for name in ("weight", "bias")
    ]


def test_numbers_without_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loss given as it is costs the number, not the step; it is said once, and `strict` raises."""
    for strict in (False, True):
        probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path / str(strict)), strict=strict, monitor=MonitorSettings()))
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe.attach(model, optimizer)
        for step in range(2):
            probe.begin_step(step)
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
            if not strict:
                probe.end_step(loss)  # type: ignore[arg-type]
                continue
            with pytest.raises(UsageError, match="end_step: Tensor is not allowed; allowed: names and numbers"):
                probe.end_step(loss)  # type: ignore[arg-type]
        probe.close()
    assert caplog.text.count("the step is written without them") == 1
    (table,) = tmp_path.glob("False/monitor/*/grad_reduced_*.csv")
    assert len(table.read_text().splitlines()) == 1 + 2 * 2


def test_no_optimizer_is_needed_for_activations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without an optimizer nothing is said when nothing of it is asked for, nor before the first monitored step."""
    train("optimizer", tmp_path / "a", MonitorSettings(gradients=False, activations=True))
    train("optimizer", tmp_path / "b", MonitorSettings(start_step=100))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_arguments_in_the_wrong_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Something that is no model is named; `strict` raises."""
    train("order", tmp_path, MonitorSettings())
    assert "attach: the model is of type SGD; give the module" in caplog.text
    probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), strict=True, monitor=MonitorSettings()))
    with pytest.raises(UsageError, match="the model is of type SGD"):
        probe.attach(torch.optim.SGD([nn.Parameter(torch.ones(1))]), None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the optimizer is a module"):
        probe.attach(nn.Linear(1, 1), nn.Linear(1, 1))
    probe.close()


def test_the_first_line_says_when_nothing_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where no sink could start, for want of rights or because a file is in the way, the line that says what is on says so."""
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO):
        train("nothing", tmp_path / "file", MonitorSettings())
    assert f"writing to {tmp_path}/file (no sink)" in caplog.text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"monitor": MonitorSettings()}, "msprobe is on: monitor; writing to"),
        ({"dump": DumpSettings(level="L0")}, "msprobe is on: dump L0; writing to"),
        (
            {"monitor": MonitorSettings(), "incident": IncidentSettings(level="L0", ring_steps=3)},
            "monitor, incidents (last 3 steps, level L0)",
        ),
        ({}, "the probe has nothing to do"),
    ],
)
def test_the_first_line_names_what_is_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: dict[str, Any], said: str) -> None:
    """The parts that the settings ask for, and no other; without any a warning instead."""
    parts: dict[str, Any] = {"monitor": None, "incident": IncidentSettings(enabled=False), **keys}
    with caplog.at_level(logging.INFO):
        probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), **parts))
        probe.attach(nn.Linear(2, 2), None)
        probe.begin_step(0)
        probe.close()
    lines = [line for line in caplog.messages if "msprobe is on" in line or "nothing to do" in line]
    assert [said in line for line in lines] == [True], lines
