"""Blocks of tensors that are cut in any way: what is read is the tensor, and every byte of it once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.align.parameters.align_names import Pair
from msprobe_engine.find.checkpoint.compare import compare
from msprobe_engine.formats.checkpoint.blocks import Boxes, Room, blocks_of, fill
from msprobe_engine.formats.checkpoint.model import Box, StoredTensor, flat, permute_boxes, strides_of
from msprobe_engine.formats.tensors.file_reads import FileReads
from msprobe_engine.measure.stored.threads import Plan

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
