"""Single saved variables (``debugger.save``, debug.json): the first one that two runs do not agree about, the first that holds NaN or Inf.

There are no calls between them that could be followed, so the order of saving tells: values in that order, then gradients from the last
value to the first, which is the order in which a backward pass makes them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from msprobe_engine.core.errors import NothingCapturedError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import findings
from msprobe_engine.find.findings import Diagnosis, Suspect
from msprobe_engine.find.nonfinite.load import number_ranks, read_step
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import missing_steps
from msprobe_engine.formats.dump.dump_table import DEBUG, DumpTable
from msprobe_engine.formats.dump.reader import DumpDirectory
from msprobe_engine.measure import distances, roundoff

_STATISTICS = ("Max", "Min", "Mean", "Norm")
_MOST = 20


def only_saved(*sides: Mapping[int, DumpTable]) -> bool:
    """All that was dumped are single saved variables."""
    tables = [side for some in sides for side in some.values()]
    return any(len(side) for side in tables) and all(set(side.role) <= {DEBUG} for side in tables)


def order(side: DumpTable) -> list[int]:
    """Rows in the order in which their variables came to be."""
    place = {name: position for position, name in enumerate(side.ops)}

    def key(row: int) -> tuple[bool, int, int]:
        name = side.ops[side.op[row]]
        head, _, number = name.removesuffix(".debug").rpartition(".")
        value = f"{head.removesuffix('_grad')}.{number}.debug"
        if head.endswith("_grad") and value in place:
            return True, -place[value], row
        return False, place[name], row

    return sorted(range(len(side)), key=key)


def add_differing_variables(
    diagnosis: Diagnosis, step: int, target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable]
) -> tuple[int, int]:
    """Put the variables of a step that differ into `diagnosis`, and the names that only one side has. Returns how many rows were looked at,
    and how many of them hold NaN or Inf on both sides and nothing else that could be compared.

    Any number of calls may lie between two variables, so `roundoff.GROWTH` times the round-off of one call is accepted.
    """
    suspects: list[tuple[int, Suspect]] = []
    compared = hidden = blank = 0
    for rank in sorted(target.keys() & golden.keys()):
        target_table, golden_table = target[rank], golden[rank]
        places = {name: row for row, name in enumerate(golden_table.name)}
        called = _find_golden_names(target_table)
        rows = [(row, places[called[row]]) for row in order(target_table) if called[row] in places]
        compared += len(rows)
        for word, some, others in (("target", called, set(golden_table.name)), ("golden", golden_table.name, set(called))):
            known = diagnosis.unmatched.setdefault(word, [])
            known += [name for name in dict.fromkeys(some) if name not in others and name not in known][:100]
        if not rows:
            continue
        m = distances.distances(target_table, golden_table, rows)
        hidden += int((m.bad_target & m.bad_golden & ~m.known).sum())
        blank += int(m.one_sided.any(1).sum())
        off = 0
        for position, (row, golden_row) in enumerate(rows):
            limit = roundoff.GROWTH * roundoff.call_limit(
                roundoff.eps(golden_table.dtype[golden_row]), roundoff.longest_sum(golden_table.shape[golden_row])
            )
            if m.distance[position] <= limit:
                continue
            off += 1
            if off <= _MOST:
                bad = bool(m.bad_target[position] and not m.bad_golden[position])
                suspects.append(
                    (position, _suspect(step, rank, target_table, row, golden_table, golden_row, float(m.distance[position]), limit, bad))
                )
        diagnosis.differences += off
    if blank:
        template = "step {0}: saved values whose statistics are not all in both runs: {1}; what is missing was not compared"
        diagnosis.problems.append(Sentence(template, step, f"{blank:,}"))
    if suspects:
        suspects.sort(key=lambda item: (item[0], item[1].rank))
        diagnosis.suspects = [suspect for _, suspect in suspects[:_MOST]]
        diagnosis.finding = _classify_finding(diagnosis.suspects[0])
        diagnosis.evidence.append(
            Sentence(
                "{0} of {1} saved values differ by more than round-off; this is the first in the order of saving, gradients "
                "behind the values. The calls before it are not in the dump: save more variables before it, or dump at level "
                "mix.",
                f"{diagnosis.differences:,}",
                f"{compared:,}",
            )
        )
    return compared, hidden


def _find_golden_names(side: DumpTable) -> list[str]:
    """What the rows are called on the golden side: their names, until a mapping has said others."""
    if side.aliases is side.ops:
        return side.name
    golden_names = []
    for name, op in zip(side.name, side.op):
        record = side.ops[op]
        golden_names.append(side.aliases[op] + name[len(record) :] if name.startswith(record) else name)
    return golden_names


def nonfinite(diagnosis: Diagnosis, step: int, sides: Mapping[int, DumpTable]) -> bool:
    """Put the variables of a step that hold NaN or Inf into `diagnosis`. Returns whether there are any."""
    suspects: list[tuple[int, Suspect]] = []
    for rank, side in sorted(sides.items()):
        rows = order(side)
        for position in np.flatnonzero(distances.nonfinite(side, rows)).tolist():
            if rows[position] not in side.nans and str(side.stats_of(rows[position])[0]).lower() not in ("nan", "inf"):
                continue  # -Inf alone is what masks are made of
            suspects.append((position, _suspect(step, rank, side, rows[position], None, -1, None, None, True)))
    if not suspects:
        return False
    suspects.sort(key=lambda item: (item[0], item[1].rank))
    diagnosis.suspects = [suspect for _, suspect in suspects[:_MOST]]
    diagnosis.finding = _classify_finding(diagnosis.suspects[0])
    diagnosis.evidence.append(
        Sentence("It is the first in the order of saving, gradients behind the values; the calls before it are not in the dump.")
    )
    return True


def saved_alone(dump: DumpDirectory) -> Diagnosis | None:
    """The first NaN or Inf among saved variables; None when something else was dumped.

    Raises:
        NothingCapturedError: nothing of it can be read.
    """
    ranks = [path for step in dump.steps for _, path in number_ranks(dump, step)]
    if not ranks or any((path / layout.DUMP).exists() or not (path / layout.DEBUG).exists() for path in ranks):
        return None
    diagnosis, values = Diagnosis(problems=missing_steps(dump)), 0
    for step in dump.steps:
        sides = read_step(dump, step, diagnosis.problems)
        diagnosis.problems += [problem for side in sides.values() for problem in side.problems]
        values += sum(map(len, sides.values()))
        if nonfinite(diagnosis, step, sides):
            break
    if not values:
        raise NothingCapturedError(
            f"{dump.root}: no saved value can be read" + (f" ({diagnosis.problems[0]})" if diagnosis.problems else "")
        )
    if not diagnosis.suspects:
        diagnosis.evidence.append(Sentence("No saved value holds NaN or Inf."))
    diagnosis.looked_at = {"steps": ", ".join(map(str, dump.steps)), "saved values": values}
    return diagnosis


def _classify_finding(first: Suspect) -> str:
    return {"NaN": findings.NONFINITE, "Inf": findings.OVERFLOW}.get(first.kind, findings.DIVERGENCE)


def _suspect(
    step: int,
    rank: int,
    side: DumpTable,
    row: int,
    golden: DumpTable | None,
    golden_row: int,
    distance: float | None,
    limit: float | None,
    bad: bool,
) -> Suspect:
    name = side.name[row]
    kind, why = "saved value", ""
    if bad:
        nan = row in side.nans or any(str(value).lower() == "nan" for value in side.stats_of(row)[:2])
        kind = "NaN" if nan else "Inf"
        why = Sentence("the saved value holds {0}", kind) + (Sentence("; the golden run does not") if golden is not None else "")
    elif distance is not None and np.isfinite(distance):
        why = (
            Sentence("the saved value differs by {0}", f"{distance:.2%}")
            if distance >= 1e-3
            else Sentence("the saved value differs by {0}", f"{distance:.1e}")
        )
    elif golden is not None and side.shape[row] != golden.shape[golden_row]:
        why = Sentence("the saved value has shape {0}, the golden run {1}", side.shape[row], golden.shape[golden_row])
    else:
        why = Sentence("the saved value is not the same")
    numbers = {}
    for word, table, table_row in (("target", side, row), ("golden", golden, golden_row)):
        if table is not None:
            four = dict(zip(_STATISTICS, table.stats_of(table_row)))
            numbers[word] = {"row": table.name[table_row], "dtype": table.dtype[table_row], "shape": table.shape[table_row], **four}
    record = side.ops[side.op[row]]
    return Suspect(
        record,
        "",
        rank,
        step,
        kind=kind,
        why=why,
        tensor=name,
        partner=golden.ops[golden.op[golden_row]] if golden is not None else "",
        numbers=numbers,
        distance=distance,
        limit=limit,
    )
