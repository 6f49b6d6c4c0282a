"""Of many ranks those that hold the same have one table: the others are named in the summary, and have none of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from msprobe_engine.align.sources import Task
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.replicas import digest_of
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.rank_table import Result

MANY = 64
"""Of up to so many steps and ranks each has a table."""


def leaders(tasks: Sequence[Task], options: CompareOptions) -> dict[str, str]:
    """Key of a task -> key of the one before it whose two dumps differ from its own only in the ranks that they name."""
    if len(tasks) <= MANY or options.compat or options.consistent_check:
        return {}
    digest = lru_cache(maxsize=None)(digest_of)
    first: dict[tuple[str, bytes, bytes], str] = {}
    found: dict[str, str] = {}
    for task in tasks:
        if task.whole or task.calibration or task.stack is not None:
            continue
        target = digest(task.target)
        golden = None if target is None else digest(task.golden)
        if target is None or golden is None:
            continue
        leader = first.setdefault((task.folder, target, golden), task.key)
        if leader != task.key:
            found[task.key] = leader
    return found


def follow(result: Result, key: str) -> Result:
    """What a task came to whose table is that of `result`."""
    return replace(result, key=key, files=[], same_as=result.key, names={side: list(some) for side, some in result.names.items()})


def run(tasks: Sequence[Task], led: Mapping[str, str], results: dict[str, Result], do: Callable[[Sequence[Task]], None]) -> list[Task]:
    """Do the tasks that others follow, then those of the followers whose leader has no table; the tasks that have followed."""
    do([task for task in tasks if task.key not in led])
    alone = [task for task in tasks if task.key in led and _has_no_table(results.get(led[task.key]))]
    if alone:
        do(alone)
    known = {task.key for task in alone}
    followed = [task for task in tasks if task.key in led and task.key not in known]
    for task in followed:
        results[task.key] = follow(results[led[task.key]], task.key)
    return followed


def _has_no_table(result: Result | None) -> bool:
    return result is None or not result.files or bool(result.problems)


def said(number: int) -> str:
    """That tables are not written."""
    one = "1 rank has no table of its own: its dumps differ from another rank's only in the ranks that they name; the summary says whose"
    many = (
        "{0} ranks have no table of their own: their dumps differ from another rank's only in the ranks that they name; the summary says"
        " whose (--rank N writes it)"
    )
    return Sentence(one) if number == 1 else Sentence(many, f"{number:,}")
