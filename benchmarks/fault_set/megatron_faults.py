"""Defects for trainings of megatron-core in any layout, each with the records that name it.

A plant is given the model chunks of a rank before the first step. It changes a branch, a weight or a scale by a few per cent, or leaves out
a sum over ranks: in bf16 that is a few times what round-off does to the statistics of two layouts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron_dumps import Plant, inner, missing_sum, wrong_eps


class MegatronFault(NamedTuple):
    """Attributes:
    plant: makes the defect.
    truth: pattern of the records that may be named first.
    layouts: it can be made in, by the start of their arguments; "" for any.
    """

    plant: Plant
    truth: str
    layouts: str = ""


def _scaled_output(module: Any) -> None:
    forward = module.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output, bias = forward(*args, **kwargs)
        return output * 1.03, bias

    module.forward = scaled


def branch(chunks: Any) -> None:
    """The MLP of the second layer gives 3 % too much."""
    _scaled_output(inner(chunks).decoder.layers[1].mlp)


def attention(chunks: Any) -> None:
    """The attention of the first layer gives 3 % too much."""
    _scaled_output(inner(chunks).decoder.layers[0].self_attention)


@torch.no_grad()
def weight(chunks: Any) -> None:
    """A projection's weight is 3 % too large."""
    inner(chunks).decoder.layers[1].self_attention.linear_qkv.weight.mul_(1.03)


@torch.no_grad()
def norm_weight(chunks: Any) -> None:
    """A norm's weight is 3 % too large."""
    inner(chunks).decoder.layers[0].input_layernorm.weight.mul_(1.03)


def gradient(chunks: Any) -> None:
    """What comes back into the first product of an MLP is 5 % too large."""

    def on_output(_module: Any, _inputs: Any, output: Any) -> None:
        output[0].register_hook(lambda grad: grad * 1.05)

    inner(chunks).decoder.layers[1].mlp.linear_fc1.register_forward_hook(on_output)


def rotary(chunks: Any) -> None:
    """Positions turn 3 % too slowly."""
    inner(chunks).rotary_pos_emb.inv_freq.mul_(0.97)


def score_scale(chunks: Any) -> None:
    """Scores of the first layer are 10 % too large."""
    core = inner(chunks).decoder.layers[0].self_attention.core_attention
    core.softmax_scale = 1.1 * (core.softmax_scale or core.hidden_size_per_attention_head**-0.5)


def gradients_not_averaged(chunks: Any) -> None:
    """Gradients are not summed over data-parallel ranks."""
    for group in chunks[0].bucket_groups:
        group.start_grad_sync = group.finish_grad_sync = lambda *_args, **_kwargs: None


def norm_gradients_not_summed(_chunks: Any) -> None:
    """Gradients of norms are not summed over the ranks that each have a part of the sequence."""
    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
    for name in ("_allreduce_layernorm_grads", "_allreduce_non_tensor_model_parallel_grads"):
        if hasattr(finalize, name):
            setattr(finalize, name, lambda *_args, **_kwargs: None)


def learning_rate(_chunks: Any) -> None:
    """The learning rate is 2 % too large."""

    def wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
        def faster(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            kept = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= 1.02
            try:
                return step(optimizer, *args, **kwargs)
            finally:
                for group, lr in zip(optimizer.param_groups, kept):
                    group["lr"] = lr

        return faster

    for kind in (torch.optim.Adam, torch.optim.AdamW):
        kind.step = wrapped(kind.step)  # type: ignore[method-assign]


_PRODUCT = r"Torch\.(matmul|baddbmm).*forward"
_UNSUMMED = rf"{_PRODUCT}|Autograd\.(Linear|_Reduce).*|Tensor\.view_as.*|Distributed\.all_reduce.*"
_UPDATE = r"Torch\.norm.*|Tensor\.float.*|Tensor\.add_.*|Functional\.(un)?flatten.*|Distributed\..*|.*parameters_grad.*"

FAULTS = {
    "branch 3 % too large": MegatronFault(branch, r".*layers\.1\.mlp\..*forward.*|Tensor\.__(mul|add)__.*forward"),
    "attention 3 % too large": MegatronFault(attention, r".*layers\.0\.self_attention.*forward.*|Tensor\.__(mul|add)__.*forward"),
    "wrong eps of a norm": MegatronFault(wrong_eps, r".*(rms|layer)_norm\.\d.*forward|.*layers\.1\.pre_mlp_layernorm.*forward.*"),
    "weight 3 % too large": MegatronFault(weight, rf"{_PRODUCT}|.*layers\.1\.self_attention\.linear_qkv.*forward.*|Tensor\.t\..*"),
    "norm weight 3 % too large": MegatronFault(norm_weight, r".*(rms|layer)_norm\.0.*forward|.*layers\.0\.input_layernorm.*forward.*"),
    "gradient 5 % too large": MegatronFault(gradient, r".*layers\.1\.mlp.*backward.*|Tensor\.(__mul__|t|matmul|view)\..*"),
    "rotary angles 3 % too small": MegatronFault(rotary, r".*rotary.*|Torch\.(outer|cat|cos).*|Tensor\.(to|__mul__)\..*"),
    "scores 10 % too large": MegatronFault(score_scale, rf"{_PRODUCT}|.*layers\.0\.self_attention\.core_attention.*forward.*|.*softmax.*"),
    "missing sum after a row-parallel product": MegatronFault(missing_sum, rf".*layers\.1\.mlp\.linear_fc2.*|{_UNSUMMED}", "--tp"),
    "gradients not averaged": MegatronFault(gradients_not_averaged, _UPDATE, "--dp"),
    "norm gradients not summed": MegatronFault(norm_gradients_not_summed, rf"{_UPDATE}|.*norm.*", "--tp 2 --sp"),
    "learning rate 2 % too large": MegatronFault(learning_rate, r"Tensor\.\w+_\..*|Tensor\.__\w+__\..*|Torch\._foreach.*"),
}
