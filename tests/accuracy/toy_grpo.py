"""A small GRPO training: a policy that samples, rewards in groups, clipped updates. With planted faults between rollout and trainer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, PAD, END = 24, 0, 1
PROMPT, LENGTH, TEMPERATURE = 4, 16, 0.8


class Policy(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(WORDS, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, WORDS)

    def forward(self, ids: Tensor, low: bool = False) -> Tensor:
        """Logits; `low`: the output layer in bfloat16."""
        hidden = self.cells(self.words(ids))[0]
        if not low:
            return self.head(hidden)  # type: ignore[no-any-return]
        return functional.linear(hidden.bfloat16(), self.head.weight.bfloat16(), self.head.bias.bfloat16()).float()


class Rollout(NamedTuple):
    """What one step has."""

    rollout: Tensor
    trainer: Tensor
    mask: Tensor
    tokens: Tensor


@torch.no_grad()
def sample(policy: Policy, ids: Tensor, low: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens with the prompt, their log probabilities, mask) of responses; 0 behind the end."""
    done = torch.zeros(len(ids), dtype=torch.bool)
    probabilities, mask = [], []
    for _ in range(LENGTH):
        scores = functional.log_softmax(policy(ids, low)[:, -1] / TEMPERATURE, -1)
        word = torch.multinomial(scores.exp(), 1)
        word[done] = PAD
        probabilities.append(scores.gather(-1, word)[:, 0].masked_fill(done, 0.0))
        mask.append(~done)
        done = done | (word[:, 0] == END)
        ids = torch.cat([ids, word], 1)
    return ids, torch.stack(probabilities, 1), torch.stack(mask, 1)


def training(fault: str, steps: int = 5) -> Iterator[Rollout]:
    """Steps of a training; updates happen when the next is asked for."""
    torch.manual_seed(0)
    policy = Policy()
    actor = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(steps):
        if fault != "stale weights":
            actor.load_state_dict(policy.state_dict())
        ids, old, mask = sample(actor, torch.randint(2, WORDS, (8, PROMPT)).repeat_interleave(4, 0), fault == "low precision")
        tokens = ids[:, PROMPT:]
        start = PROMPT if fault == "logits shifted" else PROMPT - 1
        scores = functional.log_softmax(policy(ids)[:, start : start + LENGTH] / (1 if fault == "temperature" else TEMPERATURE), -1)
        length = scores.shape[1]
        old, tokens, used = old[:, :length], tokens[:, :length], mask[:, :length]
        new = scores.gather(-1, tokens[..., None])[..., 0]
        if fault == "mask":
            used = torch.ones_like(used)
        if fault == "nan":
            old = old.masked_fill(tokens == 7, float("nan"))
        yield Rollout(old, new.detach(), used, tokens)
        reward = (tokens % 2 == 0).float().mul(mask[:, :length]).sum(1).view(8, 4)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        ratio = torch.exp(new - old.nan_to_num())
        loss = -(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * used).sum() / used.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
