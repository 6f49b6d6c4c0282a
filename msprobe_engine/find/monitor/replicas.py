"""Copies of parameters in monitor output: do ranks that hold the same parameter have the same numbers of it?

No file says which ranks hold copies, but the numbers do: where those of a parameter and those of its reduced gradient are the same on all
ranks, it is one parameter with one gradient, and every optimizer must give it one new value. Parts of a tensor, experts and stages have
gradients of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.collectives.replicas import Odd, Row, find_differing_copies, is_equal, odd_ones
from msprobe_engine.find.monitor.number_pairs import COMPARED
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key, Series, steps_of

BEFORE, AFTER, GRADIENT = "param_origin", "param_updated", "grad_reduced"
_COPIED = ("dp", "cp", "rank", "local_rank", "node")
"""Coordinates of `rank_info` in which copies may differ; all others cut the model."""
_SAME_UPDATE = Sentence("before the update it was the same on these ranks, and so was its reduced gradient")
_SAME_BEFORE = Sentence("in all steps before it was the same on these ranks")


@dataclass
class Replicas:
    """What ranks have of the same parameters.

    Attributes:
        odd: copies that differ in the earliest step in which any do, in the order of the model.
        evidence: how many, in words.
        equal: parameters of several ranks were seen, and the numbers of none of them differ.
        parted: first step in which parameters differ that were all the same in a step before; None: there is none, or it is known what for.
    """

    odd: list[Odd] = field(default_factory=list)
    evidence: list[Sentence] = field(default_factory=list)
    equal: bool = False
    parted: int | None = None


def check_replicas(run: Run) -> Replicas:
    """Hold parameters of ranks against each other; of the earliest step in which copies differ."""
    tables, groups = _parameters(run), groups_of_copies(run)
    out = Replicas()
    differ: set[tuple[tuple[int, ...], str]] = set()
    alike: set[str] = set()
    for step in sorted(tables):
        fresh: list[tuple[tuple[int, ...], str]] = []
        for group in groups:
            for name, rows in tables[step].items():
                held = [rows[rank] for rank in group if rank in rows]
                if len(held) > 1 and (group, name) not in differ:
                    out.equal = True
                    if not is_equal(held):
                        fresh.append((group, name))
        out.odd = find_differing_copies(step, _updated_alike(run, step, fresh), _SAME_UPDATE) if fresh else []
        template = "{0} parameters that are copies of each other differ."
        if not out.odd:
            table = tables[step]
            began = {name for name in table if name in alike or _began_alike(run, step, [(tuple(table[name]), name)])} if fresh else alike
            out.odd = odd_ones(step, table, began.__contains__)
            template = "{0} parameters that are copies of each other differ; others of their kind are equal on all ranks."
        if out.odd:
            out.evidence = [Sentence(template, len(out.odd))]
            return out
        if fresh and not differ and (step > min(tables) or _began_alike(run, step, fresh)):
            out.parted = step
        differ.update(fresh)
        alike |= {name for name, rows in tables[step].items() if len(rows) > 1 and is_equal(rows.values())}
    out.equal = out.equal and not differ
    out.odd = _parted_gradients(run, groups)
    if out.odd:
        out.evidence = [Sentence("{0} gradients that were the same on all their ranks differ.", len(out.odd))]
    return out


def _parted_gradients(run: Run, groups: Sequence[tuple[int, ...]]) -> list[Odd]:
    """Reduced gradients that were the same on all ranks of a group in every step, and from one step on are not: they are no longer summed.
    Those of parts differ from the beginning, and so do those of replicas that are averaged now and then."""
    for group in (group for group in groups if len(group) > 1):
        tables = {rank: columns_of(run, rank, GRADIENT) for rank in group}
        unequal = unequal_names(list(tables.values()))
        if not unequal:
            continue
        steps = steps_of(series for columns in tables.values() for column in columns[:1] for series in column.values()).tolist()
        alike: set[str] = set()
        for step in steps:
            rows = {rank: _rows(columns, step) for rank, columns in tables.items()}
            names = [name for name in rows[group[0]] if all(name in rows[rank] and any(rows[rank][name]) for rank in group)]
            held = {name: {rank: rows[rank][name] for rank in group} for name in names if name in unequal}
            other = {name: copies for name, copies in held.items() if name in alike and not is_equal(copies.values())}
            if other:
                return find_differing_copies(step, other, _SAME_BEFORE)
            if step == steps[0]:
                alike = {name for name, copies in held.items() if is_equal(copies.values())}
                if not alike:
                    break
    return []


def unequal_names(tables: Sequence[Sequence[Mapping[Key, Series]]]) -> set[str]:
    """Names whose numbers are not the same on all ranks in all steps; of all others no step needs a look."""
    first, *others = tables
    if any(len(columns) != len(first) for columns in others):
        return {key.name for columns in tables for column in columns for key in column}
    pairs = [pair for columns in others for pair in zip(first, columns)]
    return {
        key.name
        for first_column, other_column in pairs
        for key in first_column.keys() | other_column.keys()
        if not _is_same(first_column.get(key), other_column.get(key))
    }


def _is_same(series: Series | None, other: Series | None) -> bool:
    if series is None or other is None:
        return False
    return np.array_equal(series.steps, other.steps) and np.array_equal(series.values, other.values, equal_nan=True)


def _parameters(run: Run) -> dict[int, dict[str, dict[int, Row]]]:
    """Step -> parameter -> rank -> numbers, after the update where they were written then."""
    tables: dict[int, dict[str, dict[int, Row]]] = {}
    for rank in run.ranks:
        for family in (BEFORE, AFTER):
            columns = columns_of(run, rank, family)
            for key in columns[0] if columns else ():
                steps = columns[0][key].steps.tolist()
                values = zip(*(column[key].values.tolist() for column in columns if key in column))
                for step, row in zip(steps, values):
                    tables.setdefault(step, {}).setdefault(key.name, {})[rank] = row
    return tables


def _updated_alike(run: Run, step: int, differ: Sequence[tuple[tuple[int, ...], str]]) -> dict[str, dict[int, Row]]:
    """Of parameters that differ after a step those to which one update was made, with the ranks that share it.

    Args:
        differ: ranks at the same place of the model, and the parameter.
    """
    ranks = sorted({rank for group, _ in differ for rank in group})
    before, after, gradient = ({rank: _rows(columns_of(run, rank, family), step) for rank in ranks} for family in (BEFORE, AFTER, GRADIENT))
    copies: dict[str, dict[int, Row]] = {}
    for group, name in differ:
        rows = {rank: after[rank][name] for rank in group if name in after[rank]}
        went_in = {(before[rank].get(name, ()), gradient[rank].get(name, ())) for rank in rows}
        if name not in copies and len(rows) > 1 and len(went_in) == 1 and _are_known(*went_in.pop()):
            copies[name] = rows
    return copies


def _began_alike(run: Run, step: int, differ: Sequence[tuple[tuple[int, ...], str]]) -> bool:
    """Were these parameters the same before the update of a step?"""
    before = {rank: _rows(columns_of(run, rank, BEFORE), step) for rank in sorted({rank for group, _ in differ for rank in group})}
    return all(
        is_equal(before[rank].get(name, ()) for rank in group) and any(before[rank].get(name) for rank in group) for group, name in differ
    )


def _are_known(before: Row, gradient: Row) -> bool:
    """Finite numbers, and a gradient: parts of one constant (zeros, ones) are told from a copy by it alone."""
    return bool(before) and any(gradient) and all(map(math.isfinite, (*before, *gradient)))


def _rows(columns: Sequence[Mapping[Key, Series]], step: int) -> dict[str, Row]:
    """Parameter -> its numbers in one step, of all phases and chunks that have that name."""
    out: dict[str, Row] = {}
    for key in columns[0] if columns else ():
        row = tuple(value for column in columns if key in column for value in _value(column, key, step))
        out[key.name] = (*out.get(key.name, ()), *row)
    return {name: row for name, row in out.items() if row}


def _value(column: Mapping[Key, Series], key: Key, step: int) -> Iterator[float]:
    position = int(np.searchsorted(column[key].steps, step))
    if position < len(column[key].steps) and column[key].steps[position] == step:
        yield float(column[key].values[position])


def columns_of(run: Run, rank: int, family: str) -> list[Mapping[Key, Series]]:
    """The statistics of a family that are compared, each by tensor; none where the rank has not got it."""
    if family not in run.families(rank):
        return []
    return [run.series(rank, family, op) for op in COMPARED if op in run.ops(rank, family)]


def groups_of_copies(run: Run) -> list[tuple[int, ...]]:
    """Ranks at the same place of the model, as far as they said where they are."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank in run.ranks:
        info = run.info(rank).get("rank_info")
        items = info.items() if isinstance(info, Mapping) else ()
        place = tuple(sorted((str(name), str(value)) for name, value in items if name not in _COPIED))
        groups.setdefault(place, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
