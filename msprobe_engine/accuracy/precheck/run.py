"""``msprobe acc_check``: all calls of a dump through the processes into the result files, and a summary.

A check that was interrupted goes on from its result files; what comes of it is what an uninterrupted one would have written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from msprobe_engine.accuracy.precheck import memory, summary
from msprobe_engine.accuracy.precheck.calls import Call, DumpCalls, read_calls, remarks_on_lists, why_not, without_repeats
from msprobe_engine.accuracy.precheck.options import About, Options, Work
from msprobe_engine.accuracy.precheck.pool import CannotBegin, Pool
from msprobe_engine.accuracy.result_files import ResultFiles
from msprobe_engine.accuracy.results import CallResult, bare_name, build_skipped_result
from msprobe_engine.accuracy.settings import PrecheckSettings
from msprobe_engine.accuracy.verdict.mindspore_form import form_for
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.log import get_logger, printable
from msprobe_engine.core.process.cores import usable_cores
from msprobe_engine.core.settings.tree import nearest

MOST_PROCESSES = 8
CALLS_PER_PROCESS = 100
"""Calls below which one more process costs more (the import of its framework) than it saves."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a pre-check.

    Attributes:
        error_data: directory of inputs and results of calls that do not pass; None when there are none, or none were asked for.
        tally: counts, and what does not pass.
        repeats: calls that were left out because they repeat an earlier one.
        seconds: the check took.
        missing: sentences about what the dump cannot have.
    """

    result_path: Path
    details_path: Path
    error_data: Path | None
    tally: summary.Tally
    stacks: Mapping[str, Sequence[str]]
    repeats: int
    seconds: float
    compat: bool
    missing: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """See ``msprobe acc_check --help``."""
        if self.compat:
            return 0
        if self.tally.errors:
            return 1
        return 3 if self.tally.incomplete or self.missing else 0

    def text(self) -> str:
        """The summary for the console."""
        lines = [summary.text(self.tally, self.stacks, self.compat)]
        if self.repeats:
            lines.append(f"{self.repeats:,} calls were left out: they repeat an earlier one (-f)")
        lines.append(f"{self.seconds:.1f} s; results: {self.result_path}")
        lines.append(f"details: {self.details_path}")
        if self.error_data is not None:
            lines.append(f"inputs and results of calls that do not pass: {self.error_data}")
        return "\n".join(lines)


def check_dump(
    path: str | Path, settings: PrecheckSettings, options: Options, out_path: str | Path, resume: str | Path | None = None
) -> Outcome:
    """Check the calls of a dump.

    Args:
        path: dump.json, or a directory with one dump in it.
        out_path: directory of the result files, made if it is not there.
        resume: result file of an interrupted check; its calls are not checked again.

    Raises:
        DumpFormatError: no dump, or a damaged one.
        UsageError: nothing to check, no such device, or the result file to go on with is none.
        SettingsError: ``error_data_path`` is no directory.
        SinkError: a result file cannot be written.
    """
    began = time.perf_counter()
    dump = read_calls(path)
    calls = without_repeats(dump.calls) if options.filter_api else list(dump.calls)
    for remark in (*dump.remarks, *remarks_on_lists(calls, settings, options.compat is not None)):
        get_logger().warning("%s", printable(f"{dump.file}: {remark}"))
    for sentence in dump.missing:
        get_logger().warning("%s", printable(sentence))
    order = [call.name for call in calls]
    there = Path(out_path).exists()
    with _files(out_path, resume, options, settings, dump.framework) as files:
        error_data = _error_data(settings, files.stamp) if options.save_error_data else None
        tally = summary.Tally()
        for result in files.done_results(order) if files.done else ():
            tally.add(result)
        rest = [call for call in calls if call.name not in files.done]
        try:
            _check_rest(rest, dump, settings, options, files, tally, error_data)
        except CannotBegin:
            if resume is not None or tally.devices:
                _tell_how_to_go_on(files)
            else:  # nothing was checked: as if it had not begun
                _take_away(files)
                if not there:
                    with suppress(OSError):
                        Path(out_path).rmdir()
            raise
        except BaseException:
            _tell_how_to_go_on(files)
            raise
        files.sort(order)
    return Outcome(
        result_path=files.result_path,
        details_path=files.details_path,
        error_data=error_data if error_data is not None and error_data.is_dir() else None,
        tally=tally,
        stacks=dump.stacks,
        repeats=len(dump.calls) - len(calls),
        seconds=time.perf_counter() - began,
        compat=options.compat is not None,
        missing=dump.missing,
    )


def _tell_how_to_go_on(files: ResultFiles) -> None:
    """The check ends before its end; files without a row are taken away."""
    if files.done:
        get_logger().warning("%s", printable(f"the check was not finished; go on with: -csv_path {files.result_path}"))
        return
    _take_away(files)


def _take_away(files: ResultFiles) -> None:
    for path in (files.result_path, files.details_path):
        path.unlink(missing_ok=True)


def _check_rest(
    calls: Sequence[Call],
    dump: DumpCalls,
    settings: PrecheckSettings,
    options: Options,
    files: ResultFiles,
    tally: summary.Tally,
    error_data: Path | None,
) -> None:
    """Calls that the lists leave out get their row at once, all others from the processes."""

    def save_result(result: CallResult) -> None:
        tally.add(result)
        files.append(result, summary.source_line(dump.stacks.get(f"{result.name}.forward", ())))

    def report_device(about: About) -> None:
        for remark in (about.remark, *_without_call(about.operators, calls)) if not tally.devices else ():
            if remark:
                get_logger().warning("%s", printable(remark))
        tally.devices[about.device] = about.sides

    asked = []
    for call in calls:
        reason = why_not(call, settings, options.compat is not None)
        if reason is None:
            asked.append(call)
        else:
            save_result(build_skipped_result(call.name, reason))
    number = processes(options, len(asked))
    shared = memory.plan(asked, number, memory.free_memory())
    if shared.large and shared.processes < number:
        text = "large calls (%d) are checked after the others, with %d processes at a time instead of %d: memory has no room for more"
        get_logger().warning(text, len(shared.large), shared.processes, number)
    with bar("checking", len(asked)) as advance:
        for call, reason in shared.refused:
            tally.broken.append(build_skipped_result(call.name, reason))
            save_result(tally.broken[-1])
            advance(bare_name(call.name))
        for part, count in ((shared.together, number), (shared.large, shared.processes)):
            pool = Pool(_works(count, dump, settings, options, error_data), options.timeout, report_device)
            with closing(pool.check(part)) as answers:
                for answer in answers:
                    save_result(answer.result)
                    if answer.broken:
                        tally.broken.append(answer.result)
                    advance(bare_name(answer.call.name))


def _without_call(operators: Sequence[str], calls: Sequence[Call]) -> list[str]:
    """Registered names that no call has, with the nearest one that a call has."""
    known = sorted({call.name.rpartition(".")[0] for call in calls})
    remarks = []
    lasts = {api.rpartition(".")[2] for api in known}
    if unused := [name for name in operators if "." not in name and name not in lasts]:  # of a file of formulas, which may have many
        remarks.append(
            f"--operators: no call in this dump for {len(unused)} formulas: {', '.join(unused[:8])}{', ...' * (len(unused) > 8)}"
        )
    for name in operators:
        if "." in name and name not in known:
            near = nearest(name, known) or next((api for api in known if api.rpartition(".")[2] == name.rpartition(".")[2]), None)
            remarks.append(f"--operators: no call of {name!r} in this dump" + (f"; did you mean {near!r}?" if near else ""))
    return remarks


def _files(out_path: str | Path, resume: str | Path | None, options: Options, settings: PrecheckSettings, framework: str) -> ResultFiles:
    form = form_for(framework, options.compat, settings.precision)
    return ResultFiles.new(out_path, form) if resume is None else ResultFiles(Path(resume), form, go_on=True)


def _works(number: int, dump: DumpCalls, settings: PrecheckSettings, options: Options, error_data: Path | None) -> list[Work]:
    """What each process has to know: they differ in the device alone."""
    where = "" if error_data is None else str(error_data.resolve())
    directory = str(dump.file.parent.resolve())
    shared = Work.of(options, settings, framework=dump.framework, directory=directory, error_data=where)
    return [replace(shared, device=options.devices[n % len(options.devices)]) for n in range(number)]


def _error_data(settings: PrecheckSettings, stamp: str) -> Path:
    """``ut_error_data{stamp}``, the one of the result files with this stamp; the first call that does not pass makes it.

    Raises:
        SettingsError: the directory that the settings name is not there.
    """
    parent = Path(settings.error_data_path)
    if not parent.is_dir():
        raise SettingsError(f"error_data_path: {settings.error_data_path!r} is no directory; make it, or name another one")
    return parent / f"ut_error_data{stamp}"


def processes(options: Options, calls: int) -> int:
    """How many processes check so many calls."""
    if options.processes:
        return max(1, min(options.processes, calls))
    return max(1, min(MOST_PROCESSES, max(usable_cores(), len(options.devices)), math.ceil(calls / CALLS_PER_PROCESS)))
