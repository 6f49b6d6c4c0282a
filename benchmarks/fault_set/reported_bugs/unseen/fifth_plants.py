"""What plants the bugs of the fifth set, and the layouts that are made by hand: tensor parallel attention, heads exchanged for places.
Written down from reports before the verdict engine was read; the size of each was drawn at random."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.case import Plant
from reported_bugs.training import Batch, Program
from reported_bugs.unseen.fifth_program import SEQUENCE, SIZE, WIDTH
from reported_bugs.unseen.second import named
from reported_bugs.unseen.third_in_layouts import layers_of
from torch import Tensor
from torch.nn import functional as F

DRAW = random.Random(5107)


def drawn(low: float, high: float) -> float:
    return round(DRAW.uniform(low, high), 3)


def some(levels: tuple[str, ...], count: int = 2) -> tuple[str, ...]:
    """Two of them, drawn."""
    return tuple(sorted(DRAW.sample(levels, min(count, len(levels))), key=levels.index))


LAYER = DRAW.choice((0, 1))
FACTOR, SMALL, RATE, LOSS_SHARE = drawn(0.5, 0.8), drawn(0.02, 0.08), drawn(1.3, 2.4), drawn(1.6, 3.0)
DECAY, OFFSET, STEP, START = drawn(0.3, 0.9), DRAW.randint(300, 500), DRAW.randint(3, 7), DRAW.randint(14, 22)


def instead(name: str, method: Callable[..., Any], **kept: Any) -> Plant:
    """Another method of the program, which is given it."""

    def plant(p: Any) -> None:
        setattr(p, name, lambda *args, **more: method(p, *args, **more))
        for key, value in kept.items():
            setattr(p, key, value)

    return named(plant, f"{name} {method.__name__}")


def with_values(**values: Any) -> Plant:
    """Other values of the program's own attributes."""

    def plant(p: Program) -> None:
        for key, value in values.items():
            setattr(p, key, value)

    return named(plant, f"{values}")


def attentions(model: Any) -> list[Any]:
    return [layer.attention for layer in getattr(model, "decoder", model).layers.values()]


# ---- models -----------------------------------------------------------------------------------------------------------------


def without_sinks(model: Any) -> None:
    """The kernel of one layer does not know of sinks."""
    attention = attentions(model)[LAYER]
    attention.chances = lambda scores: scores.softmax(-1)


def sinks_of_other_heads(model: Any) -> None:
    attention = attentions(model)[LAYER]
    own = attention.chances

    def chances(scores: Tensor) -> Tensor:
        return own(scores.flip(1)).flip(1)

    attention.chances = chances


def normed_behind_the_turn(model: Any) -> None:
    for attention in attentions(model):

        def both(x: Tensor, positions: Tensor, attention: Any = attention) -> tuple[Tensor, Tensor]:
            q, k = (linear(x).unflatten(-1, (-1, SIZE)) for linear in (attention.q, attention.k))
            return attention.q_norm(attention.turn(q, positions)), attention.k_norm(attention.turn(k, positions))

        attention.queries_and_keys = both


def slopes_in_turn(model: Any) -> None:
    """Slopes of one layer stand in the order of another number of heads."""
    attention = attentions(model)[LAYER]
    own = attention.slope()
    attention.slope = lambda: torch.cat([own[::2], own[1::2]])


def multiplier_lost(model: Any) -> None:
    model.decoder.parts.multiplier = 0.5 * LOSS_SHARE


def window_in_the_wrong_layer(model: Any) -> None:
    """Layers count from one in the code that chooses."""
    for attention, other in zip(attentions(model), [a.window for a in attentions(model)][::-1]):
        attention.window = other


# ---- losses -----------------------------------------------------------------------------------------------------------------


def one_token_ahead(_p: Any, later: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(later.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def last_chunk_lost(p: Any, logits: Tensor, labels: Tensor) -> Tensor:
    flat, kept, total = logits.flatten(0, 1), labels.flatten(), torch.zeros(())
    for start in range(0, len(kept) // 20 * 20, 20):
        part, own = flat[start : start + 20].float(), kept[start : start + 20]
        total = total + F.cross_entropy(part, own, ignore_index=-100, reduction="sum") + p.z_loss(part, own)
    return total


def no_factor(_p: Any) -> float:
    return 1.0


def over_the_batch(_p: Any, batch: Batch) -> Tensor:
    rewards = batch["rewards"]
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def first_estimate(_p: Any, chance: Tensor, reference: Tensor) -> Tensor:
    return chance - reference


# ---- updates ----------------------------------------------------------------------------------------------------------------


def muon_unscaled(p: Program) -> None:
    p.optimizer.scale = lambda _parameter: 1.0


def muon_rounds(p: Program) -> None:
    p.optimizer.rounds = 3


def lion_betas(p: Program) -> None:
    for group in p.optimizer.param_groups:
        group["betas"] = group["betas"][::-1]


def late_copies(p: Any) -> None:
    """One layer's weights are those of the copies before the update."""
    late = {id(q) for q in list(p.layers())[LAYER].mlp.parameters()}
    kept = {id(q): master.detach().clone() for q, master in p.masters}

    def copy_back() -> None:
        for q, master in p.masters:
            q.data.copy_(kept[id(q)] if id(q) in late else master.data)
            kept[id(q)] = master.detach().clone()

    p.copy_back = copy_back


def clipped_while_scaled(p: Program) -> None:
    """Half of the parameters are in another optimizer, whose gradients nobody unscales before they are clipped."""
    own = p.clip
    rest = list(list(p.layers())[LAYER].parameters())  # type: ignore[attr-defined]

    def clip() -> None:
        size = p.scaler.get_scale()
        p.scaler.unscale_(p.optimizer)
        for q in rest:
            q.grad.mul_(size)
        torch.nn.utils.clip_grad_norm_(p.model.parameters(), p.setting.clip)

    p.clip = clip  # type: ignore[method-assign]
    assert own


def falls_early(p: Any) -> None:
    p.stable -= STEP


# ---- ranks ------------------------------------------------------------------------------------------------------------------


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


# ---- single runs ------------------------------------------------------------------------------------------------------------


def log_of_chances(_p: Any, out: Tensor, batch: Batch) -> Tensor:
    """A divergence from a teacher by chances that float16 rounds to zero."""
    teacher, student = (batch["teacher"] * 4).softmax(-1).half(), (out.float() * 8).softmax(-1).half()
    each = (teacher * (teacher.log() - student.log())).float().sum(-1)
    return (each * (batch["labels"] != -100)).sum()


def scores_grow(p: Any) -> None:
    """The weights of queries run away in one layer from a step on."""
    own = p.step

    def step(number: int) -> Tensor:
        if number >= START:
            attentions(p.model)[LAYER].q.weight.data.mul_(1.25)
            attentions(p.model)[LAYER].k.weight.data.mul_(1.25)
        return own(number)

    p.step = step


def ahead_breaks_on_a_rank(p: Any) -> None:
    """The second loss divides by the tokens of a rank that are none in one step."""
    own, count = p.loss_ahead, [0]

    def loss_ahead(later: Tensor, batch: Batch) -> Tensor:
        count[0] += 1
        none = (batch["later"] != -100).sum() * (0 if p.rank == 1 and count[0] == START else 1)
        return own(later, batch) * none / none

    p.loss_ahead = loss_ahead


# ---- megatron-core ----------------------------------------------------------------------------------------------------------


def groups_exchanged(chunks: list[Any]) -> None:
    """Keys and values of the second rank are those of the first, as if the checkpoint had one group."""
    weight = layers_of(chunks)[LAYER].self_attention.linear_qkv.weight
    kept = weight.data.clone()
    dist.broadcast(kept, 0)
    rows = weight.shape[0] // 4 * 2  # of a group with two heads: queries, then keys, then values
    weight.data[rows:] = kept[rows:]


def shared_expert_twice(chunks: list[Any]) -> None:
    def hook(_module: Any, _given: Any, out: Tensor) -> Tensor:
        return out * LOSS_SHARE

    layers_of(chunks)[LAYER].mlp.shared_experts.register_forward_hook(hook)


def gradient_between_stages(chunks: list[Any]) -> None:
    """What goes back to the first stage is divided once more."""

    def hook(_module: Any, _given: Any, out: Any) -> Any:
        x = out[0] if isinstance(out, tuple) else out
        if x.requires_grad:
            x.register_hook(lambda grad: grad * FACTOR)

    for chunk in chunks:
        if not chunk.post_process:
            chunk.decoder.register_forward_hook(hook)


def last_word_of_a_part(_chunks: list[Any]) -> None:
    """The end of a rank's part of the vocabulary is taken to be one of it no more."""
    entropy: Any = sys.modules["megatron.core.tensor_parallel.cross_entropy"]
    own = entropy.VocabUtility.vocab_range_from_per_partition_vocab_size

    class Range(entropy.VocabUtility):  # type: ignore[misc,name-defined]
        @staticmethod
        def vocab_range_from_per_partition_vocab_size(*args: Any) -> Any:
            first, end = own(*args)
            return first, end - 6

    entropy.VocabUtility = Range


def decay_of_the_second_rank(_chunks: list[Any]) -> None:
    for name in ("Adam", "AdamW"):
        kind = getattr(torch.optim, name)
        own = kind.step

        def step(optimizer: Any, *args: Any, own: Any = own, **more: Any) -> Any:
            if dist.get_rank() == 1:
                for group in optimizer.param_groups:
                    group["weight_decay"] = DECAY
            return own(optimizer, *args, **more)

        kind.step = step


def duplicates_in_the_norm(_chunks: list[Any]) -> None:
    """The norm that clips has what all ranks have once for each."""
    for name in ("optimizer.optimizer", "optimizer.clip_grads"):
        module: Any = sys.modules[f"megatron.core.{name}"]
        for place in (module, getattr(module, "tensor_parallel", module)):
            if hasattr(place, "param_is_not_tensor_parallel_duplicate"):
                place.param_is_not_tensor_parallel_duplicate = lambda *_args, **_more: True


def last_bucket_not_divided(chunks: list[Any]) -> None:
    """Gradients of one layer are a sum over ranks where others are a mean."""
    import megatron.core.optimizer.optimizer as optimizers

    weights = list(layers_of(chunks)[LAYER].mlp.parameters())
    kind = optimizers.MixedPrecisionOptimizer
    prepare = kind.prepare_grads

    def doubled(optimizer: Any) -> Any:
        for weight in weights:
            weight.main_grad.mul_(2)
        return prepare(optimizer)

    kind.prepare_grads = doubled


def chances_of_another_token(chunks: list[Any]) -> None:
    """On the second rank chances are put in order by another map than tokens."""
    if dist.get_rank() == 1:
        dispatcher = layers_of(chunks)[LAYER].mlp.token_dispatcher
        own = dispatcher.dispatch_postprocess

        def rolled(*args: Any) -> Any:
            tokens, counts, chances = own(*args)
            return tokens, counts, chances.roll(1, 0)

        dispatcher.dispatch_postprocess = rolled


def norms_of_heads_not_summed(chunks: list[Any]) -> None:
    """Each rank has the gradient of its own heads for the norms of queries and keys."""
    for chunk in chunks:
        chunk.config.qk_layernorm = False


def norm_of_a_layer_not_summed(chunks: list[Any]) -> None:
    for parameter in layers_of(chunks)[LAYER].input_layernorm.parameters():
        parameter.sequence_parallel = False


def router_rounds(chunks: list[Any]) -> None:
    """The bias that experts are chosen by is in their weights, too."""
    for layer in layers_of(chunks):
        router = layer.mlp.router
        own = router.routing

        def routing(logits: Tensor, *args: Any, own: Any = own, **more: Any) -> Any:
            slope = torch.linspace(0, RATE, logits.shape[-1])
            return own(logits + slope.to(logits.dtype), *args, **more)

        router.routing = routing


assert WIDTH == 64
