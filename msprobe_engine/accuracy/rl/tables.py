"""CSV files of log probabilities that do not fit: figures of each batch, the worst tokens, positions and sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from msprobe_engine.accuracy.rl.causes import Cause
from msprobe_engine.accuracy.rl.mismatch import Batch, Mismatch, by_position, by_sequence, worst
from msprobe_engine.core.io.output_files import AppendFile, make_directory
from msprobe_engine.core.io.safe_cells import safe_cell, utf8

_WHERE = ("step", "batch")
HEADERS = {
    "logprob_mismatch": (*_WHERE, "cause", *Mismatch.names(), "evidence"),
    "logprob_worst_tokens": (*_WHERE, "sequence", "position", "token", "rollout", "trainer", "difference"),
    "logprob_positions": (*_WHERE, "first", "last", "tokens", "mean", "absolute", "largest"),
    "logprob_sequences": (*_WHERE, "sequence", "tokens", "sum", "mean", "absolute", "largest"),
}
"""Name of each file, without ``_rank{R}.csv``, and its columns."""


class Tables:
    """The files of one rank; those that are there are continued.

    Args:
        directory: of them, made when it is missing.

    Raises:
        SinkError: they cannot be opened.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        make_directory(directory, "log probabilities")
        self.paths = {name: directory / f"{name}_rank{rank}.csv" for name in HEADERS}
        self._files: dict[str, AppendFile] = {}
        for name, path in self.paths.items():
            file = self._files[name] = AppendFile(path)
            if not file.size:
                self._append(name, [HEADERS[name]])

    def add(self, step: int, number: int, batch: Batch, mismatch: Mismatch, cause: Cause, most: int, buckets: int) -> None:
        """A batch.

        Args:
            most: of tokens and sequences that are listed.
            buckets: of positions.

        Raises:
            SinkError: it cannot be written.
        """
        where = (step, number)
        figures = [getattr(mismatch, name) for name in Mismatch.names()]
        self._append("logprob_mismatch", [(*where, cause.name, *figures, cause.evidence)])
        if not mismatch.tokens:
            return
        self._append("logprob_worst_tokens", [(*where, *row) for row in worst(batch, most)])
        self._append("logprob_positions", [(*where, *row) for row in by_position(batch, buckets)])
        sequences = sorted(by_sequence(batch), key=lambda row: -row[4])[:most]
        self._append("logprob_sequences", [(*where, *row) for row in sequences])

    def _append(self, name: str, rows: Iterable[Sequence[object]]) -> None:
        block = "".join(",".join(map(_cell, row)) + "\n" for row in rows)
        if block:
            self._files[name].append(block.encode())

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _cell(value: object) -> str:
    if isinstance(value, str):
        return safe_cell(utf8(value))
    return "" if value is None else repr(value)
