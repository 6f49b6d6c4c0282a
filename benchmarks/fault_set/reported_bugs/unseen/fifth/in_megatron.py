"""Bugs of megatron-core, written down from reports before the verdict engine was read."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.unseen.fifth.drawn import DECAY, FACTOR, LAYER, LOSS_SHARE, RATE
from reported_bugs.unseen.third_in_layouts import layers_of
from torch import Tensor


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
