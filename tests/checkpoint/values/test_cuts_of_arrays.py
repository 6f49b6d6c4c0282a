"""Index arithmetic of cuts: what a stored tensor is cut into is what numpy cuts out of the array, however the tensor lies in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_arrays import Array, array_of, checkpoint_of, stored

from msprobe_engine.align.parameters.align_names import align_checkpoints
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint import cuts
from msprobe_engine.formats.checkpoint.cuts import Heads
from msprobe_engine.formats.checkpoint.model import Box, StoredTensor, concatenate_tensors


@st.composite
def laid_out(draw: st.DrawFn, directory: Path, shape: tuple[int, ...]) -> tuple[StoredTensor, Array]:
    """A tensor of this shape in pieces: cut along dimensions, in files of their own, some transposed in their file."""
    array = np.arange(int(np.prod(shape)), dtype=draw(st.sampled_from(["float32", "float64", "int16"]))).reshape(shape)
    edges = [sorted({0, n, *draw(st.lists(st.integers(1, max(1, n - 1)), max_size=2))}) for n in shape]
    boxes: list[Box] = []
    for place in np.ndindex(*[len(e) - 1 for e in edges]):
        where = tuple(slice(e[i], e[i + 1]) for e, i in zip(edges, place))
        piece = array[where]
        if 0 in piece.shape:
            continue
        order = draw(st.permutations(range(len(shape))))
        tensor = stored("x", np.transpose(piece, order), directory / f"file{draw(st.integers(0, 2))}")
        back = cuts.transpose_tensor(tensor, np.argsort(order).tolist()).boxes[0]
        boxes.append(replace(back, offsets=tuple(s.start for s in where)))
    return StoredTensor("x", shape, str(array.dtype), tuple(boxes)), array


@given(st.data())
def test_blocks_halves_and_every_nth_row_are_those_of_numpy(tmp_path: Path, data: st.DataObject) -> None:
    """Stretches of rows, alternating rows, exchanged dimensions, slices of a stack."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tensor, array = data.draw(laid_out(tmp_path, shape))
    assert np.array_equal(array_of(cuts.transpose_tensor(tensor)), array.swapaxes(-1, -2) if array.ndim > 1 else array)
    dim, step = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    first = data.draw(st.integers(0, step - 1))
    picked = cuts.every(tensor, first, step, dim)
    expected = array[(slice(None),) * dim + (slice(first, None, step),)]
    assert picked.shape == expected.shape
    assert np.array_equal(array_of(picked), expected)
    at = data.draw(st.integers(0, shape[0]))
    parts = cuts.blocks(tensor, [at, shape[0] - at], ["a", "b"])
    assert [p.part for p in parts] == ["a", "b"]
    assert np.array_equal(np.concatenate([array_of(p) for p in parts]), array)
    assert all(np.array_equal(array_of(row), array[i]) for i, row in enumerate(cuts.split_stack(tensor)))
    if shape[0] % 2 == 0:
        gate, up = cuts.halves(tensor, alternating=True)
        assert np.array_equal(np.stack([array_of(gate), array_of(up)], 1).reshape(shape), array)


@given(st.data())
def test_grouped_projections_are_put_together_and_apart(tmp_path: Path, data: st.DataObject) -> None:
    """q, k and v of each key/value head behind one another: apart they are what separate projections have, together the whole again."""
    groups, queries, size = (data.draw(st.integers(1, 3)) for _ in range(3))
    columns = data.draw(st.integers(1, 3))
    tensor, array = data.draw(laid_out(tmp_path, (groups * (queries + 2) * size, columns)))
    heads = Heads(groups * queries * size, groups * size, groups)
    q, k, v = (array_of(part) for part in cuts.grouped_qkv(tensor, heads))
    split = array.reshape(groups, queries + 2, size, columns)
    assert np.array_equal(q, split[:, :queries].reshape(-1, columns))
    assert np.array_equal(k, split[:, queries].reshape(-1, columns))
    assert np.array_equal(v, split[:, queries + 1].reshape(-1, columns))


@given(st.data())
def test_rotary_rows_are_permuted_as_the_conversion_scripts_do(tmp_path: Path, data: st.DataObject) -> None:
    """``view(heads, size / 2, 2, columns).transpose(1, 2)``, as transformers' script for Llama has it."""
    heads, half, columns = (data.draw(st.integers(1, 4)) for _ in range(3))
    tensor, array = data.draw(laid_out(tmp_path, (heads * half * 2, columns)))
    expected = array.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(array.shape)
    assert np.array_equal(array_of(cuts.half_rotation(tensor, 2 * half)), expected)


@given(st.data())
def test_copies_are_cut_as_the_boxes_are(tmp_path: Path, data: st.DataObject) -> None:
    """Replicas of other ranks stay replicas of the part."""
    tensor, array = data.draw(laid_out(tmp_path, (8, 3)))
    with_copies = replace(tensor, copies=tensor.boxes)
    for part in (
        *cuts.halves(with_copies),
        *cuts.split_stack(with_copies),
        cuts.transpose_tensor(with_copies),
        cuts.every(with_copies, 1, 2),
    ):
        assert np.array_equal(array_of(replace(part, boxes=part.copies)), array_of(part))
    del array


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Odd halves, rows that are no heads, unknown dtypes: a message with name and shape, nothing cut wrongly."""
    tensor = stored("w", np.zeros((7, 2), np.float32), tmp_path / "f")
    with pytest.raises(DumpFormatError, match="w: 7 rows do not hold gate and up"):
        cuts.halves(tensor)
    with pytest.raises(DumpFormatError, match="w: 7 rows are not 4 of queries, 2 of keys and 2 of values in 2 groups"):
        cuts.grouped_qkv(tensor, Heads(4, 2, 2))
    with pytest.raises(DumpFormatError, match="7 rows are not heads of 4"):
        cuts.half_rotation(tensor, 4)
    with pytest.raises(DumpFormatError, match="has 7 rows; its parts together have 3"):
        cuts.blocks(tensor, [1, 2], "ab")
    with pytest.raises(DumpFormatError, match="dtype 'strange'"):
        cuts.blocks(replace(tensor, dtype="strange"), [3, 4], "ab")


def test_experts_in_one_matrix_are_those_of_grouped_mlp(tmp_path: Path) -> None:
    """megatron-core's GroupedMLP views weight1 as [experts, inputs, outputs] and weight2 as [experts, inner, hidden]."""
    rng = np.random.default_rng(0)
    n, hidden, inner = 3, 4, 5
    wide = {"weight1": rng.standard_normal((hidden, n * 2 * inner)), "weight2": rng.standard_normal((n * inner, hidden))}
    first, second = wide["weight1"].reshape(n, hidden, 2 * inner), wide["weight2"].reshape(n, inner, hidden)
    apart = {}
    for e in range(n):
        apart[f"model.layers.1.mlp.experts.{e}.gate_proj.weight"] = first[e, :, :inner].T.copy()
        apart[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] = first[e, :, inner:].T.copy()
        apart[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] = second[e].T.copy()
    facts = {"experts": n, "hidden": hidden, "gated": True}
    a = checkpoint_of({f"decoder.layers.1.mlp.experts.{k}": v for k, v in wide.items()}, tmp_path / "a", facts)
    found = align_checkpoints(a, checkpoint_of(apart, tmp_path / "b"))
    assert (found.only_a, found.only_b, len(found.pairs)) == ([], [], 9)
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)


@given(st.data())
def test_layouts_of_fused_projections_are_the_same_parameters(tmp_path: Path, data: st.DataObject) -> None:
    """By group (Megatron), in blocks (GPT-2 transposed, Phi), apart (Llama): any two of them are equal part by part, states too."""
    groups, queries, size, hidden = (data.draw(st.integers(1, 3)) for _ in range(4))
    heads = {"heads": groups * queries, "kv_heads": groups, "head_dim": size, "hidden": hidden}
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((n * size, hidden)).astype(np.float32) for n in (groups * queries, groups, groups))
    split = [x.reshape(groups, -1, hidden) for x in (q, k, v)]
    blocks = np.concatenate([q, k, v])
    forms = {
        "megatron": {"decoder.layers.0.self_attention.linear_qkv.weight": np.concatenate(split, 1).reshape(-1, hidden)},
        "legacy": {"language_model.encoder.layers.0.self_attention.query_key_value.weight": np.concatenate(split, 1).reshape(-1, hidden)},
        "phi": {"model.layers.0.self_attn.qkv_proj.weight": blocks},
        "llama": {f"model.layers.0.self_attn.{x}_proj.weight": w for x, w in (("q", q), ("k", k), ("v", v))},
    }
    first, second = data.draw(st.permutations(sorted(forms)))[:2]
    file = tmp_path / f"{data.draw(st.uuids())}"
    sides = []
    for side, form in enumerate((first, second)):
        arrays = {f"{state}{name}": w for name, w in forms[form].items() for state in ("", "exp_avg|")}
        sides.append(
            checkpoint_of(
                arrays | {f"{state}decoder.final_layernorm.weight": np.ones(hidden) for state in ("",)}, Path(f"{file}{side}"), heads
            )
        )
    found = align_checkpoints(*sides)
    assert (found.only_a, found.only_b, found.left_out) == ([], [], [])
    assert len(found.pairs) in (3, 7)
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)


def test_stored_pieces_join_to_the_whole(tmp_path: Path) -> None:
    """`concatenate_tensors` of cut pieces is the tensor again."""
    tensor = stored("w", np.arange(24, dtype=np.int32).reshape(6, 4), tmp_path / "f")
    assert np.array_equal(array_of(concatenate_tensors(cuts.halves(tensor))), array_of(tensor))
