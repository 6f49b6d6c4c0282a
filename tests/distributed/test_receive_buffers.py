"""Memory that a message is received into holds nothing before it: what lies there is no number of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks

from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, RuleSettings, SinkSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe


def buffer(*shape: int) -> torch.Tensor:
    """What `torch.empty` may give."""
    return torch.full(shape, float("nan"))


def batch(rank: int) -> None:
    """As the stages of a pipeline do it: one message each way, in one call."""
    ops = [dist.P2POp(dist.isend, torch.ones(3), 1 - rank), dist.P2POp(dist.irecv, buffer(3), 1 - rank)]
    for work in dist.batch_isend_irecv(ops[::-1] if rank else ops):
        work.wait()


def messages(rank: int) -> None:
    """Single ones, waited for or not by the call itself."""
    for send, receive in ((dist.isend, dist.irecv), (dist.send, dist.recv)):
        work: Any = send(torch.ones(3), 1) if rank == 0 else receive(buffer(3), 0)
        if hasattr(work, "wait"):
            work.wait()


def gathers(rank: int) -> None:
    """Collectives with places for what the others have."""
    mine = torch.full((2,), float(rank))
    dist.all_gather([buffer(2), buffer(2)], mine)
    dist.all_gather_into_tensor(buffer(4), mine)
    dist.reduce_scatter_tensor(buffer(1), mine)
    dist.scatter(buffer(2), [mine, mine] if rank == 0 else None, src=0)
    dist.gather(mine, [buffer(2), buffer(2)] if rank == 0 else None, dst=0)


def broadcasts(rank: int) -> None:
    """The first rank's tensor reaches the others' memory."""
    dist.broadcast(torch.ones(2) if rank == 0 else buffer(2), src=0)


CALLS = {"batch": batch, "messages": messages, "gathers": gathers, "broadcasts": broadcasts}


def planted(rank: int) -> None:
    """What arrives, and what the first rank sends, is a number of the training."""
    dist.broadcast(buffer(2) if rank == 0 else torch.ones(2), src=0)


def watched(kind: str, place: str) -> tuple[set[str], int]:
    """What alerts are about, and how many samples there were."""
    incident = IncidentSettings(enabled=True, level="mix", capture_steps=1)
    probe = TorchProbe(
        ProbeSettings(
            output_dir=place,
            strict=True,
            monitor=MonitorSettings(collectives=True, collective_inputs=True),
            incident=incident,
            rules=(RuleSettings(rule="nan_inf"),),
            sinks=SinkSettings(csv=CsvSettings(enabled=False), memory=True),
        )
    )
    alerts: set[str] = set()
    probe.pipeline.listeners.append(lambda _frame, found: alerts.update(alert.name for alert in found))
    probe.attach(torch.nn.Linear(2, 2))
    for step in range(2):
        probe.begin_step(step)
        {**CALLS, "planted": planted}[kind](dist.get_rank())
        probe.end_step()
    probe.close()
    return alerts, sum(len(frame.samples) for frame in probe.frames)


@pytest.mark.parametrize("kind", CALLS)
def test_no_alert_about_memory_that_is_received_into(kind: str, tmp_path: Path) -> None:
    """`nan_inf` is silent with inputs and outputs of collectives watched, and both have been seen."""
    for alerts, samples in run_ranks(2, watched, kind, str(tmp_path)):
        assert alerts == set()
        assert samples > 0


def test_what_is_sent_and_what_arrives_counts(tmp_path: Path) -> None:
    """A NaN that is broadcast is told on the rank that sends it, going in, and on the one that gets it, coming out."""
    (sent, _), (got, _) = run_ranks(2, watched, "planted", str(tmp_path))
    assert {"Distributed.broadcast.0.forward.input.0", "broadcast"} <= sent
    assert any(name.startswith("Distributed.broadcast.0.forward.output") for name in got)
    assert "Distributed.broadcast.0.forward.input.0" not in got
