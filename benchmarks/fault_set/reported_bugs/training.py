"""The trainings of the set of bugs from the field: one loop in small pieces, each of which a case may replace."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.models import GPT, HIDDEN, LENGTH, VOCAB, Config, transformers_model
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What is trained, and how. `rows` is the global batch of a step, over all ranks and micro batches."""

    family: str = "gpt"
    dtype: str = "bf16"
    """``bf16``: weights in it; ``amp``: autocast over float32 weights; ``fp16``: autocast with a loss scale; ``fp32``."""
    ranks: int = 1
    wrap: str = ""
    """``ddp``, ``fsdp`` or ``deepspeed1`` to ``deepspeed3``."""
    micro: int = 1
    rows: int = 4
    steps: int = 3
    lr: float = 1e-3
    clip: float = 1.0
    warmup: int = 0
    decay: float = 0.1
    attention: str = "sdpa"
    packed: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    """Of the model's config."""
    optimizer: tuple[tuple[str, Any], ...] = ()
    """Keywords of AdamW."""
    form: str = ""
    """Other ways to the same numbers, by name; see `reported_bugs.healthy.pairs`."""


@dataclass
class Program:
    """One rank of a training. A case adds to the lists of changes, or replaces a piece of the loop in `ready`."""

    setting: Setting
    rank: int = 0
    configure: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    change_model: list[Callable[[nn.Module], None]] = field(default_factory=list)
    ready: list[Callable[[Program], None]] = field(default_factory=list)

    model: Any = None
    net: Any = None
    """The model in its wrapper."""
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    losses: list[float] = field(default_factory=list)

    def build(self) -> None:
        s = self.setting
        torch.manual_seed(11)
        changes = dict(s.changes)
        for change in self.configure:
            change(changes)
        self.model = self.make_model(changes)
        if s.dtype == "bf16":
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)  # buffers stay in float32, as those of rotary angles must
        for edit in self.change_model:
            edit(self.model)
        self.model.train()
        self.wrap()
        for finish in self.ready:
            finish(self)

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        if self.setting.family == "gpt":
            return GPT(Config(**changes))
        return transformers_model(self.setting.family, changes, self.setting.attention)

    def wrap(self) -> None:
        kind = self.setting.wrap
        self.net = self.model
        if kind == "ddp":
            self.net = nn.parallel.DistributedDataParallel(self.model, **self.ddp_arguments())
        elif kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for layer in self.layers():
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        if self.setting.dtype == "fp16":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def ddp_arguments(self) -> dict[str, Any]:
        return {"find_unused_parameters": False}

    def layers(self) -> Any:
        inner = getattr(self.model, "model", None) or getattr(self.model, "transformer", None) or self.model
        return inner.layers if hasattr(inner, "layers") else inner.h

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.setting.warmup + 1))

    def groups(self) -> list[dict[str, Any]]:
        """Weights decay, norms and biases do not."""
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": self.setting.decay},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.groups(), **{"lr": self.setting.lr, "betas": (0.9, 0.95), "eps": 1e-8, **dict(self.setting.optimizer)}
        )

    def rows_of(self, step: int) -> Batch:
        """The global batch: sequences of unlike lengths with padding at their end, or packed documents."""
        s, generator = self.setting, torch.Generator().manual_seed(100 + step)
        shape = (s.rows, LENGTH + 1)
        tokens = (torch.rand(shape, generator=generator).pow(2) * (VOCAB - 3)).long() + 3
        place = torch.arange(LENGTH)
        if s.packed:
            cut = torch.randint(8, LENGTH - 8, (s.rows, 1), generator=generator)
            documents = (place[None] >= cut).long()
            positions = torch.where(documents > 0, place[None] - cut, place[None])
            labels = tokens[:, 1:].clone()
            labels.scatter_(1, cut - 1, -100)  # the last token of a document has no next one
            mask = torch.ones(s.rows, LENGTH, dtype=torch.long)
        else:
            lengths = torch.randint(LENGTH // 2, LENGTH + 1, (s.rows, 1), generator=generator)
            mask = (place[None] < lengths).long()
            labels = torch.where(place[None] < lengths - 1, tokens[:, 1:], -100)
            documents, positions = torch.zeros_like(mask), place[None].expand(s.rows, -1).contiguous()
        return {"tokens": tokens[:, :-1] * mask, "labels": labels, "mask": mask, "documents": documents, "positions": positions}

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro batches."""
        s, whole = self.setting, self.rows_of(step)
        size = s.rows // (s.micro * s.ranks)
        starts = [(micro * s.ranks + self.rank) * size for micro in range(s.micro)]
        return [{key: value[start : start + size].contiguous() for key, value in whole.items()} for start in starts]

    def tokens(self, micros: list[Batch]) -> Tensor:
        """Tokens that count in this step, over all micro batches and ranks."""
        count = torch.stack([(batch["labels"] != -100).sum() for batch in micros]).sum()
        if self.setting.ranks > 1:
            dist.all_reduce(count)
        return count

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """What a model of Transformers is given."""
        own = {"input_ids": batch["tokens"], "position_ids": batch["positions"]}
        if self.setting.packed:
            seen = GPT.allowed(None, batch)  # type: ignore[arg-type]
            dtype = torch.float32 if self.setting.dtype != "bf16" else torch.bfloat16
            return {**own, "attention_mask": torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)}
        return {**own, "attention_mask": batch["mask"]}

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """With the loss that balances experts, where there is one."""
        if self.setting.family == "gpt":
            out = self.net(batch)
            own = [layer.mlp.auxiliary for layer in self.model.layers if hasattr(layer.mlp, "auxiliary")]
            return out, self.model.config.auxiliary * torch.stack(own).sum() if own else None
        found = self.net(**self.inputs(batch))
        auxiliary = getattr(found, "aux_loss", None)
        return found.logits, None if auxiliary is None else self.model.router_aux_loss_coef * auxiliary

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        """A sum over tokens, in float32."""
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum")

    def loss_of_model(self, batch: Batch, tokens: Tensor) -> Tensor:
        """The loss that a model of Transformers computes itself: it shifts labels, so they are given as they stand with the tokens."""
        labels = torch.cat([torch.full_like(batch["labels"][:, :1], -100), batch["labels"][:, :-1]], 1)
        return self.net(**self.inputs(batch), labels=labels, num_items_in_batch=tokens).loss

    def loss(self, batch: Batch, tokens: Tensor) -> Tensor:
        if self.setting.form == "loss of the model":
            with self.precision():
                return self.loss_of_model(batch, tokens)
        with self.precision():
            logits, auxiliary = self.logits(batch)
        found = self.criterion(logits, batch["labels"]) / tokens * self.scale()
        return found if auxiliary is None else found + auxiliary / self.setting.micro

    def scale(self) -> int:
        """Wrappers take a mean over ranks; the loss is one over all tokens."""
        return self.setting.ranks if self.setting.wrap else 1

    def precision(self) -> Any:
        kinds = {"amp": torch.bfloat16, "fp16": torch.float16}
        return torch.autocast("cpu", kinds[self.setting.dtype]) if self.setting.dtype in kinds else contextlib.nullcontext()

    def synchronised(self, micro: int) -> Any:
        """Gradients are summed over ranks with the last micro batch."""
        last = micro == self.setting.micro - 1
        if self.setting.wrap == "ddp" and not last:
            return self.net.no_sync()
        if self.setting.wrap == "fsdp":
            self.net.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def clip(self) -> None:
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.setting.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip)

    def update(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def step(self, number: int) -> Tensor:
        micros = self.batches(number)
        tokens, total = self.tokens(micros), torch.zeros(())
        for micro, batch in enumerate(micros):
            with self.synchronised(micro):
                loss = self.loss(batch, tokens)
                self.backward(loss)
            total = total + loss.detach().float()
        self.clip()
        self.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(total) if math.isfinite(float(total)) else float("nan"))
        return total


assert HIDDEN % 4 == 0
