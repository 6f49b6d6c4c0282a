"""Small tensors on a device whose rows are written by one launch per type: parameters, their gradients and states."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.torch.statistics.device import trust as device_trust
from msprobe_integrations.torch.statistics.device_rows import DeviceRows
from msprobe_integrations.torch.statistics.pending import quiet
from msprobe_integrations.torch.statistics.streams import host_memory

if TYPE_CHECKING:
    from msprobe_integrations.torch.statistics.device.launch import Launcher, Numbers

SMALL = 1 << 16
"""Elements of the largest tensor of a batch: its programs are no longer few beside those of others."""
_ROW_BYTES = 8 * _rows.WORDS
_MOST = 1 << 24
"""Elements after which a batch is launched: what is kept until then may be copies made for it, 64 MiB of them."""


class Batch:
    """What has been given rows and not been launched yet. It is launched on the stream and in the thread in which it began.

    The tensors are kept until then, and nobody may write to them.

    Args:
        lost: told why a row has no numbers.
    """

    def __init__(self, lost: Callable[[str], None]) -> None:
        self.thread = threading.get_ident()
        self._lost = lost
        self._stream = -1
        self._groups: dict[tuple[Launcher, int], tuple[DeviceRows, list[Numbers]]] = {}
        self._kept: list[Any] = []
        self._elements = 0

    def add(self, launcher: Launcher, aligned: int, line: Numbers, stream: int, rows: DeviceRows, *kept: torch.Tensor) -> bool:
        """One more tensor, or pair of tensors; False: it does not fit here.

        Args:
            line: addresses of data and row, number of elements, and for a pair address of the second tensor, c0, c1, c2 and step.
        """
        if threading.get_ident() != self.thread or (stream != self._stream and self._kept):
            return False
        self._stream = stream
        group = self._groups.get((launcher, aligned))
        if group is None:
            group = self._groups[launcher, aligned] = rows, []
        group[1].append(line)
        self._kept.extend(kept)
        self._elements += line[2]
        if self._elements > _MOST:
            self.launch()
        return True

    def launch(self) -> None:
        """Write the rows. Nothing is raised: a row that cannot be written becomes that of no elements."""
        groups, self._groups = self._groups, {}
        for (launcher, aligned), (rows, lines) in groups.items():
            if not self._at_once(launcher, aligned, lines):
                with launcher.current():
                    for line in lines:
                        self._alone(launcher, aligned, line, rows)
        self._kept.clear()
        self._elements = 0

    def _at_once(self, launcher: Launcher, aligned: int, lines: list[Numbers]) -> bool:
        if len(lines) < 3 or launcher.stream() != self._stream:
            return False

        def check() -> str:
            from msprobe_integrations.torch.statistics.device import check as device_check  # imports Triton

            return device_check.check_many(launcher, aligned, launch_lines)

        what = ("many", launcher.many.__name__, aligned, *launcher.constants.values())
        with quiet():
            try:
                return device_trust.by_kernel(
                    launcher.device, what, "small tensors", check, lambda: launch_lines(launcher, aligned, lines), "a launch each"
                )
            except Exception as error:  # no memory for the table
                raise_of_training(error)
                return False

    def _alone(self, launcher: Launcher, aligned: int, line: Numbers, rows: DeviceRows) -> None:
        data, row, n, *pair = line
        try:
            direct = launcher.find(aligned, n)
            if direct is None or launcher.stream() < 0:
                raise RuntimeError("the compiled kernel has been given up, or the stream is captured")
            launcher.start(direct, (data, *pair[:1]), n, row, launcher.numbers(line), self._stream)
        except Exception as error:
            raise_of_training(error)
            launcher.note_failure(error)
            rows.cancel(row)
            self._lost(f"launch: {type(error).__name__}: {str(error)[:80]}")


def launch_lines(launcher: Launcher, aligned: int, lines: list[Numbers]) -> None:
    """Write the rows of `Batch.add`'s lines: a table goes to the device, behind which one launch is queued, and one that merges rows of
    tensors with several programs. The memory of the tables is the framework's, which knows when the copy has been done."""
    table, merges, parts = tables(np.array(lines, np.int64), launcher.part)
    memory = torch.empty(max(1, parts) * _rows.WORDS, dtype=torch.int64, device=launcher.device)
    several = table[:, 3] >> 16 > 1
    table[several, 1] += memory.data_ptr()
    merges[:, 0] += memory.data_ptr()
    behind = -(-table.size // 2) * 2  # the merges begin at a multiple of 16 bytes
    host = host_memory((behind + merges.size,), torch.int64)
    words = host.numpy()
    words[: table.size], words[behind:] = table.reshape(-1), merges.reshape(-1)
    given = host.to(launcher.device, non_blocking=True)
    launcher.launch_many(given[: table.size].view(table.shape), given[behind:].view(merges.shape), aligned == launcher.whole)


def tables(lines: npt.NDArray[np.int64], part: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Lines per program and lines of merges, for `Launcher.launch_many`, and the number of rows that are merged. Where a tensor has several
    programs the address of the row is the offset of the part's from where the parts will be, as in the first column of the merges.

    Args:
        lines: [n, 3 or 8] as `Batch.add` takes them.
        part: elements per program.
    """
    programs = -(-lines[:, 2] // part)
    first = np.cumsum(programs) - programs
    number = np.arange(programs.sum()) - np.repeat(first, programs)
    table = np.repeat(np.insert(lines, 3, programs << 16, 1), programs, 0)
    table[:, 3] += number
    several = programs > 1
    begin = np.cumsum(programs * several) - programs * several
    rows = np.repeat(begin, programs) + number
    split = np.repeat(several, programs)
    table[split, 1] = rows[split] * _ROW_BYTES
    merges = np.stack([begin[several] * _ROW_BYTES, lines[several, 1], programs[several]], 1)
    return table, merges, int(programs[several].sum())
