"""The optimizer that is watched is not the one that updates any more."""

from __future__ import annotations

import logging
from typing import Any

import parameter_cases as pc
import pytest

from msprobe_integrations.common.parameters.parameter_monitor import IDLE

pytestmark = pytest.mark.framework


def test_an_optimizer_that_has_left_is_said(caplog: Any) -> None:
    """After so many monitored steps without its update there is one message, and none while updates come, if only now and then."""
    probe = pc.probe(parameters=True)
    model = pc.net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    first, second = pc.optimizer("adamw", parameters), pc.optimizer("sgd", parameters)
    with caplog.at_level(logging.WARNING, "msprobe"), pc.closing(probe) as frames:
        probe.attach(model, first)
        for step in range(4 * IDLE):
            probe.begin_step(step)
            model(pc.data(step)).sum().backward()
            (first if step < 2 * IDLE and step % 5 == 0 else second).step()
            probe.end_step()
            if step == 2 * IDLE:
                assert caplog.text == ""
    assert caplog.text.count("has made no update for") == 1
    assert len(frames) == 4 * IDLE
