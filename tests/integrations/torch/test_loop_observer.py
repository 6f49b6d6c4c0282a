"""Steps of `LoopObserver` from the borders that an integration reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.torch.training.loop import LoopObserver


def observer(place: object) -> LoopObserver:
    """Follows a model; the frames stay in memory."""
    sinks = SinkSettings(csv=CsvSettings(enabled=False), memory=True)
    made = LoopObserver(ProbeSettings(output_dir=str(place), strict=True, monitor=MonitorSettings(), sinks=sinks))
    made.setup(nn.Linear(2, 2))
    return made


def seen(made: LoopObserver) -> list[tuple[int, bool, dict[str, float]]]:
    """Number, completeness and scalars of the steps that came."""
    probe = made.probe
    assert probe is not None
    probe.pipeline.advance(wait=True)
    return [
        (frame.step, frame.complete, {k: v for k, v in frame.scalars.items() if k in ("loss", "interrupted")}) for frame in probe.frames
    ]


def test_steps_go_on_after_one_that_raised(tmp_path: object) -> None:
    """A loop that catches the exception of a step and goes on has its later steps, too."""
    made = observer(tmp_path)
    for step in range(3):
        try:
            with made.driven(step) as scalars:
                scalars["loss"] = float(step)
                if step == 1:
                    raise RuntimeError("out of memory")
        except RuntimeError:
            assert not made.in_step
    assert seen(made) == [(0, True, {"loss": 0.0}), (1, False, {"interrupted": 1.0}), (2, True, {"loss": 2.0})]
    made.close()


def test_inner_borders_end_nothing(tmp_path: object) -> None:
    """Of borders within borders the outermost ones count; scalars of the inner ones belong to the step."""
    made = observer(tmp_path)
    with made.driven(4):
        with made.driven(0, over=pytest.fail) as scalars:
            scalars["loss"] = 1.5
        assert made.in_step
        assert made.is_driven
    assert not made.is_driven
    assert seen(made) == [(4, True, {"loss": 1.5})]
    made.close()


def test_faults_after_the_end_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What an integration still takes off when its observer is closed may fail, too; one line says so, and the training goes on."""
    made = observer(tmp_path)
    made.settings = replace(made.settings, strict=False)
    made.close()
    for _ in range(2):
        with made.safely("closing"):
            raise ValueError("cannot be put back")
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "closing" in line
    assert "ValueError: cannot be put back" in line
