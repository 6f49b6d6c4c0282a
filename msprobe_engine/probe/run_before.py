"""Which run beside this one to compare it with: the newest other run of the same program."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from msprobe_engine.config.pack.reader import Pack
from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.io.claims import EARLIER_RUN
from msprobe_engine.core.log import one_line
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.formats.dump.find_dumps import IN_RUN
from msprobe_engine.formats.pack import entries
from msprobe_engine.formats.pack.kind import NAME

_MOST_BESIDE = 1000
"""Names in the directory above this run's that are looked at."""
_MOST_READ = 20
"""Runs whose packs are read: a process that is asked to end has little time."""


def find_run_before(settings: ProbeSettings) -> str:
    """The newest other run beside this one that has what this one has, or what this one has set aside; empty where there is none. A dump
    has to have a step of this one's, and the packs of both have to name one program: runs of several lie in one directory."""
    part = IN_RUN if settings.dump is not None else "monitor"
    here = os.path.abspath(settings.output_dir)
    steps = _names_in(f"{here}/{part}") if settings.dump is not None else set()
    found: list[tuple[float, str, Path]] = []
    for above, own in ((os.path.dirname(here), False), (here, True)):
        with contextlib.suppress(OSError), os.scandir(above) as listed:
            for entry in itertools.islice(listed, _MOST_BESIDE):
                other = EARLIER_RUN.fullmatch(entry.name) if own else entry.path != here
                if not other or entry.is_symlink() or not os.path.isdir(f"{entry.path}/{part}"):
                    continue
                if not steps or not steps.isdisjoint(_names_in(f"{entry.path}/{part}")):
                    pack = Path(entry.path, NAME)
                    if own and not pack.is_file():  # another rank had replaced it before the dumps were set aside
                        pack = Path(here, NAME).with_suffix(".previous.zip")
                    found.append((os.stat(f"{entry.path}/{part}").st_mtime, entry.path, pack))
    program = _program_in(Path(settings.config_check.path or Path(here, NAME))) if found else ""
    for _, run, pack in sorted(found, reverse=True)[:_MOST_READ]:
        if one_line(run) == run and program and _program_in(pack) == program:  # others cannot be typed
            path = os.path.relpath(run)
            return run if path.startswith(("..", "-")) else path
    return ""


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
