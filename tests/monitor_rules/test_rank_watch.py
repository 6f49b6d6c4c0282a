"""Rule outlier_rank with real ranks: their numbers meet in the background."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from rule_trainings import Recorder, settings
from torch import nn

from msprobe_engine.core.settings.schema import MonitorSettings, RuleSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "frameworks"))
from forkpool import run_ranks

RULES = (RuleSettings(rule="outlier_rank", args={"patience": 3}),)
COMPARED, LIMIT = 12, 3000
"""Steps whose numbers have met on all ranks when the training ends, and the most steps until then: they meet in the background."""


def one_rank(odd: int) -> list[tuple[str, int, list[int]]]:
    import torch.distributed as dist

    from msprobe_engine.probe.rules.builtin.ranks.outlier_rank import OutlierRankRule, RankNumbers
    from msprobe_integrations.torch.monitor.probe import TorchProbe

    submit, compared = OutlierRankRule.submit, torch.zeros(1)

    def counted(rule: OutlierRankRule, numbers: RankNumbers) -> None:
        compared.add_(1)
        submit(rule, numbers)

    OutlierRankRule.submit = counted  # type: ignore[method-assign]
    rank = dist.get_rank()
    recorder = Recorder()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tempfile.TemporaryDirectory() as place:
        probe = TorchProbe(settings(Path(place), RULES, MonitorSettings(unreduced_gradients=True)), extra_sinks=[recorder])
        probe.attach(model, optimizer)
        for step in range(LIMIT):
            probe.begin_step(step)
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(16, 8, generator=generator).abs() * (30.0 if rank == odd else 1.0)
            loss = (model(x) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            probe.end_step({"loss": loss.detach()})
            dist.all_reduce(least := compared.clone(), op=dist.ReduceOp.MIN)
            if least >= COMPARED:
                break
        probe.close()
    assert least >= COMPARED, f"the numbers of {int(least)} of {step + 1} steps have met"
    return [(a.name, a.rank, a.extra["ranks"]) for a in recorder.alerts]


def test_the_rank_with_other_data_says_so() -> None:
    """Of three gloo ranks the one whose loss and local gradient differ from those of the others raises the alerts; no other does."""
    found = run_ranks(3, one_rank, 1)
    assert found[0] == found[2] == []
    assert {name for name, _, _ in found[1]} == {"loss", "grad_norm_local"}
    assert all(rank == 1 and ranks == [0, 1, 2] for _, rank, ranks in found[1])


def test_equal_ranks_are_silent() -> None:
    """Ranks with data of one kind raise nothing."""
    assert run_ranks(3, one_rank, -1) == [[], [], []]
