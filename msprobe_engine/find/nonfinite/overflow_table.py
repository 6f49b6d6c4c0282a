"""What ``run_overflow_check`` found, as log lines, a table and JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from msprobe_engine.core.io.output_files import guard_writing, write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.find.findings import finite_json

NORMAL, ABNORMAL, NOT_RUN = "normal", "abnormal", "not run"


@dataclass
class Row:
    """One API call.

    Attributes:
        name: its record.
        verdict, backward: `NORMAL`, `ABNORMAL` or `NOT_RUN`; backward is "" when there are no gradients.
        overflow, reference_overflow: NaN or Inf in an output, here and in the reference in the recorded type; the same for gradients.
        inputs: ``saved``, ``drawn from statistics`` or ``none``.
        bad_inputs: NaN or Inf among them.
        gradient: what went into the backward call.
        device, reference: where it ran.
        note: why it was not run.
    """

    name: str
    verdict: str = NOT_RUN
    overflow: bool = False
    reference_overflow: bool = False
    backward: str = ""
    backward_overflow: bool = False
    backward_reference_overflow: bool = False
    inputs: str = ""
    bad_inputs: bool = False
    gradient: str = ""
    device: str = ""
    reference: str = ""
    note: str = ""

    def log_lines(self) -> list[str]:
        """The lines of the existing tool; of the backward call one of the same form."""
        if self.verdict == NOT_RUN:
            return [f"{self.name} was not run: {self.note}"]
        lines = [_says(self.name, self.verdict)]
        if self.backward:
            lines.append(_says(f"{self.name.removesuffix('forward')}backward", self.backward))
        return lines


def _says(name: str, verdict: str) -> str:
    return f"The {name} overflow is {'a normal' if verdict == NORMAL else 'an abnormal'} overflow."


def table(rows: Sequence[Row]) -> str:
    """Columns of equal width, the abnormal ones first, then those with NaN or Inf, then the rest."""
    order = sorted(rows, key=lambda row: (ABNORMAL not in (row.verdict, row.backward), not row.overflow, row.verdict == NOT_RUN))
    lines = [("API", "forward", "backward", "inf/nan", "reference", "inputs")]
    for row in order:
        seen = "yes" if row.overflow else "no"
        should = "yes" if row.reference_overflow else "no"
        inputs = f"{row.inputs}{', with inf/nan' if row.bad_inputs else ''}" or row.note
        lines.append((row.name, row.verdict, row.backward or "-", *((seen, should) if row.verdict != NOT_RUN else ("-", "-")), inputs))
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def counts(rows: Sequence[Row]) -> str:
    """One line."""
    of = Counter(row.verdict for row in rows)
    unknown = sum(row.note == "unknown API" for row in rows)
    abnormal = sum(ABNORMAL in (row.verdict, row.backward) for row in rows)
    return f"{len(rows)} calls: {abnormal} abnormal overflow, {of[NORMAL]} normal, {of[NOT_RUN]} not run ({unknown} of them unknown APIs)"


def write(rows: Sequence[Row], directory: str | Path) -> Path:
    """Write ``overflow_check_{time_ns}.json``.

    Raises:
        SinkError: it cannot be written.
    """
    path = Path(directory) / f"overflow_check_{time.time_ns()}.json"
    with guard_writing(path, "name another directory with -o"):
        make_directories(str(directory))
        write_file(path, [finite_json({"summary": counts(rows), "calls": [asdict(row) for row in rows]})])
    return path
