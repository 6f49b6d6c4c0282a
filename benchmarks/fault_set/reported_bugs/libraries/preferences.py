"""Trainings by preferences and rewards: DPO with a reference model, a reward model, a policy with a value head."""

from __future__ import annotations

import copy
from typing import Any

import torch
from reported_bugs.libraries.language import SIZES, WORDS, LibraryProgram
from reported_bugs.models import HIDDEN, LENGTH, VOCAB
from reported_bugs.training import Batch
from torch import Tensor, nn
from torch.nn import functional as F

PROMPT = LENGTH // 4
OWN: dict[str, Any] = {"num_key_value_heads": 2, "max_position_embeddings": 2 * LENGTH, "use_cache": False, "rms_norm_eps": 1e-6}


class Preferences(LibraryProgram):
    """Two answers to each prompt."""

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        return self.transformers("LlamaConfig", "LlamaForCausalLM", changes, **WORDS, **SIZES, **OWN)

    def rows_of(self, step: int) -> Batch:
        draw, shape = torch.Generator().manual_seed(400 + step), (self.setting.rows, LENGTH)
        place = torch.arange(LENGTH)[None]
        found: Batch = {}
        prompt = torch.randint(3, VOCAB, shape, generator=draw)
        for side, low, high in (("chosen", 3, 130), ("rejected", 100, VOCAB)):
            length = torch.randint(LENGTH // 2, LENGTH + 1, (self.setting.rows, 1), generator=draw)
            answer = torch.randint(low, high, shape, generator=draw)
            found[side] = torch.where(place < length, torch.where(place < PROMPT, prompt, answer), 0)
            found[f"{side}_mask"] = (place < length).long()
        return found

    def tokens(self, micros: list[Batch]) -> Tensor:
        return torch.tensor(self.setting.rows)

    def both(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Chosen and rejected one below the other, as one batch, with the mask."""
        return torch.cat([batch["chosen"], batch["rejected"]]), torch.cat([batch["chosen_mask"], batch["rejected_mask"]])

    def counted(self, mask: Tensor) -> Tensor:
        """Words of the answers."""
        return mask.bool() & (torch.arange(LENGTH)[None] >= PROMPT)

    def loss(self, batch: Batch, tokens: Tensor) -> Tensor:
        with self.precision():
            found = self.loss_of(batch)
        return found / tokens * self.scale()

    def loss_of(self, batch: Batch) -> Tensor:
        raise NotImplementedError


class Dpo(Preferences):
    beta = 0.5

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        self.ready.insert(0, lambda p: p.make_reference())
        return super().make_model(changes)

    def make_reference(self) -> None:
        """A copy that was trained a little otherwise: the first loss is not that of equal models."""
        self.reference = copy.deepcopy(self.model).requires_grad_(False).eval()
        draw = torch.Generator().manual_seed(3)
        for weight in self.reference.parameters():
            weight.data.add_(torch.randn(weight.shape, generator=draw).to(weight.dtype) * 0.004)

    def chances(self, model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
        """Log of the chance of each answer."""
        logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].float()
        each = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return self.summed(each, self.counted(mask)[:, 1:])

    def summed(self, each: Tensor, counted: Tensor) -> Tensor:
        return (each * counted).sum(-1)

    def loss_of(self, batch: Batch) -> Tensor:
        tokens, mask = self.both(batch)
        policy = self.chances(self.net, tokens, mask)
        with torch.no_grad():
            reference = self.chances(self.reference, tokens, mask)
        chosen, rejected = (policy - reference).chunk(2)
        return -F.logsigmoid(self.beta * (chosen - rejected)).sum()


class Scored(nn.Module):
    """A head of one number on a decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder, self.score = decoder, nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        out = self.decoder(input_ids=tokens, attention_mask=mask, output_hidden_states=True)
        return out.logits, self.score(out.hidden_states[-1])[..., 0].float()


class Reward(Preferences):
    """The score of the last word that is no padding."""

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        return Scored(super().make_model(changes).model)  # type: ignore[arg-type]

    def layers(self) -> Any:
        return self.model.decoder.layers

    def last(self, mask: Tensor) -> Tensor:
        return mask.sum(-1) - 1

    def loss_of(self, batch: Batch) -> Tensor:
        tokens, mask = self.both(batch)
        hidden = self.net.decoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        scores = self.net.score(hidden)[..., 0].float()
        chosen, rejected = scores.gather(1, self.last(mask)[:, None])[:, 0].chunk(2)
        return -F.logsigmoid(chosen - rejected).sum()


class Policy(Preferences):
    """PPO: answers with rewards, chances of when they were drawn, values, a divergence from the reference."""

    temperature, clipped, of_values, of_divergence = 0.7, 0.2, 0.5, 0.05

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        return Scored(super().make_model(changes))

    def layers(self) -> Any:
        return self.model.decoder.model.layers

    def rows_of(self, step: int) -> Batch:
        found, draw = super().rows_of(step), torch.Generator().manual_seed(1400 + step)
        shape = (self.setting.rows, LENGTH)
        old = -5.0 + 0.3 * torch.randn(shape, generator=draw)
        return {
            **found,
            "rewards": torch.randn(self.setting.rows, generator=draw),
            "old": old,
            "far": old + 0.2 * torch.randn(shape, generator=draw),
        }

    def counts(self, batch: Batch) -> Tensor:
        return self.counted(batch["chosen_mask"])[:, 1:].float()

    def tokens(self, micros: list[Batch]) -> Tensor:
        """Words of answers, over the batch; the rewards are normalised over it, too."""
        self.rewards = torch.cat([batch["rewards"] for batch in micros])
        return torch.stack([self.counts(batch).sum() for batch in micros]).sum()

    def normalised(self, batch: Batch) -> Tensor:
        return (batch["rewards"] - self.rewards.mean()) / (self.rewards.std() + 1e-4)

    def advantages(self, rewards: Tensor, values: Tensor) -> Tensor:
        return rewards[:, None] - values.detach()

    def scored(self, logits: Tensor) -> Tensor:
        return logits / self.temperature

    def divergence(self, new: Tensor, far: Tensor) -> Tensor:
        """The estimate that is never negative."""
        return torch.exp(far - new) - 1 - (far - new)

    def loss_of(self, batch: Batch) -> Tensor:
        tokens, counts = batch["chosen"], self.counts(batch)
        logits, values = self.net(tokens, batch["chosen_mask"])
        new = self.scored(logits[:, :-1].float()).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        rewards, values = self.normalised(batch), values[:, :-1]
        advantages = self.advantages(rewards, values)
        ratio = torch.exp(new - batch["old"][:, 1:])
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - self.clipped, 1 + self.clipped) * advantages)
        error = (values - rewards[:, None]).pow(2)
        each = -gain + self.of_values * error + self.of_divergence * self.divergence(new, batch["far"][:, 1:])
        return (each * counts).sum()
