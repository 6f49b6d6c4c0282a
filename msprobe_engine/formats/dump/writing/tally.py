"""What a run has written, in one line at its end."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from msprobe_engine.core.text.words import many, size

_NOTHING: Mapping[str, int] = {}


class Steps:
    """A set of step numbers that mostly go up, as ranges: a long run must not fill the memory."""

    MOST = 1000

    def __init__(self) -> None:
        self.count = 0
        self._ranges: list[list[int]] = []

    def add(self, step: int) -> None:
        """One more step; nothing happens when it is there."""
        ranges = self._ranges
        i = bisect_right(ranges, step, key=_first)  # ranges[i - 1] may hold it or end just before it, ranges[i] begins behind it
        if i and step <= ranges[i - 1][1]:
            return
        self.count += 1
        follows, leads = i > 0 and ranges[i - 1][1] == step - 1, i < len(ranges) and ranges[i][0] == step + 1
        if follows:
            ranges[i - 1][1] = ranges.pop(i)[1] if leads else step
        elif leads:
            ranges[i][0] = step
        elif len(ranges) < self.MOST:
            ranges.insert(i, [step, step])

    def __str__(self) -> str:
        """``0-2, 5``: at most eight ranges."""
        shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in self._ranges[:8]]
        return ", ".join(shown) + (", ..." if len(self._ranges) > 8 else "")


class Tally:
    """Counts what reached the disk. Filled on the writer threads, read at the end.

    Attributes:
        cut_off: those of them that did not come to their end.
        lost: what was seen and could not be kept, reason to count.
        skipped: what was left out because the configuration says so, reason to count.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self.cut_off = Steps()
        self.records = 0
        self.files = 0
        self.bytes = 0
        self.lost: dict[str, int] = {}
        self.skipped: dict[str, int] = {}
        self._lock = threading.Lock()

    def wrote(self, step: int, records: int, sizes: Iterable[int], complete: bool = True) -> None:
        """Files of a step were written."""
        sizes = list(sizes)
        with self._lock:
            self.steps.add(step)
            if not complete:
                self.cut_off.add(step)
            self.records += records
            self.files += len(sizes)
            self.bytes += sum(sizes)

    def lose(self, lost: Mapping[str, int]) -> None:
        """Something was seen and is not in the files."""
        with self._lock:
            for reason, count in lost.items():
                self.lost[reason] = self.lost.get(reason, 0) + count

    def skip(self, reason: str) -> None:
        """Something was left out on purpose."""
        with self._lock:
            self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def text(self, root: Any, tensors: tuple[int, int] = (0, 0), lost: Mapping[str, int] = _NOTHING) -> str:
        """``3 steps (0, 10-11), 1,234 records, 9 files, 1.2 MB in out; lost: ...; left out: ...``

        Args:
            tensors: number of saved tensors and their bytes.
            lost: losses besides those that were counted here.
        """
        steps = f"{many(self.steps.count, 'step')}" + (f" ({self.steps})" if self.steps.count else "")
        files = f"{many(self.files, 'file')}, {size(self.bytes)}"
        if tensors[0]:
            files += f", {many(tensors[0], 'saved tensor')}, {size(tensors[1])}"
        text = f"{steps}, {many(self.records, 'record')}, {files} in {root}"
        if self.cut_off.count:
            text += f"; cut off: {many(self.cut_off.count, 'step')} ({self.cut_off})"
        for word, counts in (("lost", {**self.lost, **lost}), ("left out", self.skipped)):
            if counts:
                text += f"; {word}: " + ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items()))
        return text


def _first(span: list[int]) -> int:
    return span[0]
