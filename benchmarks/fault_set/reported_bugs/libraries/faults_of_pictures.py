"""Bugs in trainings over pictures, written down as those of `faults_of_language` were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs.case import Fault, Plant, in_model, setting_of_model, when_ready
from reported_bugs.libraries.faults_of_language import BOTH, DRAW, THREE, drawn, replaced
from reported_bugs.libraries.pictures import all_gather_without_gradient
from reported_bugs.training import Batch, Program, Setting
from reported_bugs.unseen.second import named
from torch import Tensor, nn
from torch.nn import functional as F

VIT, DIFFUSION, VAE = Setting("vit", rows=8), Setting("diffusion", rows=8), Setting("vae", rows=8)
RESNET = Setting("resnet", rows=8, dtype="amp", lr=3e-3)
CLIP = Setting("clip", rows=8)
PAIR = replace(CLIP, ranks=2, wrap="ddp")
FROZEN = replace(RESNET, changes=(("frozen", True),))
EPOCH, MOMENTUM, LAYERWISE, SMOOTH = DRAW.randint(6, 9), drawn(0.5, 0.95), drawn(0.6, 0.9), drawn(0.1, 0.4)
BETA, KEPT = drawn(0.3, 0.6), drawn(0.9, 0.99)


def pictures_changed(change: Any) -> Plant:
    def make(_program: Any, own: Any) -> Any:
        def rows_of(step: int) -> Batch:
            found = own(step)
            return {**found, "pictures": change(found["pictures"])}

        return rows_of

    return replaced("rows_of", make)


def mixed(exchanged: bool) -> Plant:
    """Mixup; `exchanged`: the weights of the two labels are exchanged."""

    def make(program: Any, _own: Any) -> Any:
        def loss_of(batch: Batch) -> Tensor:
            part = SMOOTH
            x = part * batch["pictures"] + (1 - part) * batch["pictures"].flip(0)
            logits = program.net(pixel_values=program.normalised(x)).logits.float()
            weights = (1 - part, part) if exchanged else (part, 1 - part)
            losses = [F.cross_entropy(logits, labels, reduction="sum") for labels in (batch["labels"], batch["labels"].flip(0))]
            return weights[0] * losses[0] + weights[1] * losses[1]

        return loss_of

    return named(replaced("loss_of", make), "mixed")


def layerwise(lost: bool) -> Plant:
    """Lower layers learn more slowly; `lost`: the scheduler sets every group to one rate."""

    def groups(program: Any, _own: Any = None) -> Any:
        def made() -> list[dict[str, Any]]:
            parts = [
                program.model.vit.embeddings,
                *program.model.vit.layers,
                nn.ModuleList([program.model.vit.layernorm, program.model.classifier]),
            ]
            rates = [program.setting.lr * (1.0 if lost else LAYERWISE ** (len(parts) - 1 - at)) for at in range(len(parts))]
            return [{"params": list(part.parameters()), "lr": rate, "weight_decay": 0.05} for part, rate in zip(parts, rates)]

        return made

    def plant(program: Any) -> None:
        program.groups = groups(program)

    return named(plant, "layerwise")


def train_mode(program: Program) -> None:
    program.model.train()


def other_momentum(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = MOMENTUM


def same_order_in_each_epoch(shuffled: bool) -> Plant:
    """The order of the rows of an epoch; `shuffled`: by its number."""

    def make(_program: Any, own: Any) -> Any:
        def rows_of(step: int) -> Batch:
            epoch, place = divmod(step, EPOCH)
            order = torch.randperm(EPOCH, generator=torch.Generator().manual_seed(epoch if shuffled else 0))
            return own(int(order[place]))  # type: ignore[no-any-return]

        return rows_of

    return named(replaced("rows_of", make), "epochs")


def velocity(_program: Any, own: Any) -> Any:
    def target(batch: Batch) -> Tensor:
        level = _program.level(batch["t"])
        return level.sqrt() * own(batch) - (1 - level).sqrt() * (2 * batch["pictures"] - 1)

    return target


def sine_first(model: Any) -> None:
    own = model.times
    model.times = lambda t: own(t).roll(32, 1)


def averaged_without_one(program: Any) -> None:
    """One part of the average is not updated."""
    own = program.update

    def update() -> None:
        kept = program.average.middle.conv1.weight.clone()
        own()
        program.average.middle.conv1.weight.data.copy_(kept)

    program.update = update


def deviation_of_variance(model: Any) -> None:
    model.sample = lambda mean, logvar, noise: mean + logvar.exp() * noise


def scale_not_exponent(program: Any, _own: Any) -> Any:
    return lambda: program.model.logit_scale * 1.0


LABELS = r"labels|cross_entropy|criterion|\bloss\b|mul|loss_of"
DATA = r"pixel|picture|image|input|data|patch_embeddings|embedder|rows_of|batch"
LOSS = r"loss|mse|criterion|mean|sum|mul|__sub__|target|exp|pow|weight"

CASES = (
    Fault("vit: channels exchanged", VIT, pictures_changed(lambda x: x.flip(1)), DATA + "|flip", "BGR of OpenCV", THREE),
    Fault(
        "vit: labels of a mixture exchanged",
        replace(VIT, dtype="amp"),
        mixed(True),
        LABELS,
        "lam for 1 - lam",
        BOTH,
        coarse=r"classifier|\bloss\b|backward",
        golden=mixed(False),
    ),
    Fault(
        "vit: rates of layers lost",
        replace(VIT, steps=12),
        layerwise(True),
        r"learning|\blr\b|rate|update|param|weight",
        "layer decay",
        ("mix", "monitor"),
        golden=layerwise(False),
    ),
    Fault(
        "resnet: not normalised",
        RESNET,
        replaced("normalised", lambda _p, _own: lambda x: x),
        DATA + "|__sub__|div|normalised",
        "ToTensor alone",
        BOTH,
    ),
    Fault(
        "resnet: frozen norms in training mode",
        FROZEN,
        when_ready(train_mode),
        r"normalization|batch_norm|embedder|training",
        "ultralytics/ultralytics#8753",
        THREE,
    ),
    Fault(
        "resnet: momentum of statistics",
        RESNET,
        in_model(other_momentum),
        r"momentum|running|normalization|batch_norm",
        "momentum of TensorFlow",
        BOTH,
    ),
    Fault(
        "resnet: the same order in each epoch",
        replace(RESNET, steps=32),
        same_order_in_each_epoch(False),
        DATA + "|loss|sample|order",
        "set_epoch not called",
        ("monitor",),
        golden=same_order_in_each_epoch(True),
    ),
    Fault(
        "clip: gathered without gradient",
        PAIR,
        replaced("gathered", lambda _p, _own: all_gather_without_gradient),
        r"gather|detach|projection|cross_entropy|matmul|\bt\b|backward|embeds|loss",
        "mlfoundations/open_clip gather_with_grad",
        BOTH,
    ),
    Fault(
        "clip: labels of the first rank",
        PAIR,
        replaced("first_label", lambda _p, _own: lambda rows: 0),
        r"label|cross_entropy|arange|__add__|loss",
        "labels without the rank",
        BOTH,
        coarse=r"projection|label|loss|CLIP|backward|logit_scale",
    ),
    Fault(
        "clip: scale without its exponent",
        CLIP,
        replaced("logit_scale", scale_not_exponent),
        r"logit_scale|exp|mul|loss",
        "logit_scale",
        BOTH,
        coarse=r"logit_scale|loss|CLIPModel|projection",
    ),
    Fault(
        "diffusion: noise of the step before",
        DIFFUSION,
        replaced("level", lambda _p, own: lambda t: own(t - 1)),
        r"noise|noisy|level|sqrt|__sub__|getitem|index|conv_in|alpha|mul",
        "one off in the schedule",
        BOTH,
    ),
    Fault(
        "diffusion: velocity for noise",
        replace(DIFFUSION, dtype="amp"),
        replaced("target", velocity),
        LOSS + "|velocity",
        "prediction_type",
        BOTH,
        coarse=r"conv_out|loss|UNet|backward",
    ),
    Fault(
        "diffusion: losses not weighted",
        DIFFUSION,
        replaced("weight", lambda _p, _own: lambda batch: torch.ones(len(batch["t"]))),
        LOSS + "|clamp|div|ones",
        "huggingface/diffusers#6307",
        BOTH,
        coarse=r"conv_out|loss|UNet|backward",
    ),
    Fault("diffusion: sines before cosines", DIFFUSION, in_model(sine_first), r"time|roll|cat|cos|sin", "flip_sin_to_cos", THREE),
    Fault("diffusion: groups of norms", replace(DIFFUSION, dtype="amp"), setting_of_model(groups=4), r"norm", "norm_num_groups", THREE),
    Fault(
        "diffusion: average without its warm-up",
        DIFFUSION,
        replaced("decay", lambda p, _own: lambda: p.kept),
        r"lerp|average|ema|update",
        "huggingface/diffusers#1864",
        ("mix",),
    ),
    Fault(
        "diffusion: a part of the average not updated",
        DIFFUSION,
        when_ready(averaged_without_one),
        r"lerp|average|clone|copy_|middle\.conv1",
        "buffers of the average",
        ("mix",),
    ),
    Fault(
        "vae: variance for deviation",
        VAE,
        in_model(deviation_of_variance),
        r"exp|mul|sample|decoder|latent|Autoencoder",
        "exp(logvar)",
        THREE,
    ),
    Fault(
        "vae: mean of the divergence",
        replace(VAE, dtype="amp"),
        replaced("divergence", lambda _p, own: lambda m, v: own(m, v) / m[0].numel()),
        LOSS + "|div",
        "mean for sum",
        BOTH,
        coarse=r"encoder|loss|Autoencoder|backward",
    ),
    Fault(
        "two monitors: vae, weight of the divergence",
        replace(VAE, dtype="amp", steps=32),
        when_ready(lambda p: setattr(p, "beta", BETA)),
        r"encoder|loss",
        "beta",
        ("monitor",),
    ),
    Fault(
        "two monitors: resnet, norms in training mode",
        replace(FROZEN, steps=32),
        when_ready(train_mode),
        r"normalization|embedder|norm|resnet",
        "model.train()",
        ("monitor",),
    ),
)
