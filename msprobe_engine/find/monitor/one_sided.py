"""Tensors of which one of two monitored runs has numbers in every step and the other in none: a frozen parameter has no gradient, one that
is in no optimizer no update. That is a difference of the runs, and no loss of some numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.monitor.number_pairs import given_besides
from msprobe_engine.find.monitor.other_batches import without_call
from msprobe_engine.find.monitor.suspects import module_of
from msprobe_engine.find.nonfinite.trace import module_path
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key, Series, steps_of

_CHOICE = ("targets", "activation_targets")
"""Settings of the monitor that choose tensors."""


@dataclass
class _Alone:
    """Attributes:
    step: the first that both runs have of the family.
    rank, name: whose numbers.
    target: the run in question has them.
    families: in which.
    """

    step: int
    rank: int
    name: str
    target: bool
    families: list[str]


def never_there(target: Run, golden: Run, apart: Collection[str] = (), cut: Collection[tuple[int, str]] = ()) -> list[Suspect]:
    """What one run has and the other has not on any rank, the earliest step first. Nothing where the runs have other ranks or monitor other
    tensors, or where both have some of their own: these may bear other names.

    Args:
        target, golden: the runs.
        apart: families that cannot be compared.
        cut: (rank, activation) of calls that cannot.
    """
    if set(target.ranks) != set(golden.ranks) or any(_choice(target, rank) != _choice(golden, rank) for rank in target.ranks):
        return []
    alone_by_name: dict[tuple[int, str], _Alone] = {}
    known = [_everywhere(run) for run in (target, golden)]
    for rank in sorted(target.ranks):
        for family in target.families(rank):
            if family not in golden.families(rank) or family in apart:
                continue
            names_of_sides = [
                _always(*runs, rank, family, others) for runs, others in (((target, golden), known[1]), ((golden, target), known[0]))
            ]
            if (names_of_sides[0] and names_of_sides[1]) or _is_closed(golden if names_of_sides[0] else target, rank, family):
                continue
            closed = _closed_modules(golden if names_of_sides[0] else target, rank, family)
            for name, step in (names_of_sides[0] or names_of_sides[1]).items():
                if (rank, without_call(name)) in cut or _is_inside(module_of(name), closed):
                    continue
                alone = alone_by_name.setdefault((rank, name), _Alone(step, rank, name, bool(names_of_sides[0]), []))
                alone.step = min(alone.step, step)
                alone.families.append(family)
    return [_suspect(alone) for alone in sorted(alone_by_name.values(), key=lambda alone: (alone.step, alone.rank))]


def _is_closed(run: Run, rank: int, family: str) -> bool:
    """Of activations a run has those of the whole model and no others: it was compiled, and what is in it is not called one by one."""
    return family.startswith("actv") and all(key.name.startswith(".") for key in _series(run, rank, family))


def _closed_modules(run: Run, rank: int, family: str) -> frozenset[str]:
    """Modules of which a run has activations, and none of any module in them: they are the innermost ones, or were compiled."""
    if not family.startswith("actv"):
        return frozenset()
    modules = {module_of(key.name) for key in _series(run, rank, family)}
    around = {path for module in modules for path in accumulate(module.split("."), "{0}.{1}".format) if path != module}
    return frozenset(modules - around - {""})


def _is_inside(module: str, closed: Collection[str]) -> bool:
    return any(path in closed for path in accumulate(module.split("."), "{0}.{1}".format) if path != module)


def _always(run: Run, other: Run, rank: int, family: str, others: Collection[tuple[str, str]]) -> dict[str, int]:
    """Names that a run has in all steps that both have of a family, and the other run nowhere -> the first of these steps."""
    table = _series(run, rank, family)
    steps = np.intersect1d(steps_of(table.values()), steps_of(_series(other, rank, family).values()))
    if not len(steps):
        return {}
    named = {key.name: series for key, series in table.items() if (family, key.name) not in others}
    given = given_besides(table, _series(other, rank, family))
    return {name: int(steps[0]) for name, series in named.items() if name not in given and np.isin(steps, series.steps).all()}


def _series(run: Run, rank: int, family: str) -> dict[Key, Series]:
    """One column of a family."""
    return next((dict(run.series(rank, family, op)) for op in run.ops(rank, family)[:1]), {})


def _everywhere(run: Run) -> set[tuple[str, str]]:
    """(family, name) of all ranks: another layout has a tensor elsewhere."""
    return {(family, key.name) for rank in run.ranks for family in run.families(rank) for key in _series(run, rank, family)}


def _choice(run: Run, rank: int) -> object:
    """What of the settings chooses tensors, as the run says it."""
    settings = run.info(rank).get("monitor")
    return [settings.get(key) for key in _CHOICE] if isinstance(settings, dict) else None


def _suspect(alone: _Alone) -> Suspect:
    families = ", ".join(alone.families)
    if all(family.startswith("actv") for family in alone.families):
        only_target = "this run has {0} of it in every step, the golden run in none: the module is not called there, or takes or gives less"
        only_golden = "the golden run has {0} of it in every step, this run in none: the module is not called here, or takes or gives less"
        why = Sentence(only_target, families) if alone.target else Sentence(only_golden, families)
    elif alone.target:
        why = Sentence("this run has {0} of it in every step, the golden run in none: is it frozen there, or in no optimizer?", families)
    else:
        why = Sentence("the golden run has {0} of it in every step, this run in none: is it frozen here, or in no optimizer?", families)
    row = f"{alone.families[0]}/{alone.name}"
    module = module_path(alone.name) or alone.name.rpartition(".")[0]
    return Suspect(row, module, alone.rank, alone.step, kind="series", why=why, tensor=row)
