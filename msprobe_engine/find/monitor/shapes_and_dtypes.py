"""Tensors of two monitored runs that have another shape or another data type, whatever their numbers say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence, Set
from itertools import chain
from typing import NamedTuple

import numpy as np

from msprobe_engine.core.dtypes import FLOATS, other_form
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.monitor.number_pairs import Number, order_in_step
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key
from msprobe_engine.measure import coarse_values

_FACTS = ("shape", "dtype")
_WIDE = "float32"
_STATES = ("exp_avg", "exp_avg_sq", "opt_state")


def other_kinds(target: Run, golden: Run, cut: Cut) -> tuple[list[Suspect], list[str], list[Suspect]]:
    """Tensors with another shape that are not cut otherwise (`cut_otherwise`), in the order of execution; what is to be said of data
    types; and the first activation, or state of an optimizer, of another one. A tensor whose shape in both runs is another one from step
    to step (tokens of an expert) follows the data: its numbers tell. Nothing where the files of a run do not say: a trend data base has
    neither."""
    shapes: list[tuple[tuple[int, ...], Suspect]] = []
    types: dict[tuple[str, str], list[str]] = {}
    computed: list[tuple[tuple[int, ...], Suspect]] = []
    for rank in sorted(set(target.ranks) & set(golden.ranks)):
        for family in target.families(rank):
            if family not in golden.families(rank):
                continue
            golden_tensors, steps = golden.kinds(rank, family), _first_steps(target, rank, family)
            for number, (key, kinds) in enumerate(target.kinds(rank, family).items()):
                target_kinds, golden_kinds = (
                    [" or ".join(sorted({getattr(k, f) for k in ks} - {""})) for f in _FACTS] for ks in (kinds, golden_tensors.get(key, ()))
                )
                varies = all(len({kind.shape for kind in ks}) > 1 for ks in (kinds, golden_tensors.get(key, ())))
                if (
                    all((target_kinds[0], golden_kinds[0]))
                    and target_kinds[0] != golden_kinds[0]
                    and not varies
                    and (rank, family, key) not in cut.tensors
                ):
                    step = steps.get(key, 0)
                    shapes.append(
                        (
                            (step, *order_in_step(family, key, number), rank),
                            _suspect(rank, step, family, key, target_kinds[0], golden_kinds[0]),
                        )
                    )
                same_place = (rank, family, key) not in cut.around
                if same_place and all((target_kinds[1], golden_kinds[1])) and target_kinds[1] != golden_kinds[1]:
                    types.setdefault((target_kinds[1], golden_kinds[1]), []).append(f"rank {rank}, {family}/{key.name}")
                    if family in ("actv", *_STATES) and {target_kinds[1], golden_kinds[1]} <= FLOATS.keys():
                        step = steps.get(key, 0)
                        item = _other_type(rank, step, family, key, target_kinds[1], golden_kinds[1])
                        computed.append(((step, *order_in_step(family, key, number), rank), item))
    said = [
        Sentence(
            "{0} tensors have data type {1}, in the golden run {2}; the first is {3}",
            f"{len(names):,}",
            target_kinds,
            golden_kinds,
            names[0],
        )
        for (target_kinds, golden_kinds), names in types.items()
    ]
    first = [suspect for _, suspect in sorted(computed, key=lambda item: item[0])[:1]]
    return [suspect for _, suspect in sorted(shapes, key=lambda item: item[0])], list(said), first


def rounded_in_one_run(run: Run, other: Run, items: Iterable[Number]) -> Suspect | None:
    """Numbers in float32 of a family that one run alone has rounded to a shorter type. Runs that see other activations cut the batch in
    other ways or are compiled, and sum up what one pass has rounded: of these only what an optimizer keeps is looked at."""
    same = all(_places(run, rank) == _places(other, rank) != set() for rank in run.ranks) and set(run.ranks) == set(other.ranks)
    wide = {
        (rank, family, key)
        for rank in set(run.ranks) & set(other.ranks)
        for family in set(run.families(rank)) & set(other.families(rank))
        for key, kinds in run.kinds(rank, family).items()
        if {kind.dtype for kind in (*kinds, *other.kinds(rank, family).get(key, ()))} == {_WIDE}
    }
    extremes: dict[str, dict[tuple[int, int, Key], dict[str, Number]]] = {}
    for item in items:
        if item.op in ("max", "min") and (item.rank, item.family, item.key) in wide and (same or item.family in _STATES):
            extremes.setdefault(item.family, {}).setdefault((item.step, item.rank, item.key), {})[item.op] = item
    suspects: list[tuple[tuple[int, ...], Suspect]] = []
    for pairs in extremes.values():
        both = [tuple(pair.values()) for pair in pairs.values() if len(pair) == 2]
        target_extremes, golden_extremes = (
            np.array([[getattr(number, side) for number in pair] for pair in both]).reshape(-1, 2) for side in ("target", "golden")
        )
        if rounding := coarse_values.rounded_on_one_side(target_extremes, golden_extremes):
            types = (rounding[0], _WIDE) if rounding[1] else (_WIDE, rounding[0])
            first = min((number for number, _ in both), key=lambda number: (number.step, *number.order, number.rank))
            why = Sentence(
                "its type is {0}, and all numbers of it and {1} others are those of {2} in one run alone", _WIDE, len(both) - 1, rounding[0]
            )
            row, cause = f"{first.family}/{first.key.name}", Sentence("{0}, golden {1}", *types)
            module = first.key.name.rpartition(".")[0]
            suspect = Suspect(row, module, first.rank, first.step, kind="precision", why=why, cause=cause, tensor=row)
            suspects.append(((first.step, *first.order), suspect))
    return min(suspects, key=lambda number: number[0])[1] if suspects else None


def _places(run: Run, rank: int) -> set[Key]:
    return set(run.kinds(rank, "actv")) if "actv" in run.families(rank) else set()


def of_other_form(run: Run, other: Run) -> set[tuple[int, str, Key]]:
    """(rank, family, tensor) of which one run has integers or bool and the other one numbers."""
    tensors: set[tuple[int, str, Key]] = set()
    for rank in set(run.ranks) & set(other.ranks):
        for family in set(run.families(rank)) & set(other.families(rank)):
            golden_kinds = other.kinds(rank, family)
            for key, kinds in run.kinds(rank, family).items():
                pairs = [
                    (kind.dtype, golden_kind.dtype)
                    for kind in kinds
                    for golden_kind in golden_kinds.get(key, ())
                    if kind.dtype and golden_kind.dtype
                ]
                if pairs and all(other_form(*pair) for pair in pairs):
                    tensors.add((rank, family, key))
    return tensors


class Cut(NamedTuple):
    """What ranks of two runs hold other parts of.

    Attributes:
        tensors: (rank, family, tensor) of which one run has a part and the other one the whole, or another part.
        around: those among them of modules that hold other parameters in the two runs: they may be something else.
        families: that may hold parts of sums.
        totals: numbers of the step that are sums over the parameters of a rank.
        said: of all this.
    """

    tensors: Set[tuple[int, str, Key]] = frozenset()
    around: Set[tuple[int, str, Key]] = frozenset()
    families: frozenset[str] = frozenset()
    totals: frozenset[str] = frozenset()
    said: Sequence[str] = ()


_TOTALS = frozenset(("grad_norm", "param_norm", "update_norm"))


def cut_otherwise(run: Run, other: Run, apart: Set[str]) -> Cut:
    """What cannot be compared because the ranks hold other parts of the model: in runs of one layout another shape is no such cut.
    `apart`: families that are not compared anyway."""
    if are_of_one_layout(run, other):
        return Cut()
    cut: dict[tuple[int, str, Key], str] = {}
    around: dict[tuple[int, str, Key], str] = {}
    dealt = False
    for rank in set(run.ranks) & set(other.ranks):
        holders = _modules_around(run, other, rank)
        for family in set(run.families(rank)) & set(other.families(rank)):
            target_kinds, golden_kinds = run.kinds(rank, family), other.kinds(rank, family)
            dealt = dealt or (family.startswith("param") and target_kinds.keys() != golden_kinds.keys())
            for key, kinds in target_kinds.items():
                pairs = [
                    (kind.shape, golden_kind.shape)
                    for kind in kinds
                    for golden_kind in golden_kinds.get(key, ())
                    if kind.shape and golden_kind.shape
                ]
                if family not in apart and pairs and all(_is_cut(*pair) for pair in pairs):
                    cut[rank, family, key] = f"{family}/{key.name} {pairs[0][0]}, {pairs[0][1]}"
                elif family.startswith("actv") and key.name.rpartition(".")[0] in holders:
                    around[rank, family, key] = f"{family}/{key.name}"
    said: list[str] = []
    if around and not apart:
        template = "{0} tensors of modules that hold other parts of the model on this rank cannot be compared, the first is {1}"
        said.append(Sentence(template, f"{len(around):,}", min(around.values())))
    if cut:
        template = "{0} tensors are cut over ranks otherwise, so that they cannot be compared, the first is {1}"
        said.append(Sentence(template, f"{len(cut):,}", min(cut.values())))
    families = {family for rank in run.ranks for family in run.families(rank) if family.startswith("actv")}
    if families and any(family in families for _, family, _ in cut):  # what is made of parts is a part of a sum before it is summed
        said.append(Sentence("actv and actv_grad cannot be compared: each rank may hold parts of sums"))
    else:
        families = set()
    totals = _TOTALS if dealt or any(family.startswith("param") for _, family, _ in cut) else frozenset()
    if totals:
        said.append(Sentence("{0} cannot be compared: the ranks hold other parts of the model", ", ".join(sorted(totals))))
    return Cut(cut.keys() | around.keys(), around.keys(), frozenset(families), totals, said)


def _modules_around(run: Run, other: Run, rank: int) -> set[str]:
    """Paths of the modules that hold a parameter which a rank of one run alone has, as the stage of a pipeline does; "" of the model."""
    holders: set[str] = set()
    for family in set(run.families(rank)) & set(other.families(rank)):
        if family.startswith("param"):
            for key in run.kinds(rank, family).keys() ^ other.kinds(rank, family).keys():
                parts = key.name.split(".")
                holders.update(".".join(parts[:length]) for length in range(len(parts) - 1))
    return holders


def _is_cut(target: str, golden: str) -> bool:
    """One shape is a part of the other, in one dimension."""
    shapes = json.loads(target), json.loads(golden)
    if len(shapes[0]) != len(shapes[1]):
        return False
    other = [sorted(pair) for pair in zip(*shapes) if pair[0] != pair[1]]
    return len(other) == 1 and math.gcd(*other[0]) == other[0][0] > 0


def are_of_one_layout(run: Run, other: Run) -> bool:
    """The runs have as many ranks, and where both say it, as many in each dimension (tensor, pipeline, data, ...)."""
    sizes = world_size(run), world_size(other)
    places = [[_place(one, rank) for rank in range(size)] for one, size in zip((run, other), sizes)]
    known = [{key: max(place.get(key, 0) for place in some) for key in {*chain(*some)}} for some in places]
    return not all(sizes) or (sizes[0] == sizes[1] and (not all(known) or known[0] == known[1]))


def of_other_stages(run: Run, other: Run) -> set[int]:
    """Ranks that both runs have, as other stages of a pipeline: what bears one name there is of other layers."""
    stages = [{rank: _place(one, rank).get("pp", 0) for rank in one.ranks} for one in (run, other)]
    return {rank for rank in stages[0].keys() & stages[1].keys() if stages[0][rank] != stages[1][rank]}


def _place(run: Run, rank: int) -> dict[str, int]:
    """Where a rank is in each dimension of the layout, as the run says it."""
    said = run.info(rank).get("rank_info")
    return {key: at for key, at in said.items() if isinstance(at, int)} if isinstance(said, dict) else {}


def world_size(run: Run) -> int:
    """How many ranks the training has, monitored or not; 0 where no file says it."""
    size = run.info(run.ranks[0]).get("world_size") if run.ranks else 0
    return size if isinstance(size, int) else 0


def _first_steps(run: Run, rank: int, family: str) -> dict[Key, int]:
    ops = run.ops(rank, family)[:1]
    return {key: int(series.steps[0]) for op in ops for key, series in run.series(rank, family, op).items()}


def _other_type(rank: int, step: int, family: str, key: Key, target: str, golden: str) -> Suspect:
    why, row = Sentence("it has data type {0}, in the golden run {1}", target, golden), f"{family}/{key.name}"
    cause = Sentence("{0}, golden {1}", target, golden)
    return Suspect(row, key.name.rpartition(".")[0], rank, step, kind="precision", why=why, cause=cause, tensor=row)


def _suspect(rank: int, step: int, family: str, key: Key, target: str, golden: str) -> Suspect:
    why = Sentence("its shape is {0}, in the golden run {1}", target, golden)
    row = f"{family}/{key.name}"
    return Suspect(row, key.name.rpartition(".")[0], rank, step, kind="series", why=why, tensor=row)
