"""Heat maps of histograms over the steps, as small PNG images: one column per step, the highest bin on top, bright where much is."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

COLUMNS = 256
"""Steps an image shows one by one; beyond that neighbours are put together, so an image and its memory never grow."""
_PIXELS = 4
"""Width and height of a cell."""


class Heatmap:
    """The steps of one histogram so far.

    Args:
        bins: number of bins.
    """

    def __init__(self, bins: int) -> None:
        self._cells = np.zeros((bins, COLUMNS), np.uint8)
        self._count = 0
        self._per_column = 1
        self._open: list[npt.NDArray[np.uint8]] = []

    def add(self, counts: npt.NDArray[np.int64]) -> None:
        """One step; counts are int64 [bins]."""
        total = int(counts.sum())
        # The square root of the share keeps bins with few values visible.
        self._open.append(np.sqrt(counts / total * 255.0 * 255.0).astype(np.uint8) if total else np.zeros(len(counts), np.uint8))
        if len(self._open) < self._per_column:
            return
        if self._count == COLUMNS:
            halves = self._cells.astype(np.uint16)
            self._cells[:, : COLUMNS // 2] = (halves[:, ::2] + halves[:, 1::2]) // 2
            self._cells[:, COLUMNS // 2 :] = 0
            self._count = COLUMNS // 2
            self._per_column *= 2
            if len(self._open) < self._per_column:
                return
        self._cells[:, self._count] = np.mean(self._open, axis=0)
        self._count += 1
        self._open.clear()

    def png(self) -> tuple[bytes, int, int]:
        """The image, its width and height in pixels."""
        cells = self._cells[::-1, : self._count]
        if self._open:
            cells = np.concatenate([cells, np.mean(self._open, axis=0).astype(np.uint8)[::-1, None]], axis=1)
        pixels = np.repeat(np.repeat(cells, _PIXELS, axis=0), _PIXELS, axis=1)
        height, width = pixels.shape
        lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)  # filter 0 before every line
        head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits, palette
        chunks = ((b"IHDR", head), (b"PLTE", _PALETTE), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks), width, height


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _palette() -> bytes:
    # Dark blue over red to pale yellow: lightness grows all the way, so a grey print reads the same.
    places = [0, 64, 128, 192, 255]
    colours = np.array([[8, 8, 40], [90, 20, 110], [190, 50, 80], [245, 140, 30], [252, 250, 190]])
    return np.stack([np.interp(np.arange(256), places, colours[:, i]) for i in range(3)], axis=1).astype(np.uint8).tobytes()


_PALETTE = _palette()
