"""What `diagnose` says of the monitor output of two runs: where their series part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msprobe_engine.core.errors import NothingCapturedError
from msprobe_engine.core.text.ranges import ranges_of, ranks_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import findings
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.monitor.between_steps import changed_between
from msprobe_engine.find.monitor.given_batches import find_other_batches
from msprobe_engine.find.monitor.nearest import nearest_first
from msprobe_engine.find.monitor.number_pairs import Number, paired_numbers
from msprobe_engine.find.monitor.one_sided import never_there
from msprobe_engine.find.monitor.other_batches import (
    calls_cut_otherwise,
    leave_out_unequal,
    losses_over_ranks,
    not_comparable,
    ranks_of_one_side,
    without_call,
)
from msprobe_engine.find.monitor.other_scale import without_scale
from msprobe_engine.find.monitor.series_noise import SeriesNoise
from msprobe_engine.find.monitor.shapes_and_dtypes import (
    are_of_one_layout,
    cut_otherwise,
    of_other_form,
    of_other_stages,
    other_kinds,
    rounded_in_one_run,
    world_size,
)
from msprobe_engine.find.monitor.suspects import MOST_SUSPECTS, row_of, say_again, suspect_of
from msprobe_engine.formats.monitor.completeness import (
    began_later,
    looked_at_by_one,
    missing_parts,
    other_runs,
    steps_on_one_side,
    still_running,
)
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key


def diagnose_two_monitors(target: Run, golden: Run, exact: bool = False) -> Diagnosis:
    """Two runs: the first step, and in it the first tensor in the order of execution, whose numbers part by more than before
    (`find.monitor.nearest`).

    Args:
        target, golden: the run in question, and the golden one.

    Raises:
        NothingCapturedError: there is no number that both have.
    """
    diagnosis = Diagnosis()
    runs, elsewhere = (target, golden), of_other_stages(target, golden)
    target, golden = (run.without_ranks(elsewhere) for run in runs)
    items, alone = paired_numbers(target, golden)
    apart, said_apart = not_comparable(target, golden)
    cut = cut_otherwise(target, golden, apart)
    apart |= cut.families
    unlike = of_other_form(target, golden) | cut.tensors
    calls, said_calls = calls_cut_otherwise(target, golden) if not apart else (set(), [])
    items = [
        item
        for item in items
        if item.family not in apart and (item.rank, item.family, item.key) not in unlike and item.key.name not in cut.totals
        if not item.family.startswith("actv") or (item.rank, without_call(item.key.name)) not in calls
    ]
    if not items:
        why = [*missing_parts(target), *missing_parts(golden)] or ["is it the same training?"]
        raise NothingCapturedError("; ".join([f"{target.path} and {golden.path}: no rank, step and tensor in common", *why]))
    means = set(losses_over_ranks(target, golden)) if apart == {"loss"} else set()
    losses_agree = bool(means)
    items += means
    noise = SeriesNoise(target, golden)
    ranks_of_both = world_size(target), world_size(golden)
    items, said_scale = without_scale(items, noise.of_gradients, ranks_of_both[0] / ranks_of_both[1] if all(ranks_of_both) else 1.0)
    diagnosis.evidence += said_scale
    by_step: dict[int, list[Number]] = {}
    for item in items:
        by_step.setdefault(item.step, []).append(item)
    largest: Number | None = None
    begins: Number | None = None
    alone_off: _Off | None = None
    for step in sorted(by_step):
        noise.add_step(by_step[step])
        limits = {item: 0.0 if exact else noise.limit(item) for item in by_step[step] if item.distance}
        losses_agree &= leave_out_unequal(limits, means)
        begins = begins or next(iter(nearest_first(limits, by_step[step])), None)
        off = nearest_first((item for item, limit in limits.items() if item.distance > limit), by_step[step])
        largest = max((number for number in (largest, *limits) if number is not None), key=lambda number: number.distance, default=None)
        if off and alone_off is None and not exact and noise.may_pass(off, limits):
            alone_off = _Off(off, limits, len(by_step[step]))
            continue
        if off:
            alone_off = alone_off or _Off(off, limits, len(by_step[step]))
            _say_part(diagnosis, alone_off, after=sum(earlier < alone_off.items[0].step for earlier in by_step))
            diagnosis.next = say_again(alone_off.items[0].step, [alone_off.items[0].rank], diagnosis.finding, golden=True)
            break
        noise.accept(step, limits)
        if alone_off is not None and alone_off.is_answered(by_step[step]):
            alone_off = None
    if losses_agree:
        said_apart = []
        diagnosis.evidence.append(Sentence("Each rank has the loss of its own part of the batch: the mean over the ranks was compared."))
    shapes, types, computed = other_kinds(target, golden, cut)
    families_and_names = ((number, *number.record.partition("/")[::2]) for number in shapes)
    shapes = [number for number, family, name in families_and_names if family not in apart and (number.rank, name) not in calls]
    absent = [] if elsewhere else never_there(target, golden, apart, calls)  # a layer has another name on its stage
    # what one run has no number of, and what was changed before a step begins, comes before all that differs in the step
    for finding, suspects in (
        (findings.STRUCTURE, sorted([*absent, *shapes], key=lambda number: number.step)),
        (findings.DIVERGENCE, changed_between(target, golden)),
    ):
        first = diagnosis.first_suspect
        if suspects and (first is None or suspects[0].step <= first.step):
            diagnosis.finding, diagnosis.suspects = finding, [*suspects, *diagnosis.suspects][:MOST_SUSPECTS]
    parted = alone_off.items if alone_off is not None and diagnosis.suspects else []
    _ask_batches(diagnosis, target, golden, any(item.family == "loss" or item.family.startswith("actv") for item in parted))
    diagnosis.evidence += types
    diagnosis.problems = [
        *missing_parts(runs[0]),
        *missing_parts(runs[1]),
        *steps_on_one_side(target, golden),
        *said_apart,
        *cut.said,
        *said_calls,
    ]
    diagnosis.remarks = [
        *(said for of_runs in (still_running, other_runs) for run in (target, golden) for said in of_runs(run)),
        *began_later(target, golden),
        *looked_at_by_one(target, golden),
    ]
    diagnosis.evidence += diagnosis.remarks
    diagnosis.problems += [_said_alone((golden if k else target).path, names) for k, names in enumerate(alone) if names]
    diagnosis.problems += [f"{word} ({count})" for run in (target, golden) for word, count in run.problems.items()]
    if not diagnosis.suspects:
        diagnosis.evidence.append(_say_largest(largest))
        if begins is not None and are_of_one_layout(target, golden):
            template = (
                "The runs begin to differ at step {0}, rank {1}, {2}; where two runs of one program have the same numbers, that is no "
                "round-off."
            )
            diagnosis.evidence.append(Sentence(template, begins.step, begins.rank, row_of(begins.family, begins.key.name)))
            diagnosis.next = say_again(begins.step, [begins.rank], diagnosis.finding, golden=True)
        if not computed and not cut.tensors and (rounded := rounded_in_one_run(target, golden, items)) is not None:
            computed = [rounded]
        if computed:  # numbers that agree within the round-off of another type are no all-clear
            diagnosis.finding, diagnosis.suspects = findings.STRUCTURE, computed
        diagnosis.problems += [] if alone_off is None else [alone_off.sentence()]
    diagnosis.problems += ranks_of_one_side(target, golden, apart)
    if elsewhere:
        template = "{0}: not compared, for it is another stage of the pipeline in the other run"
        diagnosis.problems.append(Sentence(template, ranks_text(sorted(elsewhere))))
    steps = sorted(by_step)
    ranks = len(set(target.ranks) & set(golden.ranks))
    diagnosis.looked_at = {"steps": f"{steps[0]} to {steps[-1]}", "ranks": ranks, "numbers": len(items)}
    return diagnosis


@dataclass(frozen=True)
class _Off:
    """Numbers of a step that differ by more than round-off explains.

    Attributes:
        items: nearest to the cause first.
        limits: what would be accepted.
        of: how many numbers were compared in the step.
    """

    items: Sequence[Number]
    limits: Mapping[Number, float]
    of: int

    def is_answered(self, later: Iterable[Number]) -> bool:
        """Were any of them looked at again?"""
        places = {(item.rank, item.family, item.key, item.op) for item in self.items}
        return any((item.rank, item.family, item.key, item.op) in places for item in later)

    def sentence(self) -> Sentence:
        """Of a step that no later one answers."""
        first = self.items[0]
        template = "{0} numbers of step {1} differ by up to {2}, which no later step confirms or clears, the first is {3}"
        furthest = max(item.distance for item in self.items)
        return Sentence(template, f"{len(self.items):,}", first.step, f"{furthest:.2%}", row_of(first.family, first.key.name))


def _say_part(diagnosis: Diagnosis, parted: _Off, after: int) -> None:
    """`after`: so many steps that both runs have come before."""
    off, limits, of = parted.items, parted.limits, parted.of
    first = off[0]
    bad = not math.isfinite(first.target) and math.isfinite(first.golden)
    diagnosis.finding = findings.NONFINITE if bad else findings.DIVERGENCE
    seen: dict[tuple[str, Key], Number] = {}
    ranks: dict[tuple[str, Key], set[int]] = {}
    for item in off:
        seen.setdefault((item.family, item.key), item)
        ranks.setdefault((item.family, item.key), set()).add(item.rank)
    for item in list(seen.values())[:MOST_SUSPECTS]:
        share = f"{item.distance:.2%}" if item.distance >= 1e-3 else f"{item.distance:.1e}"
        size = Sentence("an infinite amount") if math.isinf(item.distance) else share
        diagnosis.suspects.append(
            suspect_of(
                item,
                Sentence(
                    "{0} is {1}, in the golden run {2}: {3} ({4} would be accepted)",
                    item.op,
                    f"{item.target:.6g}",
                    f"{item.golden:.6g}",
                    size,
                    f"{limits[item]:.1e}",
                ),
                limits[item],
            )
        )
        agreeing = sorted(ranks[item.family, item.key])
        diagnosis.suspects[-1].on_ranks = ranges_of(agreeing) if len(agreeing) > 1 else []
        if item.op == "value":  # a number of the step: learning rate, loss, loss scale, norm of all gradients
            name = item.key.name.rpartition("/")[2]
            diagnosis.suspects[-1].cause = Sentence("{0} {1}, golden {2}", name, f"{item.target:.6g}", f"{item.golden:.6g}")
    diagnosis.differences = len(seen)
    numbers = first.step, f"{len(off):,}", f"{of:,}"
    if after:
        said = Sentence("Step {0}: {1} of {2} numbers differ by more than round-off explains; all steps before agree.", *numbers)
    else:
        said = Sentence("Step {0}, the first one: {1} of {2} numbers differ by more than round-off explains.", *numbers)
    diagnosis.evidence.append(said)


def _ask_batches(diagnosis: Diagnosis, target: Run, golden: Run, forward: bool) -> None:
    """Of runs that part in what the models compute (`forward`: a loss or an activation of that step), another batch of that step comes
    before all that differs in it."""
    first = diagnosis.first_suspect
    if first is None:
        return
    other, same = find_other_batches(target, golden, first.step)
    if other is not None and forward:
        diagnosis.finding, diagnosis.suspects = findings.DIVERGENCE, [other, *diagnosis.suspects][:MOST_SUSPECTS]
    elif same is not None:
        diagnosis.evidence.append(same)


def _said_alone(path: Path, names: Sequence[str]) -> Sentence:
    if len(names) == 1:
        return Sentence("{0}: 1 number of a step that both runs have is not in the other run and was not compared: {1}", path, names[0])
    template = "{0}: {1} numbers of steps that both runs have are not in the other run and were not compared, the first is {2}"
    return Sentence(template, path, f"{len(names):,}", names[0])


def _say_largest(item: Number | None) -> Sentence:
    """How far the runs are apart where nothing is off."""
    if item is None:
        return Sentence("All numbers are the same.")
    template = "The largest difference is {0} of a number: step {1}, rank {2}, {3}, {4} {5} against {6}."
    row, numbers = f"{item.family}/{item.key.name}", (f"{item.target:.7g}", f"{item.golden:.7g}")
    return Sentence(template, f"{item.distance:.1e}", item.step, item.rank, row, item.op, *numbers)
