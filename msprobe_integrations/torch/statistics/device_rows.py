"""Rows of one step on a device, until the step ends.

`RowBuffer` (`msprobe_integrations.common.statistics.row_memory`) is host memory that the C kernel writes to; `DeviceRows` is the same on
another device. Words that the host knows (COUNT, FLAGS) are put in when the rows have arrived; there the rows of the pieces of a tensor
become one.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_integrations.torch.statistics import scaled_sums

_ROW_BYTES = 8 * scaled_sums.WORDS


class DeviceRows:
    """Rows of one step on one device, in the order of reduction.

    Attributes:
        places: row number in the step of each device row, several times the same when pieces of a tensor have one each.
        counts, flags: COUNT and FLAGS of each device row, known to the host.
        repeats: how often its elements are in the tensor.
        streams: streams that wrote rows; the copy has to follow all of them.
    """

    def __init__(self, like: torch.Tensor, capacity: int) -> None:
        self._like = weakref.ref(like)
        self.device = like.device
        self._capacity = capacity
        self._lock = threading.Lock()
        self._module: Any = None if self.device.type == "cpu" else getattr(torch, self.device.type, None)
        self._made: Any = None
        self._follow: set[Any] = set()
        self._joined: set[int] = set()  # handles of streams of `_follow` that are in `streams`
        self._addresses: list[int] = []
        self.chunks: list[torch.Tensor] = [self._chunk(like)]
        self.places: list[int] = []
        self.counts: list[int] = []
        self.flags: list[int] = []
        self.repeats: list[int] = []
        self.streams: set[Any] = set()

    def _chunk(self, like: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            made = like.new_zeros((self._capacity, scaled_sums.WORDS), dtype=torch.int64)
        if hasattr(self._module, "Event"):
            stream = self._module.current_stream(self.device)
            self._made = self._module.Event()
            self._made.record(stream)
            self._follow = {stream}
        self._joined.clear()
        return made

    def take_row(self, like: torch.Tensor, place: int, count: int, flags: int, repeat: int = 1) -> torch.Tensor:
        """The next device row, [`scaled_sums.WORDS`] int64, for row `place` of the step, to be written on the present stream."""
        with self._lock:
            at = self._enter(like, place, count, flags, repeat)
            self._join()
            return self.chunks[at // self._capacity][at % self._capacity]

    def take_address(self, like: torch.Tensor, place: int, count: int, flags: int, stream: int) -> int:
        """As `take_row`, the address of the row, whose first sixteen words are written; `stream`: handle of the present stream."""
        with self._lock:
            at = self._enter(like, place, count, flags)
            if stream not in self._joined:
                self._join()
                self._joined.add(stream)
            chunk, number = divmod(at, self._capacity)
            if chunk >= len(self._addresses):
                self._addresses = [one.data_ptr() for one in self.chunks]
            return self._addresses[chunk] + number * _ROW_BYTES

    def cancel(self, address: int) -> None:
        """The row at an address of `take_address` becomes that of no elements."""
        with self._lock:
            for chunk, first in enumerate(self._addresses):
                if first <= address < first + self._capacity * _ROW_BYTES:
                    self.counts[chunk * self._capacity + (address - first) // _ROW_BYTES] = 0

    def cancel_rows(self, place: int, since: int, given: int) -> None:
        """Rows for row `place` of the step, from device row `since` on, become those of no elements, but for the first `given` of them."""
        with self._lock:
            for at in [at for at in range(since, len(self.places)) if self.places[at] == place][given:]:
                self.counts[at] = 0

    def _enter(self, like: torch.Tensor, place: int, count: int, flags: int, repeat: int = 1) -> int:
        at = len(self.places)
        self.places.append(place)
        self.repeats.append(repeat)
        self.counts.append(count)
        self.flags.append(flags)
        if at >= len(self.chunks) * self._capacity:
            self.chunks.append(self._chunk(like))
        return at

    def _join(self) -> None:
        """The present stream writes rows."""
        if not hasattr(self._module, "current_stream"):
            return
        stream = self._module.current_stream(self.device)
        self.streams.add(stream)
        if self._made is not None and stream not in self._follow:
            stream.wait_event(self._made)  # else zeros, or work on what was in this memory before, could come after the row
            self._follow.add(stream)

    def join_rows(self) -> torch.Tensor:
        """All rows taken, [n, `scaled_sums.WORDS`] int64, still on the device."""
        whole = self.chunks[0] if len(self.chunks) == 1 else torch.cat(self.chunks)
        return whole[: len(self.places)]

    def scatter(self, found: npt.NDArray[np.int64], out: Rows) -> None:
        """Put the arrived rows (`found`, as `join_rows` gave them) to their places in the step's rows, with the words the host knows."""
        ints = found[:, : _rows.WORDS].copy()
        flags = np.array(self.flags, np.int64)
        ints[:, _rows.COUNT] = self.counts
        ints[:, _rows.FLAGS] = flags & ~(ints[:, _rows.FLAGS] & _rows.HAS_INTEGERS)
        scaled_sums.decode(found, ints, flags & _rows.HAS_INTEGERS != 0)
        no_limits = ints[:, _rows.FLAGS] & _rows.HAS_INTEGERS == 0
        ints[no_limits, _rows.IMIN], ints[no_limits, _rows.IMAX] = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        made = ints.view(np.float64)
        multiply(made, np.array(self.repeats, np.int64))
        nothing = ints[:, _rows.COUNT] == 0
        if nothing.any():
            kept = ints[nothing, _rows.FLAGS]
            made[nothing] = _rows.empty(1)
            ints[nothing, _rows.FLAGS] = kept
        places = np.array(self.places, np.int64)
        first = np.unique(places, return_index=True)[1]
        out[places[first]] = made[first]
        if len(first) < len(places):
            for one in np.setdiff1d(np.arange(len(places)), first):
                at = slice(places[one], places[one] + 1)
                out[at] = _union(out[at], made[one : one + 1])


def multiply(rows: Rows, times: npt.NDArray[np.int64]) -> None:
    """All elements of a row are there several times; a digest or checksum is not asked for then."""
    several = times > 1
    if several.any():
        ints, times = _rows.as_int64(rows), times[several]
        for word in (_rows.COUNT, *range(_rows.NANS, _rows.MIN), _rows.BELOW):  # of a histogram all words before MIN are counts
            ints[several, word] *= times
        for word in (_rows.SUM, _rows.SUMSQ, _rows.SUM3, _rows.SUM4):
            rows[several, word] *= times


def _union(a: Rows, b: Rows) -> Rows:
    """`rows.merge` of pieces of one tensor, each of whose XOR is that of some of its words."""
    made, ints = _rows.merge(a, b), [_rows.as_int64(one) for one in (a, b)]
    if (ints[0][:, _rows.FLAGS] & ints[1][:, _rows.FLAGS] & _rows.HAS_XOR).all():
        words = _rows.as_int64(made)
        words[:, _rows.XOR] = ints[0][:, _rows.XOR] ^ ints[1][:, _rows.XOR]
        words[:, _rows.FLAGS] |= _rows.HAS_XOR
    return made


class Taker:
    """Gives the rows of one tensor, or of a part of one.

    Args:
        place: its row in the step.
        flags: `host_flags`.
    """

    def __init__(self, rows: DeviceRows, like: torch.Tensor, place: int, flags: int) -> None:
        self._rows = rows
        self._like = like
        self._place = place
        self._flags = flags
        self._since = len(rows.places)
        self.last: torch.Tensor | None = None
        """The row given last."""
        self.given = 0
        """Number of rows given."""

    def __call__(self, count: int, repeat: int = 1) -> torch.Tensor:
        """The row of the next `count` elements, each of which is in the tensor `repeat` times."""
        self.last = self._rows.take_row(self._like, self._place, count, self._flags, repeat)
        self.given += 1
        return self.last

    def cancel(self, given: int = 0) -> None:
        """All but the first `given` rows become those of no elements."""
        self._rows.cancel_rows(self._place, self._since, given)
