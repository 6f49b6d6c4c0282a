"""Small models, their batches, and the same training by hand in one process and in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.case import TrainingCase

Key = tuple[str, int, str]
"""(family, step, parameter)"""
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-3}
"""Of AdamW. This eps keeps tiny gradients from deciding the direction, so that float32 stays near float64."""


class Model(NamedTuple):
    """What is trained.

    Attributes:
        make: the same in every rank.
        batch: ``(step, micro batch, data rank)`` to one micro batch.
        loss: ``(model, batch)`` to its loss.
        spied: end of the class names of modules that a spy looks at, and the function of torch.nn.functional that they call.
        failing: the module that gives NaN.
        drifting: a parameter that is no matrix, so that no layout divides it.
        eps: of the optimizer.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], torch.Tensor]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    spied: tuple[str, str]
    failing: str
    drifting: str
    eps: float = OPTIMIZER["eps"]


def make_mlp() -> nn.Sequential:
    """Two linear layers that tensor parallel can divide and a norm; a second half whose sizes fit no partition. Pipelines cut it at 4."""
    torch.manual_seed(3)
    first = [nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8)]
    return nn.Sequential(*first, nn.Linear(8, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 4))


def mlp_batch(step: int, micro: int, data_rank: int) -> torch.Tensor:
    """[4, 8] float32"""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * data_rank + 10 * step + micro))


def mlp_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean() if x.dtype != torch.float64 else model(x).square().mean()
    return loss


def make_gpt() -> nn.Module:
    """A GPT-2 of Transformers, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    shape = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return model


def tokens(number: int) -> torch.Tensor:
    """Sample `number`: [8] int64."""
    return torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(number))


def gpt_batch(step: int, micro: int, data_rank: int, data_ranks: int = 1, micros: int = 1) -> torch.Tensor:
    """Two samples, in the order in which a sequential sampler deals them out: [2, 8] int64."""
    first = 2 * ((step * micros + micro) * data_ranks + data_rank)
    return torch.stack([tokens(first), tokens(first + 1)])


def gpt_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's Trainer counts it: it takes the first label for one, too, which has no prediction."""
    logits = model(input_ids=x).logits[:, :-1]
    total = nn.functional.cross_entropy(logits.reshape(-1, 32), x[:, 1:].reshape(-1), reduction="sum")
    return total / x.numel()


MODELS = {
    "mlp": Model(make_mlp, mlp_batch, mlp_loss, ("LayerNorm", "layer_norm"), "6", "6.weight"),
    "gpt_tiny": Model(
        make_gpt, gpt_batch, gpt_loss, ("LayerNorm", "layer_norm"), "transformer.h.0.ln_2", "transformer.h.1.ln_1.weight", 1e-8
    ),
}
"""Others are a framework's own: its module has ``MODELS`` with what a spy looks at, and notes the whole tensors itself."""


def reference(case: TrainingCase) -> dict[Key, float]:
    """The case by hand in float64: norms of gradients, parameters and moments, see `by_hand`."""
    model = MODELS[case.model]
    micros, ranks = case.micro_batches, case.data_ranks

    def batch(step: int, micro: int, data_rank: int) -> torch.Tensor:
        if case.model == "gpt_tiny":
            return gpt_batch(step, micro, data_rank, ranks, micros)
        return model.batch(step, micro, data_rank).double()

    steps = [[batch(step, micro, r) for micro in range(micros) for r in range(ranks)] for step in range(case.steps)]
    optimizer = lambda parameters: torch.optim.AdamW(parameters, **{**OPTIMIZER, "eps": model.eps})  # noqa: E731
    return by_hand(model.make(), model.loss, steps, optimizer, case.clip)


def local_gradients(case: TrainingCase, data_rank: int) -> dict[str, float]:
    """Norms of the gradients of a rank's own batches in step 0, before anything is reduced, by hand in float64."""
    kind = MODELS[case.model]
    model = kind.make().double()
    for micro in range(case.micro_batches):
        (kind.loss(model, kind.batch(0, micro, data_rank).double()) / case.micro_batches).backward()
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}


def by_hand(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    steps: Sequence[Sequence[Any]],
    optimizer: Any,
    clip: float = 0,
) -> dict[Key, float]:
    """Train a float64 copy: per step the norms of the gradients before clipping, of the parameters before and after, of the moments.

    Args:
        loss: ``(model, batch)`` to the loss of one micro batch.
        steps: micro batches of each step, of all ranks.
        optimizer: ``(parameters)`` to an optimizer.
    """
    model = model.double().train()
    opt = optimizer(model.parameters())
    found: dict[Key, float] = {}
    for number, batches in enumerate(steps):
        for batch in batches:
            (loss(model, batch) / len(batches)).backward()
        named = dict(model.named_parameters())
        for name, p in named.items():
            assert p.grad is not None
            found["grad_reduced", number, name] = float(p.grad.norm())
            found["param_origin", number, name] = float(p.detach().norm())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        for name, p in named.items():
            found["param_updated", number, name] = float(p.detach().norm())
            for state in ("exp_avg", "exp_avg_sq"):
                found[state, number, name] = float(opt.state[p][state].norm())
        opt.zero_grad()
    return found
