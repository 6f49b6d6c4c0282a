"""Pairs of checkpoints in one naming scheme: prefixes, padding, tied embeddings, optimizer states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from stored_arrays import array_of, checkpoint_of

from msprobe_engine.align.parameters.align_names import align_checkpoints


def _ramp(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def test_tensors_of_one_name_are_pairs_in_the_order_of_the_first_checkpoint(tmp_path: Path) -> None:
    """Names that are in no table are paired as they are; what one side lacks is named."""
    a = checkpoint_of({"z": _ramp(3), "m": _ramp(2, 2), "exp_avg|m": _ramp(2, 2), "gone": _ramp(1)}, tmp_path / "a")
    b = checkpoint_of({"m": _ramp(2, 2), "exp_avg|m": _ramp(2, 2), "z": _ramp(3), "new": _ramp(1)}, tmp_path / "b")
    found = align_checkpoints(a, b)
    assert [pair.name for pair in found.pairs] == ["z", "m", "optimizer.exp_avg.m"]
    assert [t.key for t in found.only_a] == ["gone"]
    assert [t.key for t in found.only_b] == ["new"]


def test_prefixes_of_wrappers_do_not_matter(tmp_path: Path) -> None:
    """DDP, torch.compile, FSDP and activation checkpointing change names, not parameters."""
    names = ["net.0.weight", "model.layers.1.mlp.up_proj.weight"]
    a = checkpoint_of({name: _ramp(2, 3) for name in names}, tmp_path / "a")
    b = checkpoint_of(
        {
            "module._orig_mod.net.0._fsdp_wrapped_module.weight": _ramp(2, 3),
            "module.module.model._checkpoint_wrapped_module.layers.1.mlp.up_proj.weight": _ramp(2, 3),
        },
        tmp_path / "b",
    )
    found = align_checkpoints(a, b)
    assert [pair.name for pair in found.pairs] == names
    assert not found.only_a
    assert not found.only_b


def test_a_model_that_is_an_attribute_of_another_module_is_found(tmp_path: Path) -> None:
    """Names in no table: one prefix for most of them is taken off, and said. Known names: the attribute before the layers is."""
    names = ["embed.weight", "stack.0.fc.weight", "stack.1.fc.weight", "stack.1.fc.bias", "head.weight"]
    a = checkpoint_of({f"{s}net.{name}": _ramp(2, 3) for name in names for s in ("", "exp_avg|")}, tmp_path / "a")
    b = checkpoint_of({f"{s}{name}": _ramp(2, 3) for name in [*names, "more.weight"] for s in ("", "exp_avg|")}, tmp_path / "b")
    found = align_checkpoints(a, b)
    assert [(pair.name, pair.b.key) for pair in found.pairs[:2]] == [
        ("net.embed.weight", "embed.weight"),
        ("optimizer.exp_avg.net.embed.weight", "optimizer.exp_avg.embed.weight"),
    ]
    assert len(found.pairs) == 10
    assert [t.name for t in found.only_b] == ["more.weight", "more.weight"]
    assert any("begin with 'net.'" in note for note in found.notes)

    facts = {"heads": 2, "kv_heads": 1, "head_dim": 2}
    qkv = {f"model.layers.0.self_attn.{x}_proj.weight": _ramp(n, 4) for x, n in (("q", 4), ("k", 2), ("v", 2))}
    own = {f"student.{name}": value for name, value in qkv.items()} | {"student.lm_head.weight": _ramp(8, 4)}
    c = checkpoint_of(
        {"decoder.layers.0.self_attention.linear_qkv.weight": _ramp(8, 4), "output_layer.weight": _ramp(8, 4)}, tmp_path / "c", facts
    )
    found = align_checkpoints(checkpoint_of(own, tmp_path / "d"), c)
    assert [pair.name for pair in found.pairs] == list(own)
    assert (found.only_a, found.only_b) == ([], [])


def test_names_that_merely_end_alike_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Two models without a common structure: nothing is paired."""
    a = checkpoint_of({f"tower.{i}.weight": _ramp(2, 3) for i in range(4)} | {"other.bias": _ramp(5)}, tmp_path / "a")
    b = checkpoint_of({f"p{i}.q{i}.weight": _ramp(2, 3) for i in range(4)} | {"that.bias": _ramp(7)}, tmp_path / "b")
    assert not align_checkpoints(a, b).pairs


def test_rows_that_fill_up_a_vocabulary_are_not_compared(tmp_path: Path) -> None:
    """Two tensor-parallel sizes pad to other lengths; the rows of the vocabulary itself are the pair, and it is said."""
    word = _ramp(50, 4)
    a = checkpoint_of({"embedding.word_embeddings.weight": np.concatenate([word, _ramp(6, 4)])}, tmp_path / "a")
    b = checkpoint_of({"embedding.word_embeddings.weight": np.concatenate([word, -_ramp(14, 4)])}, tmp_path / "b", {"vocab": 50})
    (pair,) = align_checkpoints(a, b).pairs
    assert pair.a.shape == pair.b.shape == (50, 4)
    assert np.array_equal(array_of(pair.a), array_of(pair.b))
    assert "rows from 50 on" in pair.note


def test_rows_beyond_the_common_ones_are_a_difference_unless_they_only_fill_up(tmp_path: Path) -> None:
    """Of a vocabulary of unknown size, rows that one table lacks fill up only when they are zeros or all the same."""
    name = "model.embed_tokens.weight"
    words = _ramp(64, 4, start=1)
    short = checkpoint_of({name: words[:60]}, tmp_path / "short")
    whole = checkpoint_of({name: words}, tmp_path / "whole")
    for a, b in ((whole, short), (short, whole)):
        assert [pair.a.shape == pair.b.shape for pair in align_checkpoints(a, b).pairs] == [False]
    lost = checkpoint_of({name: words[:60]}, tmp_path / "lost", {"vocab": 64})
    assert [(p.a.shape, p.b.shape) for p in align_checkpoints(whole, lost).pairs] == [((64, 4), (60, 4))]
    for number, filled in enumerate((np.zeros((16, 4), np.float32), np.repeat(words[-1:], 16, axis=0))):
        padded = checkpoint_of({name: np.concatenate([words, filled])}, tmp_path / f"padded{number}")
        found = align_checkpoints(padded, whole)
        assert [pair.b.shape for pair in found.pairs] == [(64, 4)]
        assert any(note.startswith(f"{name}: rows from 64 on fill up the vocabulary") and "16 of the run" in note for note in found.notes)


def test_rows_of_a_vocabulary_that_both_have_are_compared_whatever_the_tokenizer_has(tmp_path: Path) -> None:
    """A table of 60 rows for a tokenizer of 50 is padded to 64: 60 rows are compared. A vocabulary that one side lacks is a difference."""
    name = "embedding.word_embeddings.weight"
    a = checkpoint_of({name: _ramp(64, 2)}, tmp_path / "a", {"vocab": 50})
    b = checkpoint_of({"model.embed_tokens.weight": _ramp(60, 2)}, tmp_path / "b", {"vocab": 60})
    assert [pair.a.shape for pair in align_checkpoints(a, b).pairs] == [(60, 2)]
    c = checkpoint_of({name: _ramp(64, 2)}, tmp_path / "c", {"vocab": 64})
    assert [(pair.a.shape, pair.b.shape) for pair in align_checkpoints(c, b).pairs] == [((64, 2), (60, 2))]


def test_steps_of_each_parameter_and_master_copies_that_one_side_does_not_keep(tmp_path: Path) -> None:
    """torch counts steps for each parameter, Megatron once: no difference. Float32 weights are compared with the other's master copies."""
    a = {"w": _ramp(3).astype(np.float16), "master|w": _ramp(3), "exp_avg|w": _ramp(3)}
    b = {"w": _ramp(3), "exp_avg|w": _ramp(3), "step|w": np.float32(3)}
    found = align_checkpoints(checkpoint_of(a, tmp_path / "a"), checkpoint_of(b, tmp_path / "b"))
    assert [(pair.name, pair.b.key) for pair in found.pairs] == [
        ("w", "w"),
        ("optimizer.master.w", "w"),
        ("optimizer.exp_avg.w", "optimizer.exp_avg.w"),
    ]
    assert (found.only_a, found.only_b) == ([], [])
    assert [(left.names, left.open) for left in found.left_out] == [(("optimizer.step.w",), False)]
    found = align_checkpoints(checkpoint_of(b, tmp_path / "c"), checkpoint_of(a, tmp_path / "d"))
    assert [pair.name for pair in found.pairs] == ["w", "w (as optimizer.master.w)", "optimizer.exp_avg.w"]


def test_states_that_another_format_keeps_of_no_parameter(tmp_path: Path) -> None:
    """Between formats they are left out; within one they are missing."""
    a = checkpoint_of({"w": _ramp(3), "exp_avg|w": _ramp(3), "max_exp_avg_sq|w": _ramp(3)}, tmp_path / "a")
    b = checkpoint_of({"w": _ramp(3), "exp_avg|w": _ramp(3)}, tmp_path / "b")
    assert [t.key for t in align_checkpoints(a, b).only_a] == ["optimizer.max_exp_avg_sq.w"]
    b.format = "another"
    found = align_checkpoints(a, b)
    assert found.only_a == []
    assert [left.names for left in found.left_out] == [("optimizer.max_exp_avg_sq.w",)]


def test_the_same_name_of_a_weight_that_lies_the_other_way(tmp_path: Path) -> None:
    """nanoGPT has GPT-2's names with linear layers, outputs first: a square weight too is the other's transposed."""
    h = "transformer.h.0."
    weights = {f"{h}attn.c_attn.weight": _ramp(4, 12), f"{h}attn.c_proj.weight": _ramp(4, 4), f"{h}mlp.c_fc.weight": _ramp(4, 16)}
    facts = {"heads": 2, "kv_heads": 2, "head_dim": 2}
    a = checkpoint_of(weights, tmp_path / "a", facts)
    b = checkpoint_of({name: value.T.copy() for name, value in weights.items()}, tmp_path / "b", facts)
    found = align_checkpoints(a, b)
    assert len(found.pairs) == 5
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)
    assert [pair.name for pair in align_checkpoints(a, a).pairs] == list(weights)


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """DeepSeek-V3 numbers them behind the last layer and repeats the tables; Megatron has them apart and shares the tables."""
    word, head, h = _ramp(8, 4), _ramp(8, 4, start=100), "model.layers.1."
    a = {
        "embedding.word_embeddings.weight": word,
        "output_layer.weight": head,
        "decoder.layers.0.self_attention.linear_proj.weight": _ramp(4, 4),
    }
    a |= {
        "mtp.layers.0.eh_proj.weight": _ramp(4, 8),
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight": _ramp(4, 4, start=9),
    }
    b = {"model.embed_tokens.weight": word, "lm_head.weight": head, "model.layers.0.self_attn.o_proj.weight": _ramp(4, 4)}
    b |= {f"{h}eh_proj.weight": _ramp(4, 8), f"{h}self_attn.o_proj.weight": _ramp(4, 4, start=9)}
    b |= {f"{h}embed_tokens.weight": word, f"{h}shared_head.head.weight": head}
    found = align_checkpoints(checkpoint_of(a, tmp_path / "a"), checkpoint_of(b, tmp_path / "b", {"layers": 1}))
    assert (found.only_a, found.only_b, len(found.pairs)) == ([], [], 7)
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)


def test_an_encoder_and_a_decoder_have_layers_of_the_same_numbers(tmp_path: Path) -> None:
    """Where both are there they stay apart; an encoder alone is what Megatron's older names call a decoder."""
    names = [f"{part}.layers.0.mlp.linear_fc2.weight" for part in ("encoder", "decoder")]
    a = checkpoint_of({name: _ramp(2, 3, start=i) for i, name in enumerate(names)}, tmp_path / "a")
    b = checkpoint_of({f"module.{name}": _ramp(2, 3, start=i) for i, name in enumerate(names)}, tmp_path / "b")
    found = align_checkpoints(a, b)
    assert [(pair.a.name, pair.b.name) for pair in found.pairs] == [(name, f"module.{name}") for name in names]
    c = checkpoint_of({"language_model.encoder.layers.0.mlp.dense_4h_to_h.weight": _ramp(2, 3)}, tmp_path / "c")
    d = checkpoint_of({names[1]: _ramp(2, 3)}, tmp_path / "d")
    assert len(align_checkpoints(c, d).pairs) == 1


def test_halves_that_megatron_fsdp_keeps_apart(tmp_path: Path) -> None:
    """``linear_fc1.weight_w`` and ``_v`` of fsdp_dtensor are gate and up, of experts too."""
    h, a, b, c = "layers.0.mlp.", {}, {}, {}
    for e, value in enumerate((_ramp(6, 2), _ramp(6, 2, start=50))):
        a |= {f"decoder.{h}experts.linear_fc1.weight{e}": value}
        b |= {f"module.decoder.{h}experts.linear_fc1.weight{e}_{half}": x for half, x in (("w", value[:3]), ("v", value[3:]))}
        c |= {f"model.{h}experts.{e}.{x}_proj.weight": w for x, w in (("gate", value[:3]), ("up", value[3:]), ("down", _ramp(2, 3)))}
        a |= {f"decoder.{h}experts.linear_fc2.weight{e}": _ramp(2, 3)}
        b |= {f"module.decoder.{h}experts.linear_fc2.weight{e}": _ramp(2, 3)}
    sides = [checkpoint_of(x, tmp_path / str(i)) for i, x in enumerate((a, b, c))]
    for first, second in ((0, 1), (1, 0), (1, 2), (2, 1), (0, 2)):
        found = align_checkpoints(sides[first], sides[second])
        assert (found.only_a, found.only_b, len(found.pairs)) == ([], [], 6), (first, second)
        assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)


def test_latent_attention_of_mindspeed(tmp_path: Path) -> None:
    """MindSpeed-LLM keeps the projections down of queries and of keys and values in one matrix, and has older names for the rest."""
    down, up, kv_up, norm = _ramp(5, 4), _ramp(6, 3), _ramp(7, 1), _ramp(1)
    own = {
        "linear_qkv.weight": down,
        "linear_qb.weight": up,
        "linear_kvb.weight": kv_up,
        "k_layernorm.weight": norm,
        "q_layernorm.weight": _ramp(3),
    }
    hf = {"q_a_proj.weight": down[:3], "kv_a_proj_with_mqa.weight": down[3:], "q_b_proj.weight": up, "kv_b_proj.weight": kv_up}
    hf |= {"kv_a_layernorm.weight": norm, "q_a_layernorm.weight": _ramp(3)}
    a = checkpoint_of({f"decoder.layers.0.self_attention.{name}": value for name, value in own.items()}, tmp_path / "a")
    b = checkpoint_of({f"model.layers.0.self_attn.{name}": value for name, value in hf.items()}, tmp_path / "b")
    found = align_checkpoints(a, b)
    assert (found.only_a, found.only_b, len(found.pairs)) == ([], [], 6)
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)
    assert "decoder.layers.0.self_attention.linear_qkv.weight[kv_down]" in [pair.name for pair in found.pairs]


def test_adapters_of_peft_and_llama_of_mindspore_transformers(tmp_path: Path) -> None:
    """A file of an adapter leaves its name out; MindSpore's Llama has the words of Meta's and the rows of Hugging Face's."""
    a = checkpoint_of({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": _ramp(2, 4)}, tmp_path / "a")
    b = checkpoint_of({"model.layers.0.self_attn.q_proj.lora_A.default.weight": _ramp(2, 4)}, tmp_path / "b")
    assert len(align_checkpoints(a, b).pairs) == 1
    own = {
        "model.layers.0.attention.wq.weight": _ramp(8, 4),
        "model.tok_embeddings.embedding_weight": _ramp(6, 4),
        "model.norm_out.weight": _ramp(4),
    }
    hf = {"model.layers.0.self_attn.q_proj.weight": _ramp(8, 4), "model.embed_tokens.weight": _ramp(6, 4), "model.norm.weight": _ramp(4)}
    found = align_checkpoints(checkpoint_of(own, tmp_path / "c"), checkpoint_of(hf, tmp_path / "d", {"head_dim": 4}))
    assert len(found.pairs) == 3
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)


def test_an_embedding_stands_for_the_output_layer_that_it_is_tied_to(tmp_path: Path) -> None:
    """safetensors keeps tied tensors once; the output layer of the other side is compared with the embedding, states alike."""
    word = _ramp(8, 4)
    a = checkpoint_of(
        {"embedding.word_embeddings.weight": word, "output_layer.weight": word, "exp_avg|output_layer.weight": word}, tmp_path / "a"
    )
    b = checkpoint_of({"model.embed_tokens.weight": word, "exp_avg|model.embed_tokens.weight": word}, tmp_path / "b")
    found = align_checkpoints(a, b)
    assert [(pair.name, pair.b.name) for pair in found.pairs] == [
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "model.embed_tokens.weight"),
        ("optimizer.exp_avg.output_layer.weight", "model.embed_tokens.weight"),
    ]
    assert any("tied" in note for note in found.notes)
    b.facts["tied"] = True  # a state dict repeats the table, the optimizer has it once
    b.tensors["lm_head.weight"] = replace(b.tensors["model.embed_tokens.weight"], name="lm_head.weight")
    assert [pair.b.name for pair in align_checkpoints(a, b).pairs] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
    ]
    del b.tensors["lm_head.weight"]
    b.facts["tied"] = False
    assert "output_layer.weight" in [t.name for t in align_checkpoints(a, b).only_a]


def test_states_of_an_optimizer_that_one_side_does_not_keep_are_left_out_and_counted(tmp_path: Path) -> None:
    """Weights alone against a training checkpoint: nothing is missing, and what was passed over is said."""
    a = checkpoint_of({"w": _ramp(3), "exp_avg|w": _ramp(3)}, tmp_path / "a")
    b = checkpoint_of({"w": _ramp(3)}, tmp_path / "b")
    found = align_checkpoints(a, b)
    assert not found.only_a
    assert [(left.side, left.names) for left in found.left_out] == [("a", ("optimizer.exp_avg.w",))]
