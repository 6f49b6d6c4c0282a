"""Tensors whose statistics cannot be taken."""

from __future__ import annotations

import logging
from typing import Any

import parameter_cases as pc
import pytest
import torch

from msprobe_engine.core import log
from msprobe_integrations.torch import backend

pytestmark = pytest.mark.framework


def test_a_fault_of_a_kernel_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Rows without numbers are not silent: one message with the reason, however many tensors and steps; the training goes on."""
    log.forget_warnings()
    model = pc.net()
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])

    def planted(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(backend.TorchBackend, "_launch", planted)
    probe = pc.probe(parameters=True)
    with caplog.at_level(logging.WARNING, "msprobe"), pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for step in range(3):
            probe.begin_step(step)
            model(pc.data(step)).sum().backward()
            optimizer.step()
            probe.end_step()
    assert all(sample.ref.row < 0 for frame in frames for sample in frame.samples)
    (said,) = (r.getMessage() for r in caplog.records if "no statistics" in r.getMessage())
    assert "RuntimeError: planted" in said


def test_what_has_no_data_is_no_fault(caplog: Any) -> None:
    """A tensor on the meta device has no numbers and nothing to say about."""
    log.forget_warnings()
    probe = pc.probe()
    with caplog.at_level(logging.WARNING, "msprobe"), pc.closing(probe) as frames:
        probe.begin_step(0)
        probe.sample("other", "m", torch.empty(3, device="meta"))
        probe.sample("other", "n", None)
        probe.end_step()
    assert [sample.ref.row for sample in frames[0].samples] == [-1, -1]
    assert not [r for r in caplog.records if "no statistics" in r.getMessage()]
