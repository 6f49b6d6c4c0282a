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
        a, b = self._a, self._b
        if self.pair.a.shape == self.pair.b.shape:
            yield from blocks_of(a.shape, max(1, most_bytes // max(width_of(a), width_of(b))), (a, b))

    def finish_sums(self) -> Sums:
        """The sums of all blocks: the same whatever the order in which threads did them."""
        self.sums.dd, self.sums.ab, self.sums.aa, self.sums.bb = (_sum(each) for each in zip(*self._floats)) if self._floats else (0.0,) * 4
        return self.sums

    def _place(self, block: Block, at: int) -> tuple[int, ...] | None:
        """The index in the tensor of element `at` of a block."""
        if at < 0:
            return None
        found = block.place_of(at)
        return tuple(found[self._order.index(d)] for d in range(len(found)))

    def work(self, block: Block, rooms: Sequence[Room], reads: FileReads) -> None:
        """Read both sides and compare them."""
        a, b = self.pair.a, self.pair.b
        words_a, pieces_a = fill(self.boxes_a, block, a.dtype, rooms[0], reads)
        words_b, pieces_b = fill(self.boxes_b, block, b.dtype, rooms[1], reads)
        drift_a = _drift(self.copies_a, block, words_a, rooms[2], reads)
        drift_b = _drift(self.copies_b, block, words_b, rooms[2], reads)
        covered_a, covered_b = _count_elements(pieces_a), _count_elements(pieces_b)
        if covered_a < block.numel or covered_b < block.numel:
            _only_common(words_a, pieces_a, words_b, pieces_b)
        sums = differences(words_a, a.dtype, words_b, b.dtype, self.plan.atol, self.plan.rtol)
        files_a = files_b = None
        if sums.changed:
            mask = _find_changed_elements(words_a, a.dtype, words_b, b.dtype) if len(pieces_a) > 1 or len(pieces_b) > 1 else None
            files_a = _by_file(pieces_a, mask, sums.changed)
            files_b = _by_file(pieces_b, mask, sums.changed)
        with self.lock:
            self._floats.append((sums.dd, sums.ab, sums.aa, sums.bb))
            place = self._place(block, sums.at)
            tied = place is not None and self.max_at is not None and sums.max == self.sums.max and place < self.max_at
            if self.sums.add(sums) or tied:
                self.max_at = place
            self.covered_a += covered_a
            self.covered_b += covered_b
            self.files_a.update(files_a or {})
            self.files_b.update(files_b or {})
            self.drift_a.add(drift_a)
            self.drift_b.add(drift_b)


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


def _only_common(a: npt.NDArray[Any], pieces_a: Sequence[Piece], b: npt.NDArray[Any], pieces_b: Sequence[Piece]) -> None:
    """Zeros on both sides wherever one side has nothing."""
    here = np.zeros((2, *a.shape), bool)
    for k, pieces in enumerate((pieces_a, pieces_b)):
        for piece in pieces:
            place = (k, *piece.inside)  # of a tensor without dimensions here[k] is a number and takes no item
            here[place] = True
    nowhere = ~(here[0] & here[1])
    a[nowhere] = 0
    b[nowhere] = 0


def _find_changed_elements(a: npt.NDArray[Any], dtype_a: str, b: npt.NDArray[Any], dtype_b: str) -> npt.NDArray[Any] | None:
    """Where two blocks differ; None: not known."""
    if dtype_a == dtype_b:
        return np.asarray(a != b)
    if not (values_known(dtype_a) and values_known(dtype_b)):
        return None
    mask = np.empty(a.size, bool)
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for first in range(0, a.size, _PIECE):
        x, y = values(flat_a[first : first + _PIECE], dtype_a), values(flat_b[first : first + _PIECE], dtype_b)
        mask[first : first + _PIECE] = (x != y) & ~((x != x) & (y != y))
    return mask.reshape(a.shape)


def _by_file(pieces: Sequence[Piece], mask: npt.NDArray[Any] | None, changed: int) -> dict[str, int] | None:
    """Changed elements by file; None: not known (an element type without values, and several files)."""
    if len({piece.box.file for piece in pieces}) == 1:
        return {str(pieces[0].box.file): changed}
    if mask is None:
        return None
    found: Counter[str] = Counter()
    for piece in pieces:
        found[str(piece.box.file)] += int(np.count_nonzero(mask[piece.inside]))
    return {file: count for file, count in found.items() if count}


def _drift(copies: Boxes, block: Block, words: npt.NDArray[Any], room: Room, reads: FileReads) -> _Drift | None:
    if not len(copies):
        return None
    found = _Drift()
    for piece in copies.pieces(block):
        to = room.block[: math.prod(piece.sizes) * words.itemsize].view(words.dtype).reshape(piece.sizes)
        read_piece(piece, to, room.stage, reads)
        mine = np.asarray(words[piece.inside])
        bits = "u1" if words.itemsize == 16 else words.dtype
        if np.array_equal(np.ascontiguousarray(mine).reshape(mine.shape).view(bits), to.view(bits)):
            continue
        found.elements += int(np.count_nonzero(mine != to)) or 1
        found.files.add(str(piece.box.file))
        at = zlib.crc32(repr((block.offsets, piece.inside)).encode())
        found.mark += at << 32 | zlib.crc32(to.tobytes())
    return found


def start_result(pair: Pair) -> TensorResult:
    """The result of a pair before anything of it was read."""
    a, b = pair.a, pair.b
    return TensorResult(
        pair.name, a.origin or a.key, b.origin or b.key, a.shape, b.shape, a.dtype, b.dtype, a.numel, a.group, a.state, note=pair.note,
        by=BITS if a.dtype == b.dtype else VALUES,
    )  # fmt: skip


def _result(state: _Comparing) -> TensorResult:
    out, sums = start_result(state.pair), state.finish_sums()
    a, b = state.pair.a, state.pair.b
    if a.shape != b.shape:
        out.status = SHAPE
        return out
    if state.trouble and not sums.changed:
        out.status, out.note = UNREADABLE, _and(out.note, state.trouble)
        return out
    out.missing_a, out.missing_b = max(0, a.numel - state.covered_a), max(0, b.numel - state.covered_b)
    out.changed, out.beyond = sums.changed, sums.beyond
    out.nan_a, out.nan_b, out.inf_a, out.inf_b = sums.nan_a, sums.nan_b, sums.inf_a, sums.inf_b
    if values_known(a.dtype) and values_known(b.dtype):
        out.l2, out.cos, out.max_abs, out.max_at, out.rel_norm = sums.l2, sums.cos, sums.max, state.max_at, sums.rel_norm
        out.norm_a, out.norm_b = math.sqrt(sums.aa), math.sqrt(sums.bb)
        out.unrounded = sums.unrounded if a.dtype != b.dtype else None
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
