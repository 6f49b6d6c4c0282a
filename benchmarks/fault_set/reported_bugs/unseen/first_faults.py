"""Reported bugs, and other ways to the same numbers, that were written down before the other lists were read and run once before anything
was changed for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from reported_bugs import models
from reported_bugs.case import Fault, every, in_model, nothing, other_function, when_ready
from reported_bugs.training import Program, Setting
from torch import Tensor, nn
from torch.nn import functional as F

BF16, FP32, AMP = Setting(), Setting(dtype="fp32"), Setting(dtype="amp")
BOTH = ("mix", "L0")


# ---- the model ------------------------------------------------------------------------------------------------------------


def interleaved(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def larger_eps_of_queries(model: Any) -> None:
    for layer in model.layers:
        layer.attention.q_norm.eps = 1e-3


def scaled_embedding(model: Any) -> None:
    """As Gemma has it."""
    own = model.embedding.forward
    model.embedding.forward = lambda tokens: own(tokens) * model.embedding.embedding_dim**0.5


def gemma_embedding(program: Program) -> None:
    program.change_model.append(scaled_embedding)


def one_added_to_the_weight(model: Any) -> None:
    model.layers[1].norm2.weight.data.add_(1)


def wide_residual(program: Program) -> None:
    """The residual stream is kept in float32."""

    def edit(model: Any) -> None:
        own = model.embedding.forward
        turned = model.rotary.forward
        model.embedding.forward = lambda tokens: own(tokens).float()
        model.rotary.forward = lambda x, positions: turned(x.to(torch.bfloat16), positions)
        for norm in every(model, "RMSNorm"):
            inner = norm.forward
            norm.forward = lambda x, inner=inner: inner(x).to(torch.bfloat16)

    program.change_model.append(edit)


def cast_before_the_residual(program: Program) -> None:
    wide_residual(program)

    def edit(model: Any) -> None:
        layer = model.layers[1]

        def forward(x: Tensor, turn: Any, allowed: Tensor) -> Tensor:
            x = x + layer.drop1(layer.attention(layer.norm1(x), turn, allowed))
            return (x.to(torch.bfloat16) + layer.drop2(layer.mlp(layer.norm2(x)))).float()

        layer.forward = forward

    program.change_model.append(edit)


def repeated_in_turn(x: Tensor, times: int) -> Tensor:
    return x.repeat(1, times, 1, 1)


def sees_the_next(model: Any) -> None:
    def allowed(batch: dict[str, Tensor]) -> Tensor:
        length = batch["tokens"].shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril(1)
        documents = batch["documents"]
        same = documents[:, :, None] == documents[:, None, :]
        seen = (causal & same & batch["mask"][:, None, :].bool()) | torch.eye(length, dtype=torch.bool)
        return seen[:, None]

    model.allowed = allowed


def scale_of_the_hidden_size(model: Any) -> None:
    for layer in model.layers:
        layer.attention.scale = models.HIDDEN**-0.5


class Adapted(nn.Module):
    """A linear layer with a low-rank addition."""

    def __init__(self, linear: nn.Linear, scale: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        like = {"dtype": linear.weight.dtype}
        self.linear, self.scale = linear, scale
        self.first = nn.Parameter((torch.randn(8, linear.in_features, generator=generator) * 0.1).to(**like))
        self.second = nn.Parameter(torch.zeros(linear.out_features, 8, **like))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.first), self.second) * self.scale


def adapters(scale: float) -> Any:
    def edit(model: Any) -> None:
        model.requires_grad_(False)
        for layer in model.layers:
            layer.attention.q = Adapted(layer.attention.q, scale)

    return edit


def lora(program: Program) -> None:
    program.change_model.append(adapters(2.0))


# ---- the loop -------------------------------------------------------------------------------------------------------------


def z_loss(program: Program) -> None:
    """The logsumexp of the router's scores, squared, is part of the loss."""

    def finish(one: Program) -> None:
        kept: list[Tensor] = []
        for layer in one.model.layers:
            layer.mlp.router.register_forward_hook(lambda _module, _given, out: kept.append(out))
        own = one.loss

        def loss(batch: Any, tokens: Tensor) -> Tensor:
            kept.clear()
            return own(batch, tokens) + 1e-2 * torch.stack([torch.logsumexp(one.float(), -1).pow(2).mean() for one in kept]).sum()

        one.loss = loss  # type: ignore[method-assign]

    program.ready.append(finish)


def untied(program: Program) -> None:
    program.model.head.weight = nn.Parameter(program.model.head.weight.detach().clone())
    program.optimizer = program.make_optimizer()
    program.scheduler = torch.optim.lr_scheduler.LambdaLR(program.optimizer, program.rate)


def divided_twice(program: Program) -> None:
    own = program.loss
    program.loss = lambda batch, tokens: own(batch, tokens) / program.setting.micro  # type: ignore[method-assign]


def evaluating(program: Program) -> None:
    program.model.eval()


def shifted_twice(program: Program) -> None:
    own = program.rows_of

    def rows_of(step: int) -> Any:
        batch = own(step)
        batch["labels"] = torch.cat([batch["labels"][:, 1:], torch.full_like(batch["labels"][:, :1], -100)], 1)
        return batch

    program.rows_of = rows_of  # type: ignore[method-assign]


def positions_go_on(program: Program) -> None:
    own = program.rows_of

    def rows_of(step: int) -> Any:
        batch = own(step)
        batch["positions"] = torch.arange(models.LENGTH)[None].expand_as(batch["positions"]).contiguous()
        return batch

    program.rows_of = rows_of  # type: ignore[method-assign]


def all_decay(program: Program) -> None:
    for group in program.optimizer.param_groups:
        group["weight_decay"] = program.setting.decay


def counted_from_zero(program: Program) -> None:
    program.rate = lambda step: min(1.0, step / (program.setting.warmup + 1))  # type: ignore[method-assign]
    program.scheduler = torch.optim.lr_scheduler.LambdaLR(program.optimizer, program.rate)


def mean_of_each_rank(program: Program) -> None:
    program.tokens = lambda micros: torch.stack([(b["labels"] != -100).sum() for b in micros]).sum() * program.setting.ranks  # type: ignore[method-assign]


def clipped_before_unscaling(program: Program) -> None:
    def clip() -> None:
        nn.utils.clip_grad_norm_(program.model.parameters(), program.setting.clip)
        program.scaler.unscale_(program.optimizer)

    program.clip = clip  # type: ignore[method-assign]


def summed_over_ranks(program: Program) -> None:
    def hook(_state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations, and takes no text for them
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    program.net.register_comm_hook(None, hook)


def replaced_after_the_optimizer(program: Program) -> None:
    linear = program.model.layers[1].mlp.down
    linear.weight = nn.Parameter(linear.weight.detach().clone())


def rank_is_not_asked(program: Program) -> None:
    program.rank = 0


def scheduler_of_each_micro_batch(program: Program) -> None:
    own = program.backward

    def backward(loss: Tensor) -> None:
        own(loss)
        program.scheduler.step()

    program.backward = backward  # type: ignore[method-assign]


def dropout_drawn_again(model: Any) -> None:
    """A recomputation that does not restore the generator's state."""

    def forward(batch: dict[str, Tensor]) -> Tensor:
        x = model.embedding(batch["tokens"])
        turn, allowed = model.rotary(x, batch["positions"]), model.allowed(batch)
        for layer in model.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, turn, allowed, use_reentrant=False, preserve_rng_state=False)
        return model.head(model.norm(x))

    model.forward = forward


EXPERTS = (("experts", 4),)

CASES = (
    Fault("rotary turns neighbours, not halves", BF16, other_function("rotated", interleaved), r"rotated|stack|cat|attention", levels=BOTH),
    Fault(
        "eps of the query norm 1e-3",
        Setting(dtype="fp32", changes=(("query_norm", True),)),
        in_model(larger_eps_of_queries),
        "q_norm",
        levels=BOTH,
    ),
    Fault(
        "z-loss of the router left out",
        Setting(changes=EXPERTS),
        nothing,
        r"logsumexp|router|loss|__add__",
        levels=(*BOTH, "monitor"),
        golden=z_loss,
    ),
    Fault("head no longer tied after a load", Setting(changes=(("tied", True),)), when_ready(untied), r"embedding|head", levels=BOTH),
    Fault(
        "loss divided by the micro batches twice",
        Setting(micro=2),
        when_ready(divided_twice),
        r"div|loss|criterion|micro",
        levels=(*BOTH, "monitor"),
        coarse=r"head.*backward|loss|grad",
    ),
    Fault("dropout off in training", Setting(changes=(("dropout", 0.1),)), when_ready(evaluating), "drop", levels=BOTH),
    Fault(
        "labels are shifted once more",
        AMP,
        when_ready(shifted_twice),
        r"labels|cross_entropy|target|data|batch|cat",
        levels=BOTH,
        coarse=r"head.*backward|labels",
    ),
    Fault(
        "positions of packed documents go on", Setting(packed=True), when_ready(positions_go_on), r"position|rotary|data|batch", levels=BOTH
    ),
    Fault(
        "norms and biases decay",
        FP32,
        when_ready(all_decay),
        r"weight_decay|mul_|decay",
        levels=("mix", "monitor"),
        coarse=r"norm|bias|weight_decay",
    ),
    Fault(
        "warmup counts from zero",
        Setting(dtype="amp", warmup=4),
        when_ready(counted_from_zero),
        r"\blr\b|learning rate|addcdiv|mul_|_foreach|rate",
        levels=(*BOTH, "monitor"),
        coarse="learning|rate|lr|parameter|weight",
    ),
    Fault(
        "loss is a mean of each rank",
        Setting(ranks=2, wrap="ddp"),
        when_ready(mean_of_each_rank),
        r"tokens|div|loss|__mul__|all_reduce|sum",
        levels=BOTH,
        coarse=r"GPT.backward|head.*backward",
    ),
    Fault(
        "LoRA without its division by the rank",
        BF16,
        in_model(adapters(16.0)),
        r"attention\.q|scale|__mul__|second",
        levels=BOTH,
        golden=lora,
    ),
    Fault("embedding not scaled", BF16, nothing, r"embedding|__mul__", levels=BOTH, golden=gemma_embedding),
    Fault("one added to the weight of a norm", BF16, in_model(one_added_to_the_weight), r"layers\.1\.norm2", levels=BOTH),
    Fault(
        "cast before the residual",
        BF16,
        cast_before_the_residual,
        r"layers\.1\b|bfloat16|__add__|\bto\b",
        levels=BOTH,
        golden=wide_residual,
    ),
    Fault("groups repeated in turn", BF16, other_function("repeated", repeated_in_turn), r"repeat|attention", levels=BOTH),
    Fault("mask lets the next token through", AMP, in_model(sees_the_next), r"tril|allowed|mask|diagonal|input\.2|input\.3", levels=BOTH),
    Fault(
        "clipped before the gradients are unscaled",
        Setting(dtype="fp16"),
        when_ready(clipped_before_unscaling),
        r"norm|clip|unscale|mul_|_foreach|grad",
        levels=(*BOTH, "monitor"),
        coarse="exp_avg|parameter|grad",
    ),
    Fault(
        "gradients summed, not averaged",
        Setting(dtype="fp32", ranks=2, wrap="ddp"),
        when_ready(summed_over_ranks),
        r"all_reduce|reduce|grad|div",
        levels=(*BOTH, "monitor"),
    ),
    Fault(
        "parameter replaced after the optimizer was made",
        BF16,
        when_ready(replaced_after_the_optimizer),
        r"layers\.1\.mlp\.down",
        levels=(*BOTH, "monitor"),
    ),
    Fault(
        "eps of AdamW 1e-5",
        Setting(dtype="amp"),
        nothing,
        r"eps|addcdiv|_foreach|add_",
        levels=("mix", "monitor"),
        other=Setting(dtype="amp", optimizer=(("eps", 1e-5),)),
        coarse="weight|bias|eps|parameter",
    ),
    Fault("scale of the hidden size", AMP, in_model(scale_of_the_hidden_size), r"scale|attention|scaled_dot", levels=BOTH),
    Fault(
        "all ranks read the same rows",
        Setting(ranks=2, wrap="ddp"),
        when_ready(rank_is_not_asked),
        r"tokens|data|embedding|batch|labels|input",
        levels=(*BOTH, "monitor"),
    ),
    Fault(
        "scheduler steps with each micro batch",
        Setting(dtype="fp32", micro=2, warmup=8),
        when_ready(scheduler_of_each_micro_batch),
        r"\blr\b|learning rate|addcdiv|mul_|_foreach|rate",
        levels=("mix", "monitor"),
        coarse="learning|rate|lr|parameter|weight",
    ),
    Fault(
        "dropout drawn again in recomputation",
        Setting(changes=(("dropout", 0.1), ("checkpoint", "new"))),
        in_model(dropout_drawn_again),
        r"drop|recomput|backward|rng|random",
        levels=BOTH,
    ),
)
