"""The whole of ``msprobe nan_analyze`` as one function: steps in order, stop at the first bad one, report it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import NothingCapturedError
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.find.detect import Run
from msprobe_engine.find.nonfinite import first_over_ranks, incident_samples, load, report
from msprobe_engine.find.nonfinite.flags import Trace
from msprobe_engine.formats.dump.completeness import missing_steps
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.layout import RERUN
from msprobe_engine.formats.dump.replicas.reader import StepTables


@dataclass
class Result:
    """What `nan_analyze` found.

    Attributes:
        findings: suspects of the first bad step, most likely first (see `report.build_finding` for the keys); empty when clean.
        text: console report.
        steps: steps that were looked at.
        problems: files that could not be read.
        lost: that numbers were lost without a NaN, which is said of the first step alone.
        only_modules: no calls of functions were recorded in any step.
    """

    findings: Sequence[Mapping[str, Any]]
    text: str
    steps: list[int]
    problems: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    only_modules: bool = False


Seen = Callable[[int, Mapping[int, DumpTable]], None]


def nan_analyze(source: Run | str | Path, seen: Seen | None = None, tables: StepTables | None = None) -> Result:
    """Find the first NaN/Inf over all ranks.

    Args:
        source: dump root, ``step<N>`` directory, or incident directory.
        seen: gets every step that was looked at, and its ranks where there are several.
        tables: what was read of its dump before.

    Raises:
        DumpFormatError: there is no dump at `source`.
        NothingCapturedError: there is one, and nothing in it can be read.
    """
    with collection_paused():
        return _nan_analyze(source if isinstance(source, Run) else Run(Path(source)), seen, tables)


def _nan_analyze(root: Run, seen: Seen | None, tables: StepTables | None) -> Result:
    damaged: list[str] = []
    sampled = incident_samples.load(root.samples, damaged)
    second = root.path / RERUN  # the dump of a step that ran twice, in the directory of an incident
    again = Run(second).dump if second.is_dir() else None
    dump = root.dump if sampled or again is not None else root.need_dump()
    dumped = set() if dump is None else set(dump.steps)
    missing = [] if dump is None else missing_steps(dump)
    result = Result([], "", [], [*damaged, *incident_samples.ranks_without_a_word(root.path), *missing], only_modules=True)
    reruns = set(again.steps) if again is not None else set()
    note = ""
    texts: list[str] = []
    for step in sorted(dumped | set(sampled) | reruns):
        if again is not None and step in reruns and not result.findings:
            # The step ran a second time with everything captured: that says more than what is always on.
            rerun, unread = load.load_step(again, step)
            result.problems += unread
            _analyze_step(result, texts, step, rerun, {})
            if result.findings:
                note = f"Read from the second run of step {step}, with everything captured."
                break
            if rerun:
                texts.pop()
                note = f"The second run of step {step} was clean: it did not reproduce, see summary.md."
        traces: dict[int, Trace] = {}
        if dump is not None and step in dumped:
            sides: dict[int, DumpTable] = {}
            several = seen is not None and len(dump.ranks(step)) > 1
            traces, unread = load.load_step(dump, step, sides if several else None, tables.of(step) if tables else None)
            result.problems += unread
            if seen is not None:
                seen(step, sides)
        if not result.findings:
            _analyze_step(result, texts, step, traces, sampled.get(step, {}))
        elif traces:
            # Only samples were bad so far: a later captured step may show the operator.
            later = first_over_ranks.analyse(traces)
            finer = [report.build_finding(later, n) for n, origin in enumerate(later.suspects) if origin.cause in _OPERATOR_LEVEL]
            if finer:
                texts.append("In a step that was captured later:\n" + report.text(later, finer))
                result.findings = [*result.findings, *finer]
                break
        if result.findings and any(item["cause"] != "sample" for item in result.findings):
            break
    if not result.steps:
        raise NothingCapturedError(f"{root}: no readable dump of any rank" + "".join(f"\n  {problem}" for problem in result.problems))
    result.text = "\n".join([*texts, note] if note else texts)
    return result


_OPERATOR_LEVEL = ("operator", "module", "gradient", "collective", "unrecorded", "missing")


def _analyze_step(result: Result, texts: list[str], step: int, traces: Mapping[int, Trace], sampled: Mapping[int, Trace]) -> None:
    """One step: its calls, and its samples when the calls show nothing."""
    from_samples = functools.partial(incident_samples.analyse, recorded=bool(traces))
    for chosen, analyse in ((traces, first_over_ranks.analyse), (sampled, from_samples)):
        if not chosen:
            continue
        if step not in result.steps:
            result.steps.append(step)
        result.only_modules = result.only_modules and all(map(report.only_modules, chosen.values()))
        verdict = analyse(chosen)
        findings = [report.build_finding(verdict, n) for n in range(len(verdict.suspects))]
        notes: list[str] = []
        if findings and chosen is traces and (trained := load.without_passes_for_shapes(traces, notes)) is not None:
            _analyze_step(result, texts, step, trained, sampled)
            texts += notes
            return
        if findings or chosen is traces or not traces:
            texts.append(report.text(verdict, findings))
        if findings:
            texts[:] = texts[-1:]  # the finding comes first; clean steps before it are in `steps`
            result.findings = findings
            return
        if not result.lost:
            result.lost = report.describe_lost_numbers(verdict)
            result.problems += result.lost
