"""Bugs of ranks (DDP, FSDP2, DeepSpeed, stages), and the layouts that are made by hand: tensor parallel attention, heads exchanged for
places. Written down from reports before the verdict engine was read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.case import Plant
from reported_bugs.training import Batch, Program
from reported_bugs.unseen.fifth.drawn import LAYER, OFFSET, RATE, SMALL, attentions
from reported_bugs.unseen.fifth.program import SEQUENCE
from reported_bugs.unseen.second import named
from torch import Tensor


def small_gradients_dropped(p: Program) -> None:
    """A hook sends only what is large, and forgets the rest."""

    def hook(_state: Any, bucket: Any) -> Any:
        sent = bucket.buffer() / dist.get_world_size()
        size = sent.abs().float()
        sent = torch.where(size >= SMALL * size.max(), sent, torch.zeros_like(sent))
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: done.value()[0])

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # it asks for classes, not for their names
    p.net.register_comm_hook(None, hook)


def ignored(p: Program) -> None:
    """The second prediction was added to a list of what is not reduced."""
    if p.setting.ranks > 1:
        names = [name for name, _ in p.model.named_parameters() if "ahead.joined" in name]
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(p.model, names)


def ignored_when_wrapped(p: Program) -> None:
    p.change_model.append(lambda _model: ignored(p))


def far_places(cast: bool) -> Plant:
    """Positions far from zero, as numbers of float32; `cast`: the policy casts what layers are given."""

    def plant(p: Any) -> None:
        own, arguments = p.rows_of, p.policy_arguments

        def rows_of(step: int) -> Batch:
            rows = own(step)
            return {**rows, "positions": rows["positions"].float() + OFFSET}

        def policy_arguments() -> Any:
            from torch.distributed import fsdp

            policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=cast)
            return {**arguments(), "mp_policy": policy}

        p.rows_of, p.policy_arguments = rows_of, policy_arguments

    return named(plant, f"far places {cast}")


def replicas_apart(p: Any) -> None:
    """The mesh lacks the dimension that copies are summed over: each pair of ranks trains by itself."""
    if p.setting.ranks > 1:
        own = p.mesh

        def mesh() -> Any:
            whole = own()
            return whole["shard"] if whole.ndim == 2 else whole

        p.mesh = mesh


def half_of_the_rate(p: Program) -> None:
    """The schedule knows the first group only."""
    base = p.scheduler.optimizer
    base.param_groups[1]["lr"] *= RATE
    p.scheduler.base_lrs[1] *= RATE


def lost_labels(p: Program) -> None:
    """The labels of a rank's last row are cut off by a wrong length."""
    own = p.batches

    def batches(step: int) -> list[Batch]:
        found = own(step)
        for batch in found:
            if p.rank == p.setting.ranks - 1:
                batch["labels"][-1, SEQUENCE // 2 :] = -100
        return found

    p.batches = batches  # type: ignore[method-assign]


def counted_in_a_stage(p: Any) -> None:
    """Each stage counts its layers from zero where it asks which have a window."""
    if p.setting.ranks > 1:
        for attention in attentions(p.model):
            attention.window = p.model.parts.window


def stale_message(p: Any) -> None:
    """The second stage takes a part of what came for the micro batch before."""
    if p.setting.ranks > 1 and p.rank == 1:
        kept: list[Tensor] = []
        count = [0]

        def hook(_module: Any, given: Any) -> Any:
            count[0] += 1
            if count[0] == 1:  # a pass that looks for shapes, in memory that nobody has written
                return given
            x = given[0].clone()
            if kept:
                x[:, : SEQUENCE // 3] = kept.pop()[:, : SEQUENCE // 3]
            kept.append(given[0].detach().clone())
            return (x, *given[1:])

        p.model.register_forward_pre_hook(hook)


def tensor_parallel(summed: bool = True, exchanged: bool = False, name: str = "") -> Plant:
    """Attention and MLPs are cut over two ranks by heads; `summed`: gradients of norms of queries and keys, which each rank has of its own
    heads; `exchanged`: keys and values are in the order of another mesh."""

    def plant(p: Any) -> None:
        if p.setting.ranks == 1:
            return
        size = p.setting.rows // p.setting.micro

        def batches(step: int) -> list[Batch]:
            whole = p.rows_of(step)
            return [{key: value[m * size : (m + 1) * size].contiguous() for key, value in whole.items()} for m in range(p.setting.micro)]

        p.batches = batches
        p.tokens = lambda micros: torch.stack([(b["labels"] != -100).sum() for b in micros]).sum()
        own = p.wrap

        def total(grad: Tensor) -> Tensor:
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

        def wrap() -> None:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            names = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
            plan: dict[str, Any] = {
                **{n: ColwiseParallel() for n in names},
                "attention.o": RowwiseParallel(),
                "mlp.down": RowwiseParallel(),
            }
            for number, layer in enumerate(p.layers()):
                parallelize_module(layer, mesh, plan)
                for norm in (layer.attention.q_norm, layer.attention.k_norm) if summed else ():
                    norm.weight.register_hook(total)
                if exchanged and number == LAYER:
                    for linear in (layer.attention.k, layer.attention.v):
                        shard = linear.weight.to_local()
                        parts = [torch.empty_like(shard.data) for _ in range(2)]
                        dist.all_gather(parts, shard.data.contiguous())
                        shard.data.copy_(parts[1 - dist.get_rank()])
            own()

        p.wrap = wrap

    return named(plant, name or f"tensor parallel {summed} {exchanged}")


class Exchange(torch.autograd.Function):
    """Parts of `out` for parts of `into`, over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: int, into: int) -> Tensor:  # type: ignore[override]
        ctx.dimensions = out, into
        sent = torch.stack([part.contiguous() for part in x.chunk(2, out)])
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        return torch.cat(list(got), into)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        out, into = ctx.dimensions
        return Exchange.apply(grad.contiguous(), into, out), None, None


def heads_for_places(wrong: bool = False) -> Plant:
    """Each rank has a half of every sequence, and in attention a half of the heads; `wrong`: heads come back in the other order in one
    layer."""

    def plant(p: Any) -> None:
        if p.setting.ranks == 1:
            return

        def batches(step: int) -> list[Batch]:
            whole, half = p.rows_of(step), SEQUENCE // 2
            part = slice(p.rank * half, (p.rank + 1) * half)
            return [{key: (value if key == "documents" else value[:, part]).contiguous() for key, value in whole.items()}]

        def edit(model: Any) -> None:
            for number, attention in enumerate(attentions(model)):
                own = attention.core

                def core(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, own: Any = own, number: int = number) -> Tensor:
                    q, k, v = (Exchange.apply(x, 1, 2) for x in (q, k, v))
                    y = Exchange.apply(own(q, k, v, seen), 2, 1)
                    return torch.cat(y.chunk(2, 1)[::-1], 1) if wrong and number == LAYER else y

                attention.core = core

        p.batches = batches
        p.change_model.append(edit)

    return named(plant, f"heads for places {wrong}")
