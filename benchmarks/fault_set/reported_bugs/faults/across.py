"""Reported bugs that appear with another layout: data-parallel and sharded trainings of two ranks beside one process. Written down before
the other lists were read, and run once before anything was changed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs import models
from reported_bugs.case import Fault, Healthy, in_model, when_ready
from reported_bugs.faults.in_ranks import REDUCED, clipped_by_shard, hook_of, never_synchronised, plain_sgd, same_data, summed
from reported_bugs.training import Program, Setting
from torch import Tensor, nn

ONE = Setting(dtype="fp32", micro=2)
DDP, FSDP = replace(ONE, ranks=2, wrap="ddp"), replace(ONE, ranks=2, wrap="fsdp")
BF16, FSDP_BF16 = replace(ONE, dtype="bf16"), replace(FSDP, dtype="bf16")
TIED = (("tied", True),)
BOTH = ("mix", "L0")
LOSS = r"loss|criterion|div|__mul__|head"


class Places(nn.Module):
    """A table of places that is looked up once for all rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(models.LENGTH, models.HIDDEN)
        nn.init.normal_(self.table.weight, std=0.02, generator=torch.Generator().manual_seed(7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


def with_places(model: Any) -> None:
    model.places, own = Places().to(model.embedding.weight.dtype), model.embedding.forward
    model.embedding.forward = lambda tokens: model.places(own(tokens))


def places_begin_again(model: Any) -> None:
    """The second half of a sequence is numbered as the first one is, as on ranks that each have a part of it."""
    with_places(model)
    half = models.LENGTH // 2
    model.places.forward = lambda x: x + model.places.table(torch.arange(x.shape[1]) % half)


def untied(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def times_ranks(program: Program) -> None:
    """The author thinks that the wrapper sums."""
    own = program.scale
    program.scale = lambda: own() * 2  # type: ignore[method-assign]


def accumulated_on_one_rank(program: Program) -> None:
    """One rank does not divide by its micro batches."""
    if program.rank == 1:
        own = program.scale
        program.scale = lambda: own() * program.setting.micro  # type: ignore[method-assign]


def statistics_of_each_rank(program: Program, reduced: bool = False) -> None:
    """A running size of what goes into a layer, which the layer divides by, is that of the rank's own rows."""

    def edit(model: Any) -> None:
        layer = model.layers[1]
        layer.register_buffer("level", torch.ones(models.HIDDEN))
        own = layer.mlp.forward

        def forward(x: Tensor) -> Tensor:
            with torch.no_grad():
                seen = x.float().square().mean((0, 1))
                if reduced and program.setting.ranks > 1:
                    dist.all_reduce(seen)
                    seen /= program.setting.ranks
                layer.level.mul_(0.5).add_(0.5 * seen)
            return own(x / (layer.level + 1e-3).sqrt().to(x.dtype))

        layer.mlp.forward = forward

    program.change_model.append(edit)


def statistics_of_all(program: Program) -> None:
    statistics_of_each_rank(program, reduced=True)


def sgd_clipped_by_shard(program: Program) -> None:
    plain_sgd(program)
    when_ready(clipped_by_shard)(program)


def across(name: str, setting: Setting, other: Setting, plant: Any, truth: str, seen: str, **more: Any) -> Fault:
    return Fault(f"across: {name}", setting, plant, truth, seen, other=other, **{"levels": BOTH, **more})


PLACED = in_model(with_places)
CASES = (
    across(
        "no_sync around the last micro batch", ONE, DDP, when_ready(never_synchronised), REDUCED, "DDP with accumulation", coarse="embed"
    ),
    across("the same rows on all ranks", ONE, DDP, when_ready(same_data), r"token|embedding|data|batch|labels|getitem", "no sampler"),
    across("gradients summed by a hook", ONE, DDP, hook_of(summed), REDUCED, "register_comm_hook", levels=("mix", "L0", "monitor")),
    across("one rank does not divide by its micro batches", ONE, DDP, accumulated_on_one_rank, LOSS, "a loop of one's own"),
    across("loss times the number of ranks", ONE, FSDP, times_ranks, LOSS, "FSDP2 takes the mean"),
    across("head no longer tied", replace(ONE, changes=TIED), replace(FSDP, changes=TIED), in_model(untied), r"embedding|head", "to_empty"),
    across(
        "clipped by the norm of a shard",
        replace(ONE, clip=0.1),
        replace(FSDP, clip=0.1),
        sgd_clipped_by_shard,
        r".",
        "local norm",
        golden=plain_sgd,
    ),
    across(
        "statistics of each rank", ONE, DDP, statistics_of_each_rank, r"layers\.1|mean|level", "stale buffers", golden=statistics_of_all
    ),
    across(
        "places begin again",
        ONE,
        DDP,
        in_model(places_begin_again),
        r"table|places|arange|remainder|__mod__",
        "positions by rank",
        golden=PLACED,
    ),
    across(
        "places begin again, bf16",
        BF16,
        FSDP_BF16,
        in_model(places_begin_again),
        r"table|places|arange|remainder|__mod__",
        "",
        golden=PLACED,
    ),
)
HEALTHY = (
    Healthy("across: places, ddp", ONE, DDP, PLACED, ("mix", "L0"), PLACED),
    Healthy("across: places, fsdp", replace(ONE, micro=1), replace(FSDP, micro=1), PLACED, ("L0",), PLACED),
    Healthy("across: places, four micro batches", replace(ONE, micro=1), replace(ONE, micro=4), PLACED, ("L0",), PLACED),
    Healthy("across: fsdp, two micro batches", ONE, FSDP, levels=("mix", "L0")),
    Healthy("across: fsdp, two micro batches, bf16", BF16, FSDP_BF16, levels=("mix", "L0", "monitor")),
    Healthy("across: fsdp, two micro batches for one", replace(ONE, micro=1), FSDP, levels=("L0",)),
    Healthy("across: fsdp, tied", replace(ONE, changes=TIED), replace(FSDP, changes=TIED), levels=("L0",)),
    Healthy("across: fsdp for ddp", DDP, FSDP, levels=("L0", "monitor")),
    Healthy("across: statistics of all ranks", ONE, DDP, statistics_of_all, BOTH, statistics_of_all),
)
