"""What is said when a watched run is over: what was seen, where it lies, and what to type next. On rank 0, of what this process knows."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shlex
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from msprobe_engine.config.pack.reader import Pack
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.io.claims import EARLIER_RUN, PARTS
from msprobe_engine.core.log import one_line
from msprobe_engine.core.process.variables import LAUNCH_LINE
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.text.ranges import steps_text
from msprobe_engine.core.text.words import size
from msprobe_engine.core.window import of_monitor
from msprobe_engine.formats.dump.find_dumps import IN_RUN, INCIDENTS
from msprobe_engine.formats.monitor.alert_order import in_order
from msprobe_engine.formats.monitor.anomalies import from_alert
from msprobe_engine.formats.pack import entries
from msprobe_engine.formats.pack.kind import NAME
from msprobe_engine.probe.sinks.run_files import ALERTS

_LEAST = 5
"""Steps of each kind that a comparison of their times needs."""
_FIRST = 3
"""Steps at the beginning whose times say nothing: caches, compilation."""
_KEPT = 1000
_WALK_SECONDS = 0.5
_LITTLE = 0.02
"""Share of the time of all steps that watching may take without a word."""
_LONGEST_INTERVAL = 1000
_NONFINITE = ("nan_inf", "loss_not_finite")
_LONGEST_MESSAGE = 200


class ClosingWords:
    """Counts while the run lasts.

    Attributes:
        steps: how many have come to their end.
    """

    def __init__(self, settings: ProbeSettings, world_size: int) -> None:
        self._settings = settings
        self._world_size = world_size
        self.steps = 0
        self._window = of_monitor(settings.monitor) if settings.monitor is not None else None
        self._first: int | None = None
        self._last = 0
        self._looked_at = 0
        self._to_dump = set(settings.dump.step) if settings.dump is not None else set[int]()
        self._alerts: Counter[str] = Counter()
        self._named = 0
        self._alert_steps = 0
        self._alert_step: int | None = None
        self._began: list[Alert] = []
        """Alerts of the first step that has any."""
        self._seconds: dict[bool, deque[float]] = {True: deque(maxlen=_KEPT), False: deque(maxlen=_KEPT)}

    def on_frame(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """A step has ended."""
        self.steps += 1
        self._first = frame.step if self._first is None else self._first
        self._last = frame.step
        self._to_dump.discard(frame.step)
        self.add_alerts(alerts)
        looked_at = bool(frame.samples or frame.entries)
        self._looked_at += looked_at
        seconds = frame.scalars.get("step_seconds")
        first = self._window is not None and self._window.is_first(frame.step)
        if seconds is not None and self.steps > _FIRST and not first:
            self._seconds[looked_at].append(seconds)

    def add_alerts(self, alerts: Iterable[Alert]) -> None:
        """Count what has fired; what an alert says is over has been counted when it began."""
        for alert in alerts:
            if not alert.extra.get("over"):
                self._alerts[alert.rule] += alert.count
                self._named += 1
                self._alert_steps += alert.step != self._alert_step
                self._alert_step = alert.step
                if len(self._began) < _KEPT and (not self._began or alert.step == self._began[0].step):
                    self._began.append(alert)

    def text(self, incidents: Sequence[str], lost: Mapping[str, int]) -> str:
        """A few lines; empty where no step was seen.

        Args:
            incidents: names of their directories.
            lost: what was not written, and how often.
        """
        if not self.steps:
            return ""
        settings = self._settings
        root = os.path.relpath(settings.output_dir)
        root = one_line(root if not root.startswith("..") else settings.output_dir)
        total, complete = _bytes_below(settings.output_dir)
        named = ", ".join(map(one_line, incidents[:3])) + (", ..." if len(incidents) > 3 else "")
        parts = [
            ("seen", f"{_count(self.steps, 'step')}, {self._first} to {self._last}"),
            ("looked at", self._said_of_tensors()),
            ("alerts", self._said_of_alerts()),
            ("incidents", f"{len(incidents)}: {named}" if incidents else ""),
            ("not dumped", f"{steps_text(sorted(self._to_dump))}, which the run did not have" if self._to_dump else ""),
            ("not written", ", ".join(f"{_count(count, 'step')} of {name}" for name, count in sorted(lost.items()))),
            (
                "files",
                f"{'' if complete else 'at least '}{size(total)} in {root}"
                if total
                else f"none in {root}; where some were wanted, an error above says why",
            ),
            ("slow-down", self._slow_down()),
            *zip(itertools.chain(("next",), itertools.repeat("")), self._next(root, bool(incidents)) if total else []),
        ]
        return "msprobe: the run is over\n" + "\n".join(f"  {name:12}{said}" for name, said in parts if said)

    def _said_of_tensors(self) -> str:
        """Where not in every step: what is not in the numbers of the step shows only in those."""
        if self._settings.monitor is None or self._looked_at == self.steps:
            return ""
        return f"tensors in {self._looked_at} of {_count(self.steps, 'step')}"

    def _said_of_alerts(self) -> str:
        scope = "on this rank" if self._world_size > 1 else ""
        if not self._began:
            watched = self._settings.monitor is not None or self._settings.incident.level
            return f"none {scope}".strip() if watched else ""
        counts = ", ".join(f"{rule} {count}" for rule, count in self._alerts.most_common(4))
        others = ", ..." if len(self._alerts) > 4 else ""
        total = sum(self._alerts.values())
        steps = f" in {self._alert_steps} steps" if self._alert_steps > 1 else ""
        named = f", {self._named} of them written by name" if self._named < total else ""
        return (
            f"{total} {scope}".strip() + f"{steps} ({counts}{others}){named}; first: {_shorten_message(one_line(_earliest(self._began)))}"
        )

    def _slow_down(self) -> str:
        """Of steps that were looked at, against the others of the same run."""
        watched, others = self._seconds[True], self._seconds[False]
        if min(len(watched), len(others)) < _LEAST:
            return ""
        ratio = statistics.median(watched) / max(statistics.median(others), 1e-9)
        total = len(watched) + len(others)
        over_all = 1 + (ratio - 1) * len(watched) / total
        if ratio <= 1:
            return f"none that can be measured (medians of {len(watched)} steps that were looked at and {len(others)} others)"
        return (
            f"a step that was looked at took {ratio:.2f} times as long as one that was not (medians of {len(watched)} and {len(others)}), "
            f"{over_all:.3f} over all steps{self._cheaper(ratio, over_all)}"
        )

    def _cheaper(self, ratio: float, over_all: float) -> str:
        """The interval that a next run would cost little with. This run keeps its own: all ranks, and the run that it is compared with,
        have to look at the same steps, and each would measure another cost."""
        monitor = self._settings.monitor
        wanted = min(math.ceil(round((ratio - 1) / _LITTLE, 6)), _LONGEST_INTERVAL)
        if monitor is None or over_all - 1 <= _LITTLE or wanted <= monitor.interval:
            return ""
        also = f" --set monitor.replica_check.interval={wanted}" if 0 < monitor.replica_check.interval < wanted else ""
        return f"; next time --set monitor.interval={wanted}{also}: {1 + (ratio - 1) / wanted:.3f}"

    def _next(self, root: str, incident: bool) -> list[str]:
        """Commands: what was wrong, also where another rank began an incident; the training once more where a NaN was seen and no
        operators were kept; and this run against the one before it of the same program, where there is one."""
        earlier = find_run_before(self._settings)
        root = shlex.quote(root)
        commands: list[str] = []
        if earlier and not self._began and not incident and _has_alerts(earlier):  # the run in question comes first
            commands = [f"msprobe diagnose {shlex.quote(earlier)} {root}  # where the run before it, which has alerts, differs from it"]
        elif earlier:
            commands = [f"msprobe diagnose {root} {shlex.quote(earlier)}  # where this run differs from the one before it"]
        if self._began or incident:
            unknown = not self._settings.incident.level and any(alert.rule in _NONFINITE for alert in self._began)
            return [f"msprobe diagnose {root}", *(_again("--preset nan") if unknown else []), *commands]
        if self._settings.monitor is not None:
            return [f"msprobe monitor report {root}", *commands]
        dump = self._settings.dump
        if dump is None or (dump.step and len(self._to_dump) == len(set(dump.step))):
            return []
        return commands or [f"msprobe diagnose {root} GOLDEN"]


def _again(options: str) -> list[str]:
    """The launch line once more, with these options, where it is known."""
    line = one_line(os.environ.get(LAUNCH_LINE, ""))
    return [f"msprobe run {options} -- {line}"] if line else []


def _earliest(alerts: Sequence[Alert]) -> str:
    """The message of the alert that is nearest to the cause: rules find them in another order than that of execution."""
    placed = in_order(anomaly for alert in alerts if (anomaly := from_alert(asdict(alert), alert.rank, {})) is not None)
    return placed[0].anomaly.message if placed else alerts[0].message


def _shorten_message(message: str) -> str:
    """A message of one line, cut between words."""
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE].rpartition(' ')[0]} ..."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _bytes_below(directory: str) -> tuple[int, bool]:
    """Sizes of all files of this run, beside which others may lie in directories of their own, and whether there was time to ask for all: a
    process that is asked to end has little."""
    total, until = 0, time.monotonic() + _WALK_SECONDS
    for folder, inside, names in os.walk(directory):
        if folder == directory:
            inside[:] = [name for name in inside if name in PARTS]
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
        if time.monotonic() > until:
            return total, False
    return total, True


_MOST_BESIDE = 1000
"""Names in the directory above this run's that are looked at."""
_MOST_READ = 20
"""Runs whose packs are read: a process that is asked to end has little time."""


def find_run_before(settings: ProbeSettings) -> str:
    """The newest other run beside this one that has what this one has, or what this one has set aside; empty where there is none. A dump
    has to have a step of this one's, and the packs of both have to name one program: runs of several lie in one directory."""
    part = IN_RUN if settings.dump is not None else "monitor"
    own_directory = os.path.abspath(settings.output_dir)
    steps = _names_in(f"{own_directory}/{part}") if settings.dump is not None else set()
    candidates: list[tuple[float, str, Path]] = []
    for above, own in ((os.path.dirname(own_directory), False), (own_directory, True)):
        with contextlib.suppress(OSError), os.scandir(above) as listed:
            for entry in itertools.islice(listed, _MOST_BESIDE):
                other = EARLIER_RUN.fullmatch(entry.name) if own else entry.path != own_directory
                if not other or entry.is_symlink() or not os.path.isdir(f"{entry.path}/{part}"):
                    continue
                if not steps or not steps.isdisjoint(_names_in(f"{entry.path}/{part}")):
                    pack = Path(entry.path, NAME)
                    if own and not pack.is_file():  # another rank had replaced it before the dumps were set aside
                        pack = Path(own_directory, NAME).with_suffix(".previous.zip")
                    candidates.append((os.stat(f"{entry.path}/{part}").st_mtime, entry.path, pack))
    program = _program_in(Path(settings.config_check.path or Path(own_directory, NAME))) if candidates else ""
    for _, run, pack in sorted(candidates, reverse=True)[:_MOST_READ]:
        if one_line(run) == run and program and _program_in(pack) == program:  # others cannot be typed
            path = os.path.relpath(run)
            return run if path.startswith(("..", "-")) else path
    return ""


def _has_alerts(run: str) -> bool:
    """Has another run begun an incident, or written an alert?"""
    with contextlib.suppress(OSError):
        return bool(_names_in(f"{run}/{INCIDENTS}")) or any(file.stat().st_size for file in Path(run, "monitor").glob(f"*/{ALERTS}"))
    return False


def _program_in(pack: Path) -> str:
    """The script of the first rank, as a whole path; empty where the pack does not say it."""
    name = entries.of_rank("system", 0)
    try:
        program = Pack(pack).json(name)["program"]
        return os.path.normpath(os.path.join(str(program["directory"]), str(program["script"])))
    except (OSError, ProbeError, LookupError, TypeError):
        return ""


def _names_in(directory: str) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError:
        return set()
