"""Reported bugs in data-parallel and sharded trainings of two ranks."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.case import Fault, in_model, nothing, when_ready
from reported_bugs.faults.in_data import LOSS, element_flipped
from reported_bugs.faults.in_updates import UPDATE, optimizer_of_copies
from reported_bugs.training import Program, Setting
from torch import Tensor, nn

DDP = Setting(ranks=2, wrap="ddp")
DDP_AMP = Setting(ranks=2, wrap="ddp", dtype="amp")
DDP_MICRO = Setting(ranks=2, wrap="ddp", micro=2)
FSDP = Setting(ranks=2, wrap="fsdp")
FSDP_MICRO = Setting(ranks=2, wrap="fsdp", micro=2)
FSDP_CLIP = Setting(ranks=2, wrap="fsdp", clip=0.1)
WITH_L0, WITH_MONITOR = ("mix", "L1", "L0"), ("mix", "L0", "monitor")
EVERY = ("mix", "L1", "L0", "monitor")


def hook_of(make: Any) -> Any:
    return when_ready(lambda p: p.net.register_comm_hook(None, lambda state, bucket: make(state, bucket)))  # its annotations are looked at


def twice(_state: Any, bucket: Any) -> Any:
    """Gradients are divided by the number of ranks in the hook, and again behind it."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(None, bucket).then(lambda future: future.value().div_(2))


def summed(_state: Any, bucket: Any) -> Any:
    buffer = bucket.buffer()
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def narrow(_state: Any, bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(None, bucket)


def one_rank_lost(_state: Any, bucket: Any) -> Any:
    """What the second rank puts in is zero."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if dist.get_rank() == 1:
        bucket.buffer().zero_()
    return allreduce_hook(None, bucket)


def corrupted(_state: Any, bucket: Any) -> Any:
    """What the second rank gets is off in one element."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def off(future: Any) -> Tensor:
        found: Tensor = future.value()
        if dist.get_rank() == 1:
            found[1000] += found.abs().max() * 4
        return found

    return allreduce_hook(None, bucket).then(off)


def parameter_ignored(model: Any) -> None:
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layers.1.mlp.up.weight"])


def never_synchronised(p: Program) -> None:
    p.synchronised = lambda _micro: p.net.no_sync()  # type: ignore[method-assign]


def shards_never_synchronised(p: Program) -> None:
    def synchronised(_micro: int) -> Any:
        p.net.set_requires_gradient_sync(False)
        return contextlib.nullcontext()

    p.synchronised = synchronised  # type: ignore[method-assign]


def same_data(p: Program) -> None:
    own = p.batches

    def batches(step: int) -> Any:
        kept, p.rank = p.rank, 0
        try:
            return own(step)
        finally:
            p.rank = kept

    p.batches = batches  # type: ignore[method-assign]


def local_tokens(p: Program) -> None:
    p.tokens = lambda micros: torch.stack([(b["labels"] != -100).sum() for b in micros]).sum() * p.setting.ranks  # type: ignore[method-assign]


def ranks_forgotten(p: Program) -> None:
    p.scale = lambda: 1  # type: ignore[method-assign]


def second_rank(change: Any) -> Any:
    return when_ready(lambda p: change(p) if p.rank == 1 else None)


def not_updated(p: Program) -> None:
    weight, own = p.model.layers[0].mlp.down.weight, p.update

    def update() -> None:
        kept = weight.detach().clone()
        own()
        weight.data.copy_(kept)

    p.update = update  # type: ignore[method-assign]


def faster(p: Program) -> None:
    p.scheduler.lr_lambdas = [lambda _step: 1.1 for _ in p.scheduler.lr_lambdas]
    for group in p.optimizer.param_groups:
        group["lr"] *= 1.1


def stale_batch(p: Program) -> None:
    own = p.rows_of
    p.rows_of = lambda step: own(0)  # type: ignore[method-assign]


def dropout_only_there(p: Program) -> None:
    p.model.eval()


def clipped_by_shard(p: Program) -> None:
    def clip() -> None:
        grads = [q.grad.to_local() for q in p.model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in grads]))
        factor = (p.setting.clip / (norm + 1e-6)).clamp(max=1.0)
        for g in grads:
            g.mul_(factor.to(g.dtype))

    p.clip = clip  # type: ignore[method-assign]


def plain_sgd(p: Program) -> None:
    p.make_optimizer = lambda: torch.optim.SGD(p.groups(), lr=p.setting.lr, momentum=0.9)  # type: ignore[method-assign]


def clipped_by_shard_and(optimizer: Any) -> Any:
    return lambda p: (optimizer(p), when_ready(clipped_by_shard)(p))[0]


def other_weights(p: Program) -> None:
    """The second rank starts from another seed, and nothing is broadcast."""
    if p.rank == 1:
        p.change_model.append(lambda model: [nn.init.normal_(q, std=0.02) for q in model.layers[1].mlp.parameters()])


def shard_not_updated(p: Program) -> None:
    own = p.update

    def update() -> None:
        weight = p.model.layers[0].mlp.down.weight
        kept = weight.to_local().detach().clone()
        own()
        if p.rank == 1:
            weight.to_local().data.copy_(kept)

    p.update = update  # type: ignore[method-assign]


REDUCED = r"all_reduce|reduce|Distributed|hook|grad|bucket|" + UPDATE
DATA = r"\.input_0|embedding|data|rows_of|batches|getitem|contiguous|Torch\.rand"

CASES = (
    Fault("ddp: gradients averaged twice", DDP, hook_of(twice), REDUCED, "division in the hook and behind it", EVERY),
    Fault("ddp: gradients summed", DDP, hook_of(summed), REDUCED, "sum for mean", EVERY),
    Fault("ddp: gradients reduced in bf16", DDP_AMP, hook_of(narrow), REDUCED, "bf16_compress_hook", EVERY),
    Fault(
        "ddp: one rank left out of the sum", DDP, hook_of(one_rank_lost), REDUCED + "|zero_", "NVIDIA/Megatron-LM#1446 and others", EVERY
    ),
    Fault("ddp: a sum corrupted on one rank", DDP, hook_of(corrupted), REDUCED, "silent data corruption", EVERY),
    Fault(
        "ddp: a parameter not reduced",
        DDP,
        in_model(parameter_ignored),
        r"layers\.1\.mlp\.up",
        "_set_params_and_buffers_to_ignore_for_model",
        EVERY,
    ),
    Fault("ddp: no_sync left on", DDP_MICRO, when_ready(never_synchronised), REDUCED, "no_sync around the last micro batch", EVERY),
    Fault("ddp: the same data on both ranks", DDP, when_ready(same_data), DATA, "no DistributedSampler", EVERY),
    Fault(
        "ddp: loss by local tokens",
        DDP,
        when_ready(local_tokens),
        LOSS + "|__mul__|sum|all_reduce",
        "huggingface/transformers average_tokens_across_devices",
        EVERY,
        coarse=r"(head|GPT).*backward|\bloss\b|grad",
    ),
    Fault(
        "ddp: number of ranks forgotten",
        DDP,
        when_ready(ranks_forgotten),
        LOSS + "|__mul__",
        "huggingface/transformers#34242",
        EVERY,
        coarse=r"(head|GPT).*backward|\bloss\b|grad",
    ),
    Fault(
        "ddp: a weight not updated on one rank",
        DDP,
        second_rank(not_updated),
        r"layers\.0\.mlp\.down|copy_",
        "parameter not broadcast",
        EVERY,
    ),
    Fault(
        "ddp: another learning rate on one rank",
        DDP,
        second_rank(faster),
        UPDATE + "|parameter|weight|differ|not hold the same|learning_rate",
        "scheduler stepped on one rank",
        EVERY,
    ),
    Fault(
        "ddp: an element flipped on one rank",
        DDP,
        second_rank(element_flipped),
        r"layers\.1\.mlp|linear\.\d+\.forward|silu|__mul__",
        "silent data corruption",
        EVERY,
        1,
    ),
    Fault(
        "ddp: one rank reads a batch again",
        DDP,
        second_rank(stale_batch),
        DATA + "|rand|long|where",
        "loader of one worker",
        ("mix", "L1", "L0"),
        1,
    ),
    Fault(
        "ddp: dropout off on one rank",
        replace(DDP, changes=(("dropout", 0.1),)),
        second_rank(dropout_only_there),
        r"drop",
        "eval() on one rank",
        WITH_L0,
    ),
    Fault(
        "fsdp: gradients not synchronised",
        FSDP_MICRO,
        when_ready(shards_never_synchronised),
        REDUCED + "|parameter|weight",
        "set_requires_gradient_sync(False) left on",
        EVERY,
    ),
    Fault(
        "fsdp: clipped by shard",
        FSDP_CLIP,
        when_ready(clipped_by_shard),
        r"norm|clip|" + UPDATE,
        "areal-project/AReaL#312, pytorch/pytorch#170862",
        EVERY,
    ),
    Fault(
        "fsdp: clipped by shard, fp32",
        replace(FSDP_CLIP, dtype="fp32"),
        when_ready(clipped_by_shard),
        r"norm|clip|" + UPDATE,
        "areal-project/AReaL#312",
        EVERY,
        coarse=r"norm|clip|param|weight|" + UPDATE,
    ),
    Fault(
        "fsdp: clipped by shard, sgd",
        replace(FSDP_CLIP, lr=0.1),
        clipped_by_shard_and(plain_sgd),
        r"norm|clip|" + UPDATE,
        "pytorch/pytorch#170862",
        EVERY,
        coarse=r"norm|clip|param|weight|" + UPDATE,
        golden=plain_sgd,
    ),
    *(
        Fault(
            f"fsdp: clipped by shard, beside one process{name}",
            replace(FSDP_CLIP, ranks=1, wrap="", **changes),
            clipped_by_shard_and(optimizer),
            r"norm|clip|" + UPDATE,
            "pytorch/pytorch#170862",
            ("mix", "L0"),
            coarse=r"norm|clip|param|weight|" + UPDATE,
            golden=optimizer,
            other=replace(FSDP_CLIP, **changes),
        )
        for name, changes, optimizer in (
            ("", {}, nothing),
            (", amp", {"dtype": "amp"}, nothing),
            (", sgd", {"lr": 0.1}, plain_sgd),
            (", sgd, amp", {"lr": 0.1, "dtype": "amp"}, plain_sgd),
        )
    ),
    Fault(
        "fsdp: optimizer of other tensors",
        FSDP,
        when_ready(optimizer_of_copies),
        UPDATE + "|parameter|weight|embedding|optimizer",
        "optimizer made before fully_shard",
        EVERY,
    ),
    Fault("fsdp: other weights on one rank", FSDP, other_weights, r"layers\.1\.mlp", "weights drawn per rank", WITH_MONITOR),
    Fault("fsdp: a shard not updated", FSDP, when_ready(shard_not_updated), r"layers\.0\.mlp\.down|copy_", "shard not written back", EVERY),
    Fault("fsdp: the same data on both ranks", FSDP, when_ready(same_data), DATA, "no DistributedSampler", WITH_MONITOR),
    Fault(
        "fsdp: number of ranks forgotten",
        FSDP,
        when_ready(ranks_forgotten),
        LOSS + "|__mul__",
        "sum against mean",
        ("mix", "L0", "monitor"),
        coarse=r"(head|GPT).*backward|\bloss\b|grad",
    ),
    Fault(
        "ddp: a sum corrupted on one rank, alone",
        replace(DDP, lr=5e-3),
        hook_of(corrupted),
        REDUCED + "|layers|embedding|head",
        "silent data corruption",
        ("mix", "monitor"),
        alone=True,
    ),
    Fault(
        "ddp: a weight not updated on one rank, alone",
        replace(DDP, lr=5e-3),
        second_rank(not_updated),
        r"layers\.0\.mlp\.down|copy_",
        "parameter not broadcast",
        ("mix", "L0", "monitor"),
        alone=True,
    ),
    Fault(
        "ddp: no_sync left on, alone",
        replace(DDP_MICRO, lr=5e-3),
        when_ready(never_synchronised),
        REDUCED + "|parameter|not hold the same",
        "no_sync",
        ("mix", "L0", "monitor"),
        alone=True,
    ),
)
