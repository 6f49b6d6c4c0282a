"""Pairs of stored tensors, compared block by block in several threads, in memory that does not grow with the checkpoints."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.parameters.align_names import Pair
from msprobe_engine.find.checkpoint.result import GOLDEN, RUN
from msprobe_engine.find.checkpoint.tensor_result import BITS, DIFFERENT, EQUAL, INCOMPLETE, SHAPE, UNREADABLE, VALUES, WITHIN, TensorResult
from msprobe_engine.formats.checkpoint.blocks import Block, Boxes, Room, blocks_of, fill, width_of
from msprobe_engine.formats.checkpoint.model import StoredTensor, permute_boxes
from msprobe_engine.formats.checkpoint.strided_reads import Piece, read_piece
from msprobe_engine.formats.tensors.file_reads import FileReads
from msprobe_engine.measure.stored.tensors import Sums, differences, values, values_known
from msprobe_engine.measure.stored.threads import Job, Plan, Pool

_PIECE = 1 << 16
"""Elements of which float64 copies are made at a time."""


class _Comparing(Job):
    """A pair on its way: sums of the blocks that are done."""

    def __init__(self, number: int, pair: Pair, how: Plan) -> None:
        super().__init__()
        self.number, self.pair, self.plan = number, pair, how
        # the dimensions in the order of A's files: what is turned on both sides is read as it lies
        self._order = _file_order(pair.a)
        self._a, self._b = _permute_dimensions(pair.a, self._order), _permute_dimensions(pair.b, self._order)
        self.boxes_a, self.boxes_b = Boxes(self._a.boxes), Boxes(self._b.boxes)
        self.copies_a, self.copies_b = Boxes(self._a.copies), Boxes(self._b.copies)
        self.sums = Sums()
        self._floats: list[tuple[float, float, float, float]] = []
        self.max_at: tuple[int, ...] | None = None
        self.covered_a = self.covered_b = 0
        self.files_a: Counter[str] = Counter()
        self.files_b: Counter[str] = Counter()
        self.drift_a, self.drift_b = _Drift(), _Drift()

    def blocks(self, most_bytes: int) -> Iterator[Block]:
        """None where the shapes differ."""
        target, golden = self._a, self._b
        if self.pair.a.shape == self.pair.b.shape:
            yield from blocks_of(target.shape, max(1, most_bytes // max(width_of(target), width_of(golden))), (target, golden))

    def finish_sums(self) -> Sums:
        """The sums of all blocks: the same whatever the order in which threads did them."""
        self.sums.dd, self.sums.ab, self.sums.aa, self.sums.bb = (_sum(each) for each in zip(*self._floats)) if self._floats else (0.0,) * 4
        return self.sums

    def _place(self, block: Block, number: int) -> tuple[int, ...] | None:
        """The index in the tensor of element `number` of a block."""
        if number < 0:
            return None
        place = block.place_of(number)
        return tuple(place[self._order.index(d)] for d in range(len(place)))

    def work(self, block: Block, rooms: Sequence[Room], reads: FileReads) -> None:
        """Read both sides and compare them."""
        target, golden = self.pair.a, self.pair.b
        target_words, target_pieces = fill(self.boxes_a, block, target.dtype, rooms[0], reads)
        golden_words, golden_pieces = fill(self.boxes_b, block, golden.dtype, rooms[1], reads)
        target_drift = _drift(self.copies_a, block, target_words, rooms[2], reads)
        golden_drift = _drift(self.copies_b, block, golden_words, rooms[2], reads)
        target_covered, golden_covered = _count_elements(target_pieces), _count_elements(golden_pieces)
        if target_covered < block.numel or golden_covered < block.numel:
            _only_common(target_words, target_pieces, golden_words, golden_pieces)
        sums = differences(target_words, target.dtype, golden_words, golden.dtype, self.plan.atol, self.plan.rtol)
        target_files = golden_files = None
        if sums.changed:
            mask = (
                _find_changed_elements(target_words, target.dtype, golden_words, golden.dtype)
                if len(target_pieces) > 1 or len(golden_pieces) > 1
                else None
            )
            target_files = _by_file(target_pieces, mask, sums.changed)
            golden_files = _by_file(golden_pieces, mask, sums.changed)
        with self.lock:
            self._floats.append((sums.dd, sums.ab, sums.aa, sums.bb))
            place = self._place(block, sums.at)
            tied = place is not None and self.max_at is not None and sums.max == self.sums.max and place < self.max_at
            if self.sums.add(sums) or tied:
                self.max_at = place
            self.covered_a += target_covered
            self.covered_b += golden_covered
            self.files_a.update(target_files or {})
            self.files_b.update(golden_files or {})
            self.drift_a.add(target_drift)
            self.drift_b.add(golden_drift)


def _file_order(tensor: StoredTensor) -> tuple[int, ...]:
    """The dimensions of a tensor, the one with the longest strides first."""
    strides = tensor.boxes[0].strides if tensor.boxes else ()
    return tuple(sorted(range(len(tensor.shape)), key=lambda d: -strides[d] if strides else 0))


def _permute_dimensions(tensor: StoredTensor, order: tuple[int, ...]) -> StoredTensor:
    if order == tuple(range(len(order))) or len(order) != len(tensor.shape):
        return tensor
    shape = tuple(tensor.shape[d] for d in order)
    return replace(tensor, shape=shape, boxes=permute_boxes(tensor.boxes, order), copies=permute_boxes(tensor.copies, order))


def _sum(numbers: Sequence[float]) -> float:
    """Exact but for the last rounding, so that order does not matter; beyond float64 as addition has it."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return sum(numbers)


class _Drift:
    """Copies of a side that are not what its boxes hold."""

    def __init__(self) -> None:
        self.elements = 0
        self.files: set[str] = set()
        self.mark = 0
        """Of what the copies hold where they differ; the same on both sides when these drifted alike."""

    def add(self, other: _Drift | None) -> None:
        """That of another block."""
        if other is not None:
            self.elements += other.elements
            self.files |= other.files
            self.mark = (self.mark + other.mark) & 0xFFFFFFFFFFFFFFFF


class _Comparison(Pool[_Comparing]):
    def __init__(self, how: Plan, results: list[TensorResult | None], report_result: Callable[[int, TensorResult], None]) -> None:
        super().__init__(how)
        self._results, self._report_result = results, report_result

    def finish_job(self, job: _Comparing) -> None:
        """Make the result of a pair."""
        result = _result(job)
        self._results[job.number] = result
        self._report_result(job.number, result)


def compare(
    pairs: Sequence[Pair],
    how: Plan,
    report_result: Callable[[int, TensorResult], None] = lambda _number, _result: None,
    known: Mapping[int, TensorResult] | None = None,
) -> tuple[list[TensorResult], int]:
    """Compare tensors.

    Args:
        report_result: called with the number of a pair and its result as soon as it is there, from any thread, one call at a time.
        known: results of some pairs, which are not compared again.

    Returns:
        the results in the order of `pairs`, and how many bytes were read.

    Raises:
        whatever `report_result` does.
    """
    results: list[TensorResult | None] = [None] * len(pairs)
    for number, result in (known or {}).items():
        results[number] = result
    todo = sorted((i for i, result in enumerate(results) if result is None), key=lambda i: _place(pairs[i]))
    nbytes = _Comparison(how, results, report_result).run(_Comparing(i, pairs[i], how) for i in todo)
    return [result for result in results if result is not None], nbytes


def _place(pair: Pair) -> tuple[str, int]:
    boxes = pair.a.boxes or pair.b.boxes
    return (str(boxes[0].file), boxes[0].start) if boxes else ("", 0)


def _count_elements(pieces: Sequence[Piece]) -> int:
    return sum(math.prod(piece.sizes) for piece in pieces)


def _only_common(
    target: npt.NDArray[Any], target_pieces: Sequence[Piece], golden: npt.NDArray[Any], golden_pieces: Sequence[Piece]
) -> None:
    """Zeros on both sides wherever one side has nothing."""
    is_there = np.zeros((2, *target.shape), bool)
    for k, pieces in enumerate((target_pieces, golden_pieces)):
        for piece in pieces:
            place = (k, *piece.inside)  # of a tensor without dimensions here[k] is a number and takes no item
            is_there[place] = True
    nowhere = ~(is_there[0] & is_there[1])
    target[nowhere] = 0
    golden[nowhere] = 0


def _find_changed_elements(
    target: npt.NDArray[Any], target_dtype: str, golden: npt.NDArray[Any], golden_dtype: str
) -> npt.NDArray[Any] | None:
    """Where two blocks differ; None: not known."""
    if target_dtype == golden_dtype:
        return np.asarray(target != golden)
    if not (values_known(target_dtype) and values_known(golden_dtype)):
        return None
    mask = np.empty(target.size, bool)
    flat_target, flat_golden = target.reshape(-1), golden.reshape(-1)
    for start in range(0, target.size, _PIECE):
        target_values, golden_values = (
            values(flat_target[start : start + _PIECE], target_dtype),
            values(flat_golden[start : start + _PIECE], golden_dtype),
        )
        mask[start : start + _PIECE] = (target_values != golden_values) & ~(
            (target_values != target_values) & (golden_values != golden_values)
        )
    return mask.reshape(target.shape)


def _by_file(pieces: Sequence[Piece], mask: npt.NDArray[Any] | None, changed: int) -> dict[str, int] | None:
    """Changed elements by file; None: not known (an element type without values, and several files)."""
    if len({piece.box.file for piece in pieces}) == 1:
        return {str(pieces[0].box.file): changed}
    if mask is None:
        return None
    counts: Counter[str] = Counter()
    for piece in pieces:
        counts[str(piece.box.file)] += int(np.count_nonzero(mask[piece.inside]))
    return {file: count for file, count in counts.items() if count}


def _drift(copies: Boxes, block: Block, words: npt.NDArray[Any], room: Room, reads: FileReads) -> _Drift | None:
    if not len(copies):
        return None
    drift = _Drift()
    for piece in copies.pieces(block):
        to = room.block[: math.prod(piece.sizes) * words.itemsize].view(words.dtype).reshape(piece.sizes)
        read_piece(piece, to, room.stage, reads)
        first_copy = np.asarray(words[piece.inside])
        bits = "u1" if words.itemsize == 16 else words.dtype
        if np.array_equal(np.ascontiguousarray(first_copy).reshape(first_copy.shape).view(bits), to.view(bits)):
            continue
        drift.elements += int(np.count_nonzero(first_copy != to)) or 1
        drift.files.add(str(piece.box.file))
        place = zlib.crc32(repr((block.offsets, piece.inside)).encode())
        drift.mark += place << 32 | zlib.crc32(to.tobytes())
    return drift


def start_result(pair: Pair) -> TensorResult:
    """The result of a pair before anything of it was read."""
    target, golden = pair.a, pair.b
    return TensorResult(
        pair.name, target.origin or target.key, golden.origin or golden.key, target.shape, golden.shape, target.dtype, golden.dtype,
        target.numel, target.group, target.state, note=pair.note, by=BITS if target.dtype == golden.dtype else VALUES,
    )  # fmt: skip


def _result(state: _Comparing) -> TensorResult:
    out, sums = start_result(state.pair), state.finish_sums()
    target, golden = state.pair.a, state.pair.b
    if target.shape != golden.shape:
        out.status = SHAPE
        return out
    if state.trouble and not sums.changed:
        out.status, out.note = UNREADABLE, _and(out.note, state.trouble)
        return out
    out.missing_a, out.missing_b = max(0, target.numel - state.covered_a), max(0, golden.numel - state.covered_b)
    out.changed, out.beyond = sums.changed, sums.beyond
    out.nan_a, out.nan_b, out.inf_a, out.inf_b = sums.nan_a, sums.nan_b, sums.inf_a, sums.inf_b
    if values_known(target.dtype) and values_known(golden.dtype):
        out.l2, out.cos, out.max_abs, out.max_at, out.rel_norm = sums.l2, sums.cos, sums.max, state.max_at, sums.rel_norm
        out.norm_a, out.norm_b = math.sqrt(sums.aa), math.sqrt(sums.bb)
        out.unrounded = sums.unrounded if target.dtype != golden.dtype else None
    out.files_a, out.files_b = dict(state.files_a), dict(state.files_b)
    out.drift_a, out.drift_b = state.drift_a.elements, state.drift_b.elements
    out.drift_files = tuple(sorted(state.drift_a.files | state.drift_b.files))
    if state.trouble:
        out.missing_a = out.missing_b = 0
        out.note = _and(out.note, f"not read to its end: {state.trouble}")
    gate = state.plan.atol > 0 or state.plan.rtol > 0
    if sums.changed and not (gate and not sums.beyond):
        out.status = DIFFERENT
    elif state.drift_a.mark != state.drift_b.mark:
        out.status, out.note = DIFFERENT, _and(out.note, "replicas differ from each other within a checkpoint")
    elif out.missing_a or out.missing_b:
        out.status, out.note = INCOMPLETE, _and(out.note, _describe_missing_elements(out))
    elif sums.changed:
        out.status = WITHIN
    else:
        out.status = EQUAL
    return out


def _describe_missing_elements(out: TensorResult) -> str:
    sides = [f"{n} of {out.numel} elements in no file of {side}" for side, n in ((RUN, out.missing_a), (GOLDEN, out.missing_b)) if n]
    return " and ".join(sides)


def _and(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second
