"""Output directories: a run leaves dumps, monitor output and incidents side by side, and `diagnose` looks at all of them.

What names a record and a source line leads; what the others found goes to the evidence.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from msprobe_engine.core.errors import DumpFormatError, NothingCapturedError, ProbeError, UsageError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import detect, findings
from msprobe_engine.find.detect import Run
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.launch_line import GOLDEN, new_places
from msprobe_engine.find.nonfinite import incident_samples
from msprobe_engine.find.nonfinite.report import again_with_operators

MOST_INCIDENTS, MOST_STEPS = 8, 8
_WORDS = {
    detect.DUMP: Sentence("dump"),
    detect.MONITOR: Sentence("monitor output"),
    detect.INCIDENT: Sentence("incident"),
    detect.CONFIG: Sentence("pack of configurations"),
}

Look = Callable[[str, Run, Run | None], Diagnosis]
"""What is looked at, of which two runs."""


@dataclass(frozen=True)
class _Seen:
    what: str
    run: Run
    found: Diagnosis
    compared: bool = False
    """With the same of the golden run."""

    @property
    def keeps_calls(self) -> bool:
        """Is it an incident whose ring holds calls?"""
        return self.what == detect.INCIDENT and bool(incident_samples.document(self.run.path).get("levels"))

    @property
    def recorded(self) -> set[int]:
        """Steps whose calls are there. An incident of a monitor has only samples of its steps, and the calls of a later one."""
        if self.what == detect.INCIDENT and not self.keeps_calls:
            return set() if self.run.dump is None else set(self.run.dump.steps)
        return set(self.found.steps) if self.what in (detect.INCIDENT, detect.DUMP) else set()

    def order(self) -> tuple[int, int]:
        """What names a record comes first, and of those the earliest step."""
        first = self.found.first_suspect
        if first is None:
            return (3 if self.found.finding == findings.NONE else 2), 0
        records = self.what == detect.DUMP or (self.what == detect.INCIDENT and bool(first.source))
        return (0 if records else 1), first.step


def look_at_all(target: Run, golden: Run | None, look: Look) -> Diagnosis:
    """Look at everything that lies in an output directory.

    Args:
        target: the run in question.
        golden: a run that is right, None when there is none.
        look: diagnoses one thing of a kind, or two.

    Raises:
        UsageError: there is nothing to look at.
        NothingCapturedError: there is, and nothing of it can be read or compared; the error of the first thing.
    """
    seen: list[_Seen] = []
    not_looked_at: list[str] = []
    errors: list[ProbeError] = [*target.unread]

    def look_at(kind: str, run: Run, beside: Run | None) -> None:
        try:
            seen.append(_Seen(kind, run, look(kind, run, beside), beside is not None))
        except (DumpFormatError, NothingCapturedError, UsageError) as error:
            errors.append(error)

    for kind, target_part, golden_part in (
        (detect.DUMP, target.records, golden.records if golden else None),
        (detect.MONITOR, target if target.has_monitor else None, golden if golden and golden.has_monitor else None),
    ):
        if target_part is not None:
            look_at(kind, target_part, golden_part)
            if golden is not None and golden_part is None:
                not_looked_at.append(f"{kind} of the golden run, which has none: this one's was looked at alone")
        elif golden_part is not None:
            not_looked_at.append(f"{kind} of the golden run (this one has none)")
    fresh = _own_incidents(target, golden)
    not_looked_at += [f"{run.path.name} (the golden run has it too)" for run in target.incidents if run not in fresh]
    for incident in fresh[:MOST_INCIDENTS]:
        look_at(detect.INCIDENT, incident, None)
    if len(fresh) > MOST_INCIDENTS:
        not_looked_at.append(f"{len(fresh) - MOST_INCIDENTS} later incidents")
    if not seen and target.config is not None and (golden is None or golden.config is not None):
        look_at(detect.CONFIG, target, golden)
    if not seen:
        raise errors[0] if errors else UsageError(f"{target}: holds nothing that can be looked at")
    diagnosis = _together(seen, not_looked_at, [str(error) for error in errors])
    if golden is not None and not any(look_at.compared for look_at in seen):
        _say_nothing_compared(diagnosis, target, golden)
    return diagnosis


def _own_incidents(target: Run, golden: Run | None) -> list[Run]:
    """Those that the golden run has not."""
    known = {run.path.name for run in golden.incidents} if golden else set()
    return [run for run in target.incidents if run.path.name not in known]


def incidents_left_out(target: Run, golden: Run | None) -> list[str]:
    """What a command that looks at dumps alone has to say of a run with incidents: alerts have set them off, in any of its steps. Of a run
    without a dump that of its only incident is looked at."""
    if target.dump is None:
        return []
    names = [incident.path.name for incident in _own_incidents(target, golden)]
    shown = ", ".join(names[:MOST_INCIDENTS]) + (", ..." if len(names) > MOST_INCIDENTS else "")
    said = [Sentence("{0} has incidents, which only msprobe diagnose looks at: {1}", target, shown)] if names else []
    return [*said, *map(str, target.unread)]


def _say_nothing_compared(diagnosis: Diagnosis, target: Run, golden: Run) -> None:
    """Two runs that have nothing of one kind: what was found of one of them alone is no answer to the question."""
    template = "Nothing of the two runs was compared: this one has {0}, the golden run {1}"
    said = Sentence(template, target.comparable(), golden.comparable())
    diagnosis.problems.insert(0, said)
    diagnosis.evidence = [line for line in diagnosis.evidence if line != findings.ALONE]
    if diagnosis.finding != findings.NONE:
        return
    diagnosis.nothing = said
    steps = ",".join(map(str, diagnosis.steps[:MOST_STEPS]))
    options = "--preset watch" if target.records is None else f"--preset dump --set 'dump.step=[{steps}]'"
    _, place = new_places()
    diagnosis.next = [
        f"msprobe run {options} --output-dir {place} -- {GOLDEN}",
        f"msprobe diagnose {shlex.quote(str(target.path))} {place}",
    ]


def _together(seen: list[_Seen], not_looked_at: list[str], errors: list[str]) -> Diagnosis:
    """The finding of what names the record, with a sentence for everything else."""
    lead, *others = _order_findings(seen)
    diagnosis = lead.found
    first = diagnosis.first_suspect
    for other in others:
        diagnosis.evidence += [_sentence(other), *other.found.remarks]
        other_first = other.found.first_suspect
        if first is not None and first.step in other.recorded and other_first is not None and other_first.step > first.step:
            template = (
                "The records of step {0} are the same: the difference begins after the last of them, in the update or between two steps."
            )
            diagnosis.evidence.append(Sentence(template, first.step))
        if first is not None and other_first is not None and other_first.step < first.step and other_first.step not in diagnosis.steps:
            diagnosis.evidence.append(
                Sentence(
                    "That is before step {0}, the step of the records: a dump of step {1} shows the record in which it begins.",
                    first.step,
                    other_first.step,
                )
            )
        diagnosis.problems += [problem for problem in other.found.problems if problem not in diagnosis.problems]
    diagnosis.problems += [Sentence("not looked at: {0}", "; ".join(map(str.strip, str(error).splitlines()))) for error in errors]
    if first is None and len(seen) > 1:
        diagnosis.evidence.insert(0, _sentence(lead))
        diagnosis.nothing = "" if any(part.compared for part in seen) else Sentence("Nothing found in what lies here")
    diagnosis.looked_at = _looked_at(lead, others, not_looked_at)
    dumped = {step for part in seen for step in part.recorded}
    commands = [command for part in (lead, *others) for command in _next(part, dumped)]
    again = again_with_operators()
    if any(part.keeps_calls for part in seen):
        commands = [command for command in commands if command not in again]  # the run kept operators, and would show no more
    elif diagnosis.operator_unknown:
        commands = [*again, *commands]
    diagnosis.next = list(dict.fromkeys(commands))
    return diagnosis


def _place(seen: _Seen) -> Path:
    return seen.run.config or seen.run.path if seen.what == detect.CONFIG else seen.run.path


def _sentence(seen: _Seen) -> str:
    place = _place(seen).name
    place = place if place == seen.what else Sentence("{0} {1}", _WORDS[seen.what], place)
    return Sentence("{0}: {1}", place, seen.found.headline())


def _looked_at(lead: _Seen, others: list[_Seen], not_looked_at: list[str]) -> dict[str, object]:
    """Paths of everything, with the numbers of what led."""
    numbers = {key: value for key, value in lead.found.looked_at.items() if key != "monitor"}
    looked: dict[str, object] = {lead.what: str(_place(lead))} | numbers
    for kind in (detect.DUMP, detect.MONITOR, detect.INCIDENT):
        paths = [str(_place(part)) for part in others if part.what == kind]
        if paths:
            looked[kind if kind != lead.what else f"further {kind}"] = ", ".join(paths)
    return looked | ({"not looked at": ", ".join(not_looked_at)} if not_looked_at else {})


def _order_findings(seen: list[_Seen]) -> list[_Seen]:
    """What leads comes first. Of two runs an earlier step of the monitor does, where that step was dumped and its records are the same."""
    ordered = sorted(seen, key=_Seen.order)
    lead, first = ordered[0], ordered[0].found.first_suspect
    for part in ordered[1:] if first is not None and lead.compared else ():
        other_first = part.found.first_suspect
        if (
            first is not None
            and other_first is not None
            and part.compared
            and other_first.step < first.step
            and other_first.step in lead.found.steps
        ):
            return [part, *(other for other in ordered if other is not part)]
    return ordered


def _next(seen: _Seen, dumped: Collection[int]) -> list[str]:
    """What to run for more; of a step that was dumped no dump."""
    first = seen.found.first_suspect
    if first is None or (seen.what == detect.MONITOR and first.step in dumped):
        return []
    return list(seen.found.next)
