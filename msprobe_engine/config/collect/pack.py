"""What the command line collects: environment, packages, machine, and the settings in launch scripts, into a pack. Nothing is run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msprobe_engine.config.collect import packages, system
from msprobe_engine.config.environment import variables as environment
from msprobe_engine.config.launch_scripts.shell.context import ONLY_A_RUN_KNOWS
from msprobe_engine.config.launch_scripts.static import collect_static
from msprobe_engine.config.launch_scripts.static_values import StaticSettings
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.config.secrets.masking import mask_setting, masked_value
from msprobe_engine.config.secrets.names import judged_name, secret_variable
from msprobe_engine.formats.pack import entries


def collect(
    paths: Sequence[str | Path],
    output: str | Path,
    arguments: Sequence[str] | None = None,
    *,
    added: Sequence[str] = (),
    key: bytes = b"",
    of_scripts: bool = False,
) -> tuple[Path, list[str]]:
    """Write a pack of this environment and of the settings in `paths`. Scripts are read as they would start here: with the variables of
    this environment, but those that look like secrets or are others in every shell.

    Args:
        paths: launch scripts and settings files, see `collect_static`; none: environment, packages and machine only.
        output: the pack, ends in ``.zip``.
        arguments: what the scripts would be called with; None: not known.
        added, key: see `environment.collect`.
        of_scripts: of the environment only what the scripts set.

    Returns:
        where the pack is, and what should be known of it.

    Raises:
        UsageError: a file of another kind, or `output` does not end in ``.zip``. Nothing is written then.
        DumpFormatError: a given file cannot be read.
        SinkError: the pack cannot be written.
    """
    about = environment.collect({} if of_scripts else None, added=added, key=key)
    settings = collect_static(paths, arguments=arguments, inherited=_read_inherited_variables()) if paths else None
    contents: dict[str, Any] = {}
    contents[entries.ENV] = about.values
    contents[entries.of_rank("withheld", 0)] = about.entry()
    contents[entries.PIP] = packages.text()
    contents[entries.of_rank("system", 0)] = system.collect(system.program_of(_program(settings, paths)))
    notes = about.notes()
    if settings is not None:
        contents |= static_entries(settings, added=added, key=key)
        notes += settings.notes
        if not settings.values:
            notes.append(f"no settings were found in {', '.join(map(str, paths))}")
    writer = PackWriter(output)
    writer.add(contents)
    return writer.path, notes


def _program(settings: StaticSettings | None, paths: Sequence[str | Path]) -> str | Path:
    """A file of the program that the scripts start, of these themselves, or of this directory."""
    programs = [program.program for program in settings.launches] if settings is not None else []
    return next((program for program in programs if os.path.isfile(program)), paths[0] if paths else Path("any file"))


def _read_inherited_variables() -> dict[str, str]:
    """Variables that scripts may use: a value gets into a pack only as part of a setting, under the masker."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ONLY_A_RUN_KNOWS
        and not name.startswith("BASH_FUNC_")
        and len(value) <= environment.LONGEST
        and not secret_variable(name)
        and masked_value(name, value) == value
    }


def static_entries(settings: StaticSettings, *, added: Sequence[str] = (), key: bytes = b"") -> dict[str, Any]:
    """The entries of settings that were read from files: the existing tool's, and ours with file and line of each. Of the variables that
    scripts set the same is written as of those of a process."""
    plain = {name: setting.value for name, setting in settings.values.items()}
    judged = {name: judged_name(name, plain) for name in plain}
    values = {name: {**asdict(setting), "value": mask_setting(judged[name], setting.value)} for name, setting in settings.values.items()}
    for name, places in settings.conflicts.items():
        values[name]["several"] = [mask_setting(judged[name], setting.value) for setting in places]
    variables = environment.collect(settings.env, added=added, key=key)
    own = {
        "values": values,
        "env": variables.values,
        "withheld": variables.entry(),
        "launches": [
            {
                "launcher": launch.launcher,
                "program": launch.program,
                "file": launch.file,
                "line": launch.line,
                "condition": launch.condition,
            }
            for launch in settings.launches
        ],
        "files": settings.files,
        "notes": settings.notes,
    }
    existing = {name: mask_setting(judged[name], value) for name, value in settings.existing_shape().items()}
    return {entries.STATIC: existing, entries.STATIC_SETTINGS: own}
