"""A dump changes nothing: losses, gradients, weights, optimizer and random state are bitwise those without it, for every task and level,
with dropout, both kinds of activation checkpoints, autocast with a gradient scaler that backs off, and on two ranks."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh  # these imports take seconds: once here, not in every forked rank
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = pytest.mark.framework
STEPS = 4
ONE_RANK = [
    *(f"{task} {level}" for task in ("statistics", "tensor") for level in ("L0", "L1", "mix", "debug")),
    "structure L0",
    "structure mix",
    "statistics mix md5",
    "statistics mix list",
]
TWO_RANKS = ("tensor mix", "statistics L0", "statistics L1", "statistics mix", "statistics debug", "structure mix")
PARALLEL = ("ddp", "fsdp2", "tp")


class Block(nn.Module):
    """Attention and a feed-forward part with dropout; `kept` says how its activations are kept."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.act, self.drop, self.down = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 8)
        self.kept = kept

    def work(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(self.drop(self.act(self.up(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept == "all":
            return self.work(x)
        again: torch.Tensor = checkpoint(self.work, x, use_reentrant=self.kept == "reentrant")
        return again


class Net(nn.Module):
    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(kind) for kind in kinds])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parallel(kind: str) -> nn.Module:
    model = Net(("all", "non-reentrant"))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        if kind == "fsdp2":
            fully_shard(layer, mesh=mesh)
        else:
            layer.act = nn.ReLU()  # torch forbids in-place operations on what leaves a DTensor
            layer.drop = nn.Identity()  # of whole activations, from one random stream
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh) if kind == "fsdp2" else model


def config(what: str, directory: Path) -> Path:
    task, level, *more = what.split()
    section: dict[str, Any] = {"summary_mode": "md5"} if "md5" in more else {"list": ["layers.1", "linear.2"]} if "list" in more else {}
    document = {"task": task, "dump_path": str(directory / "dump"), "rank": [], "step": [1, 2], "level": level, task: section}
    path = directory / f"config{dist.get_rank() if dist.is_initialized() else ''}.json"
    path.write_text(json.dumps(document))
    return path


def digest(tensors: Any) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes() if local.dim() else str(local.item()).encode())
    return total.hexdigest()


def job(kind: str, what: str, directory: str) -> list[Any]:
    """Four steps of training, of which the second and third are dumped; everything that must not depend on that."""
    torch.manual_seed(3)
    random.seed(3)
    model = parallel(kind) if kind else Net(("all", "reentrant", "non-reentrant"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    torch.manual_seed(7 + (dist.get_rank() if kind in ("ddp", "fsdp2") else 0))
    debugger = PrecisionDebugger(str(config(what, Path(directory)))) if what else None
    seen: list[Any] = []
    for step in range(STEPS):
        if debugger is not None:
            debugger.start(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=not kind):
            hidden = model(torch.randn(2, 5, 8, requires_grad=True))
            loss = hidden.float().square().mean() * (1e38 if step == 1 and not kind else 1.0)
        if debugger is not None and "debug" in what:
            debugger.save(hidden, "hidden")
            debugger.save({"loss": loss}, "all", save_backward=False)
        if kind:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        seen += [digest([loss]), digest(gradients), len(gradients)]
        if kind != "tp":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if kind:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        optimizer.zero_grad()
        if debugger is not None:
            debugger.stop()
            debugger.step()
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return [*seen, digest(model.parameters()), digest(states), digest([torch.get_rng_state()]), random.random()]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    directory = tmp_path_factory.mktemp("plain")
    found = {}
    for kind in ("", *PARALLEL):
        done = pr.run(job, kind, "", str(directory), ranks=2 if kind else 0, directory=directory)
        found[kind] = [one.value for one in done]
    return found


def written(root: Path) -> list[Path]:
    return [*root.rglob("dump.json"), *root.rglob("debug.json")]


@pytest.mark.parametrize("what", ONE_RANK)
def test_one_rank(tmp_path: Path, references: dict[str, list[Any]], what: str) -> None:
    """Checkpoints, dropout, autocast and a scaler that meets an infinity; a dump of two steps was written."""
    done = pr.run(job, "", what, str(tmp_path), ranks=0, directory=tmp_path)
    assert [one.value for one in done] == references[""]
    assert references[""][0][3 + 4 * 0] > references[""][0][3 + 4 * 1], "the scaler has not backed off"
    assert len(written(tmp_path)) == 2


@pytest.mark.fast_cells("ddp-statistics L0")
@pytest.mark.parametrize("what", TWO_RANKS)
@pytest.mark.parametrize("kind", PARALLEL)
def test_two_ranks(tmp_path: Path, references: dict[str, list[Any]], kind: str, what: str) -> None:
    """DDP, FSDP2 and tensor parallelism on two gloo ranks."""
    done = pr.run(job, kind, what, str(tmp_path), ranks=2, directory=tmp_path, timeout=240)
    assert [one.value for one in done] == references[kind]
    assert len(written(tmp_path)) == 4
