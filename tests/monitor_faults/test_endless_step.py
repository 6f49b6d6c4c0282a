"""Steps that have no end."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import parameter_cases as pc
import pytest

from msprobe.pytorch import TrainerMon
from msprobe_engine.core import log
from msprobe_integrations.common.monitor import module_monitor

pytestmark = pytest.mark.framework


def test_a_step_that_never_ends_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """`TrainerMon` whose optimizer was replaced: its step goes on for ever. What is kept is bounded, said once and counted; the next step
    is whole again."""
    log.forget_warnings()
    monkeypatch.setattr(module_monitor, "MOST_PASSES", 5)
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path))
    keys = {"targets": {}, "format": "api", "xy_distribution": True, "wg_distribution": True, "monitor_mbs_grad": True}
    (tmp_path / "monitor_config.json").write_text(json.dumps(keys))
    model = pc.net()
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    with caplog.at_level(logging.WARNING, "msprobe"), TrainerMon(tmp_path / "monitor_config.json") as monitor:
        monitor.set_monitor(model, optimizer)
        for step, passes in enumerate((1, 5, 50, 2, 20)):
            for micro in range(passes):
                model(pc.data(step, micro)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        frames = monitor.frames
    one, five, fifty, two, twenty = (len([s for s in frame.samples if s.micro_step >= 0]) for frame in frames[:5])
    assert (five, fifty, two, twenty) == (5 * one, 5 * one, 2 * one, 5 * one)
    assert [sum(frame.lost.values()) for frame in frames[:5]] == [0, 0, 45, 0, 15]
    assert caplog.text.count("nothing is noted") == 1
