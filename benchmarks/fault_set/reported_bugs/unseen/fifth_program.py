"""The program of the fifth set: a decoder with what models of these years have (windows in turn with whole attention, sinks, normed
queries and keys, a part of each head turned, a head for the token after the next), in layouts of plain torch, with optimizers and losses of
its own. What is written in `form` of a setting chooses among them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.training import Batch, Program
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, DEPTH, HEADS, SHARED, SEQUENCE, GROUP = 160, 64, 2, 4, 2, 24, 2
SIZE = WIDTH // HEADS


@dataclass
class Parts:
    """Of the decoder."""

    window: int = 7
    sinks: bool = True
    normed: bool = True
    turned: float = 0.5
    next: bool = True
    multiplier: float = 0.5
    slopes: bool = False
    expanded: bool = True
    one_call: bool = False


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, 1e-5).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Heads are counted from what projections give, for a rank may have some of them."""

    def __init__(self, parts: Parts, number: int) -> None:
        super().__init__()
        self.parts, self.window = parts, parts.window if number % 2 == 0 else 0
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, SHARED * SIZE, bias=False) for _ in range(2))
        if parts.normed:
            self.q_norm, self.k_norm = Norm(SIZE), Norm(SIZE)
        if parts.sinks:
            self.sinks = nn.Parameter(torch.zeros(HEADS))

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        size = int(SIZE * self.parts.turned)
        angles = positions[:, :, None, None].float() * 10000.0 ** (-torch.arange(0, size, 2) / size)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def queries_and_keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (linear(x).unflatten(-1, (-1, SIZE)) for linear in (self.q, self.k))
        if self.parts.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.turn(q, positions), self.turn(k, positions)

    def seen(self, documents: Tensor) -> Tensor:
        place = torch.arange(documents.shape[1])
        distance = place[:, None] - place[None]
        near = (distance >= 0) & (distance < (self.window or documents.shape[1]))
        return (near & (documents[:, :, None] == documents[:, None]))[:, None]

    def slope(self) -> Tensor:
        return 2.0 ** (-8.0 * torch.arange(1, HEADS + 1) / HEADS)

    def bias(self, length: int) -> Tensor:
        place = torch.arange(length)
        return -self.slope()[:, None, None] * (place[:, None] - place[None]).abs()

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).float() * SIZE**-0.5
        if self.parts.slopes:
            scores = scores + self.bias(scores.shape[-1])
        return scores.masked_fill(~seen, -1e30)

    def chances(self, scores: Tensor) -> Tensor:
        if not self.parts.sinks:
            return scores.softmax(-1)
        sinks = self.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]

    def core(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Of heads before places."""
        if self.parts.one_call:
            return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=not self.parts.expanded)
        return self.chances(self.scores(q, k, seen)).to(v.dtype) @ v

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        q, k = self.queries_and_keys(x, positions)
        q, k, v = (y.transpose(1, 2) for y in (q, k, self.v(x).unflatten(-1, (-1, SIZE))))
        if self.parts.expanded:
            k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        return self.o(self.core(q, k, v, self.seen(documents)).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, parts: Parts, number: int) -> None:
        super().__init__()
        self.before, self.attention, self.between, self.mlp = Norm(WIDTH), Attention(parts, number), Norm(WIDTH), Mlp()

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), positions, documents)
        return x + self.mlp(self.between(x))


class Ahead(nn.Module):
    """Predicts the token after the next from the state of a place and the next token."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.state, self.token, self.joined = Norm(WIDTH), Norm(WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.layer = Layer(parts, 1)

    def forward(self, x: Tensor, following: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        return self.layer(self.joined(torch.cat([self.state(x), self.token(following)], -1)), positions, documents)


class Decoder(nn.Module):
    """A stage of a pipeline lacks what others have."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.embedding: Any = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(n): Layer(parts, n) for n in range(DEPTH)})
        self.norm: Any = Norm(WIDTH)
        self.head: Any = nn.Linear(WIDTH, WORDS, bias=False)
        self.ahead = Ahead(parts) if parts.next else None
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.5 if "embedding" in name else 0.6 / math.sqrt(parameter.shape[1]))
            elif name.endswith("sinks"):
                nn.init.normal_(parameter)
            else:
                parameter.data.add_(torch.randn(parameter.shape) * 0.05)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor) -> Any:
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x, positions, documents)
        if self.head is None:
            return x
        out = self.logits(x)
        return out if self.ahead is None else (out, x)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) * self.parts.multiplier


class Whole(nn.Module):
    """The decoder with its second prediction, in one forward pass."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.decoder = Decoder(parts)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> tuple[Tensor, Tensor | None]:
        found = self.decoder(tokens, positions, documents)
        if self.decoder.ahead is None:
            return found, None
        out, x = found
        following = self.decoder.embedding(tokens.roll(-1, 1))
        return out, self.decoder.logits(self.decoder.ahead(x, following, positions, documents))


class Muon(torch.optim.Optimizer):
    """Orthogonal updates of matrices inside layers; AdamW of the rest."""

    rounds, nesterov, stacked = 5, True, False

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "momentum": 0.9, "matrix": False, "betas": (0.9, 0.95)})

    def orthogonal(self, g: Tensor) -> Tensor:
        x = g.bfloat16()
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        for _ in range(self.rounds):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x.mT if tall else x

    def scale(self, p: Tensor) -> float:
        return max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            for p in ready:
                state = self.state[p]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if group["matrix"]:
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    state["direction"] = p.grad.lerp(momentum, group["momentum"]) if self.nesterov else momentum.clone()
                else:
                    state["step"] = state.get("step", 0) + 1
                    first = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 1 - group["betas"][0])
                    second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 1 - group["betas"][1])
                    unbiased = [1 - beta ** state["step"] for beta in group["betas"]]
                    p.sub_(group["lr"] * (first / unbiased[0]) / ((second / unbiased[1]).sqrt() + 1e-8))
            if group["matrix"]:
                self.move(ready, group["lr"])

    def move(self, ready: list[Any], lr: float) -> None:
        if not self.stacked:
            for p in ready:
                p.sub_((lr * self.scale(p) * self.orthogonal(self.state[p].pop("direction"))).to(p.dtype))
            return
        for shape in {p.shape for p in ready}:
            alike = [p for p in ready if p.shape == shape]
            moves = self.orthogonal(torch.stack([self.state[p].pop("direction") for p in alike]))
            for p, move in zip(alike, moves):
                p.sub_((lr * self.scale(p) * move).to(p.dtype))


class Lion(torch.optim.Optimizer):
    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = momentum.lerp(p.grad, 1 - group["betas"][0]).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - group["betas"][1])


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
