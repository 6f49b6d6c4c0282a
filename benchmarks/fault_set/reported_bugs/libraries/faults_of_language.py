"""Bugs in language models of Transformers and in adapters, written down from reports before the verdict engine was read; the size of each
was drawn at random. They were run once before anything was changed for them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from reported_bugs.case import Fault, Plant, every, in_model, setting_of_model, when_ready
from reported_bugs.libraries.language import FRAMES, Adapter
from reported_bugs.models import HIDDEN
from reported_bugs.training import Batch, Program, Setting
from reported_bugs.unseen.second import named
from torch import nn

DRAW = random.Random(20261130)
BOTH, THREE = ("mix", "L0"), ("mix", "L1", "L0")
HF = "huggingface/transformers"


def drawn(low: float, high: float) -> float:
    return round(DRAW.uniform(low, high), 3)


def other_inputs(change: Any) -> Plant:
    """`change` gets what the model is given, and the batch."""

    def finish(program: Any) -> None:
        own = program.inputs
        program.inputs = lambda batch: change(own(batch), batch)

    return when_ready(finish)


def replaced(name: str, make: Any) -> Plant:
    """A method of the program is another; `make` gets the program and its own method."""

    def finish(program: Any) -> None:
        setattr(program, name, make(program, getattr(program, name)))

    return when_ready(finish)


def mask_added_as_bool(given: dict[str, Any], _batch: Batch) -> dict[str, Any]:
    """One for seen and zero for not: it is added to the scores."""
    mask = given["attention_mask"]
    return {**given, "attention_mask": (mask > -1).to(mask.dtype)}


def offset_positions(given: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """As RoBERTa counts: from behind the number of the padding."""
    return {**given, "position_ids": torch.arange(batch["tokens"].shape[1])[None] + OFFSET}


def kept_cache(program: Any) -> None:
    """From the second step on, keys of an evaluation stay in front of those of the batch."""
    import transformers

    own, count = program.inputs, [0]

    def inputs(batch: Batch) -> dict[str, Any]:
        count[0] += 1
        if count[0] == 1:
            return own(batch)  # type: ignore[no-any-return]
        cache = transformers.DynamicCache()
        with torch.no_grad():
            program.model(input_ids=batch["tokens"][:, :CACHED], past_key_values=cache, use_cache=True)
        seen = torch.ones(len(batch["tokens"]), CACHED, dtype=torch.long)
        return {**own(batch), "past_key_values": cache, "attention_mask": torch.cat([seen, batch["mask"]], 1)}

    program.inputs = inputs


def not_scaled_head(model: Any) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: own(x * HIDDEN**0.5)


def labels_not_shifted(_program: Any, _own: Any) -> Any:
    return lambda labels: labels.clamp_min(0)


def drawn_positions(model: Any) -> None:
    table = model.model.encoder.embed_positions.weight
    table.data.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(8)) * 0.02)


def every_label(_program: Any, own: Any) -> Any:
    def rows_of(step: int) -> Batch:
        found = own(step)
        whole = torch.where(found["labels"] >= 0, found["labels"], found["tokens"])
        return {**found, "labels": torch.where(found["mask"] > 0, whole, -100)}

    return rows_of


def one_value(position: str) -> Any:
    """Biases of a checkpoint are in one norm only in the golden run."""

    def edit(model: Any) -> None:
        generator = torch.Generator().manual_seed(12)
        for name, module in model.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.bias.data.copy_(torch.randn(module.bias.shape, generator=generator) * 0.1)
                if name == position:
                    module.bias.data.zero_()

    return edit


def scaled(factor: float) -> Any:
    def edit(model: Any) -> None:
        for adapter in every(model, Adapter):
            adapter.scaling *= factor

    return edit


def merged_and_active(model: Any) -> None:
    for adapter in every(model, Adapter):
        adapter.base_layer.weight.data.add_((adapter.lora_B.weight @ adapter.lora_A.weight) * adapter.scaling)


def not_frozen(program: Any) -> None:
    """`requires_grad` is set on the modules, where it means nothing."""

    def freeze(model: Any) -> None:
        for module in model.modules():
            module.requires_grad = False

    program.freeze = freeze


def one_layer_not_frozen(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.requires_grad_(True)


def parameters_of_adafactor(scale: bool) -> Plant:
    def plant(program: Program) -> None:
        from transformers.optimization import Adafactor

        def make() -> Any:
            return Adafactor(program.model.parameters(), lr=RATE, scale_parameter=scale, relative_step=False, warmup_init=False)

        program.make_optimizer = make  # type: ignore[method-assign]

    return named(plant, "adafactor")


def sound_as_decibels(_program: Any, own: Any) -> Any:
    def rows_of(step: int) -> Batch:
        found = own(step)
        return {**found, "sound": found["sound"] * LOUDER}

    return rows_of


def one_window_for_all(model: Any) -> None:
    """Layers that see all see the window of the others."""
    model.config.layer_types = ["sliding_attention"] * len(model.config.layer_types)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = model.config.sliding_window
        if hasattr(layer, "attention_type"):
            layer.attention_type = "sliding_attention"


GEMMA, BERT, T5, WHISPER, NEOX, LORA = (
    Setting("gemma2"),
    Setting("bert"),
    Setting("t5"),
    Setting("whisper"),
    Setting("neox"),
    Setting("lora"),
)
OFFSET, CACHED, RATE, LOUDER = DRAW.randint(1, 3), DRAW.randint(3, 6), drawn(2e-3, 6e-3), drawn(1.5, 4)
EPS, BUCKETS, FACTOR = 10 ** -DRAW.uniform(4.5, 5.5), DRAW.choice((16, 24)), DRAW.choice((2.0, 4.0, 8.0))
NORM = DRAW.choice(("bert.encoder.layer.0.output.LayerNorm", "bert.encoder.layer.1.attention.output.LayerNorm"))
TRAINED = replace(LORA, changes=(("trained", drawn(0.02, 0.08)),))
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    **ROPE,
    "rope_type": "llama3",
    "factor": FACTOR,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": FRAMES // 2,
}
SCALED = Setting("llama", changes=(("rope_parameters", LLAMA3),))
ATTENTION = r"layers\.0\.self_attn|scaled_dot|softmax|tanh|mask"
LABELS, HEAD = r"labels|cross_entropy|where|criterion|\bloss\b|rows_of", r"labels|(cls|lm_head|decoder).*backward|LM.*backward|\bloss\b"
UPDATE = r"update|adafactor|optimizer|exp_avg|param|weight|mul_|add_|rms|scale"

CASES = (
    Fault(
        "bert: eps of norms",
        BERT,
        setting_of_model(layer_norm_eps=EPS),
        r"embeddings\.LayerNorm|layer_norm\.0",
        "1e-12 in the config",
        THREE,
    ),
    Fault(
        "bert: segments not passed",
        replace(BERT, dtype="amp"),
        other_inputs(lambda given, _batch: {k: v for k, v in given.items() if k != "token_type_ids"}),
        r"token_type|segment|bert\.embeddings|embedding\.\d+\.|gather|expand",
        f"{HF}#5664",
        THREE,
    ),
    Fault("bert: positions of RoBERTa", BERT, other_inputs(offset_positions), r"position|__add__|embeddings", "padding_idx + 1", BOTH),
    Fault(
        "bert: every word has a label",
        BERT,
        replaced("rows_of", every_label),
        LABELS,
        "labels of words that are not masked",
        BOTH,
        coarse=HEAD,
    ),
    Fault(
        "bert: bias of a norm not loaded",
        BERT,
        in_model(one_value(NORM)),
        NORM.replace(".", r"\."),
        "gamma and beta",
        BOTH,
        golden=named(in_model(one_value("")), "loaded"),
    ),
    Fault(
        "t5: distance of positions",
        T5,
        setting_of_model(relative_attention_max_distance=BUCKETS),
        r"SelfAttention|relative|bucket|log|mul|div|minimum",
        "config of a port",
        BOTH,
    ),
    Fault(
        "t5: head not scaled",
        replace(T5, dtype="amp"),
        in_model(not_scaled_head),
        r"lm_head|__mul__|mul",
        f"{HF} tie_word_embeddings of T5",
        THREE,
    ),
    Fault(
        "t5: decoder reads its labels",
        T5,
        replaced("begun", labels_not_shifted),
        r"decoder|shared|embed|clamp|pad|input|label|begun",
        "shift_right left out",
        BOTH,
    ),
    Fault(
        "t5: mask not passed",
        T5,
        other_inputs(lambda given, _batch: {k: v for k, v in given.items() if k != "attention_mask"}),
        r"SelfAttention|mask|scaled_dot|ones",
        "attention_mask left out",
        BOTH,
    ),
    Fault(
        "t5: adafactor scales by parameters",
        replace(T5, dtype="amp"),
        parameters_of_adafactor(True),
        UPDATE,
        "scale_parameter=True is the default",
        ("mix", "L0", "monitor"),
        golden=parameters_of_adafactor(False),
    ),
    Fault(
        "whisper: positions drawn",
        WHISPER,
        in_model(drawn_positions),
        r"encoder\.embed_positions",
        f"{HF} sinusoids initialised again",
        BOTH,
    ),
    Fault(
        "whisper: features not normalised",
        replace(WHISPER, dtype="amp"),
        replaced("rows_of", sound_as_decibels),
        r"conv1|sound|input|data|rows_of|__mul__",
        "log-mel in decibels",
        BOTH,
    ),
    Fault(
        "gemma2: scores not capped",
        GEMMA,
        setting_of_model(attn_logit_softcapping=None),
        ATTENTION,
        "attn_logit_softcapping under sdpa",
        BOTH,
    ),
    Fault(
        "gemma2: window in every layer",
        GEMMA,
        in_model(one_window_for_all),
        r"layers\.1\.self_attn|mask|softmax|sliding|__add__",
        "layer_types of the config",
        BOTH,
    ),
    Fault(
        "gemma2: scale of queries",
        replace(GEMMA, dtype="amp"),
        setting_of_model(query_pre_attn_scalar=16),
        ATTENTION + "|mul|matmul",
        "head_dim for query_pre_attn_scalar",
        THREE,
    ),
    Fault(
        "neox: branches one after the other",
        NEOX,
        setting_of_model(use_parallel_residual=False),
        r"layers\.0\W|layers\.0\.(mlp|post)|__add__|add",
        "use_parallel_residual",
        BOTH,
    ),
    Fault(
        "neox: whole heads turned",
        replace(NEOX, dtype="amp"),
        setting_of_model(rope_parameters={**ROPE, "partial_rotary_factor": 1.0}),
        r"rotary|layers\.0\.attention|cos|sin",
        "rotary_pct lost",
        BOTH,
    ),
    Fault(
        "llama: scaling of positions lost",
        SCALED,
        setting_of_model(rope_parameters=ROPE),
        r"rotary_emb",
        f"{HF} rope_scaling on reload",
        (*BOTH, "monitor"),
    ),
    Fault(
        "llama: a mask of ones is added",
        Setting("llama", packed=True),
        other_inputs(mask_added_as_bool),
        ATTENTION + "|__gt__|to|bool",
        "4-D mask",
        THREE,
    ),
    Fault(
        "llama: cache of an evaluation",
        Setting("llama"),
        when_ready(kept_cache),
        r"cat|cache|self_attn|mask|past",
        "use_cache in training",
        BOTH,
        1,
    ),
    Fault("lora: scaled by the root of the rank", LORA, in_model(scaled(8**0.5)), r"lora|[qv]_proj|__mul__|mul", "use_rslora", BOTH),
    Fault("lora: merged and active", TRAINED, in_model(merged_and_active), r"[qv]_proj|base_layer", "merge_adapter twice", THREE),
    Fault(
        "lora: base not frozen",
        LORA,
        not_frozen,
        r"requires|frozen|embed_tokens|base_layer|grad|lm_head|trained|no gradient",
        "module.requires_grad",
        ("mix", "L0", "monitor"),
    ),
    Fault(
        "lora: one matrix not frozen",
        replace(LORA, dtype="amp"),
        in_model(one_layer_not_frozen),
        r"layers\.1\.mlp\.down_proj",
        "modules_to_save",
        ("mix", "L0", "monitor"),
    ),
)
