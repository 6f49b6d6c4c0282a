"""What plants bugs that people reported of trainings in parallel layouts (megatron-core), written down before the verdict engine and the
other lists were read; the size of each was drawn at random."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.unseen.third_in_layouts import layers_of
from torch import Tensor

DRAW = random.Random(2611)
BOTH, EVERY = ("mix", "L0"), ("mix", "L0", "monitor")


def drawn(low: float, high: float) -> float:
    return round(DRAW.uniform(low, high), 3)


def some(levels: tuple[str, ...]) -> tuple[str, ...]:
    """Half of them, drawn."""
    return tuple(sorted(DRAW.sample(levels, (len(levels) + 1) // 2), key=levels.index))


LAYER, RATE, EXPERTS, OFFSET = DRAW.choice((0, 1)), drawn(0.2, 0.6), drawn(1.4, 2.6), DRAW.randint(2, 6)
UPDATE = r"param|weight|grad|norm|clip|exp_avg|update|optimizer|Tensor\.\w+_\.|foreach|flatten"


def row_biases_not_summed(chunks: list[Any]) -> None:
    """Biases behind a reduce-scatter: each rank has the gradient of its part of the sequence."""
    for layer in layers_of(chunks):
        for linear in (layer.mlp.linear_fc2, layer.self_attention.linear_proj):
            linear.bias.sequence_parallel = False


def counted_tokens(own_share: bool) -> Callable[[list[Any]], None]:
    """A loss over the tokens that count; `own_share`: each rank divides by its own number of them."""

    def plant(_chunks: list[Any]) -> None:
        import train_gpt

        def forward_step(data: Any, model: Any) -> Any:
            batch = next(data)
            counted = (batch["labels"] % (3 + 4 * dist.get_rank()) > 0).float()
            output = model(batch["tokens"], batch["positions"], batch["mask"], labels=batch["labels"])
            tokens = counted.sum()
            if not own_share:
                dist.all_reduce(tokens)
                tokens /= dist.get_world_size()

            def loss(out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                value = (out.float() * counted).sum() / tokens
                return value, {"lm loss": value.detach().clone()}

            return output, loss

        train_gpt.forward_step = forward_step

    plant.__name__ = f"counted tokens {own_share}"
    return plant


def rate_of(kind: Callable[[dict[str, Any]], bool], factor: float) -> Callable[[list[Any]], None]:
    """Another learning rate for some groups of the optimizer."""

    def plant(_chunks: list[Any]) -> None:
        def wrapped(step: Any) -> Any:
            def slower(optimizer: Any, *args: Any, **more: Any) -> Any:
                groups = [group for group in optimizer.param_groups if kind(group)]
                kept = [group["lr"] for group in groups]
                for group in groups:
                    group["lr"] *= factor
                found = step(optimizer, *args, **more)
                for group, rate in zip(groups, kept):
                    group["lr"] = rate
                return found

            return slower

        for name in ("Adam", "AdamW"):
            setattr(getattr(torch.optim, name), "step", wrapped(getattr(torch.optim, name).step))  # noqa: B010

    return plant


def bucket_not_gathered(chunks: list[Any]) -> None:
    """The second half of a weight is never gathered from the rank that updates it."""
    weight = layers_of(chunks)[LAYER].mlp.linear_fc1.weight
    kept = weight.detach().clone()

    def before(*_: Any) -> None:
        half = len(weight) // 2
        weight.data[half:] = kept[half:]

    chunks[0].register_forward_pre_hook(before)


def read_before_reduced(chunks: list[Any]) -> None:
    """Gradients of one weight are taken before their sum has ended: each rank has its own."""
    weight = layers_of(chunks)[1 - LAYER].self_attention.linear_proj.weight
    own: list[Tensor] = []
    weight.register_hook(lambda grad: own.append(grad.detach().float().clone()))
    optimizers: Any = sys.modules["megatron.core.optimizer.optimizer"]
    for kind in (optimizers.FP32Optimizer, optimizers.Float16OptimizerWithFloat16Params):
        prepare = kind.prepare_grads

        def stale(optimizer: Any, prepare: Any = prepare) -> Any:
            weight.main_grad.copy_(torch.stack(own).sum(0) / dist.get_world_size())
            own.clear()
            return prepare(optimizer)

        kind.prepare_grads = stale


def heads_of_the_other_rank(chunks: list[Any]) -> None:
    """The parts of an output projection are read in the order of another launch."""
    weight = layers_of(chunks)[LAYER].self_attention.linear_proj.weight
    parts = [torch.empty_like(weight.data) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.data)
    weight.data.copy_(parts[1 - dist.get_rank()])


def padded_vocabulary(masked: bool) -> Callable[[list[Any]], None]:
    """The last rows of the table only fill it up."""

    def plant(chunks: list[Any]) -> None:
        def hook(_module: Any, _given: Any, out: Any) -> Any:
            unused = torch.arange(out[0].shape[-1]) >= out[0].shape[-1] - 9
            return (out[0].masked_fill(unused, -1e4) if masked else out[0] + 0.0, *out[1:])

        for chunk in chunks:
            chunk.output_layer.register_forward_hook(hook)

    plant.__name__ = f"padded vocabulary {masked}"
    return plant


def with_dropout(chunks: list[Any]) -> None:
    for layer in layers_of(chunks):
        layer.hidden_dropout = 0.15


def second_rank_evaluates(chunks: list[Any]) -> None:
    with_dropout(chunks)
    if dist.get_rank() == 1:
        for chunk in chunks:
            chunk.decoder.eval()


def experts_exchanged(chunks: list[Any]) -> None:
    """What comes back from the experts of the second rank belongs to its other expert."""
    if dist.get_rank() == 1:
        first, second = layers_of(chunks)[LAYER].mlp.experts.local_experts
        for one, other in zip(first.parameters(), second.parameters()):
            one.data, other.data = other.data.clone(), one.data.clone()


def sigmoid_scores(chunks: list[Any]) -> None:
    for layer in layers_of(chunks):
        layer.mlp.router.score_function = layer.mlp.router.config.moe_router_score_function = "sigmoid"


def routed_factor(chunks: list[Any]) -> None:
    for layer in layers_of(chunks):
        layer.mlp.router.config.moe_router_topk_scaling_factor = EXPERTS


def shared_counted_twice(_chunks: list[Any]) -> None:
    """The norm that clips has the shared table of both stages in it."""
    optimizers: Any = sys.modules["megatron.core.optimizer.optimizer"]
    optimizers.param_is_not_shared = lambda _parameter: True


def copies_not_reloaded(_chunks: list[Any]) -> None:
    """A checkpoint is read into the weights; the optimizer keeps the float32 copies of those before."""
    optimizers: Any = sys.modules["megatron.core.optimizer.optimizer"]
    optimizers.MixedPrecisionOptimizer.reload_model_params = lambda _optimizer, *_args, **_more: None


def a_micro_batch_forgotten(chunks: list[Any]) -> None:
    """The product of a gradient is added to what is there from the second micro batch on; the first is lost."""
    weight, count = layers_of(chunks)[LAYER].mlp.linear_fc2.weight, [0]

    def hook(grad: Tensor) -> Tensor:
        count[0] += 1
        return grad * 0 if count[0] % 4 == 1 else grad

    weight.register_hook(hook)


def activation_of_the_last_micro_batch(chunks: list[Any]) -> None:
    """The second stage reads its buffer before the message is there."""
    for chunk in chunks:
        if not chunk.pre_process:
            own, last = chunk.set_input_tensor, [None]

            def stale(given: Any, own: Any = own, last: Any = last) -> None:
                x = given[0] if isinstance(given, list) else given
                if x is None:
                    return own(given)
                kept, last[0] = last[0], x.detach().clone()
                with torch.no_grad():
                    if kept is not None:
                        x.copy_(kept)
                return own(given)

            chunk.set_input_tensor = stale


def interleaved_rotary(chunks: list[Any]) -> None:
    for layer in layers_of(chunks):
        layer.self_attention.config.rotary_interleaved = True
    for chunk in chunks:
        chunk.rotary_pos_emb.rotary_interleaved = True


def norms_centred_at_zero(chunks: list[Any]) -> None:
    """Weights of norms are saved less one, and are read as they are."""
    for layer in layers_of(chunks):
        if layer.layer_number == LAYER + 1:
            layer.pre_mlp_layernorm.weight.data.sub_(1)


def masks_not_restored(chunks: list[Any]) -> None:
    """Layers that are computed again draw other masks."""
    with_dropout(chunks)
    states: Any = sys.modules["megatron.core.tensor_parallel.random"]
    states._set_all_rng_states = lambda *_args: None


def update_skipped_by_the_second_rank(_chunks: list[Any]) -> None:
    """The second rank alone sees an overflow, and leaves out the update."""
    optimizers: Any = sys.modules["megatron.core.optimizer.optimizer"]
    own, count = optimizers.MixedPrecisionOptimizer.step_with_ready_grads, [0]

    def step(optimizer: Any) -> Any:
        count[0] += 1
        return False if dist.get_rank() == 1 and count[0] == 2 else own(optimizer)

    optimizers.MixedPrecisionOptimizer.step_with_ready_grads = step


def rows(change: Callable[[int, dict[str, Tensor]], dict[str, Tensor]], first_rank: bool = False) -> Callable[[list[Any]], None]:
    """Other rows; `first_rank`: all ranks read those of the first."""

    def plant(_chunks: list[Any]) -> None:
        import train_gpt
        from megatron.core import parallel_state as state

        own = train_gpt.batches

        def batches(a: Any) -> Any:
            kept = state.get_data_parallel_rank
            if first_rank:
                state.get_data_parallel_rank = lambda *_args, **_more: 0
            for batch in own(a):
                state.get_data_parallel_rank = kept
                yield change(kept(), batch)
                state.get_data_parallel_rank = (lambda *_args, **_more: 0) if first_rank else kept

        train_gpt.batches = batches

    return plant


def one_token_later(rank: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "tokens": batch["tokens"].roll(OFFSET, 1)} if rank == 1 else batch


def nan_of_an_expert(chunks: list[Any]) -> None:
    """An expert of the second rank divides by the length of its tokens, and has one of zero in step 1."""
    if dist.get_rank() != 1:
        return
    count = [0]

    def hook(_module: Any, _given: Any, out: Any) -> Any:
        count[0] += 1
        scale = torch.ones_like(out[0][:, :1])
        if count[0] == 3 and len(scale):
            scale[0] = 0
        return (out[0] * scale / scale, *out[1:])

    layers_of(chunks)[1].mlp.experts.local_experts[0].linear_fc1.register_forward_hook(hook)


def norm_of_the_second_rank(chunks: list[Any]) -> None:
    """One tensor-parallel rank did not read one norm from the checkpoint."""
    if dist.get_rank() == 1:
        torch.nn.init.ones_(layers_of(chunks)[LAYER].pre_mlp_layernorm.weight)


def same_draws(chunks: list[Any]) -> None:
    """Parts of all column-parallel weights are drawn with one seed on all ranks."""
    for layer in layers_of(chunks):
        for linear in (layer.mlp.linear_fc1, layer.self_attention.linear_qkv):
            dist.broadcast(linear.weight.data, 0)
