"""What the command line collects: environment, packages, machine, and the settings in launch scripts, into a pack. Nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msprobe_engine.config_check import entries, environment, packages, system
from msprobe_engine.config_check.found import StaticSettings
from msprobe_engine.config_check.pack import PackWriter
from msprobe_engine.config_check.secrets import cleaned
from msprobe_engine.config_check.shell.context import ONLY_A_RUN_KNOWS
from msprobe_engine.config_check.static import collect_static
from msprobe_engine.core.io.claims import claim_directory

_MOST_NAMES = 10


def collect(paths: Sequence[str | Path], output: str | Path, arguments: Sequence[str] | None = None) -> tuple[Path, list[str]]:
    """Write a pack of this environment and of the settings in `paths`. Scripts are read as they would start here: with the variables of
    this environment, but those that look like secrets or are others in every shell.

    Args:
        paths: launch scripts and settings files, see `collect_static`; none: environment, packages and machine only.
        output: the pack, ends in ``.zip``.
        arguments: what the scripts would be called with; None: not known.

    Returns:
        where the pack is, and what should be known of it.

    Raises:
        UsageError: a file of another kind, or `output` does not end in ``.zip``. Nothing is written then.
        DumpFormatError: a given file cannot be read.
        SinkError: the pack cannot be written.
    """
    about = environment.collect()
    found = collect_static(paths, arguments=arguments, inherited=_inherited(about)) if paths else None
    contents: dict[str, Any] = {}
    contents[entries.ENV] = about.values
    contents[entries.PIP] = packages.text()
    contents[entries.of_rank("system", 0)] = system.collect()
    notes = []
    if about.left_out:
        notes.append(f"left out of the environment, because their names say that they are secrets: {_listed(about.left_out)}")
    if about.hidden:
        notes.append(f"masked in the environment, because their values look like secrets: {_listed(about.hidden)}")
    if found is not None:
        contents |= static_entries(found)
        notes += found.notes
        if not found.values:
            notes.append(f"no settings were found in {', '.join(map(str, paths))}")
    given = Path(output)
    claim = claim_directory(given.parent, None, by_process=True) if given.suffix == ".zip" else None
    try:
        writer = PackWriter(given if claim is None else claim.path / given.name)
        writer.add(contents)
    finally:
        if claim is not None:
            claim.release()
    return writer.path, notes


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _inherited(about: environment.Environment) -> dict[str, str]:
    hidden = {*about.hidden, *ONLY_A_RUN_KNOWS}
    return {name: value for name, value in about.values.items() if name not in hidden and len(value) <= environment.LONGEST}


def static_entries(found: StaticSettings) -> dict[str, Any]:
    """The entries of settings that were read from files: the existing tool's, and ours with file and line of each."""
    values = {name: {**asdict(one), "value": cleaned(name, one.value)} for name, one in found.values.items()}
    for name, places in found.conflicts.items():
        values[name]["several"] = [cleaned(name, one.value) for one in places]
    ours = {
        "values": values,
        "env": {name: cleaned(name, value) for name, value in found.env.items()},
        "launches": [
            {"launcher": one.launcher, "program": one.program, "file": one.file, "line": one.line, "condition": one.condition}
            for one in found.launches
        ],
        "files": found.files,
        "notes": found.notes,
    }
    existing = {name: cleaned(name, value) for name, value in found.existing_shape().items()}
    return {entries.STATIC: existing, entries.STATIC_SETTINGS: ours}
