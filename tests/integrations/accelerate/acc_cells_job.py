"""A loop around an `Accelerator` in each layout of docs/integrations.md, looked at by an eye of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import acc_job
import accelerate.accelerator
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from restored import Snapshot, snapshot
from trainer_cells import close, place_of, spoiled, watched
from trainer_checks import asked, digest
from trainer_eyes import Drift, Eye, Spy

from msprobe_integrations.accelerate import autoload

STEPS = 3
DRIFTING, FAILING = "last.weight", "first"
KINDS = {"1 rank": "NO", "DDP": "MULTI_CPU", "FSDP2": "FSDP", "DeepSpeed ZeRO 2": "DEEPSPEED"}
"""What Accelerate says that it does."""
COPIES = ("DDP, 2 ranks", "DeepSpeed ZeRO 2, 2 ranks")
"""Layouts in which ranks hold the same."""


def fsdp2() -> dict[str, Any]:
    """FSDP2 by its plugin."""
    sharded = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_offload=False,
    )
    return {"fsdp_plugin": sharded}


def zero2() -> dict[str, Any]:
    """DeepSpeed by its plugin; small buckets, as an operator-level dump looks at all of them."""
    config = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1024, "allgather_bucket_size": 1024},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
    }
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}


LAYOUTS: dict[str, Any] = {"1 rank": dict, "DDP, 2 ranks": dict, "FSDP2, 2 ranks": fsdp2, "DeepSpeed ZeRO 2, 2 ranks": zero2}


def prepared(layout: str, eye: Eye) -> tuple[Any, ...]:
    """Accelerator, the model before it (which the eye is told of) and after, optimizer, data."""
    AcceleratorState._reset_state()  # it takes a plugin once
    accelerator = Accelerator(cpu="ZeRO" not in layout, gradient_accumulation_steps=2, **LAYOUTS[layout]())
    assert accelerator.distributed_type.name == KINDS[layout.partition(",")[0]]  # with cpu=True DeepSpeed and FSDP give way to DDP
    net = acc_job.Net()
    eye.begins(net)
    samples = acc_job.samples()
    if "ZeRO" in layout:  # without cpu=True Accelerate knows of one process on a CPU, and would give every rank all batches
        assert accelerator.num_processes == 1
        samples = samples.view(-1, 4, 8)[dist.get_rank() :: dist.get_world_size()].flatten(0, 1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=4)
    return accelerator, net, *accelerator.prepare(net, acc_job.adamw(net.parameters()), data)


def loop(accelerator: Any, model: Any, optimizer: Any, data: Any, eye: Eye) -> list[float]:
    """`STEPS` updates of two batches each; losses."""
    losses = []
    for number, (x,) in zip(range(2 * STEPS), data):
        with accelerator.accumulate(model):
            loss = (model(x) - 1).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if number % 2:
            eye.updated()
    return losses


def trained(layout: str, file: Path | None, eye: Eye) -> Any:
    """Bits of a training: parameters, random state, losses."""
    asked(file, "deepspeed", "torch", "accelerate")
    accelerator, net, model, optimizer, data = prepared(layout, eye)
    losses = loop(accelerator, model, optimizer, data, eye)
    return digest([*net.parameters(), torch.get_rng_state()]), losses


def job(layout: str, given: dict[str, Path]) -> dict[str, Any]:
    """In a rank: everything watched, then something spoiled."""
    train = lambda file, eye: trained(layout, file, eye)  # noqa: E731
    found = watched(train, given, Spy())
    drift = Drift(DRIFTING, DeepSpeedZeroOptimizer if "ZeRO" in layout else None) if layout in COPIES else None
    return {**found, "said": spoiled(train, given, drift, FAILING)}


def left_behind(layout: str, file: Path) -> list[str]:
    """What differs after a followed training whose observer has been closed, and does not after one that nobody follows. What waits for
    optimizers and engines stays for the process's life and only calls on; methods of `Accelerator` are put back."""

    def differs(followed: bool, look: bool = True) -> list[str]:
        before = snapshot() if look else None
        asked(file if followed else None, "deepspeed", "torch")
        accelerator, net, model, optimizer, data = prepared(layout, Eye())
        objects = Snapshot(net, optimizer.optimizer, alone=True)
        undo = autoload.patch(accelerate.accelerator)
        loop(accelerator, model, optimizer, data, Eye())
        if followed:
            close()
        for each in undo:
            each()
        return before.changed() + objects.changed() if before is not None else []

    plain = {place_of(line) for line in [*differs(False), *differs(False)]}
    differs(True, look=False)
    return [line for line in differs(True) if place_of(line) not in plain]
