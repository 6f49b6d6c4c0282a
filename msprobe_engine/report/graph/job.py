"""One graph to be made, or two beside each other; and all that a command makes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from msprobe_engine.formats.dump.ring_file import size_of_step_file


@dataclass(frozen=True)
class Job:
    """One graph to be made, or two beside each other.

    Attributes:
        target: dump.json or debug.json.
        golden: that of the golden run; None: there is one side only.
        step, rank: of the target; 0 where its path does not say.
        golden_step, golden_rank: of the golden run.
        members, golden_members: rank and file of all ranks that are put together, the first of which `target` (`golden`) is; empty: this
            one alone.
        across: the two sides were cut over their ranks in different ways.
    """

    target: Path
    golden: Path | None
    step: int
    rank: int
    golden_step: int = 0
    golden_rank: int = 0
    members: tuple[tuple[int, Path], ...] = ()
    golden_members: tuple[tuple[int, Path], ...] = ()
    across: bool = False

    def for_workers(self) -> Job:
        """The same for a process that may run in another directory."""
        golden = None if self.golden is None else _absolute(self.golden)
        members, golden_members = ([(rank, _absolute(path)) for rank, path in some] for some in (self.members, self.golden_members))
        return replace(self, target=_absolute(self.target), golden=golden, members=tuple(members), golden_members=tuple(golden_members))

    @property
    def size(self) -> int:
        """Bytes of the files; 0 of those that are not there."""
        files = [path for _, path in (*self.ranks, *self.golden_ranks)]
        return sum(map(size_of_step_file, files))

    @property
    def ranks(self) -> tuple[tuple[int, Path], ...]:
        """Rank and file of all that the target is made of."""
        return self.members or ((self.rank, self.target),)

    @property
    def golden_ranks(self) -> tuple[tuple[int, Path], ...]:
        """The same of the golden run; empty without one."""
        return self.golden_members or (((self.golden_rank, self.golden),) if self.golden is not None else ())

    @property
    def key(self) -> tuple[int, int]:
        """Step and rank, unique within a run."""
        return self.step, self.rank

    @property
    def place(self) -> str:
        if len(self.members) > 1:
            return f"step {self.step}, ranks {', '.join(str(rank) for rank, _ in self.members)}"
        return f"step {self.step}, rank {self.rank}"


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


@dataclass
class Jobs:
    """What is to be made.

    Attributes:
        jobs: by step and rank, each pair of these once.
        notes: what is left out on purpose, and why, one sentence each.
        lost: sentences about data that was asked for and is not there.
        merge: ranks are put together although nobody asked for it: the two runs are cut over their ranks in different ways.
    """

    jobs: list[Job] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    merge: bool = False
