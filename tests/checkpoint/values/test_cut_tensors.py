"""Index arithmetic of cuts: what a stored tensor is cut into, and what is read of it in blocks, is what numpy cuts out of the array, and
every byte of it once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_arrays import Array, array_of, checkpoint_of, stored

from msprobe_engine.align.parameters.align_names import Pair, align_checkpoints
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.checkpoint.compare import compare
from msprobe_engine.formats.checkpoint import cuts
from msprobe_engine.formats.checkpoint.blocks import Boxes, Room, blocks_of, fill
from msprobe_engine.formats.checkpoint.cuts import Heads
from msprobe_engine.formats.checkpoint.model import Box, StoredTensor, concatenate_tensors, flat, permute_boxes, strides_of
from msprobe_engine.formats.tensors.file_reads import FileReads
from msprobe_engine.measure.stored.threads import Plan


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


Words = np.ndarray[Any, Any]


def cut(draw: Any, values: Words, folder: Path, name: str) -> StoredTensor:
    """`values` in files: cut along dimensions, as flat partitions, or with dimensions in another order."""
    how = draw(st.sampled_from(("whole", "grid", "flat", "turned", "grid of turned", "gaps")))
    boxes: list[Box] = []
    width = values.itemsize
    if how == "flat" and values.ndim:
        edges = sorted({0, values.size, *draw(st.lists(st.integers(0, values.size), max_size=4))})
        for k, (first, last) in enumerate(pairwise(edges)):
            path = folder / f"{name}.{k}"
            path.write_bytes(b"head" * width + values.reshape(-1)[first:last].tobytes())
            boxes += flat(values.shape, first, last - first, path, 4 * width, width)
        return StoredTensor("t", values.shape, "float32", tuple(boxes))
    order = draw(st.permutations(range(values.ndim))) if "turned" in how else tuple(range(values.ndim))
    stored = values.transpose(order)
    if how == "gaps" and values.ndim:  # one of three tensors that share their rows, as q of a fused projection stored by columns
        path = folder / name
        wide = np.concatenate([stored, stored + 1, stored + 2], axis=-1)
        path.write_bytes(wide.tobytes())
        return StoredTensor("t", values.shape, "float32", (Box((0,) * values.ndim, values.shape, path, 0, strides_of(wide.shape)),))
    if "grid" not in how:
        path = folder / name
        path.write_bytes(b"x" * width + stored.tobytes())
        found = (Box((0,) * values.ndim, stored.shape, path, width, strides_of(stored.shape)),)
    else:
        lines = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in stored.shape]
        cells: list[tuple[tuple[int, int], ...]] = [()]
        for line in lines:
            cells = [(*cell, edge) for cell in cells for edge in pairwise(line)]
        for k, cell in enumerate(cells):
            path = folder / f"{name}.{k}"
            part = np.ascontiguousarray(stored[tuple(slice(*edge) for edge in cell)])
            path.write_bytes(part.tobytes())
            boxes.append(Box(tuple(e[0] for e in cell), part.shape, path, 0, strides_of(part.shape)))
        found = tuple(boxes)
    back = tuple(int(i) for i in np.argsort(order)) if order else ()
    return StoredTensor("t", values.shape, "float32", permute_boxes(found, back))


SHAPES = st.lists(st.integers(1, 13), max_size=4).map(tuple)


@given(st.data(), SHAPES, st.integers(1, 300))
def test_a_tensor_is_read_as_it_was_however_it_was_cut(tmp_path: Path, data: st.DataObject, shape: tuple[int, ...], most: int) -> None:
    """The blocks cover the tensor once, and each holds the elements of its place."""
    values = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    tensor = cut(data.draw, values, tmp_path, "a")
    seen = np.zeros(shape, int)
    reads = FileReads()
    for block in blocks_of(shape, most, (tensor,)):
        assert block.numel <= most
        words, _ = fill(Boxes(tensor.boxes), block, "float32", Room(most * 4), reads)
        place = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.sizes))
        assert np.array_equal(words, values[place])
        seen[place] += 1
    reads.close()
    assert (seen == 1).all()


@given(st.data(), SHAPES)
def test_two_cuts_of_a_tensor_are_equal_and_a_changed_element_is_found(tmp_path: Path, data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Whatever way each side was cut: no difference, and after one bit was flipped exactly that element, with its index and its file."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape).astype(np.float32).view(np.uint32).reshape(shape)
    a, b = cut(data.draw, values, tmp_path, "a"), cut(data.draw, values, tmp_path, "b")
    plan = Plan(1 << 20, 2)
    results, _ = compare([Pair("t", a, b)], plan)
    assert results[0].status == "equal"
    assert results[0].changed == 0
    index = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    changed = values.copy()
    changed[index] ^= 1 << 20
    b = cut(data.draw, changed, tmp_path, "c")
    results, _ = compare([Pair("t", a, b)], plan)
    assert results[0].status == "different"
    assert results[0].changed == 1
    assert results[0].max_at == index
    assert sum(results[0].files_b.values()) == 1


def test_every_byte_is_read_once(tmp_path: Path) -> None:
    """A tensor cut by rows against one cut by columns: as many bytes are read as the two have."""
    values = np.random.default_rng(0).integers(0, 2**32, (512, 4096), np.uint32)
    boxes: dict[str, list[Box]] = {"a": [], "b": []}
    for side, axis in (("a", 0), ("b", 1)):
        for k, part in enumerate(np.split(values, 4, axis)):
            path = tmp_path / f"{side}{k}"
            path.write_bytes(np.ascontiguousarray(part).tobytes())
            offsets = (k * part.shape[0], 0) if axis == 0 else (0, k * part.shape[1])
            boxes[side].append(Box(offsets, part.shape, path, 0, strides_of(part.shape)))
    a, b = (StoredTensor("t", values.shape, "float32", tuple(boxes[side])) for side in "ab")
    results, nbytes = compare([Pair("t", a, b)], Plan(8 << 20, 2))
    assert results[0].equal
    assert nbytes == 2 * values.nbytes


def test_a_large_transposed_weight_is_read_in_tiles(tmp_path: Path) -> None:
    """Blocks of two sides with their dimensions in another order have long edges on both."""
    shape = (4096, 4096)
    plain = StoredTensor("t", shape, "bfloat16", (Box((0, 0), shape, tmp_path, 0, (4096, 1)),))
    turned = StoredTensor("t", shape, "bfloat16", (Box((0, 0), shape, tmp_path, 0, (1, 4096)),))
    sizes = {block.sizes for block in blocks_of(shape, 1 << 20, (plain, turned))}
    assert sizes == {(1024, 1024)}


def test_elements_in_no_file_are_counted_and_the_rest_is_compared(tmp_path: Path) -> None:
    """A missing shard: what is there is the same, and the result is no "equal"."""
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    whole, half = tmp_path / "whole", tmp_path / "half"
    whole.write_bytes(values.tobytes())
    half.write_bytes(values[:4].tobytes())
    a = StoredTensor("t", (8, 4), "float32", (Box((0, 0), (8, 4), whole, 0, (4, 1)),))
    b = StoredTensor("t", (8, 4), "float32", (Box((0, 0), (4, 4), half, 0, (4, 1)),))
    results, _ = compare([Pair("t", a, b)], Plan(1 << 20, 1))
    assert results[0].status == "incomplete"
    assert (results[0].missing_a, results[0].missing_b, results[0].changed) == (0, 16, 0)


def test_copies_that_drifted_are_found_and_named(tmp_path: Path) -> None:
    """A replica on another rank that is not the same: counted, with its file; alike on both sides it is no difference between them."""
    values = np.arange(6, dtype=np.float32)
    first, second = tmp_path / "rank0", tmp_path / "rank1"
    first.write_bytes(values.tobytes())
    second.write_bytes((values + (values == 3)).astype(np.float32).tobytes())
    box, copy = (Box((0,), (6,), path, 0, (1,)) for path in (first, second))
    a, b = StoredTensor("t", (6,), "float32", (box,), (copy,)), StoredTensor("t", (6,), "float32", (box,))
    plan = Plan(1 << 20, 1)
    drifted = compare([Pair("t", a, b)], plan)[0][0]
    assert (drifted.status, drifted.drift_a, drifted.drift_files) == ("different", 1, (str(second),))
    both = compare([Pair("t", a, a)], plan)[0][0]
    assert (both.status, both.drift_a, both.drift_b) == ("equal", 1, 1)


def test_a_file_that_ends_early_is_a_result_not_an_end(tmp_path: Path) -> None:
    """A truncated file: that tensor is unreadable, with the file and the byte it ends at; others are compared."""
    path = tmp_path / "cut"
    path.write_bytes(b"\0" * 100)
    good = StoredTensor("good", (4,), "float32", (Box((0,), (4,), path, 0, (1,)),))
    bad = StoredTensor("bad", (40,), "float32", (Box((0,), (40,), path, 0, (1,)),))
    gone = StoredTensor("gone", (4,), "float32", (Box((0,), (4,), tmp_path / "nowhere", 0, (1,)),))
    results, _ = compare([Pair(t.name, t, t) for t in (good, bad, gone)], Plan(1 << 20, 2))
    assert [r.status for r in results] == ["equal", "unreadable", "unreadable"]
    assert "ends at byte 100" in results[1].note
    assert "nowhere" in results[2].note


@pytest.mark.parametrize("workers", [1, 4])
def test_an_error_in_a_thread_reaches_the_caller(tmp_path: Path, workers: int) -> None:
    """What `finish_job` raises (a full disk) ends the comparison with that error."""
    path = tmp_path / "file"
    path.write_bytes(b"\0" * 16)
    tensor = StoredTensor("t", (4,), "float32", (Box((0,), (4,), path, 0, (1,)),))

    def full(_number: int, _result: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        compare([Pair("t", tensor, tensor)] * 20, Plan(1 << 20, workers), full)


def test_without_the_kernel_reads_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with gaps between them and turned tensors, read by Python where nothing was compiled."""
    monkeypatch.setattr("msprobe_engine.formats.tensors.file_reads.kernel", None)
    monkeypatch.setattr("msprobe_engine.formats.checkpoint.strided_reads.kernel", None)
    values = np.random.default_rng(0).integers(0, 2**32, (64, 3, 4096), np.uint32)
    path = tmp_path / "file"
    path.write_bytes(values.tobytes())
    middle = StoredTensor("t", (64, 4096), "float32", (Box((0, 0), (64, 4096), path, 4096 * 4, (3 * 4096, 1)),))
    for tensor, wanted in (
        (middle, values[:, 1]),
        (replace(middle, shape=(4096, 64), boxes=permute_boxes(middle.boxes, (1, 0))), values[:, 1].T),
    ):
        for block in blocks_of(tensor.shape, 5000, (tensor,)):
            words, _ = fill(Boxes(tensor.boxes), block, "float32", Room(20_000), FileReads())
            assert np.array_equal(words, wanted[tuple(slice(o, o + n) for o, n in zip(block.offsets, block.sizes))])
