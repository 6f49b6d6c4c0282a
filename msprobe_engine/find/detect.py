"""What a command was pointed at: a dump, an incident, monitor output, a pack of configurations, a checkpoint, or the output directory of a
run with several of these."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.claims import EARLIER_RUN, FURTHER_RUN
from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.checkpoint.open import locate, reader_of
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.find_dumps import IN_RUN, INCIDENTS, Entries, entries_of
from msprobe_engine.formats.dump.reader import DumpDirectory, open_dump
from msprobe_engine.formats.dump.ring_file import has_step_file
from msprobe_engine.formats.monitor import reader as monitor_reader
from msprobe_engine.formats.pack.kind import NAME as PACK
from msprobe_engine.formats.pack.kind import is_pack

DUMP, INCIDENT, MONITOR, CONFIG, CHECKPOINT, NOTHING = (
    "dump",
    "incident",
    "monitor output",
    "pack of configurations",
    "checkpoint",
    "nothing",
)
LATEST = "latest"
"""The link that `msprobe run` leaves to the last launch that trained."""
_LOOKED_INTO, _SHOWN = 64, 4
_MOST_STEPS, _MOST_RANKS = 8, 8
"""Where a pack is looked for in a dump: it is that of the first rank, in the first step that was dumped."""
_TRACKER = "latest_checkpointed_iteration.txt"
_SAMPLES = re.compile(r"samples_rank\d{1,9}\.jsonl")
_INCIDENT = re.compile(r"step(\d{1,18})-.+", re.DOTALL)
_COMPARABLE = {
    (True, False): Sentence("a dump only"),
    (False, True): Sentence("monitor output only"),
    (True, True): Sentence("a dump and monitor output"),
    (False, False): Sentence("neither a dump nor monitor output"),
}
"""Whether there is a dump, and whether there is monitor output."""


_NOTHING_KEPT = (
    "nothing of this incident can be read (was it not finished, or copied in part?); an alert was raised, and what it saw is not known"
)
_NOTHING_DUMPED = "has directories of steps, and no dump.json in them (was the run stopped before it wrote one, or is it a copy of a part?)"


class Run:
    """What lies at a path. It is looked for when it is asked for, and once: who passes a path on passes its `Run` on.

    Args:
        dump: the dump at the path, where it was opened before.
    """

    def __init__(self, path: Path, dump: DumpDirectory | None = None) -> None:
        self.path = path
        if dump is not None:
            self._opened = dump
            if dump.root == path:
                self.entries = dump.entries

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def entries(self) -> Entries:
        """What is in the directory; nothing where it is none.

        Raises:
            DumpFormatError: it cannot be listed.
        """
        return entries_of(self.path) if self.path.is_dir() else []

    @cached_property
    def samples(self) -> list[Path]:
        """Samples of a monitor that an incident has kept, a file each rank."""
        return [self.path / entry.name for entry in self.entries if _SAMPLES.fullmatch(entry.name)]

    @cached_property
    def _opened(self) -> DumpDirectory | DumpFormatError:
        try:
            return open_dump(self.path, self.entries or None)
        except DumpFormatError as error:
            return error

    @property
    def dump(self) -> DumpDirectory | None:
        """The dump at the path, or in the directory; None: there is none."""
        return None if isinstance(self._opened, DumpFormatError) else self._opened

    def need_dump(self) -> DumpDirectory:
        """Raises:
        DumpFormatError: there is none.
        """
        if isinstance(self._opened, DumpFormatError):
            raise self._opened
        return self._opened

    @cached_property
    def kind(self) -> str:
        """One of `DUMP`, `INCIDENT`, `MONITOR`, `CONFIG`, `CHECKPOINT` and `NOTHING`, the first that fits.

        Raises:
            DumpFormatError: there is no such path.
        """
        if not self.path.exists() and not self._is_dump:
            raise DumpFormatError(f"{self.path}: there is no such file or directory; give a dump, an incident directory or monitor output")
        if self.samples or (self.path.is_dir() and (self.path / "incident.json").is_file()):
            return INCIDENT
        if self._is_dump:
            return DUMP
        if self.is_monitored:
            return MONITOR
        if self.path.is_file() and is_pack(self.path):
            return CONFIG
        return CHECKPOINT if _is_checkpoint(self.path) else NOTHING

    @property
    def _is_dump(self) -> bool:
        """Not the output directory of a dump's run."""
        if self.path.name in (layout.DUMP, layout.DEBUG) and not self.path.is_dir():
            return self.dump is not None and self.dump.root == self.path.parent and has_step_file(self.path)
        return self.dump is not None and self.dump.root == self.path

    @cached_property
    def is_monitored(self) -> bool:
        """Has a monitor written here?"""
        return monitor_reader.has_monitor(self.path, self.entries)

    @cached_property
    def monitor(self) -> monitor_reader.Run:
        """What a monitor has written, opened.

        Raises:
            UsageError: none has.
        """
        return monitor_reader.open_run(self.path)

    @cached_property
    def records(self) -> Run | None:
        """The dump in it as a thing of its own; an incident counts as one."""
        if self.kind in (DUMP, INCIDENT):
            return self
        return None if self.dump is None else Run(self.dump.root, self.dump)

    @cached_property
    def has_monitor(self) -> bool:
        """Is there output of a monitor besides, or in place of, a dump?"""
        return self.kind == MONITOR or (self.kind != INCIDENT and self.path.is_dir() and self.is_monitored)

    @cached_property
    def _kept(self) -> list[Run]:
        place = self.path / INCIDENTS
        if self.kind == INCIDENT or place.is_symlink() or not place.is_dir():  # the path itself may be a link: ``latest``
            return []
        incidents = [(int(name[1]), entry) for entry in place.iterdir() if (name := _INCIDENT.fullmatch(entry.name))]
        return [Run(entry) for _, entry in sorted(incidents)]

    @cached_property
    def incidents(self) -> tuple[Run, ...]:
        """The incidents of a run, the earliest step first."""
        return tuple(run for run in self._kept if not run.path.is_symlink() and run.kind in (INCIDENT, DUMP))

    @cached_property
    def unread(self) -> list[DumpFormatError]:
        """What is the matter with a dump and with incidents in it, of which nothing can be read: an alert has made each incident."""
        problems = [
            _is_link(incident) if incident.is_symlink() else DumpFormatError(f"{incident}: {_NOTHING_KEPT}")
            for incident in self._unread_incidents
        ]
        place = self.path / IN_RUN
        if self.dump is None and place.is_dir():
            try:
                steps = [entry.name for entry in entries_of(place) if layout.step_of(entry.name) is not None]
            except DumpFormatError as error:
                return [*problems, error]
            problems += [DumpFormatError(f"{place}: {_NOTHING_DUMPED}")] if steps else []
        return problems

    @property
    def _unread_incidents(self) -> list[Path]:
        place = self.path / INCIDENTS
        return [place] if place.is_symlink() else [run.path for run in self._kept if run not in self.incidents]

    @property
    def several(self) -> bool:
        """Not a single thing that is named by its own path."""
        if self.kind == INCIDENT or not self.path.is_dir():
            return False
        if self.records is None:
            return bool(self.incidents or self.unread) or (_has_pack(self.path) and not self.has_monitor)
        return bool(self.incidents or self.unread) or self.records is not self or self.has_monitor

    def comparable(self) -> Sentence:
        """What of it can be compared with the same of another run."""
        return _COMPARABLE[self.records is not None, self.has_monitor]

    @cached_property
    def config(self) -> Path | None:
        """The pack of the run that it belongs to; None: there is none. What lies beside a checkpoint is not known to be of its run."""
        if not self.path.is_dir() and self.kind not in (DUMP, MONITOR):
            return None
        run: tuple[Path, ...] = (self.path.parent.parent,) if self.path.parent.name == INCIDENTS else ()
        # the directory above one of an earlier or a further run is that of another run
        other = EARLIER_RUN.fullmatch(self.path.name) or FURTHER_RUN.fullmatch(self.path.name)
        own = other is not None or (self.dump is None and self.kind == CHECKPOINT)
        for place in (self.path,) if own else (self.path, self.path.parent, *run) if self.path.is_dir() else (self.path.parent,):
            if _has_pack(place):
                return place / PACK
        return self.pack_inside

    @property
    def pack_inside(self) -> Path | None:
        """That of a dump below a ``dump_path``, which lies in the directory of a rank; None of anything else."""
        if not self.path.is_dir() or self.dump is None:
            return None
        places = (self.dump.path(s, r) for s in self.dump.steps[:_MOST_STEPS] for r in self.dump.ranks(s)[:_MOST_RANKS])
        return next((place / PACK for place in places if _has_pack(place)), None)


def _is_link(place: Path) -> DumpFormatError:
    return DumpFormatError(f"{place}: is a link, and not followed; give the directory that it leads to")


def _has_pack(place: Path) -> bool:
    return (place / PACK).is_file() and not (place / PACK).is_symlink()


def _is_checkpoint(path: Path) -> bool:
    if (path / _TRACKER).is_file():
        return True  # also where what it names is not there: its reader says so
    try:
        chosen, _ = locate(path)
        reader_of(chosen)
    except DumpFormatError:
        return False
    return True


def refuse(run: Run) -> UsageError:
    """The sentence for what `diagnose` does not look at."""
    if run.kind == CHECKPOINT:
        return UsageError(f"{run}: is a checkpoint; give a second one to compare it with (msprobe ckpt show says what it holds)")
    if runs := _runs_below(run.path):
        more = f", ... ({len(runs)} in all)" if len(runs) > _SHOWN else ""
        return UsageError(
            f"{run}: holds runs in directories of their own; give one of them: {', '.join(map(one_line, runs[:_SHOWN]))}{more}"
        )
    return UsageError(
        f"{run}: holds no dump, incident, monitor output, pack of configurations or checkpoint; give the directory that one of them was "
        "written to (msprobe show lists them)"
    )


def _runs_below(path: Path) -> list[str]:
    """Output directories of launches in a directory, the last one that trained first."""
    try:
        children = sorted((child for child in path.iterdir() if child.is_dir()), reverse=True)[:_LOOKED_INTO]
    except OSError:
        return []
    runs = [str(run) for run in map(Run, children) if run.is_monitored or run.dump is not None or run.samples]
    latest = str(path / LATEST)
    return [latest, *(run for run in runs if run != latest)] if latest in runs else runs


def common(target: Run, golden: Run | None) -> str:
    """`DUMP`, `MONITOR`, `CONFIG` or `CHECKPOINT`: what both are; an incident directory holds dumps, and counts as one.

    Raises:
        DumpFormatError: there is no such path.
        UsageError: it is something else, or the two are of different kinds.
    """
    kinds = []
    for run in (target,) if golden is None else (target, golden):
        if run.kind == NOTHING or (run.kind == CHECKPOINT and golden is None):
            raise refuse(run)
        kinds.append(DUMP if run.kind == INCIDENT else run.kind)
    if len(set(kinds)) > 1:
        raise UsageError(f"{target} is a {kinds[0]} and {golden} a {kinds[1]}: nothing of one kind can be compared; give two of one kind")
    return kinds[0]
