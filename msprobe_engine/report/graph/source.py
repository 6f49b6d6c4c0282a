"""Which dump files become a graph: of one path every step and rank, of two those that both have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from msprobe_engine.align.sources import MIXED, pair_paths
from msprobe_engine.align.tasks import Sources
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.find.detect import Run
from msprobe_engine.find.nonfinite.load import number_ranks
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import missing_ranks, missing_steps
from msprobe_engine.formats.dump.reader import DumpDirectory, open_dump, require_visible
from msprobe_engine.formats.dump.ring_file import has_step_file
from msprobe_engine.report.graph.job import Job, Jobs
from msprobe_engine.report.graph.merge.jobs import merge_jobs
from msprobe_engine.report.graph.options import GraphOptions

_CUT = (
    "The runs are cut over their ranks in different ways: what all ranks make together is compared, as with --merge auto; --match exact "
    "compares ranks by their numbers."
)


def jobs_of(target: str | Path, golden: str | Path | None, options: GraphOptions) -> Jobs:
    """Find the dump files.

    Args:
        target: the root of a dump, a step, a rank directory, or a dump.json (debug.json).
        golden: the run that is right, of the same kind; None: the target alone.
        options: which steps and ranks.

    Raises:
        DumpFormatError: there is no dump at a path.
        UsageError: nothing is left of it.
    """
    if options.merge:
        return merge_jobs(_alone(Path(target), options), _alone(Path(golden), options) if golden else None, options)
    jobs = _pairs(target, golden, options) if golden else _alone(Path(target), options)
    if golden and jobs.merge:
        whole = jobs_of(target, golden, replace(options, merge="auto"))
        whole.merge = True
        whole.notes.append(_CUT)
        return whole
    jobs.jobs.sort(key=lambda job: job.key)
    once: dict[tuple[int, int], Job] = {}
    for job in jobs.jobs:
        if job.key in once:
            jobs.notes.append(f"{job.target}: left out, {once[job.key].target} is of the same step and rank; name it itself to see it.")
        else:
            once[job.key] = job
    jobs.jobs = list(once.values())
    return jobs


def _pairs(target: str | Path, golden: str | Path, options: GraphOptions) -> Jobs:
    sources: Sources = pair_paths(target, golden, options.steps, options.ranks)
    jobs = Jobs(notes=sources.notes, lost=sources.lost)
    if options.match == "structure" and not options.ranks:
        from msprobe_engine.report.table.layout_tables import as_wholes

        cut = Sources(sources.tasks)
        as_wholes(cut)
        jobs.merge = any(task.whole for task in cut.tasks)
    for task in sources.tasks:
        step = task.step or 0
        where = task.golden.resolve().parent
        golden_step, golden_rank = layout.step_of(where.parent.name), layout.rank_of(where.name)
        rank = task.rank or 0
        jobs.jobs.append(
            Job(
                task.target,
                task.golden,
                step,
                rank,
                step if golden_step is None else golden_step,
                rank if golden_rank is None else golden_rank,
            )
        )
    return jobs


def _alone(target: Path, options: GraphOptions) -> Jobs:
    jobs = Jobs()
    require_visible(target)
    if target.suffix == ".json" and target.name not in (layout.DUMP, layout.DEBUG) and target.is_file():
        raise DumpFormatError(f"{target}: is no dump.json and no debug.json; give one of these, or the directory that holds it")
    dump = _open_dump_or_incident(target, jobs)
    seen: set[int] = set()
    for step in dump.steps:
        if options.steps and step not in options.steps:
            continue
        jobs.lost += missing_ranks(dump, step, options.ranks)
        ranks = dict(number_ranks(dump, step))
        seen |= ranks.keys()
        for rank, directory in ranks.items():
            if options.ranks and rank not in options.ranks:
                continue
            file = _file(directory, target.name)
            jobs.jobs.append(Job(file, None, step, rank))
    jobs.lost += missing_steps(dump, options.steps)
    for word, asked, there in (("steps", options.steps, set(dump.steps)), ("ranks", options.ranks, seen)):
        missing = sorted(asked - there)
        if missing:
            jobs.lost.append(f"{dump.root}: {word} {', '.join(map(str, missing[:16]))} were asked for and are not there.")
    if not jobs.jobs:
        raise UsageError(f"{target}: nothing is left to draw. {' '.join(jobs.lost + jobs.notes)}")
    return jobs


def _open_dump_or_incident(target: Path, jobs: Jobs) -> DumpDirectory:
    """The dump at a path; of a mixed dump the part with a hierarchy, of a run without a dump that of its only incident."""
    try:
        return open_dump(target)
    except DumpFormatError:
        kept = [run.path for run in Run(target).incidents]
        for place, reason in [
            *_find_mixed_parts(target),
            *((one, "has no dump but that of an incident") for one in kept if len(kept) == 1),
        ]:
            try:
                opened = open_dump(place)
            except DumpFormatError:
                continue
            jobs.notes.append(f"{target}: {reason}; the graph is that of {place}.")
            return opened
        raise


def _find_mixed_parts(target: Path) -> Iterator[tuple[Path, str]]:
    yield from ((target / name, "is a mixed dump") for name in reversed(MIXED) if (target / name).is_dir())


def _file(directory: Path, asked: str) -> Path:
    if asked == layout.DEBUG:
        return directory / layout.DEBUG
    has_dump = has_step_file(directory / layout.DUMP) or any((directory / name).exists() for name in (layout.FRAME_LOG, layout.MARKER))
    return directory / (layout.DUMP if has_dump else layout.DEBUG)
