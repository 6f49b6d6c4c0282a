"""Tensors of two monitored runs that have another shape or another data type, whatever their numbers say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence, Set
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


def other_kinds(target: Run, golden: Run, cut: Set[tuple[int, str, Key]]) -> tuple[list[Suspect], list[str], list[Suspect]]:
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
            others, steps = golden.kinds(rank, family), _first_steps(target, rank, family)
            for at, (key, kinds) in enumerate(target.kinds(rank, family).items()):
                mine, theirs = (
                    [" or ".join(sorted({getattr(k, f) for k in ks} - {""})) for f in _FACTS] for ks in (kinds, others.get(key, ()))
                )
                varies = all(len({kind.shape for kind in ks}) > 1 for ks in (kinds, others.get(key, ())))
                if all((mine[0], theirs[0])) and mine[0] != theirs[0] and not varies and (rank, family, key) not in cut:
                    step = steps.get(key, 0)
                    shapes.append(((step, *order_in_step(family, key, at), rank), _suspect(rank, step, family, key, mine[0], theirs[0])))
                if all((mine[1], theirs[1])) and mine[1] != theirs[1]:
                    types.setdefault((mine[1], theirs[1]), []).append(f"rank {rank}, {family}/{key.name}")
                    if family in ("actv", *_STATES) and {mine[1], theirs[1]} <= FLOATS.keys():
                        step = steps.get(key, 0)
                        one = _other_type(rank, step, family, key, mine[1], theirs[1])
                        computed.append(((step, *order_in_step(family, key, at), rank), one))
    said = [
        Sentence("{0} tensors have data type {1}, in the golden run {2}; the first is {3}", f"{len(names):,}", mine, theirs, names[0])
        for (mine, theirs), names in types.items()
    ]
    first = [suspect for _, suspect in sorted(computed, key=lambda one: one[0])[:1]]
    return [suspect for _, suspect in sorted(shapes, key=lambda one: one[0])], list(said), first


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
    found: list[tuple[tuple[int, ...], Suspect]] = []
    for pairs in extremes.values():
        both = [tuple(pair.values()) for pair in pairs.values() if len(pair) == 2]
        mine, theirs = (np.array([[getattr(one, side) for one in pair] for pair in both]).reshape(-1, 2) for side in ("target", "golden"))
        if told := coarse_values.rounded_on_one_side(mine, theirs):
            types = (told[0], _WIDE) if told[1] else (_WIDE, told[0])
            first = min((one for one, _ in both), key=lambda one: (one.step, *one.order, one.rank))
            why = Sentence(
                "its type is {0}, and all numbers of it and {1} others are those of {2} in one run alone", _WIDE, len(both) - 1, told[0]
            )
            row, cause = f"{first.family}/{first.key.name}", Sentence("{0}, golden {1}", *types)
            module = first.key.name.rpartition(".")[0]
            suspect = Suspect(row, module, first.rank, first.step, kind="precision", why=why, cause=cause, tensor=row)
            found.append(((first.step, *first.order), suspect))
    return min(found, key=lambda one: one[0])[1] if found else None


def _places(run: Run, rank: int) -> set[Key]:
    return set(run.kinds(rank, "actv")) if "actv" in run.families(rank) else set()


def of_other_form(run: Run, other: Run) -> set[tuple[int, str, Key]]:
    """(rank, family, tensor) of which one run has integers or bool and the other one numbers."""
    found: set[tuple[int, str, Key]] = set()
    for rank in set(run.ranks) & set(other.ranks):
        for family in set(run.families(rank)) & set(other.families(rank)):
            theirs = other.kinds(rank, family)
            for key, kinds in run.kinds(rank, family).items():
                pairs = [(one.dtype, two.dtype) for one in kinds for two in theirs.get(key, ()) if one.dtype and two.dtype]
                if pairs and all(other_form(*pair) for pair in pairs):
                    found.add((rank, family, key))
    return found


class Cut(NamedTuple):
    """What ranks of two runs hold other parts of.

    Attributes:
        tensors: (rank, family, tensor) of which one run has a part and the other one the whole, or another part.
        families: that may hold parts of sums.
        totals: numbers of the step that are sums over the parameters of a rank.
        said: of all this.
    """

    tensors: Set[tuple[int, str, Key]] = frozenset()
    families: frozenset[str] = frozenset()
    totals: frozenset[str] = frozenset()
    said: Sequence[str] = ()


_TOTALS = frozenset(("grad_norm", "param_norm", "update_norm"))


def cut_otherwise(run: Run, other: Run, apart: Set[str]) -> Cut:
    """What cannot be compared because the ranks hold other parts of the model: where the runs have as many ranks, another shape is no such
    cut. `apart`: families that are not compared anyway."""
    sizes = world_size(run), world_size(other)
    if not all(sizes) or sizes[0] == sizes[1]:
        return Cut()
    found: dict[tuple[int, str, Key], str] = {}
    dealt = False
    for rank in set(run.ranks) & set(other.ranks):
        for family in set(run.families(rank)) & set(other.families(rank)) - apart:
            mine, theirs = run.kinds(rank, family), other.kinds(rank, family)
            dealt = dealt or (family.startswith("param") and mine.keys() != theirs.keys())
            for key, kinds in mine.items():
                pairs = [(one.shape, two.shape) for one in kinds for two in theirs.get(key, ()) if one.shape and two.shape]
                if pairs and all(_is_cut(*pair) for pair in pairs):
                    found[rank, family, key] = f"{family}/{key.name} {pairs[0][0]}, {pairs[0][1]}"
    said: list[str] = []
    if found:
        template = "{0} tensors are cut over ranks otherwise, so that they cannot be compared, the first is {1}"
        said.append(Sentence(template, f"{len(found):,}", min(found.values())))
    families = {family for rank in run.ranks for family in run.families(rank) if family.startswith("actv")}
    if families and any(family in families for _, family, _ in found):  # what is made of parts is a part of a sum before it is summed
        said.append(Sentence("actv and actv_grad cannot be compared: each rank may hold parts of sums"))
    else:
        families = set()
    totals = _TOTALS if dealt or any(family.startswith("param") for _, family, _ in found) else frozenset()
    if totals:
        said.append(Sentence("{0} cannot be compared: the ranks hold other parts of the model", ", ".join(sorted(totals))))
    return Cut(found.keys(), frozenset(families), totals, said)


def _is_cut(mine: str, theirs: str) -> bool:
    """One shape is a part of the other, in one dimension."""
    shapes = json.loads(mine), json.loads(theirs)
    if len(shapes[0]) != len(shapes[1]):
        return False
    other = [sorted(pair) for pair in zip(*shapes) if pair[0] != pair[1]]
    return len(other) == 1 and math.gcd(*other[0]) == other[0][0] > 0


def world_size(run: Run) -> int:
    """How many ranks the training has, monitored or not; 0 where no file says it."""
    size = run.info(run.ranks[0]).get("world_size") if run.ranks else 0
    return size if isinstance(size, int) else 0


def _first_steps(run: Run, rank: int, family: str) -> dict[Key, int]:
    ops = run.ops(rank, family)[:1]
    return {key: int(series.steps[0]) for op in ops for key, series in run.series(rank, family, op).items()}


def _other_type(rank: int, step: int, family: str, key: Key, mine: str, theirs: str) -> Suspect:
    why, row = Sentence("it has data type {0}, in the golden run {1}", mine, theirs), f"{family}/{key.name}"
    cause = Sentence("{0}, golden {1}", mine, theirs)
    return Suspect(row, key.name.rpartition(".")[0], rank, step, kind="precision", why=why, cause=cause, tensor=row)


def _suspect(rank: int, step: int, family: str, key: Key, mine: str, theirs: str) -> Suspect:
    why = Sentence("its shape is {0}, in the golden run {1}", mine, theirs)
    row = f"{family}/{key.name}"
    return Suspect(row, key.name.rpartition(".")[0], rank, step, kind="series", why=why, tensor=row)
