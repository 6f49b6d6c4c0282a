"""Two runs, step after step: what has been seen of them so far, and what is said of it at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import numpy as np

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.align.mapping.user_mapping import describe_lost_mapping
from msprobe_engine.align.parallel.experts import together
from msprobe_engine.align.parallel.micro_batches import count_reordered
from msprobe_engine.core.errors import NothingCapturedError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import findings, saved_variables
from msprobe_engine.find.collectives.rank_checks import RankChecks
from msprobe_engine.find.coverage import one_sided_calls, other_ways, renames, two_frameworks
from msprobe_engine.find.coverage.common_records import AcceptedRows, are_unrelated, count_not_compared, restrict_to_common, say_one_sided
from msprobe_engine.find.difference import call_facts, evidence, explain, first_difference, layouts, suspects
from msprobe_engine.find.difference.divergence import Divergence, diverge
from msprobe_engine.find.difference.harmless import loss_scale
from msprobe_engine.find.difference.noise.calibration import Floats
from msprobe_engine.find.difference.optimizer.changed_between_steps import changed_before
from msprobe_engine.find.difference.optimizer.updated_parameters import name_learning_rate, name_parameters
from msprobe_engine.find.difference.optimizer.updates import note_update
from msprobe_engine.find.difference.rank_walk import RankWalk
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Diagnosis, Suspect
from msprobe_engine.find.fold_suspects import fold, stages_of
from msprobe_engine.find.nonfinite.one_side import SAME, SAME_BESIDE_NAN, SAME_IN_COMMON
from msprobe_engine.find.nonfinite.report import say_after_update
from msprobe_engine.find.origin import ARGUMENT
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.replicas.shared_columns import own_columns
from msprobe_engine.measure import distances, dump_dialects, factorize

Movements = Callable[[int, Mapping[int, DumpTable], list[str]], Mapping[int, Floats]]
AlreadyBegun = Callable[[int], Mapping[int, RankWalk]]
BothSides = Callable[[int, list[str]], tuple[Mapping[int, DumpTable], Mapping[int, DumpTable]]]


class StepLoop:
    """What is known of two runs after some of their steps.

    Attributes:
        found: the result in the making.
        before: of the last step that was walked, None before the first.
        looked: steps that both sides have.
    """

    def __init__(self, moved: Movements | None, begun: AlreadyBegun | None, exact: bool) -> None:
        self.found = Diagnosis()
        self.before: Divergence | None = None
        self.looked: list[int] = []
        self._moved, self._begun, self._exact = moved, begun, exact
        self._copies = RankChecks(), RankChecks()  # of both runs, each by itself
        self._other_calls = False  # of one side alone, that may change something
        self._first: Suspect | None = None  # where the runs begin to differ at all
        self._called: dict[tuple[int, str], int] = {}  # arguments of another value -> the first step that has them
        self._records = self._recorded = self._hidden = 0
        self._recomputed = self._mask = self._reordered = ""
        self._ways: str | None = None
        self._passes: str | None = None
        self._one_sided = False
        self._facts: list[Suspect] = []  # what records say beside numbers and is not the same
        self._ranks: set[int] = set()
        self._stages: dict[int, int] = {}
        self._largest = evidence.LargestAccepted()
        self._accepted = AcceptedRows()

    @property
    def ends(self) -> bool:
        """Something is off: later steps only show what follows from it."""
        return bool(self.found.suspects) or (self.before is not None and bool(self.before.origins))

    def saved_values(self, step: int, target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable]) -> None:
        """A step that holds nothing but what ``save()`` was given."""
        compared, hidden = saved_variables.add_differing_variables(self.found, step, target, golden)
        self._records += compared
        self._hidden += hidden
        self._ranks |= target.keys() & golden.keys()
        self.found.problems += [problem for side in (*target.values(), *golden.values()) for problem in side.problems]

    def step(self, step: int, target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable]) -> None:
        """The next step, of all ranks."""
        diagnosis = self.found
        sides_of_both = [*target.values(), *golden.values()]
        self._recorded += sum(len(side.ops) for side in target.values())
        self._stages = stages_of(target)
        for checks, ranks, others in zip(self._copies, (target, golden), (golden, target)):
            if len(ranks) > 1 and not checks.finding:
                checks.hold_replicas(step, ranks, others)
        target_as_read = target
        target, golden = restrict_to_common(target, golden, diagnosis.evidence)
        diagnosis.unseen = diagnosis.unseen or target_as_read is not target
        golden_as_read, joined_stages, other_layout = golden, False, False
        reordered = target.keys() == golden.keys() and bool(count_reordered(target, golden))
        if reordered:
            template = "The micro batches of a step come in another order than in the golden run: what they make together was compared."
            self._reordered = Sentence(template)
        one_program = not reordered and _one_program(target, golden)
        if not one_program:  # what is put together, or takes another framework's form, is changed in place
            for side in sides_of_both:
                own_columns(side)
        if not one_program and not _two_frameworks(target, golden):
            target, golden, joined_stages = together(target, golden, diagnosis.problems, diagnosis.evidence)
            other_layout = joined_stages or layouts.differ(target, golden)
        alone = sorted(target.keys() ^ golden.keys())
        if alone and not other_layout:
            diagnosis.problems.append(f"step {step}: ranks {', '.join(map(str, alone[:16]))} are on one side only, not compared")
        units = self._moved(step, golden_as_read, diagnosis.problems) if self._moved and golden_as_read is golden else None
        previous = self.before
        walked = layouts.diverge_layouts(target, golden, previous, units) if other_layout else None
        if walked is None or (target.keys() == golden.keys() and not joined_stages and not layouts.has_pieces(walked)):
            with factorize.cache_columns() if one_program else nullcontext():
                walked = diverge(target, golden, previous, units, self._begun(step) if self._begun else None)
        else:
            diagnosis.problems += describe_lost_mapping(target_as_read, target)
        self.before = walked
        self._add_step(step, target, walked, previous)
        self._judge(step, previous, walked)
        diagnosis.problems += [problem for side in sides_of_both for problem in side.problems if problem not in diagnosis.problems]

    def _add_step(self, step: int, target: Mapping[int, DumpTable], walked: Divergence, previous: Divergence | None) -> None:
        self._records += sum(walk.compared for walk in walked.walks.values())
        self._largest.add(step, walked)
        different = walked.different()
        if self._first is None:
            self._first = first_difference.of_step(step, walked)
            if self._first is not None and previous is not None and not self._facts:
                self._facts = changed_before(self.looked[-2], previous, walked)
        self._hidden += count_not_compared(walked)
        one_sided, accepted = say_one_sided(walked)
        self._accepted.add(step, accepted)
        self._one_sided = one_sided or self._one_sided
        self._ranks |= set(walked.walks)
        self._other_calls = one_sided_calls.add_one_sided_calls(self.found, different) or self._other_calls
        self._note_facts(step, walked)
        self.found.unseen = self.found.unseen or _nonfinite_alone(target, walked)
        for walker in different.walkers.values():
            if walker.hidden_by is not None:
                name, *numbers = walker.hidden_by
                template = "A mask hides scores by {0} in this run and by {1} in the golden run ({2}): what is made of them was compared."
                self._mask = self._mask or Sentence(template, *(f"{number:g}" for number in numbers), name)
            if walker.extra or walker.missing:
                self._ways = self._ways or other_ways.describe_ways_of_update(walker.target, walker.golden)
                self._passes = self._passes or other_ways.more_passes(walker.target, walker.golden)
            again = len(walker.target.recomputed), len(walker.golden.recomputed)
            if again[0] != again[1]:
                template = "Calls that the backward pass makes again to save memory: {0} in this run, {1} in the golden run."
                self._recomputed = Sentence(template, *again)
        for rank, rows in walked.of_each(DifferenceWalk.other_arguments).items():
            for row in rows:
                self._called.setdefault((rank, walked.walkers[rank].side.name[row]), step)

    def _note_facts(self, step: int, walked: Divergence) -> None:
        """Of the first step whose records say something else beside numbers; what is cut in another way has other arguments."""
        alike = {rank: walker for rank, walker in walked.different().walkers.items() if rank not in walked.wholes}
        for walker in alike.values():
            if unsaid := call_facts.one_sided_collectives(walker):
                template = "{0} against {1}: the ranks or the reduction of {2} collectives are said on one side only, the first is {3}"
                walker.side.add_problem(Sentence(template, walker.side.path, walker.golden.side.path, f"{len(unsaid):,}", unsaid[0]))
        if not self._facts:
            self._facts = suspects.of_facts(step, walked)

    def _judge(self, step: int, previous: Divergence | None, walked: Divergence) -> None:
        if walked.origins and are_unrelated(walked, self.found):
            self.found.finding, self.found.renamed, self.found.mapping = findings.STRUCTURE, {}, {}
        elif walked.origins:
            _report_origins(self.found, step, walked)
            _since(self.found, self._called)
            self.found.suspects = fold(self.found.places, self._stages)
            self._note_after_update(walked)
            if not self._lead_with_facts():
                note_update(self.found, previous, walked)

    def _note_after_update(self, walked: Divergence) -> None:
        """Work between an update and the next forward pass stands in the step of the update, and may be of the next one."""
        for suspect in self.found.suspects:
            walker = walked.walkers.get(suspect.rank)
            suspect.after_update = walker is not None and walker.side.is_after_update(suspect.record)
        first = self.found.suspects[0]
        if first.after_update:
            self.found.evidence.append(Sentence("{0}: {1}.", first.record, say_after_update(first.step)))

    def _lead_with_facts(self) -> bool:
        """The earliest difference comes first: what records say beside numbers in a step before the one in which the numbers part."""
        diagnosis, later = self.found, self.found.suspects[0]
        earlier = [suspect for suspect in self._facts if suspect.step < later.step]
        if not earlier:
            return False
        template = "The numbers differ later: step {0}, rank {1}, {2}: {3}."
        diagnosis.evidence.insert(0, Sentence(template, later.step, later.rank, later.record, later.why))
        diagnosis.finding = findings.STRUCTURE
        diagnosis.places = [*earlier, *diagnosis.places]
        diagnosis.suspects = fold(diagnosis.places, self._stages)
        return True

    def conclusion(self, what: str) -> Diagnosis:
        """The result.

        Raises:
            NothingCapturedError: no record could be compared.
        """
        diagnosis, before = self.found, self.before
        diagnosis.problems = list(dict.fromkeys(diagnosis.problems))
        if self._hidden:
            walker = "1 tensor holds NaN or Inf on both sides and cannot be compared; each run alone tells why."
            many = "{0} tensors hold NaN or Inf on both sides and cannot be compared; each run alone tells why."
            diagnosis.problems.append(Sentence(walker) if self._hidden == 1 else Sentence(many, f"{self._hidden:,}"))
        if not self._records:
            raise NothingCapturedError(
                f"{what}: no record could be compared"
                + (f" ({why[0]})" if (why := diagnosis.problems or diagnosis.evidence) else "; are they dumps of the same training?")
            )
        diagnosis.evidence += self._accepted.sentences()
        if before is None and not diagnosis.suspects:
            diagnosis.finding = findings.STRUCTURE if any(diagnosis.unmatched.values()) else findings.NONE
            diagnosis.evidence.append(Sentence("The saved values that both runs have agree within round-off."))
        if before is not None and not before.origins:
            self._nothing_off(before)
        if before is not None and (diagnosis.suspects or not before.origins):
            diagnosis.evidence += layouts.describe_layouts(before)
            diagnosis.gradients = layouts.factor_of_gradients(before)
            diagnosis.layout = [line for whole in before.wholes.values() for line in whole.plan.lines(whole.target.name, whole.golden.name)]
        if before is not None and (precision := evidence.precision(before)) is not None:
            if diagnosis.finding == findings.NONE:  # numbers that agree within the round-off of another type are no all-clear
                diagnosis.finding, diagnosis.places = findings.STRUCTURE, [suspects.of_precision(self.looked[-1], before, precision)]
                diagnosis.suspects = fold(diagnosis.places, self._stages)
            else:
                diagnosis.evidence.append(precision.sentence())
        scale = next((walker.scale for walker in before.walkers.values() if walker.scale != 1.0), None) if before is not None else None
        if scale is not None:
            diagnosis.evidence.append(Sentence("The loss scale is {0} times the golden run's; that was taken out.", f"{scale:g}"))
        if diagnosis.suspects:
            name_learning_rate(diagnosis.suspects[0], (*diagnosis.places, *self._facts))
        renames.report_renames(diagnosis)
        two_frameworks.report_coverage(diagnosis)
        if before is not None and before.noise:
            template = "Products carry noise of up to {0}: one of the runs computes them with fewer bits (TF32); that is accepted."
            diagnosis.evidence.append(Sentence(template, f"{before.noise / 4:.1e}"))
        diagnosis.steps = list(self.looked)
        diagnosis.looked_at = {"steps": ", ".join(map(str, self.looked)), "ranks": len(self._ranks), "records": self._records}
        if self._recorded:
            diagnosis.looked_at["recorded"] = self._recorded
        return diagnosis

    def _nothing_off(self, before: Divergence) -> None:
        diagnosis = self.found
        dialects = any(dump_dialects.differ(walker.side, walker.golden.side) for walker in before.different().walkers.values())
        same = not self._largest.distance or dialects
        diagnosis.evidence += [note for note in (self._recomputed, self._ways, self._mask, self._reordered) if note]
        if self._passes is not None and not layouts.has_pieces(before):
            diagnosis.finding = findings.STRUCTURE
            diagnosis.evidence.append(self._passes)
        other_calls = self._other_calls or not other_ways.only_wrapped(diagnosis.renamed)
        if same and not diagnosis.aligned and not self._recomputed and other_calls:
            diagnosis.finding = (
                findings.STRUCTURE
            )  # with round-off between them, or in another framework, the calls are another way to them
        if self._facts:
            diagnosis.finding = findings.STRUCTURE
            diagnosis.places, diagnosis.suspects = self._facts, fold(self._facts, self._stages)
        target, golden = self._copies
        if target.finding and not golden.finding and diagnosis.finding == findings.NONE:  # parameters of some ranks may have no partner
            diagnosis.finding, diagnosis.places = target.finding, target.suspects
            diagnosis.suspects = fold(diagnosis.places, self._stages)
            diagnosis.evidence += target.evidence
        untold = [one.scale for one in before.walkers.values() if not loss_scale.is_told(one)]
        if untold:
            template = (
                "the gradients are {0} times the golden run's: another loss scale, or a loss of another size; at level mix its calls tell"
            )
            diagnosis.problems.append(Sentence(template, f"{untold[0]:g}"))
        if self._first is not None:
            diagnosis.evidence.append(first_difference.describe_first_difference(self._first))
            if diagnosis.finding == findings.NONE:
                later = self._first.step > self.looked[0]
                why = first_difference.behind_unseen_update if later else first_difference.begin_otherwise
                diagnosis.problems += [*why(self._first, before), *first_difference.behind_unseen_loss(self._first, before)]
        if self._exact and diagnosis.finding == findings.NONE:
            self._count_every_bit()
        walkers = before.different().walkers.values()
        if not any(len(kind) == 3 for walker in walkers for kind in walker.target.kinds):
            template = (
                "Only modules were recorded: what the calls in them are given, running statistics, sums over ranks and the update behind"
                " the last step were not compared; at level mix the calls tell."
            )
            diagnosis.evidence.append(Sentence(template))
        if self._first is not None and all(map(_lacks_update, walkers)):
            template = (
                "The calls of the update were not recorded: a wrong factor on the gradients that it is given (clipping) hardly shows in"
                " what an optimizer like Adam makes of them; at level mix its calls tell."
            )
            diagnosis.evidence.append(Sentence(template))
        one_sided = self._one_sided or any(diagnosis.unmatched.values())
        equal = SAME_IN_COMMON if one_sided else SAME_BESIDE_NAN if self._hidden else SAME
        diagnosis.evidence += self._largest.sentences() or ([] if self._first is not None else [equal])  # an argument is no tensor
        diagnosis.problems += self._largest.blind

    def _count_every_bit(self) -> None:
        diagnosis = self.found
        if self._first is not None:
            diagnosis.finding, diagnosis.places = findings.DIVERGENCE, [self._first]
            diagnosis.suspects = fold(diagnosis.places, self._stages)
            diagnosis.evidence.append(Sentence("Every bit counts (--exact): without it the differences are round-off."))
        elif any(diagnosis.unmatched.values()):
            diagnosis.finding = findings.STRUCTURE


def _one_program(target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable]) -> bool:
    """The same ranks make the same calls with tensors of the same shapes: nothing is cut in another way."""
    if target.keys() != golden.keys():
        return False
    return all(side.ops == golden[rank].ops and side.shape == golden[rank].shape for rank, side in target.items())


def _two_frameworks(target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable]) -> bool:
    """The runs are of two frameworks and of as many ranks: their calls differ in shapes, not in how they are cut."""
    return target.keys() == golden.keys() and any(are_of_different_frameworks(side, golden[rank]) for rank, side in target.items())


def _nonfinite_alone(target: Mapping[int, DumpTable], divergence: Divergence) -> bool:
    """A rank of the target has NaN or Inf in rows that nothing was held against."""
    different = divergence.different().walkers
    for rank, side in target.items():
        walker = divergence.walkers.get(rank)
        if walker is not None and rank not in different:
            continue  # walked together with another one
        rows = np.ones(len(side), bool)
        if walker is not None and walker.side is side:
            rows[[row for row, _ in walker.rows]] = False
        if distances.nonfinite(side, np.flatnonzero(rows)).any():
            return True
    return False


def _lacks_update(walker: DifferenceWalk) -> bool:
    """A training whose backward pass was recorded, and none of the optimizer's calls on one side."""
    trees = walker.target, walker.golden
    return min(tree.last_backward for tree in trees) >= 0 and any(tree.first_update < 0 for tree in trees)


def _report_origins(diagnosis: Diagnosis, step: int, divergence: Divergence) -> None:
    diagnosis.places = suspects.of_origins(step, divergence)
    named = [number for number, suspect in enumerate(diagnosis.places) if suspect.why]
    origins = [divergence.origins[number] for number in named]
    name_parameters([diagnosis.places[number] for number in named], dataclasses.replace(divergence, origins=origins))
    rank, origin = divergence.origins[0]
    diagnosis.finding = explain.finding_of(divergence, rank, origin)
    if diagnosis.finding != findings.STRUCTURE:
        diagnosis.differences = sum(walk.differing for walk in divergence.walks.values())
    diagnosis.evidence += evidence.of_step(step, divergence)


def _since(diagnosis: Diagnosis, called: Mapping[tuple[int, str], int]) -> None:
    """A call that was made with another argument in an earlier step already, where its result did not show it, is to blame from there."""
    for suspect in diagnosis.places:
        step = called.get((suspect.rank, suspect.tensor), suspect.step)
        if suspect.kind == ARGUMENT and step < suspect.step:
            template = "{0} in step {1}, and the argument is another one since step {2}"
            suspect.why = Sentence(template, suspect.why, suspect.step, step) if suspect.why else ""
            suspect.step = step
