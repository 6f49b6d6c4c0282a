"""What is missing of a step, as far as its files tell: the one place that all commands ask, so that none calls a part the whole.

A dump of the existing tool has neither the key ``complete`` nor a mark; nothing is missing of it as far as it tells.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msprobe_engine.core.log import get_logger
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.reader import DumpDirectory
from msprobe_engine.formats.dump.ring_file import damages_in

_log = get_logger()


def missing_ranks(dump: DumpDirectory, step: int, ranks: Collection[int] = ()) -> list[str]:
    """Sentences about the directories of ranks of a step that hold no dump, or are of a rank that another one is of, and about ranks that
    other steps have, or that the dump itself says there are, and about ranks of an earlier run. Of the directory of one rank nothing is
    said.

    Args:
        ranks: those that were asked for; empty: all.
    """
    found: list[str] = []
    if repeated := dump.repeated_ranks(step):
        template = "{0}, step {1}: several directories are of one rank, and one of them is read: {2}"
        found.append(Sentence(template, dump.root, step, ", ".join(repeated[:8])))
    found += of_earlier_runs(dump, step)
    names = dump.empty_ranks(step)
    known, told = _absent_ranks(dump, step, names)
    if listed := _format_ranks(known, ranks):
        found.append(Sentence("{0}, step {1}: no directory of ranks {2}, which other steps have", dump.root, step, listed))
    if listed := _format_ranks(told, ranks):
        template = "{0}, step {1}: no directory of ranks {2}, which the run had: had they no probe, or is it a copy of a part?"
        found.append(Sentence(template, dump.root, step, listed))
    if not names:
        return found
    template = "{0}, step {1}: no dump.json in {2}; were they killed before they wrote it, or is it a copy of a part?"
    return [*found, Sentence(template, dump.root, step, some(names))]


def of_earlier_runs(dump: DumpDirectory, step: int | None = None) -> list[str]:
    """Sentences about ranks of a step that an earlier run has left in the directory, or about its steps."""
    if step is None:
        template = "{0}: of an earlier run in this directory, and not read: steps {1}"
        return [Sentence(template, dump.root, some(dump.earlier_steps))] if dump.earlier_steps else []
    template = "{0}, step {1}: of an earlier run in this directory, and not read: {2}"
    return [Sentence(template, dump.root, step, some(names))] if (names := dump.earlier_ranks(step)) else []


def all_of_earlier_runs(dump: DumpDirectory) -> list[str]:
    """Sentences about the steps and about the ranks of every step that an earlier run has left in the directory."""
    return [sentence for step in (None, *dump.steps) for sentence in of_earlier_runs(dump, step)]


def warn_of_earlier_runs(dump: DumpDirectory) -> None:
    """For a reader whose answer has no place for it."""
    for sentence in all_of_earlier_runs(dump):
        _log.warning("%s", sentence)


def _absent_ranks(dump: DumpDirectory, step: int, empty: Collection[str]) -> tuple[list[int], list[int]]:
    """Ranks that another step has, and further ones that the header of a rank of the step says there are; none where a directory of the
    step does not say its rank, or one rank was asked for."""
    present = dump.ranks(step)
    if any(isinstance(rank, str) for rank in present) or layout.is_rank_directory(dump.root.resolve().name):
        return [], []
    absent = {layout.rank_of(name) for name in empty}.union(rank for rank in present if isinstance(rank, int))
    expected = dump.head(dump.path(step, present[0])).expected_ranks()
    earlier = {layout.rank_of(name) for name in dump.earlier_ranks(step)}
    known = {rank for rank in dump.known_ranks - absent - earlier if not expected or rank in expected}
    return sorted(known), sorted(expected - absent - known)


def _format_ranks(absent: Sequence[int], wanted: Collection[int]) -> str:
    """Those of some ranks that are wanted, of many the first ones; "" without one."""
    return some([rank for rank in absent if not wanted or rank in wanted])


def missing_steps(dump: DumpDirectory, steps: Collection[int] = ()) -> list[str]:
    """Sentences about the steps of which there are directories and no dump, and about those of an earlier run; of all steps, or of those
    that are asked for."""
    empty = [step for step in dump.empty_steps if not steps or step in steps]
    found: list[str] = [Sentence("{0}: no dump.json in the directories of steps {1}", dump.root, some(empty))] if empty else []
    found += damages_in(dump.rings)
    return found + (of_earlier_runs(dump) if not steps or not set(steps).isdisjoint(dump.earlier_steps) else [])


def steps_on_one_side(target: DumpDirectory, golden: DumpDirectory) -> list[str]:
    """Sentences about steps that one of two dumps has alone. Dumps of one step each are compared whatever its number is."""
    if len(target.steps) == len(golden.steps) == 1:
        return []
    found: list[str] = []
    for dump, other in ((target, golden), (golden, target)):
        only = [step for step in dump.steps if step not in other.steps]
        if only:
            template = "{0}: steps {1} are not in {2} and were not compared"
            if len(only) == 1:
                template = "{0}: step {1} is not in {2} and was not compared"
            found.append(Sentence(template, dump.root, some(only), other.root))
    return found
