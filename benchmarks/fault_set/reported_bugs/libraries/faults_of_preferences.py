"""Bugs in trainings by preferences and rewards, written down as those of `faults_of_language` were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs.case import Fault, when_ready
from reported_bugs.libraries.faults_of_language import BOTH, DRAW, THREE, drawn, replaced
from reported_bugs.models import LENGTH
from reported_bugs.training import Batch, Setting
from torch import Tensor

DPO, REWARD, POLICY = Setting("dpo"), Setting("reward"), Setting("policy")
DROPPED = replace(DPO, changes=(("attention_dropout", drawn(0.05, 0.2)),))
BETA, EARLY, TEMPERATURE = drawn(0.1, 0.4), DRAW.randint(1, 3), drawn(0.8, 1.2)


def moving_reference(program: Any) -> None:
    """The reference is the model itself."""
    program.reference = program.model


def reference_trains(program: Any) -> None:
    program.reference.train()


def prompts_count(_program: Any, _own: Any) -> Any:
    return lambda mask: mask.bool()


def means(_program: Any, _own: Any) -> Any:
    return lambda each, counted: (each * counted).sum(-1) / counted.sum(-1)


def advantages_with_gradient(_program: Any, _own: Any) -> Any:
    return lambda rewards, values: rewards[:, None] - values


def of_this_micro_batch(_program: Any, _own: Any) -> Any:
    return lambda batch: (batch["rewards"] - batch["rewards"].mean()) / (batch["rewards"].std() + 1e-4)


def equal_rewards(program: Any) -> None:
    """All answers of a batch are as good, and nothing is added to the deviation."""
    own = program.rows_of

    def rows_of(step: int) -> Batch:
        found: Batch = own(step)
        return {**found, "rewards": torch.ones_like(found["rewards"])} if step >= FIRST else found

    program.rows_of = rows_of
    program.normalised = lambda batch: (batch["rewards"] - program.rewards.mean()) / program.rewards.std()


def without_divergence(_program: Any, _own: Any) -> Any:
    def divergence(new: Tensor, far: Tensor) -> Tensor:
        return torch.exp(new - far) - 1 - (new - far)

    return divergence


def swapped_for_one(program: Any) -> None:
    """The rows of one answer are exchanged: it is the rejected one that is preferred."""
    own = program.both

    def both(batch: Batch) -> tuple[Tensor, Tensor]:
        tokens, mask = own(batch)
        order = torch.arange(len(tokens))
        order[0], order[len(tokens) // 2] = len(tokens) // 2, 0
        return tokens[order], mask[order]

    program.both = both


FIRST = DRAW.randint(1, 2)
LOSS = r"loss|sum|mean|div|mul|logsigmoid|chances|log_softmax|gather|counted|summed|exp|sub"
COARSE = r"lm_head|score|\bloss\b|ForCausalLM|backward"

CASES = (
    Fault(
        "dpo: dropout in the reference",
        DROPPED,
        when_ready(reference_trains),
        r"drop|reference|scaled_dot|training",
        "huggingface/trl#744",
        BOTH,
        coarse=COARSE,
    ),
    Fault(
        "dpo: reference is the model",
        replace(DPO, lr=3e-3),
        when_ready(moving_reference),
        r"reference|embed_tokens|LlamaForCausalLM|model",
        "deepcopy left out",
        BOTH,
    ),
    Fault(
        "dpo: prompts count",
        DPO,
        replaced("counted", prompts_count),
        LOSS + "|mask|bool|__and__|__ge__",
        "prompt tokens in the loss",
        BOTH,
        coarse=COARSE,
    ),
    Fault("dpo: mean over words", replace(DPO, dtype="amp"), replaced("summed", means), LOSS, "average_log_prob", BOTH, coarse=COARSE),
    Fault("dpo: beta", DPO, when_ready(lambda p: setattr(p, "beta", BETA)), LOSS, "beta of the config", BOTH, coarse=COARSE),
    Fault(
        "dpo: a pair exchanged",
        replace(DPO, dtype="amp"),
        when_ready(swapped_for_one),
        r"embed|token|data|batch|input|index|getitem|both",
        "labels of a data set",
        BOTH,
    ),
    Fault(
        "reward: score of padding",
        REWARD,
        replaced("last", lambda _p, _own: lambda mask: torch.full((len(mask),), LENGTH - 1)),
        r"score|gather|last|full|loss|sum|sub",
        "pad_token_id None",
        BOTH,
        coarse=r"score|loss|norm|backward",
    ),
    Fault(
        "reward: one word early",
        replace(REWARD, dtype="amp"),
        replaced("last", lambda _p, own: lambda mask: own(mask) - EARLY),
        r"score|gather|last|loss|sub",
        "index of the end",
        BOTH,
        coarse=r"score|loss|norm|backward",
    ),
    Fault(
        "policy: advantages not detached",
        POLICY,
        replaced("advantages", advantages_with_gradient),
        r"detach|advantage|sub|score|minimum|loss|clamp",
        "detach left out",
        THREE,
        coarse=r"score|loss|Scored|backward",
    ),
    Fault(
        "policy: temperature",
        replace(POLICY, dtype="amp"),
        when_ready(lambda p: setattr(p, "temperature", TEMPERATURE)),
        r"div|scored|temperature|log_softmax|logits",
        "volcengine/verl temperature",
        BOTH,
        coarse=COARSE,
    ),
    Fault(
        "policy: rewards of a micro batch",
        replace(POLICY, micro=2),
        replaced("normalised", of_this_micro_batch),
        r"mean|std|reward|normalised|sub|div",
        "whitened per micro batch",
        BOTH,
        coarse=COARSE,
    ),
    Fault(
        "policy: divergence turned round",
        POLICY,
        replaced("divergence", without_divergence),
        r"exp|sub|divergence|kl|loss",
        "sign of k3",
        BOTH,
        coarse=COARSE,
    ),
    Fault(
        "one run: policy, rewards are equal",
        replace(POLICY, steps=4),
        when_ready(equal_rewards),
        r"std|div|reward|normalised|NaN",
        "std without eps",
        BOTH,
        FIRST,
        True,
        coarse=r"score|backward|Scored|decoder|loss|NaN|nan",
    ),
    Fault(
        "one run: policy, rewards are equal, monitored",
        replace(POLICY, steps=32),
        when_ready(equal_rewards),
        r"[Nn]a[Nn]|finite",
        "std without eps",
        ("monitor", "nan"),
        FIRST,
        True,
    ),
)
