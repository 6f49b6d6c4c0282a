"""Writes one step of the gradient probe: signs first, the table last, each file whole or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.io.csv_text import format_rows
from msprobe_engine.core.io.output_files import WholeFile, guard_writing, make_directory
from msprobe_engine.core.io.regular_files import require_regular
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_engine.formats.grad_probe import layout, signs

_PIECE = 1 << 20


class Gradient(NamedTuple):
    """One gradient of a step.

    Attributes:
        shape: of what was seen: the gradient, or the part of it this rank has.
        row: index of its statistics row.
        signs: packed signs of its elements, see `signs`; None at level L0.
        below: [len(bounds)] int64, elements <= each bound, NaN in none; None below level L2.
        shard: ``[lo, hi) of n`` for a part of a parameter, else ``""``.
    """

    name: str
    shape: tuple[int, ...]
    row: int
    signs: signs.Bytes | None = None
    below: npt.NDArray[np.int64] | None = None
    shard: str = ""


class StepFiles:
    """Files of one rank.

    Args:
        directory: ``{dump_path}/rank{R}``.
        level: ``L0``, ``L1`` or ``L2``.
        bounds: of the intervals, for level L2.
        loose: also write one ``.npy`` per parameter, as the existing tool does.
    """

    def __init__(self, directory: Path, level: str, bounds: Sequence[float], loose: bool = True) -> None:
        self.directory = directory
        self._level, self._bounds, self._loose = level, list(bounds), loose

    def write(self, step: int, gradients: Sequence[Gradient], rows: Rows) -> None:
        """Write the files of one step; those of an earlier run are replaced.

        Raises:
            SinkError: they cannot be written; the table of the step is not there then.
        """
        make_directory(self.directory, "gradients")
        table = self.directory / layout.summary_name(step)
        with guard_writing(table, "name another place"):
            require_regular(table)
            table.unlink(missing_ok=True)  # a step without a table is not complete
        kept = [(g.name, g.shape, g.signs) for g in gradients if g.signs is not None]
        if kept:
            _write_signs(self.directory / layout.signs_name(step), kept)
        if kept and self._loose:
            folder = self.directory / f"step{step}"
            make_directory(folder, "gradient directions")
            for name, shape, packed in kept:
                _write_positive(folder / f"{layout.file_stem(name)}.npy", shape, packed)
        shards = any(g.shard for g in gradients)
        lines = (self._line(g, rows[g.row], shards) for g in gradients)
        with _whole(table) as file:
            file.write(format_rows([layout.header(self._level, self._bounds, shards), *lines], "\r\n").encode("utf-8-sig"))

    def _line(self, gradient: Gradient, row: npt.NDArray[np.float64], shards: bool) -> list[object]:
        s = _rows.read_row(row)
        own: list[object] = []
        nan: list[object] = []
        if self._level == "L0":
            own = ["" if s.crc32 is None else f"{s.crc32:08x}"]
        elif self._level == "L2":
            below = [] if gradient.below is None else [int(n) for n in gradient.below]
            counts = [upper - below_count for below_count, upper in zip([0, *below], [*below, s.count - s.nans])] if self._bounds else []
            own = [n / s.count if s.count else 0 for n in (*counts, s.zeros)]
            nan = [s.nans / s.count if s.count else 0]
        top = ["" if v is None else _float32(v) for v in (s.max, s.min, s.norm if s.count else 0.0)]
        return [gradient.name, *own, *top, list(gradient.shape), *nan, *[gradient.shard] * shards]


def _float32(value: float) -> float:
    """The value as the existing tool prints it: rounded to float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _write_positive(path: Path, shape: tuple[int, ...], packed: signs.Bytes) -> None:
    """``gradient > 0`` as a bool array in numpy's format, written in pieces."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|b1", "fortran_order": False, "shape": shape})
    numel = int(np.prod(shape, dtype=np.int64))
    with _whole(path) as file:
        file.write(head.getvalue())
        for at in range(0, len(packed), _PIECE):
            file.write(signs.positive(packed[at : at + _PIECE], min(4 * _PIECE, numel - 4 * at)).data)


def _write_signs(path: Path, kept: Iterable[tuple[str, tuple[int, ...], signs.Bytes]]) -> None:
    """A safetensors file, https://huggingface.co/docs/safetensors: length of the header, header (JSON), data."""
    kept = list(kept)
    tensors: dict[str, object] = {}
    at = 0
    for name, _, packed in kept:
        tensors[name] = {"dtype": "U8", "shape": [len(packed)], "data_offsets": [at, at + len(packed)]}
        at += len(packed)
    shapes = json.dumps({name: list(shape) for name, shape, _ in kept})
    head = json.dumps({"__metadata__": {layout.SHAPES: shapes}, **tensors}).encode()
    head += b" " * (-len(head) % 8)
    with _whole(path) as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for _, _, packed in kept:
            file.write(packed.data)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when all of it is written.

    Raises:
        SinkError: it cannot be written; what was begun is removed.
    """
    with guard_writing(path, "name another place"), WholeFile(path) as whole:
        yield whole.file
