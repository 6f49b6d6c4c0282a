"""``msprobe run_ut`` with ``is_online``: calls of trainings that run are checked as they come.

Results go to ``{out_path}/step{N}/accuracy_checking_result_{time}_rank{R}.csv`` and the details beside it. What has come and is not
checked yet is in the spool (`spool`), so a check that was interrupted goes on when it is started again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from msprobe_engine.accuracy.online.queue_dir.spool import Spool
from msprobe_engine.accuracy.online.queue_dir.step import SpoolCall, SpoolStep
from msprobe_engine.accuracy.online.receiver import Reception
from msprobe_engine.accuracy.precheck import summary
from msprobe_engine.accuracy.precheck.options import ONLY_ACCELERATOR, Options, Work
from msprobe_engine.accuracy.precheck.pool import Feed, Pool
from msprobe_engine.accuracy.result_files import DETAILS, RESULT, ResultFiles, read_results
from msprobe_engine.accuracy.result_forms import form_of
from msprobe_engine.accuracy.results import CallResult
from msprobe_engine.accuracy.settings import PrecheckSettings
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.process.cores import usable_cores
from msprobe_engine.formats.dump import layout

SPOOL = "online_spool"
MOST_PROCESSES = 8
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class OnlineOutcome:
    """What came of an online pre-check.

    Attributes:
        out_path: where the result files are.
        tallies: counts and what does not pass, by rank.
        sources: lines of the training by name of a forward record, of calls that do not pass.
        losses: what is not there, one line each.
        seconds: it took.
        interrupted: it did not come to its end; started again it goes on.
        compat: columns and exit codes of the existing tool.
    """

    out_path: Path
    tallies: dict[int, summary.Tally]
    sources: dict[str, list[str]]
    losses: tuple[str, ...]
    seconds: float
    interrupted: bool
    compat: bool

    @property
    def exit_code(self) -> int:
        """0: no error found; 1: wrong results; 3: nothing wrong was found, but something could not be checked; 130: interrupted."""
        if self.interrupted:
            return INTERRUPTED
        if self.compat:
            return 0
        if any(tally.errors for tally in self.tallies.values()):
            return 1
        return 3 if self.losses or any(tally.incomplete for tally in self.tallies.values()) else 0

    def text(self) -> str:
        """The summary for the console."""
        lines = []
        for rank, tally in sorted(self.tallies.items()):
            lines += [f"rank {rank}:", summary.text(tally, self.sources)]
        if not self.tallies:
            lines.append("no call was received: nothing was checked")
        lines += [f"not everything is there: {loss}" for loss in self.losses]
        lines.append(f"{self.seconds:.1f} s; results: {self.out_path}{os.sep}step*{os.sep}accuracy_checking_result_*.csv")
        if self.interrupted:
            lines.append("interrupted: the same command goes on where this one has ended")
        return "\n".join(lines)


class Results:
    """The result files of all steps; of one thread."""

    def __init__(self, out_path: Path, settings: PrecheckSettings, options: Options, spool: Spool) -> None:
        self._out_path, self._spool = out_path, spool
        self._form = form_of(options.compat, settings.precision)
        self._open: dict[int, tuple[SpoolStep, ResultFiles]] = {}
        self.tallies: dict[int, summary.Tally] = {}
        self.sources: dict[str, list[str]] = {}

    def find_written_calls(self, step: SpoolStep) -> Iterable[str]:
        """Names of the calls of a step that an earlier process has written.

        Raises:
            UsageError: its result file is gone, or is none.
        """
        path = step.results
        if path is None:
            return ()
        files = ResultFiles(path, self._form, go_on=True)
        self._open[id(step)] = step, files
        for result in files.done_results():
            self.tally(step.rank).add(_of_step(result, step.number))
        return files.done

    def finished_before(self) -> None:
        """Count what an earlier process has written of steps that are not open any more."""
        open_paths = {files.result_path for _, files in self._open.values()}
        for rank, path in self._spool.result_files():
            details = path.with_name(path.name.replace(RESULT, DETAILS, 1))
            if path not in open_paths and path.is_file() and details.is_file():
                for result in read_results(path, details):
                    self.tally(rank).add(_of_step(result, layout.step_of(path.parent.name)))

    def tally(self, rank: int) -> summary.Tally:
        return self.tallies.setdefault(rank, summary.Tally())

    def write(self, call: SpoolCall, result: CallResult, broken: bool) -> None:
        """Write the rows of one call.

        Raises:
            SinkError: they cannot be written.
        """
        step = call.step
        entry = self._open.get(id(step))
        if entry is None:
            files = ResultFiles.new(self._out_path / f"step{step.number}", self._form, f"_rank{step.rank}")
            self._spool.note_results(step, files.result_path.resolve())
            entry = self._open[id(step)] = step, files
        source = call.source
        entry[1].append(result, source)
        tally = self.tally(step.rank)
        result_of_step = _of_step(result, step.number)
        tally.add(result_of_step)
        if broken:
            tally.broken.append(result_of_step)
        if source and not result.passed:
            # The line of a call stack that `summary.source_line` made this of
            place, _, function = source.rpartition(" in ")
            path, _, line = place.rpartition(":")
            self.sources[f"{result_of_step.name}.forward"] = [f"File {path}, line {line}, in {function}"]

    def finish(self, step: SpoolStep) -> None:
        """Everything of the step is written: rows get the order of the calls."""
        found = self._open.pop(id(step), None)
        if found is not None:
            with found[1] as files:
                files.sort(step.names)

    def close(self) -> None:
        for _, files in self._open.values():
            files.close()
        self._open.clear()


def serve(settings: PrecheckSettings, options: Options, out_path: str | Path) -> OnlineOutcome:
    """Check calls of trainings until all of these have ended. An interrupt (Ctrl-C) ends it with everything written that is checked.

    Args:
        settings: with ``is_online``.
        out_path: directory of result files, made if it is not there.

    Raises:
        UsageError, SettingsError, TransportError: it cannot begin as the settings say.
        SinkError: results cannot be written.
    """
    began = time.perf_counter()
    _refuse(options)
    out = Path(out_path)
    spool = Spool(Path(settings.spool_path).expanduser() if settings.spool_path else out / SPOOL, settings.keep_spool)
    results = Results(out, settings, options, spool)
    feed = Feed()
    interrupted = False
    reception: Reception | None = None
    try:
        recovered = spool.recover(results.find_written_calls)
        results.finished_before()
        reception = Reception(settings, spool, feed, recovered)
        pool = Pool(_works(settings, options), options.timeout)
        with bar("checking", 0) as advance, closing(pool.check(feed)) as answers:
            for answer in answers:
                call = answer.call
                assert isinstance(call, SpoolCall)
                results.write(call, answer.result, answer.broken)
                spool.mark_checked(call)
                while spool.finished:
                    results.finish(spool.finished.popleft())
                advance(call.api)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if reception is not None:
            reception.close()
        while spool.finished:
            results.finish(spool.finished.popleft())
        results.close()
        spool.close()
    return OnlineOutcome(
        out_path=out,
        tallies=results.tallies,
        sources=results.sources,
        losses=tuple(_losses(reception, spool)),
        seconds=time.perf_counter() - began,
        interrupted=interrupted,
        compat=options.compat is not None,
    )


def _refuse(options: Options) -> None:
    """Raises:
    UsageError: an option has no meaning for calls of a training that runs.
    """
    wrong = {
        "-f": options.filter_api,
        "-save_error_data": options.save_error_data,
        "--dtype": options.dtype,
        "--compiled": options.compiled,
    }
    for flag, given in wrong.items():
        if given:
            hint = "set keep_spool and check the spool with acc_check" if flag == "-save_error_data" else "check a dump instead"
            raise UsageError(f"{flag}: is not possible with is_online, where the results come from the training; {hint}")


def _works(settings: PrecheckSettings, options: Options) -> list[Work]:
    """What each process has to know."""
    number = options.processes or max(1, min(MOST_PROCESSES, max(usable_cores(), len(options.devices))))
    operators = tuple(str(Path(name).resolve()) for name in options.operators)
    own = {"framework": "pytorch", "dtype": None, "compiled": False, "operators": operators, "received": True}
    shared = Work.of(options, settings, **own)
    devices = [options.devices[n % len(options.devices)] for n in range(number)]
    if settings.three_way == "off":
        return [replace(shared, device=device) for device in devices]
    mark = ONLY_ACCELERATOR if settings.three_way == "auto" else ""
    return [replace(shared, device=device, second=f"{mark}{device}") for device in devices]


def _losses(reception: Reception | None, spool: Spool) -> list[str]:
    if reception is None:
        return []
    sentences = list(reception.gone)
    counted = (
        (reception.lost, "messages were given up by a training (its queue was full, or this host was away too long)"),
        (reception.missing, "messages never came"),
        (reception.refused, "messages could not be used"),
        (reception.pressed, "calls were checked without their gradients: the spool (spool_gb) is smaller than a step"),
        (spool.replaced, "calls were not checked: another training has sent their step again"),
        (spool.alone, "backward records have no forward record"),
    )
    return sentences + [f"{count:,} {sentence}" for count, sentence in counted if count]


def _of_step(result: CallResult, step: int | None) -> CallResult:
    """For the summary, where calls of several steps stand together."""
    if result.passed and not result.skipped:
        return result
    prefix = f"step{step}/"
    tensors = tuple(replace(tensor, name=f"{prefix}{tensor.name}") for tensor in result.tensors)
    return replace(result, name=f"{prefix}{result.name}", tensors=tensors)
