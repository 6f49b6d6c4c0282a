"""Where it begins, over all ranks and steps of a run of `msprobe_engine.report.graph.run`, by the diagnosis that the other commands have
too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from msprobe_engine.align.mapping.user_mapping import Mappings
from msprobe_engine.align.parallel.merge_records import origin_of
from msprobe_engine.core.errors import DumpFormatError, NothingCapturedError
from msprobe_engine.core.log import one_line
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.core.text.sentences import Sentence, one_line_of
from msprobe_engine.find.difference.rank_walk import RankWalk
from msprobe_engine.find.findings import NONE, NONFINITE, NOTHING, OVERFLOW, Diagnosis
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.replicas.reader import StepTables
from msprobe_engine.measure import distances
from msprobe_engine.report.graph.job import Job
from msprobe_engine.report.graph.nodes.model import Comparison, Graph

Key = tuple[int, int]
"""Step and rank of the target."""


@dataclass(frozen=True)
class Place:
    """A suspect.

    Attributes:
        names: records that show it, the nearest first; the first one that the graph has is its node.
        rank: in whose dump these names stand.
    """

    names: tuple[str, ...]
    text: str
    rank: int


@dataclass
class Suspects:
    """What was found.

    Attributes:
        finding: one of `msprobe_engine.find.findings.FINDINGS`; ``unknown`` when it could not be told.
        headline: the first line of the summary.
        why: a sentence on the first suspect, "" when there is none.
        places: step and rank -> the first suspect there.
        first: the most likely of all.
        problems: what could not be read or compared.
    """

    finding: str = NONE
    headline: str = ""
    why: str = ""
    places: dict[Key, Place] = field(default_factory=dict)
    first: Key | None = None
    problems: list[str] = field(default_factory=list)


def of_two(
    jobs: Sequence[Job],
    paths: tuple[str, str],
    mappings: Mappings,
    known: Mapping[Key, Comparison],
    tables: StepTables,
    problems: Sequence[str] = (),
) -> Suspects:
    """Where two runs part.

    Args:
        jobs: pairs of dump files.
        mappings: names of the target on the golden side.
        known: comparisons that are in memory; the others are read and walked again.
        tables: what was read before.
        problems: what could not be read or compared before; the first line counts it.
    """
    from msprobe_engine.find.config_and_checkpoint import add_settings
    from msprobe_engine.find.detect import Run
    from msprobe_engine.find.nonfinite.one_side import add_nonfinite_of_one_side
    from msprobe_engine.find.origin import MISSING
    from msprobe_engine.find.run import compare_steps

    def find_walk(job: Job) -> RankWalk | None:
        made = known.get(job.key)
        return made.begun if made is not None and not job.members else None

    def find_walks(step: int) -> dict[int, RankWalk]:
        return {job.rank: one for job in jobs if job.step == step and (one := find_walk(job)) is not None}

    def read_step(step: int, problems: list[str]) -> tuple[dict[int, DumpTable], dict[int, DumpTable]]:
        target: dict[int, DumpTable] = {}
        golden: dict[int, DumpTable] = {}
        fresh: set[int] = set()
        look = read_side if mappings else tables.of(step).read
        for job in jobs:
            walk = find_walk(job)
            if job.step == step and walk is not None:
                target[job.rank], golden[job.rank] = walk.sides
            elif job.step == step:
                _read_sides(look, job.ranks, target, problems)
                golden_paths = job.golden_ranks if job.members else tuple((job.rank, path) for _, path in job.golden_ranks)
                _read_sides(look, golden_paths, golden, problems)
                fresh.update(rank for rank, _ in job.ranks if rank in target)
        mappings.apply_all({rank: target[rank] for rank in fresh}, golden)
        for sides in (target, golden):
            for rank in [rank for rank, side in sides.items() if not len(side)]:
                del sides[rank]
        return target, golden

    of_rank = {(job.step, rank): job.key for job in jobs for rank, _ in job.ranks}
    suspects = Suspects()
    try:
        with collection_paused():
            diagnosis = compare_steps(sorted({job.step for job in jobs}), read_step, " and ".join(paths), begun=find_walks)
            runs = Run(Path(paths[0])), Run(Path(paths[1]))
            add_nonfinite_of_one_side(diagnosis, *runs, tables, {step for step, _ in of_rank}, {rank for _, rank in of_rank})
            add_settings(diagnosis, *runs)
    except (NothingCapturedError, DumpFormatError) as error:
        return Suspects("unknown", Sentence("Nothing could be compared"), problems=[Sentence("no first suspect: {0}", error)])
    diagnosis.problems = list(dict.fromkeys([*problems, *diagnosis.problems]))
    suspects.finding, suspects.headline, suspects.problems = diagnosis.finding, diagnosis.headline(), diagnosis.problems
    for suspect in (one for one in diagnosis.places or diagnosis.suspects if one.why):
        row = suspect.tensor
        names = tuple(name for name in (suspect.record, _record_of_row(row)) if name)
        why = suspect.why
        if suspect.kind == MISSING:  # its record is one of the golden run, whose names mean other calls in the target
            names = names[1:] or names
            why = Sentence("{0}: {1}", suspect.record, why)
        key = of_rank.get((suspect.step, suspect.rank), (suspect.step, suspect.rank))
        suspects.places.setdefault(key, Place(names, one_line_of(why), suspect.rank))
        suspects.first = suspects.first or key
        suspects.why = suspects.why or one_line_of(suspect.why)
    return suspects


def _read_sides(
    look: Callable[[Path], DumpTable], files: Iterable[tuple[int, Path]], sides: dict[int, DumpTable], problems: list[str]
) -> None:
    for rank, path in files:
        try:
            sides[rank] = look(path)
        except DumpFormatError as error:
            problems.append(str(error))


def of_one(jobs: Iterable[Job], bad: set[Key], tables: StepTables, problems: Sequence[str] = ()) -> Suspects:
    """The first NaN or Inf of a run.

    Args:
        jobs: its dump files.
        bad: step and rank of those that hold something that is not finite; when there are none, nothing is read.
        tables: what was read before.
        problems: what could not be read before; the first line counts it.
    """
    from msprobe_engine.find.nonfinite import first_over_ranks, load, report

    suspects = Suspects()
    jobs = list(jobs)
    of_rank = {(job.step, rank): job.key for job in jobs for rank, _ in job.ranks}
    for step in sorted({step for step, _ in bad}):
        traces, replicas = {}, load.ReplicaTraces(tables.of(step))
        for rank, path in [file for job in jobs if job.step == step for file in job.ranks]:
            if path.name == layout.DEBUG:
                _find_in_saved_values(suspects, (step, rank), path)
                continue
            try:
                traces[rank] = load.load_rank(step, rank, path.parent, suspects.problems, replicas=replicas)
            except DumpFormatError as error:
                suspects.problems.append(str(error))
        if not traces:
            if suspects.first is not None:
                break
            continue
        verdict = first_over_ranks.analyse(traces)
        findings = [report.build_finding(verdict, n) for n in range(len(verdict.suspects))]
        for item in findings:
            text = one_line_of(Sentence("{0}: {1}", item["what"], item["explanation"]))
            suspects.places.setdefault(of_rank[step, item["rank"]], Place((item["op_name"],), text, item["rank"]))
        if findings:
            first = findings[0]
            suspects.finding = OVERFLOW if first["what"] in ("Inf", "-Inf") else NONFINITE
            suspects.first, suspects.why = of_rank[step, first["rank"]], one_line(str(first["explanation"]))
            suspects.headline = report.text(verdict, findings).split("\n")[0]
            break
    if suspects.finding == NONE:
        unread = list(dict.fromkeys([*problems, *suspects.problems]))
        suspects.headline = Diagnosis(nothing=NOTHING, problems=unread).headline()
    return suspects


def _find_in_saved_values(suspects: Suspects, key: Key, path: Path) -> None:
    """The first value that is not finite among those that were saved one by one (debug.json)."""
    try:
        side = read_side(path)
    except DumpFormatError as error:
        suspects.problems.append(str(error))
        return
    bad = np.flatnonzero(distances.nonfinite(side, np.arange(len(side))))
    if not len(bad):
        return
    row = int(bad[0])
    suspects.places[key] = Place((side.ops[side.op[row]],), Sentence("{0} holds NaN or Inf", side.name[row]), key[1])
    if suspects.first is None:
        suspects.first, suspects.finding, suspects.why = key, NONFINITE, suspects.places[key].text
        suspects.headline = one_line(f"First NaN or Inf: step {key[0]}, rank {key[1]}, saved value {side.ops[side.op[row]]}")


def insert_suspects(made: Graph | Comparison, suspects: Suspects) -> None:
    """Note the suspect of a rank in its graph. What a rank shows alone stands where the whole says nothing of it, unless that says that
    nothing is off."""
    key = (made.step, made.rank)
    place = suspects.places.get(key)
    if suspects.finding == NONE:
        made.suspect, made.suspect_text = None, ""
    if place is None:
        return
    graph = made.target if isinstance(made, Comparison) else made
    node = next((node for name in place.names if (node := node_of(graph, place.rank, name)) is not None), None)
    if node is None and isinstance(made, Comparison):  # a call that only the golden run makes
        node = _beside_missing(made, place.names)
    if node is not None:
        made.suspect, made.suspect_text, made.leading = node, place.text, key == suspects.first


def _beside_missing(made: Comparison, names: Sequence[str]) -> int | None:
    """The target's node where the golden run makes a call that the target does not."""
    golden = made.golden
    for name in names:
        node = golden.index.get(name, -1)
        while node > 0:
            if made.partners and made.golden_partners[node] >= 0:
                return made.golden_partners[node]
            node = golden.parents[node]
    return None


def _record_of_row(row: str) -> str:
    """``Functional.linear.0.forward`` of ``Functional.linear.0.forward.output.0``."""
    for word in (".input", ".output", ".parameters.", ".kwargs"):
        head, found, _ = row.rpartition(word)
        if found:
            return head
    return row


def node_of(graph: Graph, rank: int, name: str) -> int | None:
    """The node of a record.

    Args:
        graph: of one rank, or of several.
        rank: whose dump the record is in.

    Returns:
        None when the graph has no such record. The rows of a rank that was merged with others are those of the first of them, which is the
        nearest before it that has the record.
    """
    side = graph.side
    if side is None:
        return graph.index.get(name)
    best, node = -1, None
    for op in range(len(side.ops)):
        origin = origin_of(side, op)
        of_rank, there = origin if origin is not None else (graph.rank, side.ops[op])
        if there == name and best < of_rank <= rank and graph.node_of_record[op] >= 0:
            best, node = of_rank, graph.node_of_record[op]
    return graph.index.get(name) if node is None else node
