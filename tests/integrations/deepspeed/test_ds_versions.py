"""The core of the integration on one version of DeepSpeed: the installed one (`nox -t deepspeed` installs others)."""

from __future__ import annotations

from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch
from forkpool import run_ranks
from log_lines import heard

from msprobe_engine.core.settings.schema import MonitorSettings

pytestmark = pytest.mark.framework
VERSION = str(harness.deepspeed.__version__).partition("+")[0]
MONITOR = MonitorSettings(activations=True, gradients=True, parameters=True, optimizer_states=True)


def truth() -> dict[str, float]:
    """Gradient norms of the batches of both ranks, without DeepSpeed, in double precision."""
    torch.manual_seed(0)
    net = harness.Net().double()
    for rank in range(2):
        (net(torch.randn(4, 7, generator=torch.Generator().manual_seed(100 + rank)).double()) / 2).backward()
    return {name: float(p.grad.norm()) for name, p in net.named_parameters() if p.grad is not None}


def plain_loop(engine: Any, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for x in data:
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def trained(stage: int) -> Any:
    lines = heard()
    conf = harness.config(stage, "fp32", zero_allow_untested_optimizer=True)
    del conf["optimizer"]  # older versions would compile an Adam of their own
    try:
        plain = jobs.train(conf, "fp32", 2, None, plain_loop)
    except RuntimeError as error:
        return str(error)
    seen = jobs.train(conf, "fp32", 2, {"monitor": MONITOR}, plain_loop)
    dumped = jobs.train(conf, "fp32", 2, {"dump": jobs.dump_of("L0")}, plain_loop)
    frames = [
        (f.step, f.scalars, {k[2]: v[0].norm for k, v in harness.samples_of(f).items() if k[0] == "grad_reduced"}) for f in seen.frames
    ]
    (dump,) = dumped.dumps.values()
    return plain.bits == seen.bits == dumped.bits, frames, sorted(dump), [line for line in lines if "without it" in line]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_core(stage: int) -> None:
    """Same bits with a monitor and with a dump; steps, scalars, names of modules; gradients of the whole; nothing of the table missing."""
    expected = truth()
    found = run_ranks(2, trained, stage, timeout=200)
    if isinstance(found[0], str):
        pytest.skip(f"DeepSpeed {VERSION} does not train with torch {torch.__version__} without the probe: {found[0][:200]}")
    for same, frames, names, lost in found:
        assert same
        assert [frame[0] for frame in frames] == [0, 1]
        assert {"loss", "learning_rate", "skipped"} <= set(frames[0][1])
        for name, norm in expected.items():
            assert frames[0][2][name] == pytest.approx(norm, rel=1e-5), name
        assert {"Module.a.Linear.forward.0", "Module.a.Linear.backward.0"} <= set(names)
        assert lost == []
