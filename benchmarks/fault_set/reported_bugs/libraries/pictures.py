"""Trainings over pictures: a vision transformer, a ResNet with batch norm, CLIP over two ranks, a diffusion U-Net with an average of its
weights, a variational autoencoder."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.libraries.language import SIZES, WORDS, LibraryProgram
from reported_bugs.models import HIDDEN, LENGTH
from reported_bugs.training import Batch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, SIDE, MEAN, STD, TIMES = 10, 16, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 100


def pictures(rows: int, draw: torch.Generator) -> Tensor:
    """Smooth, in 0 to 1, channels of unlike brightness."""
    rough = torch.rand(rows, 3, 4, 4, generator=draw) * torch.tensor([1.0, 0.7, 0.4])[None, :, None, None]
    return F.interpolate(rough, SIDE, mode="bilinear") + 0.05 * torch.rand(rows, 3, SIDE, SIDE, generator=draw)


class Pictures(LibraryProgram):
    """The loss is a mean over pictures."""

    def rows_of(self, step: int) -> Batch:
        draw = torch.Generator().manual_seed(300 + step)
        found = pictures(self.setting.rows, draw)
        other = torch.randint(0, CLASSES, (self.setting.rows,), generator=draw)
        return {"pictures": found, "labels": (found.mean((2, 3)) @ torch.tensor([7.0, 5.0, 3.0])).long() % CLASSES, "other": other}

    def normalised(self, x: Tensor) -> Tensor:
        mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
        return self.floats((x - mean) / std)

    def tokens(self, micros: list[Batch]) -> Tensor:
        return torch.tensor(self.setting.rows)

    def loss(self, batch: Batch, tokens: Tensor) -> Tensor:
        with self.precision():
            found = self.loss_of(batch)
        return found / tokens * self.scale()

    def loss_of(self, batch: Batch) -> Tensor:
        """A sum over pictures."""
        logits = self.net(pixel_values=self.normalised(batch["pictures"])).logits
        return F.cross_entropy(logits.float(), batch["labels"], reduction="sum")


class Vit(Pictures):
    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        own = {"image_size": SIDE, "patch_size": 4, "num_labels": CLASSES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return self.transformers("ViTConfig", "ViTForImageClassification", changes, **SIZES, **own)


class ResNet(Pictures):
    """`frozen`: the backbone does not learn, and its batch norms keep their statistics."""

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        import transformers

        given = dict(changes)
        frozen = given.pop("frozen", False)
        own = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "basic", "num_labels": CLASSES}
        model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**{**own, **given}))
        if frozen:
            draw = torch.Generator().manual_seed(6)
            for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
                norm.running_mean.copy_(torch.randn(norm.num_features, generator=draw) * 0.1)
                norm.running_var.copy_(torch.rand(norm.num_features, generator=draw) + 0.5)
            model.resnet.requires_grad_(False)
            self.ready.insert(0, lambda p: p.model.resnet.eval())
        made: nn.Module = model
        return made


class Clip(Pictures):
    """Every picture against every text, of all ranks."""

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        words = {**WORDS, "eos_token_id": 2}
        text = {**words, **SIZES, "max_position_embeddings": LENGTH}
        vision = {**SIZES, "image_size": SIDE, "patch_size": 4}
        return self.transformers("CLIPConfig", "CLIPModel", changes, text_config=text, vision_config=vision, projection_dim=32)

    def rows_of(self, step: int) -> Batch:
        found, draw = super().rows_of(step), torch.Generator().manual_seed(700 + step)
        tokens = torch.randint(3, 200, (self.setting.rows, LENGTH), generator=draw)
        tokens[:, 1:4] = (found["pictures"].mean((2, 3)) * 60).long() + 3
        lengths = torch.randint(8, LENGTH, (self.setting.rows, 1), generator=draw)
        tokens = torch.where(torch.arange(LENGTH)[None] < lengths, tokens, 0).scatter(1, lengths, 2)
        return {**found, "tokens": tokens, "mask": (torch.arange(LENGTH)[None] <= lengths).long()}

    def gathered(self, x: Tensor) -> Tensor:
        """Of all ranks, with gradients."""
        if self.setting.ranks == 1:
            return x
        import torch.distributed.nn

        return torch.cat(torch.distributed.nn.all_gather(x.contiguous()))

    def first_label(self, rows: int) -> int:
        return self.rank * rows

    def logit_scale(self) -> Tensor:
        found: Tensor = self.model.logit_scale.exp()
        return found

    def loss_of(self, batch: Batch) -> Tensor:
        out = self.net(input_ids=batch["tokens"], attention_mask=batch["mask"], pixel_values=self.normalised(batch["pictures"]))
        texts, images = out.text_embeds.float(), out.image_embeds.float()
        labels = torch.arange(len(texts)) + self.first_label(len(texts))
        scale = self.logit_scale()
        by_text = F.cross_entropy(scale * texts @ self.gathered(images).t(), labels, reduction="sum")
        by_image = F.cross_entropy(scale * images @ self.gathered(texts).t(), labels, reduction="sum")
        return (by_text + by_image) / 2


class Block(nn.Module):
    def __init__(self, width: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, width), nn.Conv2d(width, out, 3, padding=1)
        self.time = nn.Linear(HIDDEN, out)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        found: Tensor = self.shortcut(x) + self.conv2(F.silu(self.norm2(inner)))
        return found


class UNet(nn.Module):
    """As those of diffusion models, with two sizes."""

    def __init__(self, groups: int = 8, width: int = 16) -> None:
        super().__init__()
        self.time_embedding = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.down = Block(width, width, groups)
        self.downsample = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = Block(2 * width, 2 * width, groups)
        self.upsample = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = Block(2 * width, width, groups)
        self.norm_out, self.conv_out = nn.GroupNorm(groups, width), nn.Conv2d(width, 3, 3, padding=1)

    def times(self, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * torch.exp(-math.log(10000) * torch.arange(HIDDEN // 2) / (HIDDEN // 2))[None]
        return torch.cat([angles.cos(), angles.sin()], 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.time_embedding(self.times(t).to(x.dtype))
        high = self.down(self.conv_in(x), time)
        low = self.upsample(self.middle(self.downsample(high), time))
        found: Tensor = self.conv_out(F.silu(self.norm_out(self.up(torch.cat([low, high], 1), time))))
        return found


class Diffusion(Pictures):
    """Predicts the noise; an average of the weights follows."""

    kept = 0.99

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        self.alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.15, TIMES), 0)
        self.updates = 0
        self.ready.insert(0, lambda p: setattr(p, "average", copy.deepcopy(p.model).requires_grad_(False)))
        return UNet(**changes)

    def layers(self) -> Any:
        return [self.model.down, self.model.middle, self.model.up]

    def rows_of(self, step: int) -> Batch:
        found, draw = super().rows_of(step), torch.Generator().manual_seed(800 + step)
        noise = torch.randn(found["pictures"].shape, generator=draw)
        return {**found, "noise": noise, "t": torch.randint(1, TIMES, (self.setting.rows,), generator=draw)}

    def level(self, t: Tensor) -> Tensor:
        return self.alphas[t][:, None, None, None]

    def noisy(self, batch: Batch) -> Tensor:
        level = self.level(batch["t"])
        return level.sqrt() * (2 * batch["pictures"] - 1) + (1 - level).sqrt() * batch["noise"]

    def target(self, batch: Batch) -> Tensor:
        return batch["noise"]

    def weight(self, batch: Batch) -> Tensor:
        """Of each picture: min-SNR with gamma 5."""
        level = self.alphas[batch["t"]]
        ratio = level / (1 - level)
        return ratio.clamp(max=5.0) / ratio

    def loss_of(self, batch: Batch) -> Tensor:
        found = self.net(self.floats(self.noisy(batch)), batch["t"])
        return (F.mse_loss(found.float(), self.target(batch), reduction="none").mean((1, 2, 3)) * self.weight(batch)).sum()

    def decay(self) -> float:
        """Small in the first updates."""
        return min(self.kept, (1 + self.updates) / (10 + self.updates))

    def update(self) -> None:
        super().update()
        self.updates += 1
        with torch.no_grad():
            for average, weight in zip(self.average.parameters(), self.model.parameters()):  # type: ignore[attr-defined]
                average.lerp_(weight, 1 - self.decay())


class Autoencoder(nn.Module):
    def __init__(self, width: int = 16, latent: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.SiLU(), nn.GroupNorm(4, width), nn.Conv2d(width, 2 * latent, 3, 2, 1))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(latent, width, 2, 2), nn.SiLU(), nn.GroupNorm(4, width), nn.ConvTranspose2d(width, 3, 2, 2)
        )

    def sample(self, mean: Tensor, logvar: Tensor, noise: Tensor) -> Tensor:
        return mean + torch.exp(0.5 * logvar) * noise

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.encoder(x).chunk(2, 1)
        return self.decoder(self.sample(mean, logvar, noise)), mean, logvar


class Vae(Pictures):
    beta = 0.1

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        return Autoencoder(**changes)

    def layers(self) -> Any:
        return [self.model.encoder, self.model.decoder]

    def rows_of(self, step: int) -> Batch:
        draw = torch.Generator().manual_seed(600 + step)
        return {**super().rows_of(step), "noise": torch.randn(self.setting.rows, 4, 4, 4, generator=draw)}

    def divergence(self, mean: Tensor, logvar: Tensor) -> Tensor:
        """Of each picture."""
        return 0.5 * (mean.pow(2) + logvar.exp() - 1 - logvar).sum((1, 2, 3))

    def loss_of(self, batch: Batch) -> Tensor:
        x = self.normalised(batch["pictures"])
        found, mean, logvar = self.net(x, self.floats(batch["noise"]))
        error = F.mse_loss(found.float(), x.float(), reduction="none").sum((1, 2, 3))
        return (error + self.beta * self.divergence(mean.float(), logvar.float())).sum()


def all_gather_without_gradient(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)
