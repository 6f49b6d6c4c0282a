"""Reported bugs in mixtures of experts: router, balance, capacity."""

from __future__ import annotations

from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Fault, every, in_model, setting_of_model
from reported_bugs.faults.in_models import ALL, HF, MOE, TWO
from torch import Tensor
from torch.nn import functional as F


def router_in_low_precision(model: Any) -> None:
    for moe in every(model, models.Experts):
        moe.probabilities = lambda x, moe=moe: torch.softmax(moe.router(x), -1)


def weights_not_normalised(model: Any) -> None:
    for moe in every(model, models.Experts):
        moe.chosen = lambda probabilities, moe=moe: probabilities.topk(moe.top, -1)


def one_expert(model: Any) -> None:
    for moe in every(model, models.Experts):
        moe.top = 1


def softmax_twice(model: Any) -> None:
    for moe in every(model, models.Experts):
        moe.balance = lambda p, e, own=moe.balance: own(torch.softmax(p, -1), e)


def balance_not_by_top(model: Any) -> None:
    for moe in every(model, models.Experts):
        moe.balance = lambda p, e, own=moe.balance, moe=moe: own(p, e) * moe.top


def tokens_dropped(model: Any) -> None:
    """An expert takes no more tokens than its capacity."""
    for moe in every(model, models.Experts):

        def chosen(probabilities: Tensor, own: Any = moe.chosen) -> tuple[Tensor, Tensor]:
            weights, experts = own(probabilities)
            place = F.one_hot(experts.flatten(), models.EXPERTS).cumsum(0).gather(1, experts.flatten()[:, None]).view_as(experts)
            return weights * (place <= 56), experts

        moe.chosen = chosen


def router_alone(model: Any) -> None:
    """Weights of chosen experts carry no gradient to the router."""
    for moe in every(model, models.Experts):

        def chosen(probabilities: Tensor, own: Any = moe.chosen) -> tuple[Tensor, Tensor]:
            weights, experts = own(probabilities)
            return weights.detach(), experts

        moe.chosen = chosen


def expert_weights_shifted(model: Any) -> None:
    """Experts are loaded one off."""
    experts = model.layers[0].mlp.experts
    states = [expert.state_dict() for expert in experts]
    states = [{key: value.clone() for key, value in state.items()} for state in states]
    for number, expert in enumerate(experts):
        expert.load_state_dict(states[(number + 1) % len(states)])


CASES = (
    Fault("router in bf16", MOE, in_model(router_in_low_precision), r"layers\.0\.mlp|softmax", "router in the model's dtype", ALL),
    Fault(
        "router weights not normalised",
        MOE,
        in_model(weights_not_normalised),
        r"layers\.0\.mlp|topk|truediv|\bdiv\b",
        "norm_topk_prob",
        ALL,
    ),
    Fault("one expert for two", MOE, in_model(one_expert), r"layers\.0\.mlp|topk", "top_k not read", TWO),
    Fault(
        "balance weighted ten times",
        MOE,
        setting_of_model(auxiliary=0.1),
        r"auxiliary|loss|mul|mlp|router",
        f"{HF} router_aux_loss_coef",
        ALL,
    ),
    Fault("softmax twice in the balance", MOE, in_model(softmax_twice), r"layers\.0\.mlp|softmax|balance", f"{HF}#45120", ALL),
    Fault("balance not divided by top k", MOE, in_model(balance_not_by_top), r"layers\.0\.mlp|mul|balance", f"{HF}#43688", TWO),
    Fault("tokens over capacity dropped", MOE, in_model(tokens_dropped), r"layers\.0\.mlp|chosen|one_hot|mul", "capacity factor", TWO),
    Fault(
        "no gradient to the router",
        MOE,
        in_model(router_alone),
        r"layers\.[01]\.mlp|router|detach|topk|truediv",
        "jingyaogong/minimind#858",
        ALL,
    ),
    Fault(
        "experts loaded one off",
        MOE,
        in_model(expert_weights_shifted),
        r"layers\.0\.mlp|forward: linear weight is not the same",
        "expert order in a checkpoint",
        ALL,
    ),
)
