"""Trainings of several ranks that make no call, and the same training by one process in float64."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import parameter_cases as pc
import plain_cases as cases
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
MONITOR = {**cases.MONITOR, "unreduced_gradients": True, "updates": True}


def data(step: int, micro: int, rank: int) -> torch.Tensor:
    return cases.batch(10 * step + micro, rank)


def truth(world: int, micros: int, clip: float = 0.0) -> list[dict[str, Any]]:
    """Per step: loss (of each rank), gradients before and after clipping, parameters and first moments, of one process in float64."""
    model = cases.two().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    found = []
    for step in range(STEPS):
        losses, local = [], []
        for rank in range(world):
            of_rank = [model(data(step, micro, rank).double()).square().mean() / micros for micro in range(micros)]
            losses.append(sum(loss.item() for loss in of_rank))
            total: Any = sum(of_rank)
            gradients = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
            local.append({name: pc.whole(g) for (name, _), g in zip(model.named_parameters(), gradients)})
            (total / world).backward()
        reduced = {name: pc.whole(p.grad) for name, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip).item() if clip else 0.0
        clipped = {name: pc.whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            {
                "loss": losses,
                "local": local,
                "grad_norm": norm,
                "reduced": reduced,
                "clipped": clipped,
                "param_updated": {name: pc.whole(p.detach()) for name, p in model.named_parameters()},
                "exp_avg": {name: pc.whole(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()},
            }
        )
    return found


def check(frames: list[Any], expected: list[dict[str, Any]], rank: int, phases: tuple[str, ...] = ("reduced",)) -> None:
    """Every number of every parameter, on this rank."""
    assert [frame.step for frame in frames] == list(range(STEPS))
    for frame, true in zip(frames, expected):
        seen = pc.samples(frame)
        where = (rank, frame.step)
        assert abs(frame.scalars["loss"] - true["loss"][rank]) < 1e-6, (where, frame.scalars["loss"], true["loss"])
        for name in true["reduced"]:
            unreduced = seen.get(("grad_unreduced", name, "accumulated"))
            if unreduced is not None and unreduced.shape == true["local"][rank][name].shape and "placements" not in unreduced.extra:
                pc.assert_same(unreduced, true["local"][rank][name], (*where, name, "unreduced"), 1e-5)
            for phase in phases:
                pc.assert_same(seen["grad_reduced", name, phase], true[phase][name], (*where, name, phase), 1e-5)
            pc.assert_same(seen["param_updated", name, ""], true["param_updated"][name], (*where, name), 1e-5)
            pc.assert_same(seen["exp_avg", name, ""], true["exp_avg"][name], (*where, name, "exp_avg"), 1e-5)


def wrapped(kind: str) -> nn.Module:
    """``ddp``, ``fsdp2``, ``tp``; FSDP1 as ``fsdp1``, ``fsdp1_flat``, ``fsdp1_whole`` (NO_SHARD)."""
    model = cases.two()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for part in (model.encoder, model.decoder):
            fully_shard(part)
        return fully_shard(model)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(model, mesh, {"encoder": ColwiseParallel(), "decoder": RowwiseParallel()})
    strategy = ShardingStrategy.NO_SHARD if kind == "fsdp1_whole" else ShardingStrategy.FULL_SHARD
    model.encoder = FullyShardedDataParallel(  # type: ignore[assignment]
        model.encoder, use_orig_params=kind != "fsdp1_flat", sharding_strategy=strategy, device_id=torch.device("cpu")
    )
    return FullyShardedDataParallel(model, use_orig_params=kind != "fsdp1_flat", sharding_strategy=strategy, device_id=torch.device("cpu"))


def train(kind: str, micros: int, clip: float) -> list[bytes]:
    """A script as people write it; returns the bits of this rank's parameters."""
    rank = 0 if kind == "tp" else dist.get_rank()
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(STEPS):
        for micro in range(micros):
            last = micro == micros - 1
            if kind == "ddp":
                model.require_backward_grad_sync = last  # type: ignore[assignment]
            elif kind == "fsdp2":
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            (model(data(step, micro, rank)).square().mean() / micros).backward()
        if clip:
            own = getattr(model, "clip_grad_norm_", None)
            own(clip) if own is not None else nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(data(90, 0, rank))
    return [np.asarray(getattr(p, "_local_tensor", p).detach()).tobytes() for p in model.parameters()]


def follow(kind: str, micros: int = 1, clip: float = 0.0, sections: dict[str, Any] | None = None) -> dict[str, Any]:
    """In one rank: train alone and watched; check all numbers."""
    alone = train(kind, micros, clip)
    world = 1 if kind == "tp" else dist.get_world_size()
    expected = truth(world, micros, clip)
    monitor = {**MONITOR, "gradient_phases": ["reduced", "clipped"]}
    with cases.launched(monitor, **copy.deepcopy(sections or {})) as launch:
        watched = train(kind, micros, clip)
    check(launch.frames, expected, 0 if kind == "tp" else dist.get_rank(), ("reduced", "clipped") if clip else ("reduced",))
    files = sorted(str(p.relative_to(launch.directory)) for p in launch.directory.rglob("*") if p.is_file())
    families = sorted({sample.family for frame in launch.frames for sample in frame.samples})
    norms = [(frame.scalars.get("grad_norm"), true["grad_norm"]) for frame, true in zip(launch.frames, expected)]
    found = {"same": alone == watched, "files": files, "families": families, "norms": norms}
    for name in files:
        if name.endswith("dump.json"):
            found["records"] = list(json.loads((launch.directory / name).read_text())["data"])
        elif "grad_summary" in name:
            found["gradients"] = [line.split(",") for line in (launch.directory / name).read_text().splitlines()[1:]]
    return found


def drift() -> list[str]:
    """DDP whose second rank changes a parameter by itself; the files of an output directory."""
    monitor = {"gradients": True, "parameters": True, "replica_check": {"interval": 1}}
    with cases.launched(monitor, incident={"enabled": True, "capture_level": "L0"}, rules=[{"rule": "replica_mismatch"}]) as launch:
        model = DistributedDataParallel(cases.two())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(5):
            model(data(step, 0, dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and dist.get_rank() == 1:
                with torch.no_grad():
                    model.module.encoder.weight[0, 0] += 1e-3
            dist.barrier()
    return [str(path.relative_to(launch.directory)) for path in launch.directory.rglob("*") if path.is_file()]


class Stage(nn.Module):
    """One or more of the layers of `layers`."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        every = layers()
        self.layers = nn.ModuleDict({str(number): every[number] for number in range(first, last)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(4)]


def pipeline(schedule: str, micros: int) -> tuple[list[bytes], list[dict[str, Any]]]:
    """A pipeline of two ranks, with one stage each or (``Interleaved1F1B``) two; this rank's parameters, and the gradients of each step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    rank = dist.get_rank()
    numbers = [rank, rank + 2] if schedule == "Interleaved1F1B" else [rank]
    size = 1 if len(numbers) == 2 else 2
    parts = [Stage(number * size, (number + 1) * size) for number in numbers]
    stages = [PipelineStage(part, number, 4 // size, torch.device("cpu")) for part, number in zip(parts, numbers)]
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=0.01)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    kinds: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
    run: Any = (
        ScheduleInterleaved1F1B(stages, micros, loss_fn=loss) if len(stages) == 2 else kinds[schedule](stages[0], micros, loss_fn=loss)
    )
    gradients = []
    for step in range(STEPS):
        inputs = [data(step, 0, 0)] if rank == 0 else []
        run.step(*inputs, **({"target": data(step, 1, 0)} if numbers[-1] == 4 // size - 1 else {}))
        gradients.append({name: pc.whole(p.grad) for part in parts for name, p in part.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return [np.asarray(p.detach()).tobytes() for part in parts for p in part.parameters()], gradients


def pipeline_truth() -> list[tuple[float, dict[str, Any]]]:
    """Loss and gradients of each step, of one process in float64."""
    model = Stage(0, 4).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        loss = (model(data(step, 0, 0).double()) - data(step, 1, 0).double()).square().mean()
        loss.backward()
        found.append((loss.item(), {name: pc.whole(p.grad) for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return found


def follow_pipeline(schedule: str) -> dict[str, Any]:
    """In one rank: gradients of this rank's layers, loss on the last stage, activations of every micro batch."""
    alone, _ = pipeline(schedule, 4)
    expected = pipeline_truth()
    rules = [{"rule": "outlier_rank"}]  # its group of all ranks is made in the first step
    with cases.launched({**cases.MONITOR, "activations": True}, rules=rules) as launch:
        watched, gradients = pipeline(schedule, 4)
    last = dist.get_rank() == 1
    assert [frame.step for frame in launch.frames] == list(range(STEPS))
    for frame, (loss, true), own in zip(launch.frames, expected, gradients):
        seen = {s.name: s for s in frame.samples if s.family == "grad_reduced"}
        assert set(seen) == set(own)
        for name, sample in seen.items():
            got = pc._rows.read(frame.rows[sample.ref.row])
            assert abs(got.norm - np.sqrt((true[name] ** 2).sum())) < 1e-6, (frame.step, name)
        if last:
            assert abs(frame.scalars["loss"] - loss) < 1e-6, (frame.scalars["loss"], loss)
        else:
            assert "loss" not in frame.scalars
        passes = {s.micro_step for s in frame.samples if s.family == "actv"}
        assert passes == {0, 1, 2, 3}, passes
    return {"same": alone == watched}
