"""Trainings of language models other than a decoder alone: BERT, T5, Whisper, Gemma 2, GPT-NeoX and adapters over a frozen Llama."""

from __future__ import annotations

import math
from typing import Any

import torch
from reported_bugs.models import HIDDEN, LENGTH, VOCAB
from reported_bugs.training import Batch, Program
from torch import Tensor, nn
from torch.nn import functional as F

FRAMES, MELS = 2 * LENGTH, 20
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class LibraryProgram(Program):
    """A model of a library; `defaults` are those of its config."""

    defaults: dict[str, Any] = {}

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        """From the config class; the attention is the setting's."""
        raise NotImplementedError

    def transformers(self, config: str, model: str, changes: dict[str, Any], **defaults: Any) -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(
            getattr(transformers, config)(**{"attn_implementation": self.setting.attention, **defaults, **changes})
        )
        return made

    def layers(self) -> Any:
        """Every list of layers: encoder and decoder have one each."""
        return [layer for module in self.model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1 for layer in module]

    def floats(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16) if self.setting.dtype == "bf16" else x


class Bert(LibraryProgram):
    """Words are masked; two segments."""

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        own = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 2 * LENGTH}
        return self.transformers("BertConfig", "BertForMaskedLM", changes, **WORDS, **SIZES, **own)

    def rows_of(self, step: int) -> Batch:
        found, draw = super().rows_of(step), torch.Generator().manual_seed(900 + step)
        tokens, mask = found["tokens"], found["mask"]
        hidden = (torch.rand(tokens.shape, generator=draw) < 0.25) & (mask > 0)
        cut = torch.randint(6, LENGTH // 2, (len(tokens), 1), generator=draw)
        segments = (torch.arange(LENGTH)[None] >= cut).long()
        return {"tokens": tokens.where(~hidden, 3), "labels": tokens.where(hidden, -100), "mask": mask, "segments": segments}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {"input_ids": batch["tokens"], "attention_mask": batch["mask"], "token_type_ids": batch["segments"]}


class EncoderDecoder(LibraryProgram):
    """Labels are what the decoder reads, one on."""

    def rows_of(self, step: int) -> Batch:
        found, draw = super().rows_of(step), torch.Generator().manual_seed(500 + step)
        lengths = torch.randint(LENGTH // 3, LENGTH // 2 + 1, (self.setting.rows, 1), generator=draw)
        answers = torch.randint(3, VOCAB, (self.setting.rows, LENGTH // 2), generator=draw)
        answers = (found["tokens"][:, : LENGTH // 2] + answers % 7).clamp(3, VOCAB - 1)
        labels = torch.where(torch.arange(LENGTH // 2)[None] < lengths, answers, -100)
        sound = torch.randn(self.setting.rows, MELS, FRAMES, generator=draw).cumsum(2).div(6).tanh()
        return {"tokens": found["tokens"], "mask": found["mask"], "labels": labels, "sound": sound}

    def begun(self, labels: Tensor) -> Tensor:
        return F.pad(labels[:, :-1], (1, 0), value=1).clamp_min(0)


class T5(EncoderDecoder):
    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        sizes = {"d_model": HIDDEN, "d_kv": 16, "d_ff": 2 * HIDDEN, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        return self.transformers(
            "T5Config", "T5ForConditionalGeneration", changes, **WORDS, **sizes, decoder_start_token_id=1, use_cache=False
        )

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {"input_ids": batch["tokens"], "attention_mask": batch["mask"], "decoder_input_ids": self.begun(batch["labels"])}


class Whisper(EncoderDecoder):
    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        sides = {
            f"{side}_{key}": value
            for side in ("encoder", "decoder")
            for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 2 * HIDDEN))
        }
        sizes = {"d_model": HIDDEN, "num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": LENGTH}
        return self.transformers(
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            changes,
            **WORDS,
            **sizes,
            **sides,
            decoder_start_token_id=1,
            use_cache=False,
        )

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {"input_features": self.floats(batch["sound"]), "decoder_input_ids": self.begun(batch["labels"])}


class Gemma2(LibraryProgram):
    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        own: dict[str, Any] = {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 12,
            "query_pre_attn_scalar": 4,
            "initializer_range": 0.08,
        }
        own["attn_implementation"] = "eager"  # others have no caps on scores
        caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "max_position_embeddings": 2 * LENGTH, "use_cache": False}
        return self.transformers("Gemma2Config", "Gemma2ForCausalLM", changes, **WORDS, **SIZES, **own, **caps)


class NeoX(LibraryProgram):
    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        own = {"rope_parameters": rope, "max_position_embeddings": 2 * LENGTH, "use_cache": False}
        return self.transformers("GPTNeoXConfig", "GPTNeoXForCausalLM", changes, **WORDS, **SIZES, **own)


class Adapter(nn.Module):
    """A frozen layer and a product of low rank, as PEFT has it; `trained`: the second factor is that of a checkpoint."""

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float, dropout: float, trained: float) -> None:
        super().__init__()
        self.base_layer, self.scaling = base_layer, alpha / rank
        self.lora_dropout = nn.Dropout(dropout)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.normal_(self.lora_B.weight, std=trained) if trained else nn.init.zeros_(self.lora_B.weight)
        self.to(base_layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling
        return found


class Lora(LibraryProgram):
    """Adapters of a frozen Llama, in every query and value projection."""

    def make_model(self, changes: dict[str, Any]) -> nn.Module:
        given = {"rank": 8, "alpha": 16.0, "dropout": 0.0, "trained": 0.0, **changes}
        adapter = {key: given.pop(key) for key in ("rank", "alpha", "dropout", "trained")}
        own = {"num_key_value_heads": 2, "max_position_embeddings": 4 * LENGTH, "use_cache": False, "rms_norm_eps": 1e-6}
        model: Any = self.transformers("LlamaConfig", "LlamaForCausalLM", given, **WORDS, **SIZES, **own)
        self.freeze(model)
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name), **adapter))
        made: nn.Module = model
        return made

    def freeze(self, model: Any) -> None:
        model.requires_grad_(False)
