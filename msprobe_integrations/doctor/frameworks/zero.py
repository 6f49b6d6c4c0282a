"""E2: DeepSpeed ZeRO on one device: the training has the bits it has without the probe, and rows of gradients are those of plain AdamW."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from msprobe_engine.core.records import Frame
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import attach_probe

STAGES = (1, 2, 3)
KINDS = ("fp32", "bf16")  # the CPU has the first
_STEPS = 3


def run(device: Device) -> Iterator[Line]:
    """One line per stage."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except Exception as error:
        yield Line("DeepSpeed ZeRO", "skipped", why=f"DeepSpeed cannot be imported: {type(error).__name__}: {str(error)[:100]}")
        return
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.suppress(AttributeError):  # the first use would compile C++ for more than a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # over what its accelerator communicates by
    try:
        for stage in STAGES:
            for kind in KINDS if device.full else KINDS[:1]:
                yield _stage(device, stage, kind)
    finally:
        dist.destroy_process_group()


class _Zero(Job):
    """A job whose model is a DeepSpeed engine."""

    def __init__(self, device: str, stage: int, kind: str) -> None:
        import deepspeed

        super().__init__("tiny", device)
        # buckets that hold the model, and no more: a dump of calls looks at them
        buckets = {"reduce_bucket_size": 1 << 18, "allgather_bucket_size": 1 << 18, "stage3_param_persistence_threshold": 0}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.size.batch,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage, "overlap_comm": False, **buckets},
            "zero_allow_untested_optimizer": True,
        }
        if kind == "bf16":
            config["bf16"] = {"enabled": True}
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, model_parameters=self.model.parameters(), config=config
        )

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)  # type: ignore[operator]

    def update(self) -> None:
        self.model.step()  # type: ignore[operator]


def _stage(device: Device, stage: int, kind: str) -> Line:
    name, place = f"DeepSpeed ZeRO {stage}, {kind}", str(device.device)
    try:
        plain, again = (_train(_Zero(place, stage, kind), "off")[0] for _ in range(2))
    except Exception as error:
        return Line(name, "skipped", why=f"fails without the probe: {type(error).__name__}: {str(error)[:200]}")
    wrong = []
    repeatable = torch.equal(plain, again)
    losses, frames = _train(_Zero(place, stage, kind), "parameters")
    for mode, weights in (("monitor", losses), *((mode, _train(_Zero(place, stage, kind), mode)[0]) for mode in ("L0", "mix"))):
        if repeatable and not torch.equal(weights, plain):
            wrong.append(f"{mode}: other losses")
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    expected = _norms(_train(Job("tiny", place, dtype), "parameters")[1][0])
    norms, limit = _norms(frames[0]), 2e-2 if kind == "bf16" else 1e-4
    missing = sorted(set(expected) - set(norms))
    off = [key for key in expected if key in norms and abs(norms[key] - expected[key]) > limit * expected[key] + 1e-7]
    if missing:
        wrong.append(f"{len(missing)} of {len(expected)} gradients have no row: {missing[:3]}")
    if off:
        wrong.append(f"gradients: {', '.join(f'{key} {norms[key]:.6g}, without ZeRO {expected[key]:.6g}' for key in off[:3])}")
    remark = [] if repeatable else ["two runs without the probe differ: bits were not compared"]
    return Line(name, "WRONG" if wrong else "ok", f"{len(norms)} rows of gradients", why="; ".join([*wrong, *remark]))


def _train(job: Job, mode: str) -> tuple[torch.Tensor, list[Frame]]:
    with tempfile.TemporaryDirectory() as directory:
        with attach_probe(job, mode, Path(directory)) as step:
            losses = torch.stack([step() for _ in range(_STEPS)]).float().cpu()
        return losses, step.frames


def _norms(frame: Frame) -> dict[str, float]:
    """Name of a parameter to the norm of its reduced gradient."""
    return {
        record.name: float(record.statistics.norm)
        for record in frame.records()
        if getattr(record.source, "family", "") == "grad_reduced" and record.statistics.norm is not None
    }
