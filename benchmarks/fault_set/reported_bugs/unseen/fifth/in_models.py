"""Bugs in the model, the loss and the update of the fifth set's program, and in single runs of it; written down from reports before the
verdict engine was read."""

from __future__ import annotations

from typing import Any

import torch
from reported_bugs.training import Batch, Program
from reported_bugs.unseen.fifth.decoder import SIZE
from reported_bugs.unseen.fifth.drawn import LAYER, LOSS_SHARE, START, STEP, attentions
from torch import Tensor
from torch.nn import functional as F

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
