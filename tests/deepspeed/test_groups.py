"""Several parameter groups: each parameter's update follows the settings of its own group."""

from __future__ import annotations

import deepspeed_harness as harness
import pytest
import torch
from forkpool import run_ranks

from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_engine.probe.sinks.memory import MemorySink

pytestmark = pytest.mark.framework
LR, MOMENTUM = 0.1, 0.9
DECAY = (0.0, 0.5)
MONITOR = MonitorSettings(gradients=False, parameters=True, updates=True)


def job(stage: int, nesterov: bool) -> None:
    harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = harness.Net()
    names = [name for name, _ in net.named_parameters() if not name.startswith("unused")]
    parameters = [p for name, p in net.named_parameters() if name in names]
    groups = [{"params": parameters[:2], "weight_decay": DECAY[0]}, {"params": parameters[2:], "weight_decay": DECAY[1]}]
    momentum = MOMENTUM if nesterov else 0.0
    sgd = torch.optim.SGD(groups, lr=LR, momentum=momentum, nesterov=nesterov)
    conf = {**harness.config(stage, "fp32"), "zero_allow_untested_optimizer": True}
    del conf["optimizer"]
    engine, *_ = harness.deepspeed.initialize(model=net, optimizer=sgd, config=conf)
    sink = MemorySink()
    probe = harness.probe_of(MONITOR, sink)
    probe.attach(engine)
    for step, batch in enumerate(harness.batches("fp32", 3)):
        probe.begin_step(step)
        engine.backward(engine(batch))
        engine.step()
        probe.end_step()
    probe.close()
    for frame in sink.frames:
        seen = harness.samples_of(frame)
        for name in names:
            old, new, update = (seen[family, "", name, -1][0] for family in ("param_origin", "param_updated", "update"))
            assert update.count == old.count
            means = [statistics.mean or 0.0 for statistics in (old, new, update)]
            assert LR * means[2] == pytest.approx(means[0] - means[1], abs=1e-7), (frame.step, name)


@pytest.mark.fast_cells("0-False", "1-True", "2-False", "3-True")
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_update_of_every_group(stage: int, nesterov: bool) -> None:
    """The learning rate times the update is what the parameter has moved by, in the second group, too: ZeRO 1 and 2 show the inner
    optimizer one group at a time."""
    run_ranks(2, job, stage, nesterov)
