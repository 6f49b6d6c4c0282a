"""What two runs were started with, and checkpoints: packs of configurations and checkpoints as `diagnose` shows them.

A setting that is not the same on both sides and explains where the numbers begin to differ: it stands first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.config.severity import CHANGES, MAY
from msprobe_engine.core.dtypes import float_type
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.ranges import format_ranges
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.checkpoint.result import ValueDifference, sort_by_distance
from msprobe_engine.find.checkpoint.tensor_result import TensorResult
from msprobe_engine.find.config.between_ranks import Deviation, between_ranks
from msprobe_engine.find.config.comparison import headline
from msprobe_engine.find.config.difference import DATASET, SETTINGS, WEIGHTS, Difference, fold_differences
from msprobe_engine.find.config.pack_settings import DYNAMIC_FILE, PackSide
from msprobe_engine.find.config.packs import compare_packs
from msprobe_engine.find.config.tensors import LATER
from msprobe_engine.find.detect import Run
from msprobe_engine.find.findings import CHECKPOINT, CONFIG, NONE, SETTING, Diagnosis, Suspect
from msprobe_engine.find.origin import TAKEN
from msprobe_engine.formats.checkpoint.model import RANDOM

_OF_A_FACTOR = 0.1
"""Factors are whole numbers, or one over them."""

MOST_SUSPECTS, MOST_LINES = 20, 6
_FSDP = re.compile(r"[/\\]distributed[/\\](_composable[/\\])?fsdp[/\\]")
"""In a line of a call stack: FSDP's own code."""
_MOST_VALUES = 3
"""Of two checkpoints, values (a step, a learning rate) that are named before tensors."""


def diagnose_packs(target: Path, golden: Path) -> Diagnosis:
    """Two packs: every difference that matters is a suspect, the worst first.

    Raises:
        DumpFormatError: one of them is no pack.
    """
    compared = compare_packs(golden, target)
    matter = compared.differences
    found = Diagnosis(CONFIG if matter else NONE, problems=list(compared.problems), differences=len(matter))
    found.suspects = [_suspect(one) for one in matter[:MOST_SUSPECTS]]
    found.evidence = [headline(compared)] + [f"{name}: {verdict}" for name, verdict in compared.summary().items() if verdict != "pass"]
    found.evidence += [
        Sentence("Computed: {0} {1}, golden {2}.", name.replace("_", " "), b, a)
        for name, (a, b, equal) in compared.derived.items()
        if not equal
    ]
    found.evidence += [Sentence("Not compared: {0}.", why) for why in compared.not_compared.values()]
    found.evidence += compared.notes
    found.next = [f"msprobe config_check {shlex.quote(str(target))} {shlex.quote(str(golden))} -o config_check_result"] if matter else []
    found.looked_at = {"pack": str(target), "golden": str(golden), "compared": sum(sheet.compared for sheet in compared.sheets.values())}
    found.nothing = Sentence("No difference of the configurations that matters")
    return found


def diagnose_pack(target: Path) -> Diagnosis:
    """One pack: does a rank or node have something else than the others?

    Raises:
        DumpFormatError: it is no pack.
    """
    ranks = between_ranks(target)
    matter = ranks.matter
    found = Diagnosis(CONFIG if matter else NONE, differences=len(matter))
    found.suspects = [_of_ranks(one) for one in matter[:MOST_SUSPECTS]]
    found.evidence = [ranks.headline(), *ranks.notes]
    found.next = [compare_ranks(target)] if matter else []
    found.looked_at = {"pack": str(target), "ranks": len(ranks.ranks)}
    found.nothing = Sentence("The ranks were started with the same")
    return found


def blame_ranks(found: Diagnosis, pack: Path) -> None:
    """A rank that was started with something else that changes its results is a finding, where the numbers show none.

    Raises:
        DumpFormatError: it is no pack.
    """
    ranks = between_ranks(pack)
    found.suspects = [_of_ranks(one) for one in ranks.matter if one.severity == CHANGES][:MOST_SUSPECTS]
    if found.suspects:
        found.finding = CONFIG
        found.next.append(compare_ranks(pack))


def compare_ranks(pack: Path) -> str:
    """The command that says what ranks were started with, and which of them otherwise."""
    return f"msprobe config_check --ranks {shlex.quote(str(pack))}"


def _of_ranks(one: Deviation) -> Suspect:
    numbers = {"these ranks": {"value": one.value}, "the others": {"value": one.others}}
    return Suspect(f"{one.sheet} {one.name}", "", one.ranks[0], 0, kind=CONFIG, why=one.sentence(), numbers=numbers)


def _suspect(one: Difference) -> Suspect:
    name = one.name if one.bench_name in (one.cmp_name, "") or not one.cmp_name else f"{one.cmp_name} / {one.bench_name}"
    numbers: dict[str, Any] = {"target": {"value": one.cmp}, "golden": {"value": one.bench}}
    rank, step = (one.ranks[0] if one.ranks else 0), (one.steps[0] if one.steps else 0)
    at = f" (rank {format_ranges(one.ranks)})" if one.ranks else ""
    return Suspect(
        f"{one.sheet} {name}{at}", "", rank, step, source=one.where, kind=CONFIG, why=one.reason(), cause=one.values, numbers=numbers
    )


def started_otherwise(target: Path | None, golden: Path | None) -> tuple[list[str], list[str], list[Difference]]:
    """Sentences for the evidence of two runs (or of one, whose ranks are held against each other), problems, and the differences of the
    two that matter, the worst first."""
    if target is None:
        return [], [], []
    try:
        if golden is None:
            ranks = between_ranks(target)
            return [Sentence("Configuration: {0}.", one.sentence()) for one in ranks.matter[:MOST_LINES]], [], []
        compared = compare_packs(golden, target)
    except DumpFormatError as error:
        return [], [Sentence("not looked at: {0}", error)], []
    matter = compared.differences
    if not matter:
        return [Sentence("Configuration: {0}", headline(compared))], list(compared.problems), []
    told = fold_differences(matter)
    lines: list[str] = [Sentence("Configuration: {0}.", one.sentence()) for one in told[:MOST_LINES]]
    if len(told) > MOST_LINES:
        lines.append(
            Sentence(
                "Configuration: {0} more differences; msprobe config_check {1} {2} lists them.", len(told) - MOST_LINES, target, golden
            )
        )
    return lines, list(compared.problems), matter


def add_settings(found: Diagnosis, target: Run, golden: Run) -> None:
    """What the runs of two dumps were started with, where both have a pack: as evidence, and first where it explains the first suspect."""
    if target.config is not None and golden.config is not None:
        lines, problems, differences = started_otherwise(target.config, golden.config)
        found.evidence += [*lines, *problems]
        blame_settings(found, differences)


def gradients_averaged_otherwise(found: Diagnosis, target: Path | None, golden: Path | None) -> list[str]:
    """That a wrapper divides sums of gradients by a number of ranks which they were not made for, where nothing else was found and no
    record shows the sums."""
    if found.finding != NONE or found.gradients is None or target is None or golden is None:
        return []
    hooks = [own_hook(path) for path in (target, golden)]
    if hooks[0] != hooks[1]:
        template = (
            "the gradients of the ranks are put together by {0}, code of the program, and no record shows what it gives: a sum in place of"
            " a mean hardly shows in what an optimizer like Adam makes of it; at level mix the update tells"
        )
        return [Sentence(template, hooks[0] or hooks[1])]
    ranks = [averaged_over(path) for path in (target, golden)]
    left = found.gradients / (ranks[0] / ranks[1])
    if abs(left - 1) < _OF_A_FACTOR:
        return []
    template = (
        "the gradients that ranks sum up are {0} times the golden run's, and their sums are divided by {1} ranks, golden {2}: unless they"
        " are scaled afterwards they become {3} times the golden run's (a loss that does not count its ranks); at level mix the update"
        " tells"
    )
    return [Sentence(template, f"{found.gradients:g}", *ranks, f"{left:g}")]


def averaged_over(pack: Path) -> int:
    """Number of ranks over which a wrapper of the model takes the mean of gradients, as a pack says it: `DistributedDataParallel`,
    `fully_shard`, Megatron's wrapper or an engine of DeepSpeed; 1 where it says nothing of the kind."""
    values, ranks = _settings_of_model(pack)
    if isinstance(size := values.get("data_parallel_size"), int):  # Megatron's; a loss per token is divided by all tokens afterwards
        of_sequence = values.get("context_parallel_size")
        return 1 if values.get("calculate_per_token_loss") else size * (of_sequence if isinstance(of_sequence, int) else 1)
    averages = any(name.startswith(("ddp.", "fsdp.")) for name in values) or values.get("gradient_allreduce_op") == "mean"
    return ranks if averages else 1


def own_hook(pack: Path) -> str:
    """What puts the gradients of the ranks together in the place of `DistributedDataParallel`, as a pack says it; "" where that does it by
    itself, or by a hook of torch, all of which take the mean."""
    hook = str(_settings_of_model(pack)[0].get("ddp.comm_hook", ""))
    return "" if hook.startswith("torch.") else hook


def _settings_of_model(pack: Path) -> tuple[dict[str, Any], int]:
    """By name, and the number of ranks."""
    try:
        side = PackSide(read_pack(pack))
    except DumpFormatError:  # `started_otherwise` says it
        return {}, 1
    values = {name: one.value for some in side.settings(DYNAMIC_FILE, False).values() for name, one in some.settings.items()}
    return values, side.world_size or 1


def blame_settings(found: Diagnosis, differences: Sequence[Difference]) -> None:
    """What the runs were started with comes first where it explains the first suspect.

    A setting that has the values of the call, or of an update one of the optimizer's, is named in front of it.
    """
    first = found.first_suspect
    if first is None:
        return
    setting = find_explaining_setting(first, differences)
    if setting is not None:
        lead_with_setting(found.suspects, setting)
    else:
        _blame_first_weights(found, [one for one in differences if _before_first_step(one)])


def blame_settings_alone(found: Diagnosis, differences: Sequence[Difference]) -> None:
    """Settings that change the numbers of a training are a finding where no record shows them: a learning rate that rises more slowly is
    the same in the first step. What only may matter stays a line of the evidence."""
    settings = [one for one in differences if one.sheet == SETTINGS and one.severity == CHANGES]
    if found.finding != NONE or not settings:
        return
    compared = found.nothing not in found.problems  # else the headline says that nothing was
    found.suspects = [replace(_suspect(one), kind=SETTING if compared else CONFIG) for one in settings[:MOST_SUSPECTS]]
    found.finding = CONFIG


def _blame_first_weights(found: Diagnosis, differences: Sequence[Difference]) -> None:
    """Where numbers of a monitor part in the step that the run begins with, weights that were other ones before it come first: what they
    make of it does not name them. A monitor that watches parameters names them itself. Where FSDP gathers its parts of weights first, or a
    module takes in a buffer that its line of source does not name alone, they are the cause."""
    first = found.first_suspect
    alone = "a weight differs before the first step: {0}"
    weights = [_suspect(one) for one in differences[:MOST_SUSPECTS]]
    for one, of in zip(weights, differences):
        alike = sum(other.why == of.why for other in differences)
        several = "{1} weights differ before the first step; of the first: {0}"
        one.cause = Sentence(several, of.why, f"{alike:,}") if alike > 1 else Sentence(alone, of.why)
    if weights and first is not None and first.kind == "series" and first.step <= weights[0].step and "param_" not in first.record:
        found.suspects = [*weights, *found.suspects][:MOST_SUSPECTS]
    names = list(dict.fromkeys(one.name for one in differences if one.values))  # each rank has its part
    if first is not None and not (names and _gathers_weights(first)):
        names = _weights_of_module(first, differences)
        names = [] if any(name.rpartition(".")[2] in first.cause for name in names) else names
    if names and first is not None and first.step <= weights[0].step:
        several = "{1} weights differ before the first step, the first is {0}"
        first.cause = Sentence(several, names[0], f"{len(names):,}") if names[1:] else Sentence(alone, names[0])
        first.why = Sentence("{0}; {1}", first.cause, first.why)


def _gathers_weights(one: Suspect) -> bool:
    """FSDP itself makes this call, and puts together the weights that a module is about to use."""
    return "all_gather" in one.record and any(_FSDP.search(line) for line in one.stack)


def diagnose_checkpoints(target: Path, golden: Path) -> Diagnosis:
    """Two checkpoints: suspects are values that matter, then every tensor that differs, the furthest apart first.

    Raises:
        DumpFormatError: one of them is no checkpoint.
    """
    from msprobe_engine.find.checkpoint.diff import diff

    compared = diff(target, golden)
    different = compared.different
    others = [*compared.only_in_a, *compared.only_in_b, *(value.name for value in compared.values_that_matter)]
    found = Diagnosis(CHECKPOINT if different or others else NONE, problems=list(compared.problems))
    found.differences = len(different) + len(others)
    # Another learning rate or step says why elements differ; the elements do not say more.
    values = [_value(one) for one in sorted(compared.values_that_matter, key=lambda one: one.group == RANDOM)]
    found.suspects = values[:_MOST_VALUES] + [_tensor(one) for one in sort_by_distance(different, MOST_SUSPECTS)]
    found.evidence = [Sentence("{0}.", compared.verdict()), *compared.hints]
    found.evidence += [Sentence("{0}: {1}.", one.record, one.why) for one in values[_MOST_VALUES:][:MOST_LINES]]
    found.unmatched = {"golden": compared.only_in_b, "target": compared.only_in_a} if compared.only_in_a or compared.only_in_b else {}
    found.problems += [f"{one.name}: {one.note}" for one in compared.unknown[:MOST_LINES]]
    if found.finding == NONE and not compared.equal and not found.problems:
        found.problems.append(compared.verdict())
    found.next = [f"msprobe ckpt diff {shlex.quote(str(target))} {shlex.quote(str(golden))} -o ckpt_diff"] if found.finding != NONE else []
    found.looked_at = {"checkpoint": str(target), "golden": str(golden), "tensors": len(compared.tensors)}
    found.nothing = (
        Sentence("The checkpoints hold the same") if not found.problems else Sentence("What could be read of both checkpoints is the same")
    )
    return found


def _value(one: ValueDifference) -> Suspect:
    why = Sentence("{0}, golden {1}", repr(one.a), repr(one.b)) + (Sentence("; {0}", one.why) if one.why else "")
    return Suspect(one.name, "", 0, 0, kind=CHECKPOINT, why=why, numbers={"target": {"value": one.a}, "golden": {"value": one.b}})


def _tensor(one: TensorResult) -> Suspect:
    why = one.hint or one.note or ("" if one.changed is not None or one.shape_a != one.shape_b else Sentence("its elements differ"))
    target: dict[str, Any] = {"type": one.dtype_a, "shape": list(one.shape_a), "norm": one.norm_a, "NaN": one.nan_a, "Inf": one.inf_a}
    golden: dict[str, Any] = {"type": one.dtype_b, "shape": list(one.shape_b), "norm": one.norm_b, "NaN": one.nan_b, "Inf": one.inf_b}
    if one.shape_a != one.shape_b:
        shapes = Sentence("its shape is {0}, golden {1}", list(one.shape_a), list(one.shape_b))
        why = shapes + (Sentence("; {0}", why) if why else "")
    elif one.changed is not None:
        why = Sentence("{0} of {1} elements differ, by {2} at most", one.changed, one.numel, f"{one.max_abs or 0.0:.3g}") + (
            Sentence("; {0}", why) if why else ""
        )
    return Suspect(one.name, "", 0, 0, kind=CHECKPOINT, why=why, numbers={"target": target, "golden": golden}, distance=one.rel_norm)


_OF_OPTIMIZER = re.compile(
    r"adam_.*|learning_rate|(min_|max_)?lr.*|weight_decay.*|decay_.*|decoupled_.*|momentum|optimizer|clip_grad|bias_correction|warmup.*"
)
"""Common names of settings that an update is made with."""


_OF_WEIGHTS = frozenset(("rope_base", "rope_scaling", "position_embedding", "seed", "init_std", "init_rule", "initial_weights"))
"""Common names of settings that weights and buffers are made with."""


_TYPES_OF_PARAMETERS = frozenset(("parameter_dtypes", "param_dtype"))
_TYPE = re.compile(r"\b(?:bfloat|float|half)\w*")


def find_explaining_setting(first: Suspect, differences: Sequence[Difference]) -> Difference | None:
    """The difference of settings that the first suspect follows from: one with its very values; in an update, one of the optimizer; of
    numbers of a monitor, the only one there is (where the two numbers of a step are said, one that only may change numbers is not).

    Args:
        differences: the worst first.
    """
    settings = [one for one in differences if one.severity == CHANGES and one.sheet == SETTINGS]
    values = [first.numbers.get(side, {}).get("value") for side in ("target", "golden")]
    if None not in values:
        same = next((one for one in settings if [_number(one.cmp), _number(one.bench)] == [_number(value) for value in values]), None)
        if same is not None:
            return same
    if _weights_of_module(first, differences):
        made = [one for one in settings if one.term in _OF_WEIGHTS]
        return made[0] if len(made) == 1 else None
    if first.kind == "series":
        if (kept := _other_type_of_parameters(first, differences)) is not None:
            return kept
        only = _only_one(differences)
        return None if only is not None and only.severity == MAY and first.cause else only
    return next((one for one in settings if _of_optimizer(one)), None) if first.parameter else None


def _weights_of_module(first: Suspect, differences: Sequence[Difference]) -> list[str]:
    """Weights and buffers of the module that takes in something else, where they were other ones before the first step."""
    if first.kind != TAKEN or not first.module:
        return []
    return [one.name for one in differences if _before_first_step(one) and one.name.startswith(f"{first.module}.")]


def _before_first_step(one: Difference) -> bool:
    return one.sheet == WEIGHTS and one.severity == CHANGES and one.term != LATER


def _other_type_of_parameters(first: Suspect, differences: Sequence[Difference]) -> Difference | None:
    """Parameters that one run keeps in another data type, where numbers part by less than that type resolves."""
    for one in differences:
        kinds = [float_type(name) for name in _TYPE.findall(f"{one.cmp} {one.bench}")] if one.term in _TYPES_OF_PARAMETERS else []
        coarsest = max((kind.eps for kind in kinds if kind is not None), default=0.0)
        if first.distance is not None and first.distance < coarsest:
            return one
    return None


def _only_one(differences: Sequence[Difference]) -> Difference | None:
    """Where numbers part that name no call: the setting that is the only thing which the runs were started with and that changes numbers,
    else the only one that may. Samples and weights follow from settings, and those of the optimizer have a series of their own."""
    others = [one for one in differences if one.matters and one.sheet not in (DATASET, WEIGHTS) and not _of_optimizer(one)]
    for severity in (CHANGES, MAY):
        if found := [one for one in others if one.severity == severity]:
            return found[0] if len(found) == 1 and found[0].sheet == SETTINGS else None
    return None


def _of_optimizer(one: Difference) -> bool:
    return bool(one.term and _OF_OPTIMIZER.fullmatch(one.term)) or one.name.startswith("optimizer.")


def _number(value: Any) -> Any:
    """A number whatever its spelling; all else as text."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)


def lead_with_setting(suspects: Sequence[Suspect], one: Difference) -> None:
    """Name the setting as the cause of the first suspect and of all that say the same, and in front of what the numbers say of it."""
    first = suspects[0]
    same = first.same_elsewhere()
    cause = Sentence("{0} = {1}, golden {2}", one.name, *one.both)
    for suspect in suspects:
        if (first.parameter and suspect.parameter) or suspect.same_elsewhere() == same:
            suspect.cause = cause
    first.why = Sentence("{0} in the settings ({1}); {2}", cause, one.why, first.why)
