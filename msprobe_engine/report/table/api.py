"""Comparisons as functions: this project's own, and under the names and with the arguments of versions 8.1.1 and 26.2.0.

Of many ranks those that hold the same have one table: the others are named in the summary, and have none of their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from msprobe_engine.align.mapping.user_mapping import Mappings
from msprobe_engine.align.sources import add_calibration, pair_paths
from msprobe_engine.align.tasks import Sources, Task
from msprobe_engine.core.errors import DumpFormatError, NothingCapturedError, UsageError
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.core.process.jobs import run_jobs
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.detect import Run
from msprobe_engine.find.difference.noise.calibration import Floats, movements
from msprobe_engine.find.difference.rank_walk import RankWalk
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.run_directory import incidents_left_out
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.replicas.reader import StepTables
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table import same_ranks
from msprobe_engine.report.table.manifest import Manifest, absolute_options, absolute_task
from msprobe_engine.report.table.rank_table import DiagnosedTask, Result, build_failed_result, compare_guarded, places_of
from msprobe_engine.report.table.summary import Comparison
from msprobe_engine.report.table_files import check_format, output_directory


def compare_dumps(
    target: str | Path,
    golden: str | Path,
    output: str | Path = "./output",
    options: CompareOptions | None = None,
    *,
    stack: str | Path | None = None,
    scheduler: str = "",
    diagnose: bool = True,
    suffix: str = "",
) -> Comparison:
    """Compare two dumps: tables of every step and rank, where the difference begins, and a summary as json.

    An interrupted comparison goes on where it stopped when it is called again with the same arguments.

    Args:
        target, golden: see `msprobe_engine.align.sources`.
        output: directory of the results; made when it is not there.
        options: None: `CompareOptions()`.
        stack: stack.json of the target, where it does not lie beside its dump.json.
        scheduler: address of a Dask scheduler (``tcp://host:8786``); "": this machine.
        diagnose: say where the difference begins.
        suffix: at the end of the tables' names.

    Raises:
        DumpFormatError: there is no dump at a path.
        MissingExtraError: a format or the cluster needs a package that is not here.
        SinkError: the output cannot be written.
        UsageError: the arguments do not fit each other or the data.
    """
    options = options or CompareOptions()
    for mode in options.formats:
        check_format(mode)
    _check_files(options)
    sources = pair_paths(target, golden, options.steps, options.ranks, stack)
    if not (options.compat or options.ranks or options.calibration or options.consistent_check):
        from msprobe_engine.report.table.layout_tables import as_wholes

        as_wholes(sources)
    if not (options.compat or options.steps or options.ranks):
        sources.lost += incidents_left_out(Run(Path(target), sources.dumps[0]), Run(Path(golden), sources.dumps[1]))
    if suffix:
        sources.tasks = [replace(task, stem=f"{task.stem}{_safe_suffix(suffix)}") for task in sources.tasks]
    directory = output_directory(output)
    if options.calibration:
        add_calibration(sources, options.calibration)
    comparison = Comparison(str(target), str(golden), options.columns, options.compat, notes=sources.notes, problems=sources.lost)
    pairs = (
        (task.step or 0, layout.step_of(task.golden.resolve().parent.parent.name) or 0) for task in sources.tasks if task.target.suffix
    )
    comparison.other_steps = next((pair for pair in pairs if pair[0] != pair[1]), None)
    manifest = Manifest(directory, _fingerprint(sources, options))
    try:
        return _compare_tasks(comparison, sources, options, directory, manifest, scheduler, diagnose)
    finally:
        manifest.release()


def _check_files(options: CompareOptions) -> None:
    """What is wrong with metrics and matrices is said before the work, and also when nothing has use for them."""
    if options.metrics or options.postprocess is not None:
        from msprobe_engine.measure.tensors.mode import plugin_names
        from msprobe_engine.measure.tensors.postprocess import Postprocess

        plugin_names(options)
        Postprocess(options.postprocess)


def _compare_tasks(
    comparison: Comparison, sources: Sources, options: CompareOptions, directory: Path, manifest: Manifest, scheduler: str, diagnose: bool
) -> Comparison:
    size = sum(task.size for task in sources.tasks)
    keep = diagnose and len(sources.tasks) <= _MOST_KEPT and size * _KEPT < options.memory_mb << 20
    tables = StepTables(scheduler=scheduler)
    results = _results(sources, options, directory, manifest, keep, scheduler, tables)
    comparison.results = [results[task.key] for task in sources.tasks]
    if diagnose:
        with collection_paused():
            _diagnose(comparison, sources, results, options, tables)
    if comparison.diagnosis is not None and not (options.compat or options.consistent_check or options.postprocess is not None):
        _write_again(comparison.diagnosis, sources, results, options, directory, manifest, scheduler)
        comparison.results = [results[task.key] for task in sources.tasks]
    for result in comparison.results:
        result.begun = None
    comparison.write(directory / f"compare_summary_{manifest.stamp}.json")
    if not comparison.all_problems:
        manifest.remove()
    return comparison


_KEPT = 4
"""Memory of the columns of both sides, per byte of their dump files."""
_MOST_KEPT = 16
"""Files whose columns workers hand back for the diagnosis. Of more ranks most are the same, and those are read once for all of them."""


def _results(
    sources: Sources,
    options: CompareOptions,
    directory: Path,
    manifest: Manifest,
    keep: bool,
    scheduler: str,
    tables: StepTables,
) -> dict[str, Result]:
    results = {task.key: result for task in sources.tasks if (result := manifest.find_result(task)) is not None}
    if results:
        sources.notes.append(f"{len(results)} of {len(sources.tasks)} tables are those of an earlier try that was interrupted.")
    for key in [key for key, result in results.items() if result.same_as and result.same_as not in results]:
        del results[key]  # the table that stood for its own is made again
    todo = [task for task in sources.tasks if task.key not in results]

    def run_tasks(tasks: Sequence[Task]) -> None:
        _run("compare", tasks, results, options, directory, manifest, keep, scheduler)

    followed = run(todo, {} if keep else leaders(todo, options, tables), results, run_tasks)
    for task in followed:
        manifest.add_result(task, results[task.key])
    if followed:
        sources.notes.append(describe_same_tables(len(followed)))
    return results


def _run(
    word: str,
    tasks: Sequence[Task],
    results: dict[str, Result],
    options: CompareOptions,
    directory: Path,
    manifest: Manifest,
    keep: bool,
    scheduler: str,
) -> None:
    """Do tasks and put what they came to into `results`. `word`: for the bar of progress."""
    given, given_directory = {task.key: task for task in tasks}, directory
    if scheduler:  # its workers run in directories of their own
        tasks, options, directory = [absolute_task(task) for task in tasks], absolute_options(options), directory.resolve()
    work = partial(compare_guarded, options=options, output=os.fspath(directory), stamp=manifest.stamp, keep=keep)
    kind = "dask" if scheduler else options.scheduler
    with bar(word, len(tasks)) as advance, collection_paused():
        for task, result in run_jobs(tasks, work, build_failed_result, kind, options.workers, options.memory_mb, scheduler):
            result.files = [os.fspath(given_directory / os.path.relpath(file, directory)) for file in result.files]
            results[task.key] = result
            manifest.add_result(given[task.key], result)
            advance(task.place)


def _write_again(
    diagnosis: Diagnosis,
    sources: Sources,
    results: dict[str, Result],
    options: CompareOptions,
    directory: Path,
    manifest: Manifest,
    scheduler: str,
) -> None:
    """A table was written with what its rank shows alone. Where the diagnosis of all ranks and steps says something else (a collective
    gives out what another rank has put in), it is written again with that."""
    again: list[Task] = []
    followers: list[str] = []
    for step in diagnosis.steps:
        of_step = _ranks(sources.tasks, step)
        begins = {task.key: diagnosis.begins_in(step, None if task.whole else rank) for rank, task in of_step}
        for _, task in of_step:
            result, places = results[task.key], places_of(begins[task.key])
            if result.same_as and places == places_of(begins[result.same_as]):
                followers.append(task.key)
            elif result.same_as or (result.files and result.begins != places):
                again.append(DiagnosedTask(**vars(task), begins=tuple(begins[task.key]), differs=bool(diagnosis.suspects)))
    if again:
        _run("verdicts", again, results, options, directory, manifest, False, scheduler)
    for key in followers:
        results[key] = copy_result(results[results[key].same_as], key)


def _fingerprint(sources: Sources, options: CompareOptions) -> str:
    told = repr((options, [(str(task.target.resolve()), str(task.golden.resolve()), task.key) for task in sources.tasks]))
    return hashlib.sha256(told.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _diagnose(comparison: Comparison, sources: Sources, results: Mapping[str, Result], options: CompareOptions, tables: StepTables) -> None:
    """Where the difference begins. Runs with other numbers of ranks are read whole: they may be cut differently."""
    from msprobe_engine.find.config_and_checkpoint import add_settings
    from msprobe_engine.find.nonfinite.one_side import add_later_nonfinite, add_nonfinite_of_one_side
    from msprobe_engine.find.run import compare_steps

    mappings, all_of_it = Mappings.of(options), not options.steps and not options.ranks
    steps = sorted({task.step or 0 for task in sources.tasks})
    whole = any(task.whole for task in sources.tasks) or (sources.lost and all_of_it and not Path(comparison.target).is_file())
    finite: set[Path] = set()
    runs = Run(Path(comparison.target), sources.dumps[0]), Run(Path(comparison.golden), sources.dumps[1])
    of_tasks = partial(_sides, sources.tasks, results, mappings, finite, tables)
    sides = partial(_whole_steps, runs, sources.tasks, mappings) if whole else of_tasks
    try:
        moved = partial(_movements, sources.tasks) if any(task.calibration for task in sources.tasks) else None
        begun = partial(_find_walks, sources.tasks, results)
        comparison.diagnosis = compare_steps(steps, sides, f"{comparison.target} and {comparison.golden}", moved, begun)
        if all_of_it and runs[0].dump is not None:
            comparison.diagnosis.unseen |= bool(set(runs[0].dump.steps).difference(steps))
        add_nonfinite_of_one_side(comparison.diagnosis, *runs, tables, options.steps, options.ranks)
        if all_of_it:
            add_later_nonfinite(comparison.diagnosis, *runs, tables, finite)
        if not options.compat:
            add_settings(comparison.diagnosis, *runs)
    except (NothingCapturedError, DumpFormatError) as error:
        if not comparison.all_problems:
            comparison.problems.append(f"no diagnosis: {error}")
    if comparison.diagnosis is not None:
        comparison.diagnosis.problems = list(dict.fromkeys([*comparison.all_problems, *comparison.diagnosis.problems]))


def _sides(
    tasks: list[Task],
    results: Mapping[str, Result],
    mappings: Mappings,
    finite: set[Path],
    tables: StepTables,
    step: int,
    problems: list[str],
) -> tuple[dict[int, DumpTable], dict[int, DumpTable]]:
    """The ranks of a step: those that the tasks handed back, else read again, where nothing is changed in them equal ones once."""
    from msprobe_engine.find.nonfinite.one_side import files_without

    replicas = None if mappings else tables.of(step)
    read = read_side if replicas is None else replicas.read
    target: dict[int, DumpTable] = {}
    golden: dict[int, DumpTable] = {}
    ranks = _ranks(tasks, step)
    if replicas is not None:
        replicas.expect([path for _, task in ranks if results[task.key].begun is None for path in (task.target, task.golden)])
    for rank, task in ranks:
        try:
            begun = results[task.key].begun
            pair = begun.sides if begun is not None else (read(task.target), read(task.golden))
            if begun is None:
                mappings.apply(*pair)
            if len(pair[0]) and len(pair[1]):
                target[rank], golden[rank] = pair
        except DumpFormatError as error:
            problems.append(str(error))
    finite.update(files_without(target) | files_without(golden))
    return target, golden


def _find_walks(tasks: list[Task], results: Mapping[str, Result], step: int) -> dict[int, RankWalk]:
    return {rank: begun for rank, task in _ranks(tasks, step) if (begun := results[task.key].begun) is not None}


def _ranks(tasks: list[Task], step: int) -> list[tuple[int, Task]]:
    of_step = (task for task in tasks if (task.step or 0) == step)
    return [(number if task.rank is None else task.rank, task) for number, task in enumerate(of_step)]


def _movements(tasks: list[Task], step: int, golden: Mapping[int, DumpTable], problems: list[str]) -> dict[int, Floats]:
    """What round-off moves each row of the golden ranks of a step."""
    found = {}
    for rank, task in _ranks(tasks, step):
        if rank in golden and task.calibration:
            try:
                found[rank] = movements(golden[rank], [read_side(path) for path in task.calibration])
            except DumpFormatError as error:
                problems.append(str(error))
    return found


def _whole_steps(
    runs: Sequence[Run], tasks: list[Task], mappings: Mappings, step: int, problems: list[str]
) -> tuple[dict[int, DumpTable], dict[int, DumpTable]]:
    """All ranks of a step of both runs."""
    from msprobe_engine.find.nonfinite.load import read_step

    task = next(task for task in tasks if (task.step or 0) == step)
    golden_step = layout.step_of(task.golden.resolve().parent.parent.name)
    target_dump, golden_dump = (run.need_dump() for run in runs)
    target, golden = read_step(target_dump, step, problems), read_step(golden_dump, step if golden_step is None else golden_step, problems)
    mappings.apply_all(target, golden)
    return target, golden


def _safe_suffix(suffix: str) -> str:
    if not isinstance(suffix, str) or len(suffix) > 100 or not all(c.isalnum() or c in "._-" for c in suffix):
        raise UsageError(f"suffix {str(suffix)[:120]!r}: letters, digits, '.', '_' and '-' are allowed, at most 100")
    return suffix


def leaders(tasks: Sequence[Task], options: CompareOptions, tables: StepTables) -> dict[str, str]:
    """Key of a task -> key of the one before it whose two dumps differ from its own only in the ranks that they name."""
    if len(tasks) <= same_ranks.MANY or options.compat or options.consistent_check:
        return {}
    alike = [task for task in tasks if not (task.whole or task.calibration or task.stack is not None)]

    def files(task: Task) -> same_ranks.Files:
        return same_ranks.Files(task.step or 0, (task.target, task.golden))

    return same_ranks.leaders(alike, lambda task: task.key, files, lambda task: task.folder, tables)


def copy_result(result: Result, key: str) -> Result:
    """What a task came to whose table is that of `result`."""
    return replace(result, key=key, files=[], same_as=result.key, names={side: list(some) for side, some in result.names.items()})


def run(tasks: Sequence[Task], led: Mapping[str, str], results: dict[str, Result], do: Callable[[Sequence[Task]], None]) -> list[Task]:
    """Do the tasks that others follow, then those of the followers whose leader has no table; the tasks that have followed."""
    followed = same_ranks.run(tasks, lambda task: task.key, led, do, lambda key: _has_table(results.get(key)))
    for task in followed:
        results[task.key] = copy_result(results[led[task.key]], task.key)
    return followed


def _has_table(result: Result | None) -> bool:
    return result is not None and bool(result.files) and not result.problems


def describe_same_tables(number: int) -> str:
    """That tables are not written."""
    one = "1 rank has no table of its own: its dumps differ from another rank's only in the ranks that they name; the summary says whose"
    many = (
        "{0} ranks have no table of their own: their dumps differ from another rank's only in the ranks that they name; the summary says"
        " whose (--rank N writes it)"
    )
    return Sentence(one) if number == 1 else Sentence(many, f"{number:,}")
