"""The training that both tools dump: a tiny transformer, one or two ranks, from one config.json per job.

    python tests/compat/training.py JOBS.json

JOBS.json is a list of jobs ``{"out": directory, "config": content of config.json, "ranks": 1 or 2, "does": ["p2p", ...]}``. Each job
runs in processes forked from this one, so that torch and the tool are imported once; ``out`` gets ``config.json``, ``dump/`` and one
log per rank. The tool is the one whose ``msprobe`` is importable: only names that both have are used, so nothing here knows which.

What the training is made to show: modules called with positional and keyword tensors, nested and dict outputs, a frozen parameter,
casts to bfloat16 and back, dropout, masks with infinities, integer, bool, double, complex and empty tensors, gradient clipping, AdamW
and SGD, and in the second step two micro batches. Two ranks add DDP and collectives. On request (``does``): ``p2p`` sends and receives,
``inplace`` an activation in place, ``recompute`` the second block recomputed in the backward pass, ``nan`` the logarithm of negative
numbers in the second block of the last rank.
"""

from __future__ import annotations

import atexit
import importlib
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCABULARY, BATCH, LENGTH, STEPS = 8, 2, 11, 2, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, HEADS, -1).transpose(1, 2).chunk(3, dim=-1)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(width / HEADS)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        y = self.drop(weights) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width)), weights


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.poisoned = False
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.poisoned:
            x = torch.log(x)
        return self.drop(self.down(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self, low: bool) -> None:
        super().__init__()
        self.low = low
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        y, _ = self.attention(self.norm1(x), mask=mask)
        if self.low:
            y = (y.to(torch.bfloat16) * scale).float()
        x = x + y
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=inplace)
        self.last = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.relu(self.first(x))
        return {"logits": self.last(hidden), "hidden": hidden}


class Transformer(nn.Module):
    def __init__(self, inplace: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.positions.weight.requires_grad_(False)
        self.blocks = nn.ModuleList([Block(low=False), Block(low=True)])
        self.head = Head(inplace)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = self.blocks[0](x, mask)
        if self.recompute:
            x = checkpoint(self.blocks[1], x, mask, 0.5, use_reentrant=True)
        else:
            x = self.blocks[1](x, mask=mask, scale=0.5)
        return self.head(x)


def other_values(logits: torch.Tensor, ids: torch.Tensor) -> None:
    """Calls with the dtypes and structures that a transformer does not have by itself."""
    right = torch.argmax(logits, dim=-1) == ids
    right.float().mean()
    values, _ = torch.topk(logits.detach(), 3, dim=-1)
    torch.cat([values, values * 2], dim=0)
    torch.mul(torch.ones(2, dtype=torch.float64), 1e300)
    torch.add(ids, torch.tensor(2**40))
    torch.abs(torch.fft.rfft(values))
    torch.isnan(logits)
    torch.sum(torch.mul(values[:0], 2.0))
    values.half().clamp(min=0.0)
    torch.einsum("bsv,bsv->bs", values, values)
    torch.tensor(-3.0).abs()


def collectives(loss: torch.Tensor, p2p: bool) -> None:
    """One collective of every kind that both tools know."""
    rank, world = dist.get_rank(), dist.get_world_size()
    value = loss.detach().clone().reshape(1)
    dist.all_reduce(value)
    dist.all_reduce(torch.full((3,), 1.0 + rank), op=dist.ReduceOp.MAX)
    later = torch.arange(4.0) + rank
    work = dist.all_reduce(later, group=dist.new_group([0, 1]), async_op=True)
    assert work is not None
    work.wait()
    dist.broadcast(torch.full((2,), float(rank)), src=1)
    dist.reduce(torch.full((2,), 1.0 + rank), dst=0)
    dist.all_gather([torch.empty(2) for _ in range(world)], torch.full((2,), float(rank)))
    dist.all_gather_into_tensor(torch.empty(2 * world), torch.full((2,), float(rank)))
    dist.gather(torch.full((2,), float(rank)), [torch.empty(2) for _ in range(world)] if rank == 0 else None, dst=0)
    dist.scatter(torch.empty(2), [torch.full((2,), 5.0), torch.full((2,), 7.0)] if rank == 0 else None, src=0)
    dist.reduce_scatter_tensor(torch.empty(2), torch.arange(2.0 * world) + rank)
    dist.all_to_all_single(torch.empty(2), torch.arange(2.0) + 10 * rank)
    dist.barrier()
    if p2p:
        peer = 1 - rank
        if rank == 0:
            dist.send(torch.full((2,), 3.0), dst=peer)
        else:
            dist.recv(torch.zeros(2), src=peer)
        for request in (dist.isend(torch.full((2,), float(rank)), dst=peer), dist.irecv(torch.zeros(2), src=peer)):
            assert request is not None
            request.wait()
        swap = [dist.P2POp(dist.isend, torch.full((2,), 8.0 + rank), peer), dist.P2POp(dist.irecv, torch.zeros(2), peer)]
        for request in dist.batch_isend_irecv(swap):
            request.wait()


def train(job: dict[str, Any]) -> None:
    """Two steps under the tool."""
    from msprobe.pytorch import PrecisionDebugger, seed_all

    config = Path(job["out"]) / "config.json"
    level = job["config"]["level"]
    seed_all(seed=1234, mode=True, rm_dropout=False)
    debugger = PrecisionDebugger(config_path=str(config))
    model: nn.Module = Transformer("inplace" in job["does"], "recompute" in job["does"])
    distributed = job["ranks"] > 1
    if "nan" in job["does"] and (not distributed or dist.get_rank() == 1):
        model.get_submodule("blocks.1.mlp").poisoned = True  # type: ignore[assignment]
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    head = [p for n, p in model.named_parameters() if "head." in n]
    rest = [p for n, p in model.named_parameters() if "head." not in n and p.requires_grad]
    optimizers = [torch.optim.AdamW(rest, lr=0.01, foreach=True), torch.optim.SGD(head, lr=0.1, momentum=0.9, foreach=False)]
    torch.manual_seed(7 + (dist.get_rank() if distributed else 0))
    for step in range(STEPS):
        debugger.start(model=model)
        for _ in range(1 + step):
            ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
            logits = model(ids)["logits"]
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1))
            if level == "debug":
                save(debugger, logits, loss)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        other_values(logits, ids)
        if distributed:
            collectives(loss, "p2p" in job["does"])
        debugger.stop()
        debugger.step()


def save(debugger: Any, logits: torch.Tensor, loss: torch.Tensor) -> None:
    """Variables of the kinds that ``save`` takes."""
    debugger.save(logits, "logits")
    debugger.save(loss, "loss")
    debugger.save({"pair": [1, "s", 0.5], "nan": torch.tensor([float("nan"), float("inf")])}, "extra", save_backward=False)
    debugger.save([logits, {"k": (loss, 3)}], "nested")


def child(job: dict[str, Any], rank: int) -> None:
    """One rank, in a process of its own."""
    code = 1
    out = Path(job["out"])
    log = os.open(out / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        os.chdir(out)
        torch.set_num_threads(1)
        if job["ranks"] > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(job["ranks"]))
            dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=job["ranks"])
        train(job)
        if job["ranks"] > 1:
            dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()  # as at the end of a program; what the tool still holds is written there
    os._exit(code)


def run(job: dict[str, Any], limit: float = 600.0) -> None:
    """Run one job; its end is written to ``out/codes.json``: exit code per rank, None for a rank that did not come to an end."""
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(job["config"]))
    pids = []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if not pid:
            child(job, rank)
        pids.append(pid)
    codes: list[int | None] = [None] * len(pids)
    end = time.monotonic() + limit
    while None in codes:
        for rank, pid in enumerate(pids):
            if codes[rank] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(pid, 9)
        time.sleep(0.005)
    (out / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    for module in ("msprobe.pytorch", "torch._dynamo"):  # every optimizer imports the latter
        importlib.import_module(module)  # once here instead of in every forked process
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one)
