"""A probe that was built before the process group."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from msprobe_engine.incident.notify import SilentNotifier, StoreNotifier
from msprobe_engine.settings.schema import MonitorSettings, ProbeSettings
from msprobe_integrations.torch.probe import TorchProbe


def test_incidents_are_announced_when_the_group_came_late(tmp_path: Path) -> None:
    """Ranks that meet after the probe was built tell each other about incidents from the next step on."""
    probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), strict=True, monitor=MonitorSettings()))
    model = nn.Linear(2, 2)
    probe.attach(model)
    incidents = probe.session.incidents
    assert incidents is not None
    assert isinstance(incidents.notifier, SilentNotifier)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        probe.begin_step(0)
        assert isinstance(incidents.notifier, StoreNotifier)
        assert incidents.world_size == 2
        model(torch.ones(1, 2)).sum().backward()
        probe.end_step()
    finally:
        probe.close()
        dist.destroy_process_group()
