"""A small training whose monitor is compared with a slow reference: whole tensors, gathered by the test, in float64."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo  # every optimizer imports it: once here instead of in every forked rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import IncidentSettings, MonitorSettings, ProbeSettings, RuleSettings, SinkSettings
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.torch.monitor.probe import TorchProbe

EVERYTHING = {
    "unreduced_gradients": True,
    "parameters": True,
    "optimizer_states": True,
    "updates": True,
    "momentum_agreement": True,
}


class Net(nn.Module):
    """Shapes that divide unevenly; `unused` gets no gradient, `frozen` wants none."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 13, dtype=dtype), nn.Linear(13, 3, dtype=dtype), nn.Linear(3, 1, dtype=dtype)
        self.unused, self.frozen = nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 3, dtype=dtype)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.frozen(torch.tanh(self.b(torch.tanh(self.a(x))))))


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(dtype)


def data(step: int, micro: int = 0, rank: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + micro)).to(dtype)


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    """``plain``, ``ddp``, ``ddp_views``, ``fsdp2``, ``fsdp2_columns`` (matrices divided along their second dimension) or ``hsdp``."""
    if kind.startswith("ddp"):
        return DistributedDataParallel(model, gradient_as_bucket_view=kind == "ddp_views", find_unused_parameters=True)
    if kind.startswith("fsdp2") or kind == "hsdp":
        world = dist.get_world_size()
        names = ("replica", "shard")
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names) if kind == "hsdp" else init_device_mesh("cpu", (world,))
        place = (lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % world == 0 else None) if kind == "fsdp2_columns" else None
        for part in (model.a, model.b, model.c):
            fully_shard(part, mesh=mesh, shard_placement_fn=place)
        fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return model


def optimizer(name: str, parameters: Any, **keys: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **keys)
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.97), eps=1e-6, **keys)


def probe(rules: Sequence[str] = (), **monitor: Any) -> TorchProbe:
    """A strict probe that keeps its frames."""
    return TorchProbe(
        ProbeSettings(
            output_dir=tempfile.mkdtemp(prefix="msprobe-test-"),
            strict=True,
            monitor=MonitorSettings(**monitor),
            rules=tuple(RuleSettings(rule=name) for name in rules),
            sinks=SinkSettings(memory=True),
            incident=IncidentSettings(enabled=False),
        )
    )


@contextmanager
def closing(one: TorchProbe) -> Iterator[list[Frame]]:
    """The frames of a probe; all there when the block is left."""
    (memory,) = (sink for sink in one.session.writer.sinks if hasattr(sink, "frames"))
    found: list[Frame] = []
    try:
        yield found
    finally:
        one.close()
    found.extend(memory.frames)


class Seen(NamedTuple):
    """One sample of a frame."""

    statistics: _rows.Statistics
    shape: tuple[int, ...]
    extra: dict[str, Any]


def samples(frame: Frame) -> dict[tuple[str, ...], Seen]:
    """(family, name, phase or state or tag, micro step if there is one) -> sample; every key once."""
    found: dict[tuple[str, ...], Seen] = {}
    for sample in frame.samples:
        detail = sample.phase or sample.extra.get("state") or sample.extra.get("tag") or ""
        key = (sample.family, sample.name, detail) + ((str(sample.micro_step),) if sample.micro_step >= 0 else ())
        assert key not in found, key
        found[key] = Seen(_rows.read_row(frame.rows[sample.ref.row]), sample.ref.description.shape, dict(sample.extra))
    return found


def whole(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """All of a tensor, in float64; gathers."""
    full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return np.array(full.double().numpy())


def assert_same(seen: Seen, truth: np.ndarray[Any, Any], where: Any, tolerance: float = 1e-6) -> None:
    """Statistics and shape of a sample are those of `truth`."""
    s = seen.statistics
    assert seen.shape == truth.shape, (where, seen.shape, truth.shape)
    assert s.count == truth.size, (where, s.count)
    numbers = {"norm": np.sqrt((truth**2).sum()), "min": truth.min(), "max": truth.max(), "mean": truth.mean()}
    for op, value in numbers.items():
        got = getattr(s, op)
        assert abs(got - value) <= tolerance * max(1.0, abs(value)), (where, op, got, value)
    assert s.zeros == (truth == 0).sum(), where
    assert s.nans == 0, where
