"""The program of the fifth set: the decoder in layouts of plain torch, with optimizers and losses of its own. What is written in `form` of
a setting chooses among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.training import Batch, Program
from reported_bugs.unseen.fifth.decoder import DEPTH, WORDS, Parts, Whole
from reported_bugs.unseen.fifth.optimizers import Lion, Muon
from torch import Tensor, nn
from torch.nn import functional as F

SEQUENCE, GROUP = 24, 2


class DecoderProgram(Program):
    masters: list[Any]
    scaled_by_schedule = False
    """Whether the pipeline divides gradients by the number of micro batches, which the loss has done already."""

    def has(self, word: str) -> bool:
        return word in self.setting.form.split()

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        model = Whole(Parts(**changes))
        return model.decoder if self.has("pipeline") else model

    @property
    def decoder(self) -> Any:
        return getattr(self.model, "decoder", self.model)

    def layers(self) -> Any:
        return self.decoder.layers.values()

    def rows_of(self, step: int) -> Batch:
        s, draw = self.setting, torch.Generator().manual_seed(700 + step)
        tokens = (torch.rand((s.rows, SEQUENCE + 2), generator=draw).pow(2) * WORDS).long()
        answer = torch.randint(2, SEQUENCE // 2, (s.rows, 1), generator=draw)
        place = torch.arange(SEQUENCE)[None]
        cut = torch.randint(6, SEQUENCE - 6, (s.rows, 1), generator=draw)
        documents = (place >= cut).long() if s.packed else torch.zeros(s.rows, SEQUENCE, dtype=torch.long)
        positions = torch.where(documents > 0, place - cut, place)
        found = {"tokens": tokens[:, :-2], "documents": documents, "positions": positions}
        for name, shift in (("labels", 1), ("later", 2)):
            inside = torch.where(documents > 0, SEQUENCE, cut if s.packed else SEQUENCE) > place + shift - 1
            found[name] = torch.where((place >= answer) & inside, tokens[:, shift : SEQUENCE + shift], -100)
        if self.has("grpo"):
            found["rewards"] = torch.rand((s.rows,), generator=draw).repeat_interleave(1)
            found["drift"], found["reference"] = (torch.randn((s.rows, SEQUENCE), generator=draw) * 0.2 for _ in range(2))
        if self.has("distill"):
            found["teacher"] = torch.randn((s.rows, SEQUENCE, WORDS), generator=draw) * 3
        return found

    # ---- losses -------------------------------------------------------------------------------------------------------------

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        found = self.net(batch["tokens"], batch["positions"], batch["documents"])
        return found if isinstance(found, tuple) else (found, None)

    def loss(self, batch: Batch, tokens: Tensor) -> Tensor:
        with self.precision():
            out, later = self.logits(batch)
        found = self.main_loss(out, batch)
        if later is not None:
            found = found + 0.3 * self.loss_ahead(later, batch)
        return found / tokens * self.scale()

    def main_loss(self, out: Tensor, batch: Batch) -> Tensor:
        if self.has("grpo"):
            return self.policy(out, batch)
        if self.has("distill"):
            return self.distilled(out, batch)
        return self.criterion(out, batch["labels"])

    def loss_ahead(self, later: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(later.float().flatten(0, 1), batch["later"].flatten(), ignore_index=-100, reduction="sum")

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.has("chunks"):
            return self.in_chunks(logits, labels)
        flat, kept = logits.float().flatten(0, 1), labels.flatten()
        return F.cross_entropy(flat, kept, ignore_index=-100, reduction="sum") + self.z_loss(flat, kept)

    def in_chunks(self, logits: Tensor, labels: Tensor) -> Tensor:
        flat, kept, total = logits.flatten(0, 1), labels.flatten(), torch.zeros(())
        for start in range(0, len(kept), 20):
            part, own = flat[start : start + 20].float(), kept[start : start + 20]
            total = total + F.cross_entropy(part, own, ignore_index=-100, reduction="sum") + self.z_loss(part, own)
        return total

    z_weight = 1e-2

    def z_loss(self, flat: Tensor, labels: Tensor) -> Tensor:
        return self.z_weight * (flat.logsumexp(-1).square() * (labels != -100)).sum()

    temperature = 2.0

    def distilled(self, out: Tensor, batch: Batch) -> Tensor:
        student = F.log_softmax(out.float() / self.temperature, -1)
        teacher = F.log_softmax(batch["teacher"] / self.temperature, -1)
        each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        return self.factor_of_distillation() * (each * (batch["labels"] != -100)).sum()

    def factor_of_distillation(self) -> float:
        return self.temperature**2

    clip_low, clip_high = 0.2, 0.28

    def advantages(self, batch: Batch) -> Tensor:
        groups = batch["rewards"].view(-1, GROUP * 2)
        return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

    def divergence(self, chance: Tensor, reference: Tensor) -> Tensor:
        return torch.exp(reference - chance) - (reference - chance) - 1

    def policy(self, out: Tensor, batch: Batch) -> Tensor:
        labels = batch["labels"]
        chance = -F.cross_entropy(out.float().transpose(1, 2), labels, ignore_index=-100, reduction="none")
        ratio = torch.exp(chance - (chance.detach() + batch["drift"]))
        advantage = self.advantages(batch)[:, None]
        held = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain = torch.minimum(ratio * advantage, held * advantage)
        away = self.divergence(chance, chance.detach() + batch["reference"])
        return -((gain - 0.05 * away) * (labels != -100)).sum()

    # ---- optimizers ---------------------------------------------------------------------------------------------------------

    def make_optimizer(self) -> torch.optim.Optimizer:
        s, named = self.setting, [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        if self.has("muon"):
            inside = [p for n, p in named if p.dim() > 1 and "layer" in n]
            rest = [p for n, p in named if not (p.dim() > 1 and "layer" in n)]
            groups = [{"params": inside, "matrix": True, "weight_decay": s.decay}, {"params": rest}]
            return Muon(groups, s.lr)
        if self.has("lion"):
            return Lion(self.groups(), s.lr)
        if self.has("masters"):
            self.masters = [(p, nn.Parameter(p.detach().float().clone())) for _, p in named]
            sizes = (lambda q: q.dim() > 1, lambda q: q.dim() <= 1)
            chosen = [[q for _, q in self.masters if kind(q)] for kind in sizes]
            return torch.optim.AdamW(
                [{"params": chosen[0], "weight_decay": s.decay}, {"params": chosen[1], "weight_decay": 0.0}], lr=s.lr, betas=(0.9, 0.95)
            )
        return super().make_optimizer()

    def update(self) -> None:
        if not self.has("masters"):
            super().update()
            return
        for p, master in self.masters:
            master.grad = p.grad.float()
        self.optimizer.step()
        self.copy_back()
        for p, _ in self.masters:
            p.grad = None

    def copy_back(self) -> None:
        for p, master in self.masters:
            p.data.copy_(master.data)

    stable, falling = 20, 12

    def rate(self, step: int) -> float:
        if not self.has("wsd"):
            return super().rate(step)
        return min(1.0, (step + 1) / 5) * max(0.0, min(1.0, 1 - (step - self.stable) / self.falling))

    # ---- layouts ------------------------------------------------------------------------------------------------------------

    def ddp_arguments(self) -> dict[str, Any]:
        found = super().ddp_arguments()
        return {**found, "static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.02} if self.has("static") else found

    def mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        if self.has("hsdp"):
            return init_device_mesh("cpu", (2, self.setting.ranks // 2), mesh_dim_names=("replicate", "shard"))
        return init_device_mesh("cpu", (self.setting.ranks,))

    def policy_arguments(self) -> dict[str, Any]:
        from torch.distributed import fsdp

        found: dict[str, Any] = {"mesh": self.mesh(), "reshard_after_forward": not self.has("kept")}
        if self.has("policy"):
            found["mp_policy"] = fsdp.MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        return found

    def wrap(self) -> None:
        if self.has("pipeline") and self.setting.ranks > 1:
            self.wrap_stage()
            return
        if self.setting.wrap != "fsdp":
            super().wrap()
            return
        from torch.distributed import fsdp

        arguments = self.policy_arguments()
        for parameter in self.model.parameters() if self.has("policy") else ():
            parameter.data = parameter.data.bfloat16().float()  # as a checkpoint in bfloat16 has them
        for layer in self.layers():
            fsdp.fully_shard(layer, **arguments)
        fsdp.fully_shard(self.model, **arguments)
        self.net, self.optimizer = self.model, self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    @contextmanager
    def synchronised(self, micro: int) -> Iterator[None]:
        if self.has("own sums"):
            yield
            return
        with super().synchronised(micro):
            yield

    def wrap_stage(self) -> None:
        """Two stages, the second of which has the head."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        model, half = self.decoder, DEPTH // 2
        for number in range(DEPTH):
            if (number >= half) != (self.rank == 1):
                del model.layers[str(number)]
        if self.rank == 0:
            model.norm = model.head = None
        else:
            model.embedding = None
        self.net = model
        self.optimizer = self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        stage = PipelineStage(model, self.rank, 2, torch.device("cpu"))
        kind = ScheduleGPipe if self.has("gpipe") else Schedule1F1B
        self.schedule = kind(stage, self.setting.micro, loss_fn=self.loss_of_stage, scale_grads=self.scaled_by_schedule)

    def clip_over_stages(self) -> None:
        """By the norm of the gradients of both."""
        own = [p.grad for p in self.model.parameters() if p.grad is not None]
        squares = nn.utils.get_total_norm(own).float().square()
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.setting.clip, squares.sqrt())

    def loss_of_stage(self, out: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(out, labels) / self.counted

    def step(self, number: int) -> Tensor:
        if not (self.has("pipeline") and self.setting.ranks > 1):
            return super().step(number)
        batch = self.rows_of(number)
        self.counted = (batch["labels"] != -100).sum()
        both = {key: batch[key] for key in ("positions", "documents")}
        losses: list[Tensor] = []
        if self.rank == 0:
            self.schedule.step(batch["tokens"], **both)
        else:
            self.schedule.step(target=batch["labels"], losses=losses, **both)
        self.clip_over_stages()
        self.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.stack([loss.detach().float() for loss in losses]).sum() if losses else torch.zeros(())
        dist.broadcast(total, 1)
        self.losses.append(float(total))
        return total
