"""``free_benchmark.csv``: a row for every result that is not consistent; and a table of all operators that were looked at.

Columns are those of the existing tool (8.1.1); MindSpore's second is called ``pert_type``, PyTorch's ``pert_mode``. Processes of
several ranks may write into one file: rows are appended whole.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from msprobe_engine.accuracy.free_benchmark.judge import Judgement
from msprobe_engine.accuracy.free_benchmark.perturb import TO_CPU
from msprobe_engine.core.io.output_files import write_all, write_file
from msprobe_engine.core.io.regular_files import make_directories, open_regular
from msprobe_engine.core.io.safe_cells import safe_cell, utf8

NAME, SUMMARY = "free_benchmark.csv", "free_benchmark_summary"
FLIPPED = "symbol_flipping"


@dataclass
class Looked:
    """What became of the calls of one operator.

    Attributes:
        checked: results that were compared.
        differ: of these, not consistent.
        worst: largest `Judgement.max_rel`.
        amplified: largest relative change of a result by that of the input; nan when the input was not changed.
        skipped: reason -> calls.
    """

    checked: int = 0
    differ: int = 0
    worst: float = 0.0
    amplified: float = math.nan
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """Count a call that was not compared."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def add(self, judgement: Judgement, input_change: float) -> None:
        """Count a result."""
        self.checked += 1
        self.differ += not judgement.consistent
        self.worst = max(self.worst, judgement.max_rel)
        if input_change > 0:
            self.amplified = max(judgement.change / input_change, 0.0 if math.isnan(self.amplified) else self.amplified)


class FreeBenchmarkTable:
    """The files of one run.

    Args:
        directory: of them; made when something is written.
        mode_column: name of the second column.
        flipped: what stands for a changed sign in ``max_rel``.
    """

    def __init__(self, directory: Path, mode_column: str, flipped: str = FLIPPED) -> None:
        self.directory = directory
        self._flipped = flipped
        self._header = f"rank,{mode_column},stage,step,api_name,max_rel,dtype,shape,output_index\n"
        self._rows: list[str] = []
        self.operators: dict[str, Looked] = {}

    def row(
        self, rank: int | None, mode: str, stage: str, step: int, api: str, judgement: Judgement, dtype: str, shape: str, place: str
    ) -> None:
        """A result that is not consistent; `place`: which of several results."""
        rel = self._flipped if judgement.flipped else "" if mode == TO_CPU else repr(judgement.max_rel)  # to_cpu has errors, no ratios
        cells = ("" if rank is None else str(rank), mode, stage, str(step), api, rel, dtype, shape, place)
        self._rows.append(",".join(safe_cell(utf8(cell)) for cell in cells) + "\n")

    def get_counts(self, api: str) -> Looked:
        """The counts of an operator (``Functional.softmax``)."""
        return self.operators.setdefault(api, Looked())

    def flush(self, place: str = "") -> None:
        """Append what there is.

        Args:
            place: directory of the file below that of the run; made when it is missing.

        Raises:
            OSError: it cannot be written.
        """
        if not self._rows:
            return
        path = self.directory / place / NAME
        make_directories(os.fspath(path.parent))
        if not path.exists():
            self._create_file(path)
        fd = open_regular(path, os.O_WRONLY | os.O_APPEND)
        try:
            write_all(fd, ["".join(self._rows).encode()])
        finally:
            os.close(fd)
        self._rows.clear()

    def _create_file(self, path: Path) -> None:
        """The file with its header is there at once, or that of another rank."""
        temporary = path.with_name(f".{NAME}.{os.getpid()}.tmp")
        write_file(temporary, [self._header.encode()])
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)

    def summary(self, rank: int | None) -> Path | None:
        """Write the table of operators, those with differences first; None when there is none.

        Raises:
            OSError: it cannot be written.
        """
        if not self.operators:
            return None
        make_directories(os.fspath(self.directory))
        path = self.directory / f"{SUMMARY}{'' if rank is None else f'_rank{rank}'}.csv"
        lines = ["api,checked,differ,max_rel,amplification,skipped\n"]
        for api, known in sorted(self.operators.items(), key=lambda item: (-item[1].differ, -item[1].worst, item[0])):
            skipped = "; ".join(f"{reason}: {count}" for reason, count in known.skipped.items())
            amplified = "" if math.isnan(known.amplified) else repr(known.amplified)
            worst = repr(known.worst) if known.checked else ""
            lines.append(",".join(map(safe_cell, (api, str(known.checked), str(known.differ), worst, amplified, skipped))) + "\n")
        write_file(path, ["".join(lines).encode()])
        return path

    def text(self) -> str:
        """One line for the log."""
        checked = sum(known.checked for known in self.operators.values())
        differ = sum(known.differ for known in self.operators.values())
        reasons: dict[str, int] = {}
        for known in self.operators.values():
            for reason, count in known.skipped.items():
                reasons[reason] = reasons.get(reason, 0) + count
        skipped = "; ".join(f"{reason}: {count}" for reason, count in reasons.items())
        where = f" ({NAME} in {self.directory})" if differ else ""
        return f"free benchmark: {checked} results compared, {differ} differ{where}; calls not compared: {skipped or 'none'}"
