"""Cuts, numbers and flat buffers of Megatron's layouts: what was cut comes back whole, whatever the sizes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_arrays import array_of, stored

from msprobe_engine.formats.checkpoint.megatron.arguments import bucket_sizes
from msprobe_engine.formats.checkpoint.megatron.buffers import find_layout, fit_buckets, laid_out
from msprobe_engine.formats.checkpoint.megatron.cuts import Cut, cut_of, is_expert, is_listed, mamba_parts, merge_pieces
from msprobe_engine.formats.checkpoint.megatron.file import single_experts
from msprobe_engine.formats.checkpoint.megatron.numbering import expert_number, in_model, layers_in, local_layer, offsets, without
from msprobe_engine.formats.checkpoint.megatron.ranks import Rank, Sizes, rank_of
from msprobe_engine.formats.checkpoint.model import Box, StoredTensor
from msprobe_engine.formats.checkpoint.torch_dist.reader import in_model_shape, single

SIZES = st.integers(1, 4)
LAYER = "decoder.layers.0."


def numbered(*shape: int) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


@given(ranks=SIZES, units=SIZES, columns=SIZES, cut=st.sampled_from([Cut.SAME, Cut.ROWS, Cut.COLUMNS, Cut.GATED]))
def test_what_was_cut_over_tensor_parallel_ranks_comes_back_whole(tmp_path: Path, ranks: int, units: int, columns: int, cut: Cut) -> None:
    """Rows, columns and the halves of gated layers are put together to what was cut, and replicas are kept as copies."""
    array = numbered(2 * ranks * units, ranks * columns)
    if cut is Cut.SAME:
        pieces = [array] * ranks
    elif cut is Cut.GATED:
        pieces = [np.concatenate([half[r * units : (r + 1) * units] for half in np.split(array, 2)]) for r in range(ranks)]
    else:
        pieces = np.split(array, ranks, axis=0 if cut is Cut.ROWS else 1)
    file = tmp_path / "data"
    whole = merge_pieces([stored("x", piece, file) for piece in pieces], cut)
    assert np.array_equal(array_of(whole), array)
    assert len(whole.copies) == (ranks - 1 if cut is Cut.SAME else 0)


@given(ranks=SIZES, inner=SIZES, state=SIZES, heads=SIZES)
def test_parts_of_state_space_layers_are_cut_each_for_itself(tmp_path: Path, ranks: int, inner: int, state: int, heads: int) -> None:
    """A rank has its rows of z, of x, of B, of C and of dt, one behind the other."""
    rows = [n * ranks for n in (inner, inner, state, state, heads)]
    array = numbered(sum(rows), 3)
    parts = np.split(array, np.cumsum(rows)[:-1])
    pieces = [np.concatenate([np.split(part, ranks)[r] for part in parts]) for r in range(ranks)]
    shapes = {"mixer.out_proj.weight": (3, inner), "mixer.D": (heads,), "mixer.conv1d.weight": (inner + 2 * state, 1, 4)}
    names = mamba_parts("mixer.in_proj.weight", shapes)
    assert np.array_equal(array_of(merge_pieces([stored("x", piece, tmp_path / "data") for piece in pieces], Cut.MAMBA, names)), array)
    assert mamba_parts("mixer.conv1d.weight", shapes) == [inner, state, state]


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("embedding.word_embeddings.weight", Cut.ROWS),
        ("output_layer.weight", Cut.ROWS),
        ("language_model.output_layer.weight", Cut.ROWS),
        ("word_embeddings_for_head.weight", Cut.ROWS),
        ("embedding.position_embeddings.weight", Cut.SAME),
        (LAYER + "self_attention.linear_qkv.weight", Cut.ROWS),
        (LAYER + "self_attention.linear_qkv.bias", Cut.ROWS),
        (LAYER + "self_attention.query_key_value.bias", Cut.ROWS),
        (LAYER + "self_attention.linear_qkv.layer_norm_weight", Cut.SAME),
        (LAYER + "self_attention.linear_proj.weight", Cut.COLUMNS),
        (LAYER + "self_attention.dense.weight", Cut.COLUMNS),
        (LAYER + "self_attention.linear_proj.bias", Cut.SAME),
        (LAYER + "self_attention.q_layernorm.weight", Cut.SAME),
        (LAYER + "mlp.linear_fc1.weight", Cut.GATED),
        (LAYER + "mlp.linear_fc1.bias", Cut.GATED),
        (LAYER + "mlp.linear_fc1.layer_norm_weight", Cut.SAME),
        (LAYER + "mlp.linear_fc2.weight", Cut.COLUMNS),
        (LAYER + "mlp.linear_fc2.bias", Cut.SAME),
        (LAYER + "mlp.experts.local_experts.3.linear_fc1.weight", Cut.GATED),
        (LAYER + "mlp.experts.linear_fc1.weight3", Cut.GATED),
        (LAYER + "mlp.experts.linear_fc2.weight3", Cut.COLUMNS),
        (LAYER + "mlp.shared_experts.linear_fc1.weight", Cut.GATED),
        (LAYER + "mlp.shared_experts.gate_weight", Cut.SAME),
        (LAYER + "mlp.router.weight", Cut.SAME),
        (LAYER + "mlp.router.expert_bias", Cut.SAME),
        (LAYER + "self_attention.linear_kv_up_proj.weight", Cut.ROWS),
        (LAYER + "self_attention.linear_q_up_proj.layer_norm_weight", Cut.SAME),
        (LAYER + "self_attention.linear_kvb.weight", Cut.ROWS),
        ("mtp.layers.0.eh_proj.weight", Cut.ROWS),
        ("mtp.layers.0.enorm.weight", Cut.SAME),
        (LAYER + "mixer.A_log", Cut.ROWS),
        (LAYER + "mixer.in_proj.weight", Cut.MAMBA),
        (LAYER + "mixer.conv1d.bias", Cut.MAMBA_CONV),
        (LAYER + "mixer.out_proj.weight", Cut.COLUMNS),
    ],
)
def test_every_parameter_has_its_cut(name: str, cut: Cut) -> None:
    """The table of cuts by name: a norm inside of a cut layer is not cut, biases of layers that add up over ranks neither."""
    shapes = {}
    for head in ("mlp.", "mlp.shared_experts.", "mlp.experts.local_experts.3."):
        shapes |= {f"{LAYER}{head}linear_fc1.weight": (8, 4), f"{LAYER}{head}linear_fc2.weight": (4, 4)}
    shapes |= {f"{LAYER}mlp.experts.linear_fc1.weight3": (8, 4), f"{LAYER}mlp.experts.linear_fc2.weight3": (4, 4)}
    assert cut_of(name, shapes, 2) is cut
    assert cut_of(name, shapes, 1) is Cut.SAME
    assert is_listed(name)


def test_first_layers_without_a_gate_are_cut_in_rows() -> None:
    """Whether a layer is gated follows from the shapes, not from arguments that may be missing."""
    shapes = {LAYER + "mlp.linear_fc1.weight": (4, 4), LAYER + "mlp.linear_fc2.weight": (4, 4)}
    assert cut_of(LAYER + "mlp.linear_fc1.weight", shapes, 2) is Cut.ROWS
    assert not is_listed("decoder.layers.0.adapter.weight")


@pytest.mark.parametrize(("rows", "cut"), [(8, Cut.SAME), (4, Cut.ROWS)])
def test_down_projections_of_latent_attention_are_cut_or_not(rows: int, cut: Cut) -> None:
    """Transformer Engine keeps them whole, the local layers cut them; what takes in their output tells."""
    head = LAYER + "self_attention."
    shapes = {f"{head}linear_q_down_proj.weight": (rows, 16), f"{head}linear_q_up_proj.weight": (24, 8)}
    assert cut_of(f"{head}linear_q_down_proj.weight", shapes, 2) is cut
    packed = {f"{head}linear_qkv.weight": (14, 16), f"{head}linear_kvb.weight": (24, 6)}
    assert cut_of(f"{head}linear_qkv.weight", packed, 2, latent=True) is Cut.SAME
    assert cut_of(f"{head}linear_qkv.weight", packed, 2) is Cut.ROWS


@given(counts=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=3))
def test_layers_are_numbered_without_gaps_whatever_the_stages_have(counts: list[list[int]]) -> None:
    """Chunks of a virtual pipeline go through all stages, one after the other; uneven and empty stages too."""
    starts = offsets(counts)
    numbers = [starts[chunk][stage] + n for chunk in range(len(counts)) for stage in range(3) for n in range(counts[chunk][stage])]
    assert numbers == list(range(sum(map(sum, counts))))


def test_a_pipeline_that_turns_round_numbers_its_second_chunk_from_the_end() -> None:
    """MindSpeed's dualpipev: the first stage has the first and the last layers."""
    assert offsets([[2, 2], [2, 2]], v_shaped=True) == [[0, 2], [6, 4]]
    assert [without(n, {1, 4}) for n in (0, 2, 3, 5)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.4.mlp.linear_fc1.weight"),
        ("language_model.encoder.layers.1.mlp.dense_h_to_4h.bias", "language_model.encoder.layers.4.mlp.dense_h_to_4h.bias"),
        (
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight",
            "decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight",
        ),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight1", "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"),
        ("decoder.layers.0.mlp.local_experts.1.linear_fc2.bias", "decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.bias"),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "decoder.layers.3.mlp.shared_experts.linear_fc1.weight"),
        ("output_layer.weight", "output_layer.weight"),
    ],
)
def test_names_get_the_numbers_of_the_whole_model(name: str, expected: str) -> None:
    """Layers count on from the stage's first, experts from the rank's first; grouped experts get single names."""
    assert in_model(name, 3, 4) == expected
    assert is_expert(name) == ("local_experts.5" in expected)
    assert (expert_number(expected) == 5) == is_expert(name)


def test_layers_are_counted_by_root() -> None:
    """Encoder, decoder and layers for several tokens ahead have numbers of their own."""
    names = ["decoder.layers.0.x", "decoder.layers.2.x", "mtp.layers.0.transformer_layer.x", "encoder.layers.1.x", "final_norm.x"]
    assert layers_in(names) == {"decoder.layers": 3, "mtp.layers": 1, "encoder.layers": 2}
    assert local_layer("vision_model.decoder.layers.3.mlp.x") == ("vision_model.decoder.layers", 3, "mlp.x")


@given(tp=SIZES, pp=SIZES, ep=SIZES, etp=SIZES, cp=SIZES, dp=SIZES)
def test_the_files_that_are_expected_are_those_that_ranks_write(tp: int, pp: int, ep: int, etp: int, cp: int, dp: int) -> None:
    """A rank writes when it is the first of its data-parallel group or of that of its experts; all of these are expected and no other."""
    world = math.lcm(tp * cp, etp * ep) * dp
    sizes = Sizes(tp, pp, ep, etp, cp)
    written = set()
    for n in range(world):
        dense_first, expert_first = n // (tp * cp) == 0, n // (etp * ep) == 0
        if dense_first or expert_first:
            written.add((n % tp, n // etp % ep))
    assert {(rank.tp, rank.ep) for rank in sizes.list_writing_ranks()} == written
    assert len(sizes.list_writing_ranks()) == pp * len(written)
    for rank in sizes.list_writing_ranks():
        numbers = [int(word) for word in sizes.directory(rank).removeprefix("mp_rank_").split("_")]
        assert rank_of(numbers, sizes) == rank


@given(numels=st.lists(st.integers(1, 300), min_size=1, max_size=12), bucket=st.none() | st.integers(1, 900), data=st.data())
def test_buckets_are_found_again(numels: list[int], bucket: int | None, data: st.DataObject) -> None:
    """What is laid out in buckets lies in order, aligned and apart, and is found again by the sizes of the buckets alone."""
    alone = data.draw(st.sets(st.sampled_from(range(len(numels))), max_size=2))
    layout = laid_out(numels, alone, bucket)
    places = sorted(zip(layout.places, numels, strict=True))
    for (first, numel), (second, _) in itertools.pairwise(places):
        assert second.bucket > first.bucket or second.start >= first.start + numel
    assert all(place.start % 64 == 0 and place.start + numel <= layout.sizes[place.bucket] for place, numel in places)
    again = fit_buckets(numels, layout.sizes)
    assert again is not None
    assert again.places == layout.places
    assert find_layout(numels, layout.total, alone, [bucket]) is not None
    assert fit_buckets([*numels, 1], layout.sizes) is None
    assert fit_buckets(numels, [*layout.sizes, 64]) is None


def test_sizes_of_buckets_that_a_run_may_have_had() -> None:
    """They follow from the arguments; without overlap there is one bucket."""
    assert bucket_sizes({"overlap_grad_reduce": False}, 100) == [None]
    assert bucket_sizes({"overlap_grad_reduce": True, "ddp_bucket_size": 7}, 100) == [7, None]
    assert bucket_sizes({"ddp_num_buckets": 4, "data_parallel_size": 64}, 100) == [25, 64_000_000, None]


@given(experts=SIZES, hidden=SIZES, inner=SIZES)
def test_experts_in_one_matrix_become_single_ones(tmp_path: Path, experts: int, hidden: int, inner: int) -> None:
    """`weight1` and `weight2` hold the experts of a rank one behind the other, each turned: as GroupedMLP views them."""
    weights = {"1": numbered(experts, hidden, 2 * inner), "2": numbered(experts, inner, hidden)}
    stored_as = {"1": (hidden, experts * 2 * inner), "2": (experts * inner, hidden)}
    for number, array in weights.items():
        tensor = stored("", array.reshape(stored_as[number]), tmp_path / "data")
        single_ones = dict(single_experts(f"{LAYER}mlp.experts.weight{number}", tensor, experts))
        for expert in range(experts):
            name = f"{LAYER}mlp.experts.local_experts.{expert}.linear_fc{number}.weight"
            assert np.array_equal(array_of(single_ones[name]), array[expert].T)
    other = stored("", numbered(2, 2), tmp_path / "data")
    assert dict(single_experts("decoder.x.weight", other, 2)) == {"decoder.x.weight": other}


@given(layers=SIZES, experts=SIZES, rows=SIZES)
def test_stacks_of_layers_and_experts_become_single_parameters(tmp_path: Path, layers: int, experts: int, rows: int) -> None:
    """Keys of distributed checkpoints: the layer is dimension 0, the expert the next; halves that were saved apart are put together."""
    file = tmp_path / "data"
    dense, moe = numbered(layers, rows, 2), numbered(layers, experts, 2 * rows, 2)
    tensors: list[StoredTensor] = [
        stored("decoder.layers.mlp.linear_fc2.weight", dense, file),
        stored("decoder.layers.mlp.experts.experts.linear_fc1.weight", moe, file, state="exp_avg", group="optimizer"),
        stored("decoder.layers.9.mlp.experts.experts.2.linear_fc1.weight_v", moe[0, 0, rows:], file),
        stored("decoder.layers.9.mlp.experts.experts.2.linear_fc1.weight_w", moe[0, 0, :rows], file),
        stored("decoder.final_layernorm.weight", dense[0, 0], file),
    ]
    found_ones = {tensor.key: tensor for tensor in single(tensors)}
    assert len(found_ones) == layers + layers * experts + 2
    for layer in range(layers):
        assert np.array_equal(array_of(found_ones[f"decoder.layers.{layer}.mlp.linear_fc2.weight"]), dense[layer])
        for expert in range(experts):
            key = f"optimizer.exp_avg.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
            assert np.array_equal(array_of(found_ones[key]), moe[layer, expert])
    halves = found_ones["decoder.layers.9.mlp.experts.local_experts.2.linear_fc1.weight"]
    assert np.array_equal(array_of(halves), moe[0, 0])


@given(pieces=st.lists(SIZES, min_size=1, max_size=3), sizes=st.lists(SIZES, min_size=3, max_size=3), cut=st.integers(0, 5))
def test_states_in_flat_stretches_of_pieces_get_the_shape_of_the_parameter(
    tmp_path: Path, pieces: list[int], sizes: list[int], cut: int
) -> None:
    """Old checkpoints have, for each piece of a parameter, flat stretches of the data-parallel ranks."""
    piece = tuple(sizes[: len(pieces)])
    shape = tuple(count * size for count, size in zip(pieces, piece, strict=True))
    whole_array, count = numbered(*shape), math.prod(piece)
    boxes = []
    for place in itertools.product(*map(range, pieces)):
        where = tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, piece, strict=True))
        values = whole_array[where].ravel()
        for first, last in itertools.pairwise(sorted({0, min(cut, count), count})):
            lies = stored("", values[first:last], tmp_path / "data").boxes[0]
            boxes.append(Box((*place, first), (*[1] * len(pieces), last - first), lies.file, lies.start, (*[count] * len(pieces), 1)))
    flat_one = StoredTensor("x", (*pieces, count), "float32", tuple(boxes))
    found_one = in_model_shape(flat_one, shape)
    assert found_one is not None
    assert np.array_equal(array_of(found_one), whole_array)
    assert in_model_shape(flat_one, (*shape, 1)) is None
    assert in_model_shape(flat_one, (*shape[:-1], shape[-1] * 2)) is None


def test_a_rank_names_its_directory() -> None:
    """With experts alone the second number is theirs."""
    assert Sizes(tp=2, pp=1, ep=4).directory(Rank(1, 0, 3)) == "mp_rank_01_003"
    assert Sizes(tp=2, pp=2, ep=4).directory(Rank(1, 1, 3)) == "mp_rank_01_001_003"
    assert rank_of((1, 3), Sizes(tp=2, ep=4)) == Rank(1, 0, 3)
