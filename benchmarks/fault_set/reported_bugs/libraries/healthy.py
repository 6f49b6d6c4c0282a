"""Pairs of trainings of library models that differ in nothing but rounding, and single runs that are right; written down as the faults
were. They were run once before anything was changed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs.case import Healthy, Plant, every, nothing, when_ready
from reported_bugs.libraries.faults_of_language import BERT, GEMMA, LORA, NEOX, T5, WHISPER, parameters_of_adafactor, replaced
from reported_bugs.libraries.faults_of_pictures import CLIP, DIFFUSION, FROZEN, PAIR, RESNET, VAE, VIT, mixed
from reported_bugs.libraries.faults_of_preferences import DPO, DROPPED, POLICY, REWARD
from reported_bugs.training import Batch, Program, Setting
from reported_bugs.unseen.second import named
from torch import Tensor, nn

BOTH, EVERY, ONLY = ("mix", "L0"), ("mix", "L0", "monitor"), ("monitor",)
PLAIN = named(lambda _p: None, "plain")


def pair(name: str, setting: Setting, other: Setting, plant: Plant = nothing, levels: Any = BOTH, golden: Plant | None = None) -> Healthy:
    return Healthy(f"libraries: {name}", setting, other, plant, levels, plant if golden is None else golden)


def alone(name: str, setting: Setting, levels: tuple[str, ...], plant: Plant = nothing) -> Healthy:
    """Watched runs have float32 weights: norms that begin at one do not move in 16 bits, and the monitor says so."""
    dumped = "mix" in levels
    own = replace(setting, steps=3) if dumped else replace(setting, steps=32, dtype="amp")
    return Healthy(f"one run: {name}", own, None, plant, levels)


def recomputed(program: Program) -> None:
    program.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def channels_last(program: Program) -> None:
    program.model.to(memory_format=torch.channels_last)


def one_after_the_other(program: Any) -> None:
    """Chosen and rejected answers in a pass each."""
    own = program.chances

    def chances(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([own(model, t, m) for t, m in zip(tokens.chunk(2), mask.chunk(2))])

    program.chances = chances


def compiled_parts(kind: str) -> Plant:
    def finish(program: Any) -> None:
        for module in every(program.model, kind):
            module.compile(dynamic=False)

    return when_ready(finish)


def other_experts(program: Program) -> None:
    program.model.set_experts_implementation("grouped_mm")


def eager_experts(program: Program) -> None:
    program.model.set_experts_implementation("eager")


def average_from_a_copy(program: Any) -> None:
    """The average begins as a copy of the weights behind the first update, and has one decay from there on: so does the helper of torch."""
    program.decay = lambda: program.kept if program.updates > 1 else 0.0


def average_of_torch(program: Any) -> None:
    """The same average by the helper of torch."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    own = AveragedModel(program.model, multi_avg_fn=get_ema_multi_avg_fn(program.kept))
    update = Program.update

    def step() -> None:
        update(program)
        program.updates += 1
        own.update_parameters(program.model)

    program.update = step


def log_of_chances(program: Any) -> None:
    """Cross entropy for log_softmax and gather."""

    def chances(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
        logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].float()
        each = -nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return program.summed(each, program.counted(mask)[:, 1:])  # type: ignore[no-any-return]

    program.chances = chances


def reversed_rows(_program: Any, own: Any) -> Any:
    def batches(step: int) -> list[Batch]:
        return own(step)[::-1]  # type: ignore[no-any-return]

    return batches


FUSED = (("fused", True),)
LOOP = (("foreach", False),)
MIXTRAL = Setting("mixtral")
PLAIN_DPO = named(nothing, "nothing")
CASES = (
    pair("bert, sdpa for eager", replace(BERT, attention="eager"), BERT, levels=EVERY),
    pair(
        "bert, fsdp for ddp, amp",
        replace(BERT, dtype="amp", ranks=2, wrap="ddp"),
        replace(BERT, dtype="amp", ranks=2, wrap="fsdp"),
        levels=EVERY,
    ),
    pair("bert, layers compiled", BERT, BERT, compiled_parts("BertIntermediate"), levels=("L0", "monitor"), golden=PLAIN),
    pair("t5, four micro batches for one", T5, replace(T5, micro=4), levels=EVERY),
    pair("t5, recomputation", replace(T5, dtype="amp"), replace(T5, dtype="amp"), when_ready(recomputed), golden=PLAIN),
    pair("t5, adafactor, a repeat", replace(T5, steps=6), replace(T5, steps=6), parameters_of_adafactor(False), levels=EVERY),
    pair("whisper, sdpa for eager", replace(WHISPER, attention="eager"), WHISPER),
    pair(
        "whisper, ddp for one process, amp", replace(WHISPER, dtype="amp"), replace(WHISPER, dtype="amp", ranks=2, wrap="ddp"), levels=EVERY
    ),
    pair("gemma2, recomputation", GEMMA, GEMMA, when_ready(recomputed), golden=PLAIN),
    pair(
        "gemma2, fused optimizer for loops, amp",
        replace(GEMMA, dtype="amp", optimizer=LOOP),
        replace(GEMMA, dtype="amp", optimizer=FUSED),
        levels=EVERY,
    ),
    pair("neox, sdpa for eager", replace(NEOX, attention="eager"), NEOX),
    pair("neox, fsdp for one process", NEOX, replace(NEOX, ranks=2, wrap="fsdp")),
    pair(
        "mixtral, experts grouped",
        MIXTRAL,
        MIXTRAL,
        when_ready(other_experts),
        levels=EVERY,
        golden=named(when_ready(eager_experts), "eager"),
    ),
    pair("lora, two micro batches for one", LORA, replace(LORA, micro=2), levels=EVERY),
    pair(
        "vit, micro batches in another order",
        replace(VIT, micro=4),
        replace(VIT, micro=4),
        replaced("batches", reversed_rows),
        golden=PLAIN,
    ),
    pair("vit, ddp for one process", VIT, replace(VIT, ranks=2, wrap="ddp"), levels=EVERY),
    pair(
        "vit, mixtures, two micro batches, amp",
        replace(VIT, dtype="amp", micro=2, optimizer=LOOP),
        replace(VIT, dtype="amp", micro=2),
        mixed(False),
        levels=EVERY,
    ),
    pair("resnet, channels last", RESNET, RESNET, when_ready(channels_last), levels=EVERY, golden=PLAIN),
    pair("resnet, frozen norms, four micro batches for two", replace(FROZEN, micro=2), replace(FROZEN, micro=4), levels=EVERY),
    pair("clip, two ranks for one process", CLIP, PAIR, levels=EVERY),
    pair("diffusion, channels last", DIFFUSION, DIFFUSION, when_ready(channels_last), levels=EVERY, golden=PLAIN),
    pair(
        "diffusion, average by torch",
        DIFFUSION,
        DIFFUSION,
        when_ready(average_of_torch),
        levels=EVERY,
        golden=named(when_ready(average_from_a_copy), "average from a copy"),
    ),
    pair(
        "diffusion, ddp for one process, two micro batches",
        replace(DIFFUSION, micro=2),
        replace(DIFFUSION, micro=2, ranks=2, wrap="ddp"),
        levels=EVERY,
    ),
    pair("vae, two micro batches for one, amp", replace(VAE, dtype="amp"), replace(VAE, dtype="amp", micro=2), levels=EVERY),
    pair("dpo, answers one after the other", DPO, DPO, when_ready(one_after_the_other), golden=PLAIN_DPO),
    pair(
        "dpo, cross entropy for log_softmax",
        replace(DPO, dtype="amp"),
        replace(DPO, dtype="amp"),
        when_ready(log_of_chances),
        levels=EVERY,
        golden=PLAIN,
    ),
    pair("reward, two micro batches for one", REWARD, replace(REWARD, micro=2), levels=EVERY),
    pair("policy, sdpa for eager, two micro batches", replace(POLICY, micro=2, attention="eager"), replace(POLICY, micro=2), levels=EVERY),
    alone("bert", BERT, ("monitor", "watch")),
    alone("t5, adafactor", T5, ("monitor", "watch"), parameters_of_adafactor(False)),
    alone("whisper, dumped", WHISPER, BOTH),
    alone("gemma2, dumped", GEMMA, BOTH),
    alone("vit, ddp", replace(VIT, dtype="amp", ranks=2, wrap="ddp"), ("monitor", "watch")),
    alone("resnet", RESNET, ("monitor", "watch")),
    alone("resnet, frozen norms, dumped", FROZEN, BOTH),
    alone("clip, two ranks", PAIR, ("monitor", "watch")),
    alone("clip, two ranks, dumped", PAIR, BOTH),
    alone("diffusion", DIFFUSION, ("monitor", "watch")),
    alone("diffusion, dumped", DIFFUSION, BOTH),
    alone("vae", VAE, ("monitor", "watch")),
    alone("dpo, dropout", DROPPED, ("monitor", "watch")),
    alone("dpo, dumped", DPO, BOTH),
    alone("policy", POLICY, ("monitor", "watch")),
    alone("lora", LORA, ("monitor", "watch")),
    alone("lora, dumped", LORA, BOTH),
)
