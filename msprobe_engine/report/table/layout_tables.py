"""Tables of runs with different layouts: one per step, of what the ranks of each side make together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from msprobe_engine.align.calls.match import Matching
from msprobe_engine.align.mapping.user_mapping import Mappings, describe_lost_mapping
from msprobe_engine.align.parallel.experts import together
from msprobe_engine.align.parallel.micro_batches import cut_into_micro_batches
from msprobe_engine.align.parallel.unshard.global_tensors import GlobalTensors
from msprobe_engine.align.parallel.unshard.planner import Unsharder
from msprobe_engine.align.tasks import Sources, Task
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.difference import layouts
from msprobe_engine.find.nonfinite.load import read_step
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.reader import DumpDirectory, open_dump
from msprobe_engine.formats.dump.stream import open_records
from msprobe_engine.formats.dump.world import parallel_of
from msprobe_engine.measure import distances


def as_wholes(sources: Sources) -> None:
    """Where the runs are of different layouts, put one task per step in place of one per rank. What a dump says of its layout decides; of
    runs with other numbers of ranks their shapes do."""
    tasks = [task for task in sources.tasks if task.rank is not None and task.target.name == task.golden.name == layout.DUMP]
    if not tasks or tasks != sources.tasks or not _differ(tasks[0], sources.dumps):
        return
    firsts: dict[str, Task] = {}
    for task in tasks:
        firsts.setdefault(task.folder, task)
    sources.tasks = [replace(task, rank=None, stem="compare_result_whole", whole=True) for task in firsts.values()]
    sources.lost[:] = [text for text in sources.lost if "ranks only in the" not in text]
    sources.notes[:] = [text for text in sources.notes if " ranks against " not in text]
    sources.notes.append(
        "The runs are of different layouts: tables compare what all ranks of a step make together. Rows that cannot be put together, and "
        "calls that one layout makes alone, are left out; the diagnosis counts them."
    )


def _differ(task: Task, dumps: Sequence[DumpDirectory | None]) -> bool:
    try:
        sizes = [_sizes(path) for path in (task.target, task.golden)]
        if all(sizes):
            return any(sizes[0].get(axis, 1) != sizes[1].get(axis, 1) for axis in ("tp", "pp", "dp", "cp", "ep", "vpp"))
        ranks = [_number_of_ranks(path, dump) for path, dump in zip((task.target, task.golden), dumps)]
        if ranks[0] == ranks[1]:
            return False
        target, golden = _sides(task)
        target, golden, other = together(target, golden, [], [])
        return bool(other) or layouts.differ(target, golden)
    except DumpFormatError:
        return False


def _sizes(path: Path) -> Mapping[str, int]:
    with open_records(path) as records:
        return parallel_of(records.header, "size")


def _step(path: Path) -> Path:
    return path.resolve().parent.parent


def _number_of_ranks(path: Path, dump: DumpDirectory | None) -> int:
    step = layout.step_of(_step(path).name) or 0
    dump = dump or open_dump(_step(path))
    return len(dump.ranks(step if step in dump.steps else dump.steps[0]))


def _sides(task: Task) -> tuple[Mapping[int, DumpTable], Mapping[int, DumpTable]]:
    found = []
    for path in (task.target, task.golden):
        dump, problems = open_dump(_step(path)), list[str]()
        sides = read_step(dump, dump.steps[0], problems)
        if problems:
            raise DumpFormatError("; ".join(problems))
        found.append(sides)
    return found[0], found[1]


def read_whole(task: Task, mappings: Mappings, problems: list[str]) -> tuple[GlobalTensors, int, Matching]:
    """Both wholes of a step, the lowest rank of the target, and which rows belong together: those that could be put together.

    Args:
        task: of which all ranks are read.
        problems: where to say what could not be used.

    Raises:
        DumpFormatError: a rank cannot be read, or a side is empty.
    """
    target, golden = _sides(task)
    if not target or not golden:
        raise DumpFormatError(f"{task.target if not target else task.golden}: no record in it; nothing to compare")
    mappings.apply_all(target, golden)
    ranks = target
    target, golden, _ = together(target, golden, [], [])
    problems += describe_lost_mapping(ranks, target)
    whole = Unsharder(cut_into_micro_batches(target, golden), cut_into_micro_batches(golden, target)).join()
    rows, _ = distances.paired_rows(whole.target, whole.golden, whole.structure.pairs)
    left_out = {*whole.plan.skipped, *of_groups(whole.target)}
    kept = np.array([pair for pair in rows if pair[0] not in left_out], np.int64).reshape(-1, 2)
    records = np.array(whole.target.op, np.int64), np.array(whole.golden.op, np.int64)
    return whole, min(ranks), Matching(kept[:, 0], kept[:, 1], {}, records)


def of_groups(side: DumpTable) -> Iterator[int]:
    """Arguments of calls that are given a process group: the group, and switches for what is done with it."""
    for op in {side.op[row] for row, dtype in enumerate(side.dtype) if dtype == "torch.ProcessGroup"}:
        yield from (row for row in side.rows(op) if row in side.values)
