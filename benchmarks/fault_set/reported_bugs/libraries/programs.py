"""Which program a family of models is trained by."""

from __future__ import annotations

from reported_bugs.libraries import language, pictures, preferences
from reported_bugs.training import Program
from reported_bugs.unseen.fifth.program import DecoderProgram
from reported_bugs.unseen.sixth.program import Clamped, HybridProgram, Latent, Seeing

PROGRAMS: dict[str, type[Program]] = {
    "bert": language.Bert,
    "t5": language.T5,
    "whisper": language.Whisper,
    "gemma2": language.Gemma2,
    "neox": language.NeoX,
    "lora": language.Lora,
    "vit": pictures.Vit,
    "resnet": pictures.ResNet,
    "clip": pictures.Clip,
    "diffusion": pictures.Diffusion,
    "vae": pictures.Vae,
    "dpo": preferences.Dpo,
    "reward": preferences.Reward,
    "policy": preferences.Policy,
    "decoder": DecoderProgram,
    "hybrid": HybridProgram,
    "latent": Latent,
    "clamped": Clamped,
    "seeing": Seeing,
}
