"""One pair of dump files that is to be compared, and all pairs of two paths."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from msprobe_engine.formats.dump.reader import DumpDirectory
from msprobe_engine.formats.dump.ring_file import size_of_step_file


@dataclass(frozen=True)
class Task:
    """One pair of dump files.

    Attributes:
        target, golden: dump.json or debug.json, or directories of static graphs (`align.static_graph_sources`).
        step, rank: of the target; None when the path does not say it.
        folder: of the results below the output directory; ``.`` when there is one step only.
        stem: name of the results, without time and suffix (``compare_result_rank0``).
        stack: stack.json of the target, where it does not lie beside the dump.
        calibration: the same rank and step of further golden dumps.
        whole: all ranks of the step are put together first (`report.table.layout_tables`); the files are those of one of them.
        stamped: the name of the result ends with the time.
    """

    target: Path
    golden: Path
    step: int | None = None
    rank: int | None = None
    folder: str = "."
    stem: str = "compare_result"
    stack: Path | None = None
    calibration: tuple[Path, ...] = ()
    whole: bool = False
    stamped: bool = True

    @property
    def key(self) -> str:
        """Unique within a comparison: ``step1/compare_result_rank0``."""
        return f"{self.folder}/{self.stem}"

    @property
    def place(self) -> str:
        """For messages: ``step 1, rank 0``."""
        said = [f"step {self.step}"] if self.step is not None else []
        said += [f"rank {self.rank}"] if self.rank is not None else []
        return ", ".join(said) or self.target.parent.name or str(self.target)

    @property
    def size(self) -> int:
        """Bytes of both files; 0 of those that are not there."""
        return sum(map(size_of_step_file, (self.target, self.golden)))


@dataclass
class Sources:
    """What is to be compared.

    Attributes:
        tasks: by step and rank.
        notes: what is left out, and why, one sentence each.
        lost: sentences about data that was asked for and cannot be compared.
        dumps: those of both sides; None of files, of static graphs, and of the folders of a mixed dump.
    """

    tasks: list[Task] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    dumps: tuple[DumpDirectory | None, DumpDirectory | None] = (None, None)
