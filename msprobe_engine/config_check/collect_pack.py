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
from msprobe_engine.config_check.static import collect_static


def collect(paths: Sequence[str | Path], output: str | Path) -> tuple[Path, list[str]]:
    """Write a pack of this environment and of the settings in `paths`.

    Args:
        paths: launch scripts and settings files, see `collect_static`; none: environment, packages and machine only.
        output: the pack, ends in ``.zip``.

    Returns:
        where the pack is, and what should be known of it.

    Raises:
        UsageError: a file of another kind, or `output` does not end in ``.zip``. Nothing is written then.
        DumpFormatError: a given file cannot be read.
        SinkError: the pack cannot be written.
    """
    found = collect_static(paths) if paths else None
    contents: dict[str, Any] = {}
    about = environment.collect()
    contents[entries.ENV] = about.values
    contents[entries.PIP] = packages.text()
    contents[entries.of_rank("system", 0)] = system.collect()
    notes = []
    if about.left_out:
        notes.append(f"{about.left_out} variables of the environment are left out: their names say that they are secrets")
    if found is not None:
        contents |= static_entries(found)
        notes += found.notes
        if not found.values:
            notes.append(f"no settings were found in {', '.join(map(str, paths))}")
    writer = PackWriter(output)
    writer.add(contents)
    return writer.path, notes


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
