"""Pairs of stored tensors, compared block by block in several threads, in memory that does not grow with the checkpoints."""

from __future__ import annotations

import math
import queue
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.checkpoint.blocks import Block, Boxes, Piece, Room, blocks_of, fill, read_piece, width_of
from msprobe_engine.checkpoint.filereads import FileReads, ReadsOfThreads, Unreadable
from msprobe_engine.checkpoint.metrics import Sums, differences, values_known
from msprobe_engine.checkpoint.names import Pair
from msprobe_engine.checkpoint.result import (
    BITS,
    DIFFERENT,
    EQUAL,
    INCOMPLETE,
    SHAPE,
    UNREADABLE,
    VALUES,
    WITHIN,
    TensorResult,
)  # fmt: skip

BLOCK_BYTES = 2 << 20
"""Of one side. Two sides of this size stay in the cache of a core between reading and comparing."""
LEAST_BLOCK = 64 << 10
_ROOMS = 6
"""Buffers of a block's size that a thread needs: two sides with a stage each, and a copy with what is around it."""


class Plan(NamedTuple):
    """How a comparison is run.

    Attributes:
        memory: bytes for buffers of all threads.
        workers: threads.
        atol, rtol: the gate; both 0: bits.
    """

    memory: int
    workers: int
    atol: float = 0.0
    rtol: float = 0.0

    @property
    def block_bytes(self) -> int:
        """Of one side's block."""
        return max(LEAST_BLOCK, min(BLOCK_BYTES, self.memory // (self.workers * _ROOMS)))


class _State:
    """A pair on its way: sums of the blocks that are done."""

    def __init__(self, number: int, pair: Pair) -> None:
        self.number, self.pair = number, pair
        self.lock = threading.Lock()
        self.boxes_a, self.boxes_b = Boxes(pair.a.boxes), Boxes(pair.b.boxes)
        self.copies_a, self.copies_b = Boxes(pair.a.copies), Boxes(pair.b.copies)
        self.sums = Sums()
        self.max_at: tuple[int, ...] | None = None
        self.covered_a = self.covered_b = 0
        self.files_a: Counter[str] = Counter()
        self.files_b: Counter[str] = Counter()
        self.drift_a, self.drift_b = _Drift(), _Drift()
        self.trouble = ""
        self.left = 1  # the producer's own

    def done(self) -> bool:
        with self.lock:
            self.left -= 1
            return self.left == 0


class _Drift:
    """Copies of a side that are not what its boxes hold."""

    def __init__(self) -> None:
        self.elements = 0
        self.files: set[str] = set()
        self.mark = 0
        """Of what the copies hold where they differ; the same on both sides when these drifted alike."""


def compare(
    pairs: Sequence[Pair], plan: Plan, finished: Callable[[TensorResult], None] = lambda _result: None
) -> tuple[list[TensorResult], int]:
    """Compare tensors.

    Args:
        finished: called from any thread, one call at a time, with each result as soon as it is there.

    Returns:
        the results in the order of `pairs`, and how many bytes were read.
    """
    return _Comparison(pairs, plan, finished).run()


class _Comparison:
    def __init__(self, pairs: Sequence[Pair], plan: Plan, finished: Callable[[TensorResult], None]) -> None:
        self._pairs, self._plan, self._finished = pairs, plan, finished
        self._results: list[TensorResult | None] = [None] * len(pairs)
        self._reads = ReadsOfThreads()
        self._work: queue.Queue[tuple[_State, Block] | None] = queue.Queue(maxsize=4 * plan.workers)
        self._lock = threading.Lock()
        self._stop: BaseException | None = None

    def run(self) -> tuple[list[TensorResult], int]:
        threads = [threading.Thread(target=self._worker, name=f"compare-{i}", daemon=True) for i in range(self._plan.workers)]
        for thread in threads:
            thread.start()
        try:
            for item in self._blocks():
                self._put(item)
            for _ in threads:
                self._put(None)
        except BaseException as error:
            self._stop = self._stop or error
        for thread in threads:
            thread.join()
        self._reads.close()
        if self._stop is not None:
            raise self._stop
        return [result for result in self._results if result is not None], self._reads.nbytes

    def _put(self, item: tuple[_State, Block] | None) -> None:
        while self._stop is None:
            try:
                return self._work.put(item, timeout=0.2)
            except queue.Full:
                continue
        raise self._stop

    def _blocks(self) -> Iterator[tuple[_State, Block]]:
        """All blocks, in the order in which checkpoint A's files have them."""
        order = sorted(range(len(self._pairs)), key=lambda i: _place(self._pairs[i]))
        for number in order:
            pair = self._pairs[number]
            state = _State(number, pair)
            if pair.a.shape == pair.b.shape:
                try:
                    most = max(1, self._plan.block_bytes // max(width_of(pair.a), width_of(pair.b)))
                    for block in blocks_of(pair.a.shape, most, (pair.a, pair.b)):
                        with state.lock:
                            state.left += 1
                        yield state, block
                except Unreadable as error:
                    state.trouble = str(error)
            if state.done():
                self._finish(state)

    def _worker(self) -> None:
        try:
            rooms = [Room(self._plan.block_bytes) for _ in range(3)]
            while self._stop is None:
                try:
                    item = self._work.get(timeout=0.2)
                except queue.Empty:
                    continue
                if item is None:
                    return
                state, block = item
                if not state.trouble:
                    try:
                        self._block(state, block, rooms, self._reads.mine())
                    except Unreadable as error:
                        state.trouble = str(error)
                if state.done():
                    self._finish(state)
        except BaseException as error:  # the main thread raises it
            self._stop = self._stop or error

    def _block(self, state: _State, block: Block, rooms: Sequence[Room], reads: FileReads) -> None:
        a, b = state.pair.a, state.pair.b
        words_a, pieces_a = fill(state.boxes_a, block, a.dtype, rooms[0], reads)
        words_b, pieces_b = fill(state.boxes_b, block, b.dtype, rooms[1], reads)
        drift_a = _drift(state.copies_a, block, words_a, rooms[2], reads) if len(state.copies_a) else None
        drift_b = _drift(state.copies_b, block, words_b, rooms[2], reads) if len(state.copies_b) else None
        covered_a, covered_b = _covered(pieces_a), _covered(pieces_b)
        if covered_a < block.numel or covered_b < block.numel:
            _only_common(words_a, pieces_a, words_b, pieces_b)
        sums = differences(words_a, a.dtype, words_b, b.dtype, self._plan.atol, self._plan.rtol)
        files_a = files_b = None
        if sums.changed:
            mask = words_a != words_b if a.dtype == b.dtype and (len(pieces_a) > 1 or len(pieces_b) > 1) else None
            files_a = _by_file(pieces_a, mask, sums.changed)
            files_b = _by_file(pieces_b, mask, sums.changed)
        with state.lock:
            if state.sums.add(sums):
                state.max_at = block.place_of(sums.at)
            state.covered_a += covered_a
            state.covered_b += covered_b
            if files_a:
                state.files_a.update(files_a)
            if files_b:
                state.files_b.update(files_b)
            for total, found in ((state.drift_a, drift_a), (state.drift_b, drift_b)):
                if found is not None:
                    total.elements += found.elements
                    total.files |= found.files
                    total.mark = (total.mark + found.mark) & 0xFFFFFFFFFFFFFFFF

    def _finish(self, state: _State) -> None:
        result = _result(state, self._plan)
        with self._lock:
            self._results[state.number] = result
            self._finished(result)


def _place(pair: Pair) -> tuple[str, int]:
    boxes = pair.a.boxes or pair.b.boxes
    return (str(boxes[0].file), boxes[0].start) if boxes else ("", 0)


def _covered(pieces: Sequence[Piece]) -> int:
    return sum(math.prod(piece.sizes) for piece in pieces)


def _only_common(a: npt.NDArray[Any], pieces_a: Sequence[Piece], b: npt.NDArray[Any], pieces_b: Sequence[Piece]) -> None:
    """Zeros on both sides wherever one side has nothing."""
    here = np.zeros((2, *a.shape), bool)
    for k, pieces in enumerate((pieces_a, pieces_b)):
        for piece in pieces:
            here[k][piece.inside] = True
    nowhere = ~(here[0] & here[1])
    a[nowhere] = 0
    b[nowhere] = 0


def _by_file(pieces: Sequence[Piece], mask: npt.NDArray[Any] | None, changed: int) -> dict[str, int] | None:
    """Changed elements by file; None: not known (element types differ and the block is made of several files)."""
    if len({piece.box.file for piece in pieces}) == 1:
        return {str(pieces[0].box.file): changed}
    if mask is None:
        return None
    found: Counter[str] = Counter()
    for piece in pieces:
        found[str(piece.box.file)] += int(np.count_nonzero(mask[(*piece.inside, ...)]))
    return {file: count for file, count in found.items() if count}


def _drift(copies: Boxes, block: Block, words: npt.NDArray[Any], room: Room, reads: FileReads) -> _Drift:
    found = _Drift()
    for piece in copies.pieces(block):
        to = room.block[: math.prod(piece.sizes) * words.itemsize].view(words.dtype).reshape(piece.sizes)
        read_piece(piece, to, room.stage, reads)
        mine = words[(*piece.inside, ...)]
        bits = "u1" if words.itemsize == 16 else words.dtype
        if np.array_equal(np.ascontiguousarray(mine).view(bits), to.view(bits)):
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


def _result(state: _State, plan: Plan) -> TensorResult:
    out, sums = start_result(state.pair), state.sums
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
    gate = plan.atol > 0 or plan.rtol > 0
    if sums.changed and not (gate and not sums.beyond):
        out.status = DIFFERENT
    elif state.drift_a.mark != state.drift_b.mark:
        out.status, out.note = DIFFERENT, _and(out.note, "replicas differ from each other within a checkpoint")
    elif out.missing_a or out.missing_b:
        out.status, out.note = INCOMPLETE, _and(out.note, _missing(out))
    elif sums.changed:
        out.status = WITHIN
    else:
        out.status = EQUAL
    return out


def _missing(out: TensorResult) -> str:
    sides = [f"{n} of {out.numel} elements in no file of {side}" for side, n in (("A", out.missing_a), ("B", out.missing_b)) if n]
    return " and ".join(sides)


def _and(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second
