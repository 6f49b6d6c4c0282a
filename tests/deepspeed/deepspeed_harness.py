"""A small model under every kind of DeepSpeed optimizer, in forked ranks. DeepSpeed is imported once, in the parent."""

from __future__ import annotations

import logging
import os
from typing import Any

from msprobe_engine.probe.sinks.memory import MemorySink

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import importlib

import deepspeed
import torch
import torch._dynamo
from torch import nn

from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.core.statistics.rows import Statistics
from msprobe_integrations.torch.monitor.probe import TorchProbe

with contextlib.suppress(ImportError):  # initialize imports it late; older versions do not have it
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # the first use would compile C++ for more than a minute
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch on the CPU has what these models need

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


STRICT = True
"""Faults of the probe raise; a rank may set it back for itself."""


class Net(nn.Module):
    """Sizes that fit no partition: shards begin and end inside of parameters, the last partition is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 13)
        self.b = nn.Linear(13, 5, bias=False)
        self.c = nn.Linear(5, 3)
        self.unused = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).float().pow(2).mean()


def config(stage: int, dtype: str, accumulation: int = 1, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration; `zero` in `more` goes into ``zero_optimization``. Buckets hold the whole model, and no more: those of
    DeepSpeed's own size, 500 million elements, are looked at by every dump of calls."""
    buckets = {"reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
    zero = {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0, **buckets, **more.pop("zero", {})}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": zero,
    }
    if dtype != "fp32":
        found[dtype] = {"enabled": True, **({"initial_scale_power": 6} if dtype == "fp16" else {})}
    return {**found, **more}


def engine_of(conf: dict[str, Any]) -> Any:
    """A DeepSpeed engine over the model, the same weights on all ranks; with a torch optimizer when the configuration has none."""
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = Net()
    given = None if "optimizer" in conf else torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=given, model_parameters=net.parameters(), config=conf)
    return engine


def batches(dtype: str, count: int) -> list[torch.Tensor]:
    """Micro batches of this rank."""
    generator = torch.Generator().manual_seed(100 + deepspeed.comm.get_rank())
    return [torch.randn(4, 7, generator=generator).to(DTYPES[dtype]) for _ in range(count)]


def probe_of(monitor: MonitorSettings, sink: MemorySink) -> TorchProbe:
    """A probe that keeps its frames and writes nothing."""
    settings = ProbeSettings(
        output_dir="unused",
        strict=STRICT,
        monitor=monitor,
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(enabled=False),
    )
    return TorchProbe(settings, extra_sinks=[sink])


Key = tuple[str, str, str, int]
Sampled = dict[Key, tuple[Statistics, dict[str, Any]]]


def samples_of(frame: Frame) -> Sampled:
    """(family, phase, name, micro step) -> statistics and facts; a state of the optimizer has its name behind the family."""
    found: Sampled = {}
    for record in frame.records():
        source = record.source
        family = source.family + (f" {source.extra['state']}" if "state" in source.extra else "")
        key = (family, source.phase, record.name, source.micro_step)
        assert key not in found, key
        found[key] = (record.statistics, dict(source.extra))
    return found
