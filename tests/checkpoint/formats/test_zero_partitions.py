"""The arithmetic of ZeRO's flat partitions, against flat vectors that are cut with numpy; and names that patterns of a file match."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from stored_arrays import array_of

from msprobe_engine.formats.checkpoint.deepspeed.parallel import cuts_of
from msprobe_engine.formats.checkpoint.deepspeed.zero_partitions import in_a_row, in_pieces, of_partitions, of_pieces, partition_size
from msprobe_engine.formats.checkpoint.model import Box, StoredTensor
from msprobe_engine.formats.tensors.torch_file import FileTensor

SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


def parts_in(file: Path, vectors: list[np.ndarray[Any, Any]]) -> dict[int, FileTensor]:
    """The vectors one behind the other in a file."""
    found, at = {}, 0
    with file.open("wb") as out:
        for rank, vector in enumerate(vectors):
            out.write(vector.tobytes())
            found[rank] = FileTensor("float32", vector.shape, (1,), file, at)
            at += vector.nbytes
    return found


def values_of(name: str, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> np.ndarray[Any, Any]:
    return array_of(StoredTensor(name, shape, "float32", boxes))


@given(shapes=SHAPES, ranks=st.integers(1, 5), gap=st.integers(0, 3), trimmed=st.booleans())
def test_partitions_of_a_flat_vector_give_every_parameter(
    tmp_path_factory: Any, shapes: list[tuple[int, ...]], ranks: int, gap: int, trimmed: bool
) -> None:
    """Stages 1 and 2: parameters in a row with gaps, cut into equal partitions, the padding at the end in the file or left out."""
    table = {f"p{number}": shape for number, shape in enumerate(shapes)}
    slots, total = in_a_row(table, [gap] * (len(shapes) - 1) + [0])
    size = -(-total // ranks)
    padding = size * ranks - total
    vector = np.full(size * ranks, -1, np.float32)
    arrays = {}
    for number, slot in enumerate(slots):
        arrays[slot.name] = np.arange(slot.numel, dtype=np.float32).reshape(slot.shape) + 1000 * number
        vector[slot.at : slot.at + slot.numel] = arrays[slot.name].ravel()
    pieces = [vector[rank * size : (rank + 1) * size] for rank in range(ranks)]
    paddings = {rank: padding if rank == ranks - 1 else 0 for rank in range(ranks)}
    if trimmed and padding:
        pieces[-1] = pieces[-1][: max(0, size - padding)]
    assert partition_size({rank: len(piece) for rank, piece in enumerate(pieces)}, paddings) == size
    if padding <= size:
        parts = parts_in(tmp_path_factory.mktemp("parts") / "flat", pieces)
        for slot in slots:
            assert np.array_equal(values_of(slot.name, slot.shape, of_partitions(slot, parts, size)), arrays[slot.name])


@given(shapes=SHAPES, ranks=st.integers(1, 5), gone=st.integers(0, 9))
def test_pieces_of_every_parameter_give_it(tmp_path_factory: Any, shapes: list[tuple[int, ...]], ranks: int, gone: int) -> None:
    """Stage 3: each parameter in equal pieces, one per rank; without a rank's file its elements, and no others, are covered by nothing."""
    table = {f"p{number}": shape for number, shape in enumerate(shapes)}
    slots, length = in_pieces(table, ranks)
    arrays = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in table.items()}
    vectors = [np.zeros(length, np.float32) for _ in range(ranks)]
    for slot in slots:
        one = -(-slot.numel // ranks)
        padded = np.zeros(one * ranks, np.float32)
        padded[: slot.numel] = arrays[slot.name].ravel()
        for rank in range(ranks):
            vectors[rank][slot.at : slot.at + one] = padded[rank * one : (rank + 1) * one]
    parts = parts_in(tmp_path_factory.mktemp("pieces") / "flat", vectors)
    for slot in slots:
        assert np.array_equal(values_of(slot.name, slot.shape, of_pieces(slot, parts, ranks)), arrays[slot.name])
    missing = gone % ranks
    del parts[missing]
    for slot in slots:
        one = -(-slot.numel // ranks)
        lost = min(one, max(0, slot.numel - missing * one))
        assert sum(box.numel for box in of_pieces(slot, parts, ranks)) == slot.numel - lost


def test_partitions_that_do_not_belong_together_have_no_size() -> None:
    """Ranks of runs of other sizes are told; a last rank's padding may be more than its partition."""
    assert partition_size({0: 8, 1: 7}, {0: 0, 1: 0}) is None
    assert partition_size({0: 8, 1: 5}, {0: 0, 1: 3}) == 8
    assert partition_size({0: 8, 1: 8}, {0: 0, 1: 3}) == 8
    assert partition_size({0: 2, 1: 2, 2: 0}, {0: 0, 1: 0, 2: 5}) == 2
    assert partition_size({1: 5}, {1: 3}) == 8


def test_patterns_from_a_file_cannot_take_for_ever() -> None:
    """Patterns that Python's matching could need years for are passed over and said; plain ones match."""
    notes: list[str] = []
    info = {
        "parameter_with_row_parallelism_patterns": [r"^model\.layers\.0\.o_proj\.weight$", r"\d+.self_attention.dense.weight", r"(a+)+$"],
        "tp_replicated_parameter_patterns": [".*" * 50 + "x", 7, "[", "x" * 5000],
    }
    begin = time.perf_counter()
    cuts = cuts_of(info, notes)
    assert cuts is not None
    assert cuts.columns.match("model.layers.0.o_proj.weight")
    assert cuts.columns.match("13.self_attention.dense.weight")
    assert not cuts.columns.match("model.layers.0.o_proj.weights")
    assert not cuts.same.match("a" * 200)
    assert time.perf_counter() - begin < 30
    assert len(notes) == 1
    assert "4 patterns" in notes[0]
