"""Of many ranks those that hold the same have one table: the others are named in the summary, and have none of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msprobe_engine.align.sources import Task
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.replicas import StepTables
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table import same_ranks
from msprobe_engine.report.table.rank_table import Result


def leaders(tasks: Sequence[Task], options: CompareOptions, tables: StepTables) -> dict[str, str]:
    """Key of a task -> key of the one before it whose two dumps differ from its own only in the ranks that they name."""
    if len(tasks) <= same_ranks.MANY or options.compat or options.consistent_check:
        return {}
    alike = [task for task in tasks if not (task.whole or task.calibration or task.stack is not None)]

    def files(task: Task) -> same_ranks.Files:
        return same_ranks.Files(task.step or 0, (task.target, task.golden))

    return same_ranks.leaders(alike, lambda task: task.key, files, lambda task: task.folder, tables)


def follow(result: Result, key: str) -> Result:
    """What a task came to whose table is that of `result`."""
    return replace(result, key=key, files=[], same_as=result.key, names={side: list(some) for side, some in result.names.items()})


def run(tasks: Sequence[Task], led: Mapping[str, str], results: dict[str, Result], do: Callable[[Sequence[Task]], None]) -> list[Task]:
    """Do the tasks that others follow, then those of the followers whose leader has no table; the tasks that have followed."""
    followed = same_ranks.run(tasks, lambda task: task.key, led, do, lambda key: _has_table(results.get(key)))
    for task in followed:
        results[task.key] = follow(results[led[task.key]], task.key)
    return followed


def _has_table(result: Result | None) -> bool:
    return result is not None and bool(result.files) and not result.problems


def said(number: int) -> str:
    """That tables are not written."""
    one = "1 rank has no table of its own: its dumps differ from another rank's only in the ranks that they name; the summary says whose"
    many = (
        "{0} ranks have no table of their own: their dumps differ from another rank's only in the ranks that they name; the summary says"
        " whose (--rank N writes it)"
    )
    return Sentence(one) if number == 1 else Sentence(many, f"{number:,}")
