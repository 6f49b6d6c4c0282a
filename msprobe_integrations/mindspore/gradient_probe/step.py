"""Takes the gradients of one update: their statistics, signs and interval counts, on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.grad_probe.files import Gradient, StepFiles
from msprobe_engine.formats.grad_probe.signs import Bytes, packed_size
from msprobe_integrations.common.gradient_probe import step
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.tensors.npy import array_of

_PIECE = 1 << 18  # elements; a multiple of 4
_FLOATS = frozenset(("Float16", "Float32", "Float64", "BFloat16"))


class GradientStep(step.GradientStep[MindSporeBackend]):
    """See `msprobe_integrations.common.gradient_probe.step.GradientStep`."""

    def take(self, name: str, gradient: Any, shard: str = "") -> None:
        """Take one gradient as it is now.

        Raises:
            TimeoutError: the memory for signs is used up and nothing is written.
        """
        description = self._backend.describe(gradient)
        if description.dtype not in _FLOATS:
            self.left_out[name] = f"its type is {description.dtype}"
            return
        self._room_for(name, math.prod(description.shape))
        reduced = gradient
        if self._backend.want_checksum and description.dtype != "Float32":  # the checksum in the files is that of float32
            reduced = mindspore.Tensor(array_of(gradient).astype(np.float32))
        ref = self._backend.reduce(reduced)
        if ref.row < 0:
            self.left_out[name] = "it has no data that can be read"
            return
        packed = below = None
        if self._signs or self._bounds:
            flat = array_of(gradient).reshape(-1)
            packed = pack_signs(flat) if self._signs else None
            below = count_below(flat, self._bounds) if self._bounds else None
        self._taken.append((name, description.shape, ref.row, packed, below, shard))

    def finish(self) -> Callable[[StepFiles, int], None]:
        """Everything is taken: what puts it into files, on another thread."""
        pending, taken = self._backend.finish_step(), self._taken

        def write(files: StepFiles, number: int) -> None:
            files.write(number, [Gradient(*one) for one in taken], pending.rows())

        return write


def pack_signs(flat: npt.NDArray[Any]) -> Bytes:
    """The signs of [n] numbers as `msprobe_engine.formats.grad_probe.signs` has them, [ceil(n / 4)]."""
    out = np.zeros(packed_size(flat.size), np.uint8)
    for at in range(0, flat.size, _PIECE):
        piece = _comparable(flat[at : at + _PIECE])
        codes = np.zeros(-(-piece.size // 4) * 4, np.uint8)
        nan = piece != piece  # only NaN differs from itself
        codes[: piece.size] = (piece > 0) + 2 * (piece < 0).view(np.uint8) + 3 * nan.view(np.uint8)
        four = codes.reshape(-1, 4)
        out[at // 4 : at // 4 + len(four)] = four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6
    return out


def count_below(flat: npt.NDArray[Any], bounds: Sequence[float]) -> npt.NDArray[np.int64]:
    """How many of [n] numbers are <= each bound, [len(bounds)]; both rounded to the type the comparison is made in: float64 for float64,
    else float32. NaN is below nothing."""
    out = np.zeros(len(bounds), np.int64)
    for at in range(0, flat.size, _PIECE):
        piece = _comparable(flat[at : at + _PIECE])
        for i, bound in enumerate(bounds):
            out[i] += np.count_nonzero(piece <= piece.dtype.type(bound))
    return out


def _comparable(piece: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return piece if piece.dtype in (np.float32, np.float64) else piece.astype(np.float32)
