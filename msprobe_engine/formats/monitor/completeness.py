"""What is missing of a monitored run, as far as its files tell: the one place that all commands ask, so that none calls a part the whole.

The steps of a rank are those of its numbers of the steps, which every step of this tool has. The existing tool writes none of these: there
they are the steps of one family that all ranks have.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.io.claims import FURTHER_RUN
from msprobe_engine.core.log import one_line
from msprobe_engine.core.process.processes import Process, parse_process
from msprobe_engine.core.text.ranges import few_ranges, ranks_text, steps_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.words import shorten_text, some
from msprobe_engine.core.window import Window
from msprobe_engine.formats.monitor import losses
from msprobe_engine.formats.monitor.losses import Loss
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.run_layout import rank_directory
from msprobe_engine.formats.monitor.series import whole

_LOOKS = re.compile(r"rule .+|(.+ )?capture|attach|step (begin|boundary)|monitor\.(?!hot$).+")
"""Names of parts without which less is looked at."""
_MOST = 8
"""Sentences of one kind: of many ranks that each lack something else the first ones."""
_NAMED = 16
"""Ranks without files that are named."""
_NO_STEP = "{0}: no step is there; the run was killed before it wrote its first one, could not write, or has just begun"

Steps = Mapping[int, frozenset[int]]


def missing_parts(run: Run) -> list[str]:
    """Sentences about ranks without files, ranks that lack steps which others have, ranks that did not end, steps that were interrupted,
    what could not be written, parts of the probe that failed, and ranks with other settings; and about a run of which there is no step."""
    if not run.ranks:
        return [Sentence(_NO_STEP, run.path)]
    return [
        *_missing_ranks(run),
        *_missing_steps(run),
        *_cut_off(run),
        *_interrupted_steps(run),
        *_losses(run),
        *_failed(run),
        *_other_settings(run),
    ]


def _failed(run: Run) -> list[str]:
    """Rules, and parts that look at tensors, which a fault of their own has switched off on the way: what they did not see nobody did."""
    off: dict[tuple[str, str], list[int]] = {}
    for rank in run.ranks:
        told = run.info(rank).get("switched_off")
        for part, error in told.items() if isinstance(told, Mapping) else ():
            if _LOOKS.fullmatch(part):
                off.setdefault((one_line(str(part)), one_line(str(error))), []).append(rank)
    template = "{0}: {1} has failed on {2} ({3}) and was off from then on: what it would have seen is not known"
    return [Sentence(template, run.path, part, ranks_text(ranks), error) for (part, error), ranks in islice(off.items(), _MOST)]


def remarks(run: Run) -> list[str]:
    """Sentences about what a run says of itself that is no fault: -Inf that the rule `nan_inf` has taken for that of masks, data that came
    again, parameters that are in no optimizer, ranks that left tensors to others, and names of a framework that its version lacks, with the
    part of the probe that is off for it."""
    found: list[str] = []
    if remark := _find_remarks(run, "masks", "tensors"):
        ranks, count, facts = remark
        template = "{0}: -Inf in {1} activations of {2} did no harm and was taken for that of masks, the first is {3} in step {4}"
        if count == 1:
            template = "{0}: -Inf in {1} activation of {2} did no harm and was taken for that of masks: {3} in step {4}"
        found.append(Sentence(template, run.path, f"{count:,}", ranks_text(ranks), facts["first"], facts.get("step")))
    if remark := _find_remarks(run, "batches", "steps"):
        ranks, count, facts = remark
        template = "{0}: the first {1} steps of {2} have the same batch, which is right only where one batch is to be learned by heart"
        if facts["first"] != "one batch":
            template = "{0}: every {1} steps of {2} have the batches of the epoch before in the same order: the data are not shuffled"
        found.append(Sentence(template, run.path, f"{count:,}", ranks_text(ranks)))
    if remark := _find_remarks(run, "without_optimizer", "parameters"):
        ranks, count, facts = remark
        template = "{0}: {1} parameters of {2} are in no optimizer and have no update statistics, the first is {3}"
        if count == 1:
            template = "{0}: {1} parameter of {2} is in no optimizer and has no update statistics: {3}"
        found.append(Sentence(template, run.path, f"{count:,}", ranks_text(ranks), facts["first"]))
    if of := {tuple(chosen) for rank in run.ranks if (chosen := _tensors_of(run, rank))}:
        template = "{0}: numbers of tensors were written by ranks {1} alone (sinks.rank); the others wrote those of the step, and alerts"
        found.append(Sentence(template, run.path, few_ranges(max(of))))
    gone: dict[tuple[str, str], list[int]] = {}
    for rank in run.ranks:
        for name, part in told.items() if isinstance(told := run.info(rank).get("missing"), Mapping) else ():
            gone.setdefault((one_line(str(name)), one_line(str(part))), []).append(rank)
    for (name, part), ranks in islice(gone.items(), _MOST):
        template = "{0}: {1} was not there on {2} (another version of the framework), so this was off: {3}"
        found.append(Sentence(template, run.path, name, ranks_text(ranks), part))
    return found


def _tensors_of(run: Run, rank: int) -> list[str]:
    """Ranges of the ranks whose tensors are written, as a rank says; empty: all."""
    told = run.info(rank).get("tensors_of")
    ranks = told.get("ranks") if isinstance(told, Mapping) else None
    return [one_line(str(one)) for one in ranks] if isinstance(ranks, list) else []


def _find_remarks(run: Run, key: str, number: str) -> tuple[list[int], int, Mapping[str, Any]] | None:
    """Ranks that have a remark under `key`, the largest `number` in these, and the first remark; None without one."""
    by_rank = {rank: facts for rank in run.ranks if isinstance(facts := run.info(rank).get(key), Mapping)}
    by_rank = {rank: facts for rank, facts in by_rank.items() if isinstance(facts.get("first"), str) and whole(facts.get(number))}
    if not by_rank:
        return None
    return list(by_rank), max(whole(facts[number]) or 0 for facts in by_rank.values()), next(iter(by_rank.values()))


def still_running(run: Run) -> list[str]:
    """A sentence where processes of the run live on this machine: what is here is what they have written so far."""
    last = {rank: _last_whole(run, rank) for rank, process in _find_unclosed_ranks(run).items() if process.runs()}
    if not last:
        return []
    template = "{0}: {1} still run; the last step that is whole so far is {2}"
    if len(last) == 1:
        template = "{0}: {1} is still running; the last step that is whole so far is {2}"
    return [Sentence(template, run.path, ranks_text(sorted(last)), min(last.values(), key=lambda step: -1 if step is None else step))]


def other_runs(run: Run) -> list[str]:
    """A sentence where the directory has further runs in it (``run-2``): they are not looked at."""
    if not run.path.is_dir():
        return []
    names = [path.name for path in run.path.iterdir() if FURTHER_RUN.fullmatch(path.name) and path.is_dir()]
    names.sort(key=lambda name: (len(name), name))
    if not names:
        return []
    return [Sentence("{0}: {1} in it are runs of their own and were not looked at", run.path, some(names, 4))]


def steps_on_one_side(target: Run, golden: Run) -> list[str]:
    """Sentences about steps that one of two runs has alone on a rank. Steps between those that the other run monitors by its interval
    are none of them, nor are steps before the one that the other run began with (`began_later`)."""
    of_target, of_golden = _steps_of_ranks([target, golden])
    sentences: list[str] = []
    for run, other, own, others in ((target, golden, of_target, of_golden), (golden, target, of_golden, of_target)):
        pairs: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
        for rank in sorted(set(own) & set(others)):
            pairs.setdefault((own[rank], others[rank]), []).append(rank)
        alone: dict[frozenset[int], list[int]] = {}
        for (own_steps, other_steps), ranks in pairs.items():
            began = _began(other, ranks[0])
            if only := frozenset(step for step in _monitored_by(other, ranks[0], other_steps, own_steps - other_steps) if step >= began):
                alone.setdefault(only, []).extend(ranks)
        for only, ranks in islice(alone.items(), _MOST):
            template = "{0}: {1} of {2} are not in {3} and were not compared"
            if len(only) == 1:
                template = "{0}: {1} of {2} is not in {3} and was not compared"
            sentences.append(Sentence(template, run.path, steps_text(sorted(only)), ranks_text(sorted(ranks)), other.path))
    return sentences


def passed_over(run: Run, rank: int) -> npt.NDArray[np.int64]:
    """Steps in which a rank looked at no tensors, as its settings say (``first_steps``, ``interval``), ascending."""
    steps = sorted(run.recorded_steps(rank)[0])
    monitor = run.info(rank).get("monitor")
    if not isinstance(monitor, Mapping) or not steps or monitor.get("hot"):
        return np.zeros(0, np.int64)
    start, interval, first = (whole(monitor.get(key)) or 0 for key in ("start_step", "interval", "first_steps"))
    window = Window(start=start, interval=max(interval, 1), first=first)
    window.is_first(_began(run, rank))
    return np.array([step for step in steps if not window.is_wanted(step, rank)], np.int64)


def looked_at_by_one(target: Run, golden: Run) -> list[str]:
    """A sentence where one run has looked at tensors in steps that the other has passed over: a training that went on from a checkpoint has
    first steps of its own."""
    sentences: list[str] = []
    for run, other in ((target, golden), (golden, target)):
        steps: set[int] = set()
        for rank in set(run.ranks) & set(other.ranks):
            looked = run.recorded_steps(rank)[0].difference(passed_over(run, rank).tolist())
            steps |= looked.intersection(passed_over(other, rank).tolist())
        if steps:
            template = "{0} looked at tensors in {1}, {2} by its settings did not: of these the numbers of the step alone were compared"
            sentences.append(Sentence(template, run.path, steps_text(sorted(steps)), other.path))
    return sentences


def began_later(target: Run, golden: Run) -> list[str]:
    """A sentence where one run says that its first step is a later one, as a resumed training's is: nothing of it is missing."""
    first = [min((_began(run, rank) for rank in run.ranks), default=0) for run in (target, golden)]
    if first[0] == first[1]:
        return []
    later, other = (target, golden) if first[0] > first[1] else (golden, target)
    template = "{0} began with step {1}; what {2} did before was not compared"
    return [Sentence(template, later.path, max(first), other.path)]


def _began(run: Run, rank: int) -> int:
    """The first step of a rank, as it says itself; 0 where it does not."""
    return whole(run.info(rank).get("first_step")) or 0


def _missing_ranks(run: Run) -> Iterator[str]:
    if run.path.is_file() or rank_directory(run.path.resolve()) is not None:
        return  # one rank was asked for
    infos = [run.info(rank) for rank in run.ranks]
    world = max((whole(info.get("world_size")) or 0 for info in infos), default=0)
    chosen = _chosen_ranks(run)
    having = set(run.ranks)
    expected: Collection[int] = {rank for rank in chosen if rank < world} if chosen else range(world)
    count = len(expected) - sum(rank in expected for rank in having)
    if count <= 0:
        return
    missing = list(islice((rank for rank in sorted(expected) if rank not in having), _NAMED)) if chosen else _first_gaps(having)
    missing = missing[:count]
    more = Sentence("{0} and {1} more", ranks_text(missing), f"{count - len(missing):,}") if count > len(missing) else ranks_text(missing)
    template = "{0}: the run had {1} ranks, and there are no files of {2}; a process was killed early, or this is a copy of a part"
    yield Sentence(template, run.path, f"{world:,}", more)


def _first_gaps(having: Collection[int]) -> list[int]:
    """The first numbers from 0 on that are not in `having`."""
    return list(islice((rank for rank in range(len(having) + _NAMED) if rank not in having), _NAMED))


def _chosen_ranks(run: Run) -> frozenset[int]:
    """Ranks that the settings of the run name as those that monitor; empty: all."""
    found: set[int] = set()
    for rank in run.ranks:
        monitor = run.info(rank).get("monitor")
        ranks = monitor.get("rank") if isinstance(monitor, Mapping) else None
        found.update(number for one in (ranks if isinstance(ranks, list) else ()) if (number := whole(one)) is not None and number >= 0)
    return frozenset(found)


def _missing_steps(run: Run) -> Iterator[str]:
    (steps,) = _steps_of_ranks([run])
    chosen = _chosen_ranks(run)
    alike: dict[frozenset[int], list[int]] = {}
    for rank, own in steps.items():
        if own or not chosen or rank in chosen:
            alike.setdefault(own, []).append(rank)
    together = frozenset[int]().union(*alike)
    if not together:
        told = any(kept is not None and kept.lost for rank in run.ranks for _, kept in run.losses(rank))
        yield Sentence("{0}: no step is there", run.path) if told else Sentence(_NO_STEP, run.path)
    lacking = [(own, together - own, ranks) for own, ranks in alike.items() if len(own) < len(together)]
    for own, missing, ranks in lacking[:_MOST]:
        inner = sorted(step for step in missing if own and step < max(own))
        if not own:
            yield Sentence("{0}: {1} wrote no step, others go on to step {2}", run.path, ranks_text(ranks), max(together))
        elif len(inner) < len(missing):
            template = "{0}: {1} ended after step {2}, others go on to step {3}; a process was killed, or the run is still going on"
            yield Sentence(template, run.path, ranks_text(ranks), max(own), max(together))
        if inner:
            yield Sentence("{0}: no {1} of {2}, which other ranks have", run.path, steps_text(inner), ranks_text(ranks))


def _find_unclosed_ranks(run: Run) -> dict[int, Process]:
    """Ranks whose last launch has not closed its files, and who writes or wrote them."""
    found = {}
    for rank in run.ranks:
        for _, kept in run.losses(rank)[-1:]:
            if kept is not None and kept.process and (process := parse_process(kept.process)) is not None:
                found[rank] = process
    return found


def _last_whole(run: Run, rank: int) -> int | None:
    steps, interrupted = run.recorded_steps(rank)
    return max(steps - interrupted, default=None)


def _cut_off(run: Run) -> Iterator[str]:
    where: dict[tuple[str, int | None], list[int]] = {}
    for rank, process in _find_unclosed_ranks(run).items():
        runs = process.runs()
        if not runs:
            host = "" if runs is False else process.host or "another host"
            where.setdefault((host, _last_whole(run, rank)), []).append(rank)
    for (host, last), ranks in islice(where.items(), _MOST):
        who = ranks_text(sorted(ranks))
        seen = Sentence("no step is whole") if last is None else Sentence("the last step that is whole is {0}", last)
        if host:
            yield Sentence("{0}: {1} did not end, or still runs on {2}, which cannot be seen from here; {3}", run.path, who, host, seen)
        else:
            yield Sentence("{0}: {1} did not end: the process was killed or has crashed; {2}", run.path, who, seen)


def _interrupted_steps(run: Run) -> Iterator[str]:
    where: dict[frozenset[int], list[int]] = {}
    for rank in run.ranks:
        if steps := run.recorded_steps(rank)[1]:
            where.setdefault(steps, []).append(rank)
    for steps, ranks in islice(where.items(), _MOST):
        template = "{0}: {1} were interrupted on {2}; what is there of them is not the whole"
        if len(steps) == 1:
            template = "{0}: {1} was interrupted on {2}; what is there of it is not the whole"
        yield Sentence(template, run.path, steps_text(sorted(steps)), ranks_text(ranks))


def _losses(run: Run) -> Iterator[str]:
    where: dict[tuple[str, Loss], set[int]] = {}
    for rank in run.ranks:
        for file, kept in run.losses(rank):
            if not file.exists() and run.info(rank).get("losses") is True and file.parent.is_dir():
                yield Sentence("{0}: is not there; it would tell what the run could not write, and whether it ended", file)
            elif kept is None:
                yield Sentence("{0}: cannot be read; it would tell what the run could not write", file)
            for name, loss in (kept.lost if kept is not None else {}).items():
                where.setdefault((name, loss), set()).add(rank)
    for (name, loss), ranks in islice(where.items(), _MOST):
        yield losses.describe_loss(run.path, name, ranks_text(sorted(ranks)), loss)


def _other_settings(run: Run) -> Iterator[str]:
    """Ranks that were told to record something else than most: what they lack is no fault of the training, and nobody has looked there."""
    alike: dict[str, list[int]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for rank in run.ranks:
        info = run.info(rank)
        if isinstance(monitor := info.get("monitor"), Mapping):
            told = {f"monitor.{key}": value for key, value in monitor.items()} | {"rules": info.get("rules")}
            text = json.dumps(told, sort_keys=True, default=str)
            facts.setdefault(text, told)
            alike.setdefault(text, []).append(rank)
    usual = max(alike, key=lambda text: len(alike[text]), default="")
    for text, ranks in islice(alike.items(), _MOST + 1):
        if text != usual:
            keys = [key for key in facts[text] | facts[usual] if facts[text].get(key) != facts[usual].get(key)]
            said = some([f"{key} {_format_value(facts[text].get(key))} / {_format_value(facts[usual].get(key))}" for key in keys], 4)
            template = "{0}: {1} recorded by other settings than {2}: {3}; what only some ranks have was not compared between ranks"
            yield Sentence(template, run.path, ranks_text(ranks), ranks_text(alike[usual]), said)


def _format_value(value: Any) -> str:
    return shorten_text(json.dumps(value, default=str))


def _steps_of_ranks(runs: list[Run]) -> list[Steps]:
    """Of each run rank -> its steps; ranks with the same steps share one set."""
    numbers = [{rank: run.recorded_steps(rank)[0] for rank in run.ranks} for run in runs]
    if all(steps for one in numbers for steps in one.values()):
        return list(numbers)
    families = [run.families(rank) for run in runs for rank in run.ranks]
    common = [family for family in families[0] if all(family in other for other in families)][:1] if families else []
    known: dict[frozenset[int], frozenset[int]] = {}
    found: list[Steps] = []
    for run, one in zip(runs, numbers):
        tables: dict[int, frozenset[int]] = {}
        for rank in run.ranks:
            parts = (np.unique(run.table(rank, family).steps).tolist() for family in common or run.families(rank))
            steps = frozenset[int]().union(one[rank], *parts)
            tables[rank] = known.setdefault(steps, steps)
        found.append(tables)
    return found


def _monitored_by(run: Run, rank: int, own: frozenset[int], steps: Iterable[int]) -> Iterator[int]:
    """Of `steps` those that a run with these own steps would have monitored, had it come to them."""
    if not own:
        yield from steps
        return
    first = min(own)
    interval = reduce(math.gcd, (step - first for step in own))
    if not interval:
        monitor = run.info(rank).get("monitor")
        interval = max(1, whole(monitor.get("interval")) or 1) if isinstance(monitor, Mapping) else 1
    yield from (step for step in steps if (step - first) % interval == 0)
