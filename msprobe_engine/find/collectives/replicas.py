"""Copies of a parameter on several ranks that should be equal: which one is not.

Names do not say which ranks hold copies and which hold parts (tensor, expert and pipeline parallelism). Three things do:

* parts differ in every layer; a copy that has gone astray differs where the same parameter of other layers is equal (`odd_ones`);
* ranks whose collectives sum as many gradients as they have parameters hold all of them (`summing_groups`);
* a parameter with the same numbers and the same gradient on all ranks is one parameter: an update that parts it is wrong (the monitor).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.align.parameters.prefixes import strip_wrappers
from msprobe_engine.core.operator_traits import normal_op
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.formats.dump.dump_table import INPUT, PARAMETERS, DumpTable, is_number
from msprobe_engine.formats.dump.replicas.reader import of_each
from msprobe_engine.measure import distances

Row = tuple[Any, ...]
"""Statistics (or a checksum) of one copy."""
_CALL = re.compile(r"\.forward\.\d+\.")
_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])")
_OTHER_LAYERS = Sentence("the same parameter of other layers is equal everywhere")


@dataclass
class Odd:
    """A parameter that is not equal on all its ranks, though it should be."""

    step: int
    name: str
    rank: int
    others: list[int]
    why: str
    numbers: dict[str, Any] = field(default_factory=dict)


def parameters(sides: Mapping[int, DumpTable]) -> dict[str, dict[int, Row]]:
    """Parameter rows of the first forward call of each module: row name -> rank -> shape, statistics, checksum."""
    table: dict[str, dict[int, Row]] = {}
    for rank, held in of_each(sides, _parameters_of).items():
        for name, row in held:
            table.setdefault(name, {})[rank] = row
    return table


def _parameters_of(side: DumpTable) -> list[tuple[str, Row]]:
    parameters: list[tuple[str, Row]] = []
    for row in _parameter_rows(side):
        digest, four = side.extra.get(row, {}).get("digest"), side.stats_of(row)
        if not all(map(is_number, four)):
            if not (digest or side.md5[row]):
                continue  # nothing that could be held against a copy; `load_rank` says it
            four = (None,) * 4
        parameters.append((side.name[row], (str(side.shape[row]), *four, side.md5[row], digest)))
    return parameters


def _parameter_rows(side: DumpTable) -> list[int]:
    """Rows of parameters, each of the first forward call of its module."""
    first_rows: dict[str, int] = {}
    for row, role in enumerate(side.role):
        if role == PARAMETERS:
            first_rows.setdefault(_CALL.sub(".", side.name[row]), row)
    return list(first_rows.values())


def summing_groups(sides: Mapping[int, DumpTable]) -> list[tuple[int, ...]]:
    """Groups of ranks that all-reduce flat buffers of as many elements as each of them trains, as DDP does with its buckets.

    Such ranks hold all parameters alike. Parts are not summed over the ranks that hold them, and activations are not flat.
    """
    summed: dict[tuple[int, ...], dict[int, int]] = {}
    groups: dict[int, tuple[list[Any], tuple[int, ...] | None]] = {}  # replicas have one list for all that name a group
    for rank, flat in of_each(sides, _flat_sums).items():
        for op, elements in flat.items():
            tags = sides[rank].collectives[op].get("tags")
            ranks = tags.get("group_ranks") if isinstance(tags, dict) else None
            if not isinstance(ranks, list):
                continue
            if id(ranks) not in groups:
                groups[id(ranks)] = ranks, tuple(ranks) if all(isinstance(member, int) for member in ranks) else None
            group = groups[id(ranks)][1]
            if group is not None:
                counts = summed.setdefault(group, {})
                counts[rank] = counts.get(rank, 0) + elements
    trained = of_each(sides, _count_trained_elements)
    return [
        group
        for group, counts in summed.items()
        if len(group) > 1 and all(trained.get(rank) and counts.get(rank) and not counts[rank] % trained[rank] for rank in group)
    ]


def _flat_sums(side: DumpTable) -> dict[int, int]:
    """All-reduces -> elements of the flat buffers that go in."""
    elements: dict[int, int] = {}
    for op in side.collectives:
        if normal_op("".join(side.ops[op].split(".")[1:2])) == "allreduce":
            rows = (row for row in side.rows(op) if side.role[row] == INPUT)
            shapes = (side.shape[row] for row in rows if isinstance(side.shape[row], list) and len(side.shape[row]) == 1)
            elements[op] = sum(map(distances.elements, shapes))
    return elements


def _count_trained_elements(side: DumpTable) -> int:
    """Elements of the parameters that require a gradient."""
    return sum(distances.elements(side.shape[row]) for row in _parameter_rows(side) if side.requires_grad[row])


def find_differing_copies(
    step: int, table: Mapping[str, Mapping[int, Row]], reason: Sentence, last: Mapping[str, Row] | None = None
) -> list[Odd]:
    """Parameters of one step that are known to be copies and differ between ranks.

    Args:
        table: parameter -> rank -> what is known of its copy there, in the order of the model.
        reason: why they are copies; ends the sentence of each.
        last: parameter -> what all ranks had of it in the step before, if they had the same.
    """
    return [_odd(step, name, rows, reason, (last or {}).get(name)) for name, rows in table.items() if not is_equal(rows.values())]


def of_same_shape(table: Mapping[str, Mapping[int, Row]], group: Collection[int]) -> dict[str, dict[int, Row]]:
    """What a group of ranks has of the parameters that all of them hold in one shape; a row begins with its shape."""
    out = {name: {rank: rows[rank] for rank in group} for name, rows in table.items() if all(rank in rows for rank in group)}
    return {name: rows for name, rows in out.items() if len({row[0] for row in rows.values()}) == 1}


def ranks_alike(table: Mapping[str, Mapping[int, Row]]) -> list[tuple[int, ...]]:
    """Groups of ranks that have the same numbers of all parameters, as those that hold one shard of a model have."""
    held: dict[int, list[tuple[str, Row]]] = {}
    for name, rows in table.items():
        for rank, row in rows.items():
            held.setdefault(rank, []).append((name, row))
    groups: dict[tuple[tuple[str, Row], ...], list[int]] = {}
    for rank, parameters_of_rank in sorted(held.items()):
        groups.setdefault(tuple(parameters_of_rank), []).append(rank)
    return [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]


def say_not_compared(diagnosis: Diagnosis, parted: int | None, checked: int | None = None) -> None:
    """Nothing recorded says which ranks hold copies.

    Args:
        parted: first step in which parameters differ that were all the same before; None: there is none.
        checked: every so many steps ``monitor.replica_check`` has compared those that the training knew of; None: it was off.
    """
    said = Sentence("Replicas were not compared: nothing recorded says which ranks hold copies; set monitor.replica_check.")
    if checked is not None:
        template = "monitor.replica_check looked at the copies that the training knew of every {0} steps and raised no alert."
        said = Sentence(template, checked)
    diagnosis.evidence.append(said)
    if parted is not None:
        template = "parameters that were the same on several ranks differ from step {0} on; where ranks are replicas, they have parted"
        diagnosis.problems.append(Sentence(template, parted))


def of_the_whole(table: Mapping[str, Mapping[int, Row]], whole: Mapping[str, Mapping[int, Row]]) -> dict[str, dict[int, Row]]:
    """What ranks have of the parameters that one process has in the same shape; nothing where a rank lacks one of them, as a stage of a
    pipeline or a rank with experts of its own does."""
    shapes = {_of_parameter(name): row[0] for name, rows in whole.items() for row in rows.values()}
    held = {_of_parameter(name): rows for name, rows in table.items()}
    ranks = {rank for rows in held.values() for rank in rows}
    if not shapes or any(name not in held or ranks - held[name].keys() for name in shapes):
        return {}
    return {name: dict(rows) for name, rows in table.items() if {row[0] for row in rows.values()} == {shapes.get(_of_parameter(name))}}


def of_moved_copies(
    table: Mapping[str, Mapping[int, Row]], began: Mapping[str, Mapping[int, Row]], other: Mapping[str, Mapping[int, Row]]
) -> dict[str, dict[int, Row]]:
    """What ranks have of the parameters that another run holds alike on the same ranks, in the same shape (else they are parts here), where
    it has moved them. Nothing where a rank lacks one of those parameters: stages of a pipeline may number their layers alike.

    Args:
        began, other: of the other run, in its first step and in this one.
    """
    moved: dict[str, dict[int, Row]] = {}
    if any(rows.keys() - table.get(name, {}).keys() for name, rows in other.items()):
        return moved
    for name, rows in table.items():
        then, now = set(began.get(name, {}).values()), set(other.get(name, {}).values())
        one_shape = len({row[0] for row in (*rows.values(), *now)}) == 1
        if one_shape and len(then) == len(now) == 1 and then != now and rows.keys() == other[name].keys():
            moved[name] = dict(rows)
    return moved


def moved_alike(table: Mapping[str, Mapping[int, Row]], last: Mapping[str, Row]) -> bool:
    """Some parameter has other numbers than in the step before, the same on all ranks that hold it: ranks that share nothing differ.

    Args:
        last: parameter -> what all ranks had of it in the step before.
    """
    return any(len(rows) > 1 and len(values := set(rows.values())) == 1 and values != {last.get(name)} for name, rows in table.items())


def of_tied(table: Mapping[str, Mapping[int, Row]], whole: Mapping[str, Mapping[int, Row]]) -> dict[str, dict[int, Row]]:
    """What ranks (the first and the last stage of a pipeline) have of matrices that one process has under several names."""
    names: dict[Row, list[str]] = {}
    for name, rows in whole.items():
        for row in rows.values():
            if "," in row[0]:
                names.setdefault(row, []).append(_of_parameter(name))
    held = {_of_parameter(name): (name, rows) for name, rows in table.items()}
    tied_rows: dict[str, dict[int, Row]] = {}
    for row, tied in names.items():
        places = [held[name] for name in tied if name in held]
        if len(tied) > 1 and len(places) == len(tied):
            tied_rows[places[0][0]] = {rank: copy for _, rows in reversed(places) for rank, copy in rows.items() if copy[0] == row[0]}
    return tied_rows


def _of_parameter(name: str) -> str:
    """The name of a parameter in that of a row, whatever is around the model."""
    module, _, parameter = name.partition(".parameters.")
    return f"{strip_wrappers(_CALL.split(module + '.')[0].removeprefix('Module.').rpartition('.')[0])}.{parameter}"


def is_equal(rows: Iterable[Row]) -> bool:
    """Do all ranks have the same, or none of them a number?"""
    values = set(rows)
    return len(values) <= 1 or all(_nan(value) for value in values)


def odd_ones(step: int, table: Mapping[str, Mapping[int, Row]], began_alike: Callable[[str], bool]) -> list[Odd]:
    """Parameters of one step that differ between ranks where the same parameter of most other layers does not; and one that no other layer
    has, where all others do not and it was the same before: else it may be cut (a table of a vocabulary).

    Args:
        table: parameter -> rank -> what is known of its copy there, in the order of the model.
        began_alike: name of a parameter -> it was the same on its ranks before.
    """
    kinds: dict[str, list[bool]] = {}
    equal: dict[str, bool] = {}
    for name, rows in table.items():
        if len(rows) < 2:
            continue
        equal[name] = is_equal(rows.values())
        kinds.setdefault(_NUMBER.sub("*", name), []).append(equal[name])
    same, all_of = sum(equal.values()), len(equal)
    odd = []
    for name, same_everywhere in equal.items():
        if same_everywhere:
            continue
        kind = kinds[_NUMBER.sub("*", name)]
        alone = len(kind) == 1 and same == all_of - 1 and same >= 2 and began_alike(name)
        if alone or (len(kind) > 1 and 2 * sum(kind) >= len(kind)):
            odd.append(_odd(step, name, table[name], _OTHER_LAYERS))
    return odd


def _nan(row: Row) -> bool:
    return any(value != value for value in row)


def _odd(step: int, name: str, rows: Mapping[int, Row], reason: Sentence, last: Row | None = None) -> Odd:
    counts = Counter(rows.values())
    usual, often = counts.most_common(1)[0]
    others = sorted(rank for rank, row in rows.items() if row == usual)
    away = sorted(rank for rank, row in rows.items() if row != usual)
    stays = [rank for rank, row in sorted(rows.items()) if row == last]
    if stays and len(stays) < len(rows):
        others = sorted(rows.keys() - stays)
        usual, rank = rows[others[0]], stays[0]
        template = "the update of the step before has not moved it on rank {0}, and has on ranks {1}"
        why = Sentence(template, ", ".join(map(str, stays[:8])), ", ".join(map(str, others[:8])))
    elif 2 * often > len(rows):
        why = Sentence("it differs on rank {0} from the copies on ranks {1}", ", ".join(map(str, away)), ", ".join(map(str, others[:8])))
        rank = away[0]
    else:
        rank = away[-1]
        why = Sentence(
            "its copies on ranks {0} differ, and no value has a majority: which of them is wrong cannot be told (rank {1} "
            "is named because it differs from rank {2}, which counts as the one that is copied)",
            ", ".join(map(str, sorted(rows)[:16])),
            rank,
            others[0],
        )
    numbers = {"target": {"row": name, "value": list(rows[rank])}, f"rank {others[0]}": {"row": name, "value": list(usual)}}
    return Odd(step, name, rank, others, Sentence("{0}; {1}", why, reason), numbers)
