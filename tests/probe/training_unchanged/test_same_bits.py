"""The probe changes nothing: loss, weights and random state are bitwise equal with it and without, on one rank and under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch
import torch.distributed as dist
from torch import nn

from msprobe_engine.core.settings.schema import DumpSettings, IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
STEPS = 6
EVERYTHING = MonitorSettings(
    activations=True,
    activation_gradients=True,
    unreduced_gradients=True,
    micro_batch_gradients=True,
    parameters=True,
    optimizer_states=True,
    digest=True,
)


class Drops(nn.Module):
    """The tiny GPT with a dropout at its end, so that the random stream matters."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = pr.gpt.Gpt(pr.TINY)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.drop(self.gpt(ids))


def job(kind: str, directory: str) -> dict[str, Any]:
    torch.manual_seed(3)
    net = Drops()
    model = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank())
    probe, debugger = None, None
    if kind == "debugger":
        debugger = PrecisionDebugger(str(pr.write_config(Path(directory), "mix", summary_mode="digest")))
    elif kind:
        level = kind if kind in ("L0", "L1", "mix") else ""
        probe = TorchProbe(
            ProbeSettings(
                output_dir=directory,
                strict=True,
                monitor=None if level else EVERYTHING,
                incident=IncidentSettings(enabled=bool(level), level=level),
                dump=DumpSettings(level="mix", step=(3,)) if level else None,
            )
        )
        probe.attach(model, optimizer)
    losses = []
    for step in range(STEPS):
        if probe is not None:
            probe.begin_step(step)
        if debugger is not None:
            debugger.start(model)
        for micro in range(2):
            if probe is not None:
                probe.micro_step = micro
            ids = torch.randint(0, pr.TINY.vocabulary, (2, pr.TINY.length + 1))
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if debugger is not None:
            debugger.stop()
            debugger.step()
        if probe is not None:
            probe.end_step({"loss": loss})
    if probe is not None:
        probe.close()
    if debugger is not None:
        debugger.writer.close()
    return pr.state(net, losses)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("plain")
    return {n: [o.value for o in pr.run(job, "", str(directory), ranks=n, directory=directory)] for n in (0, 2)}


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("kind", ["L0", "L1", "mix", "monitor", "debugger"])
@pytest.mark.fast_cells("mix-0", "monitor-0")
def test_same_bits(tmp_path: Path, references: dict[int, list[dict[str, Any]]], kind: str, ranks: int) -> None:
    """Six steps with dropout, two micro batches and clipping give the same bits under every level and the full monitor."""
    done = pr.run(job, kind, str(tmp_path / "out"), ranks=ranks, directory=tmp_path, timeout=240)
    for one, reference in zip(done, references[ranks]):
        assert one.value["losses"] == reference["losses"]
        assert one.value["weights"] == reference["weights"]
        assert one.value["random"] == reference["random"]
    assert any((tmp_path / "out").rglob("*.csv" if kind == "monitor" else "dump.json"))
