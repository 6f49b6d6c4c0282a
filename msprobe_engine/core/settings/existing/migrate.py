"""A settings file of the existing tool as ``probe.yaml``: what the doors read from it (`read_settings`), written in this project's keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings import text
from msprobe_engine.core.settings.existing.config_json import unread_sections
from msprobe_engine.core.settings.load import read_settings, recognise
from msprobe_engine.core.settings.tree import Key, keys_of, plain

_ENVIRONMENT = ("MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR", "MSPROBE_LOG_LEVEL")
"""Variables that have a say in what a file means."""
_SHORTEST_RANGE = 3


class Migration(NamedTuple):
    """What becomes of a file.

    Attributes:
        tree: `read_settings` makes the same settings of it as of the file, in the same environment.
        without_counterpart: keys that have no effect or another meaning here, one line each.
        notes: what the file holds and the run it describes does not use, and variables that have been looked at.
    """

    tree: dict[str, Any]
    without_counterpart: list[str]
    notes: list[str]


def migrate(path: str | Path, kind: str | None = None) -> Migration:
    """Translate a ``config.json`` or ``monitor_config.json``.

    Args:
        kind: ``dump`` or ``monitor``; None: recognised by the keys.

    Raises:
        SettingsError: it has mistakes, or is no such file.
    """
    node = text.read_file(Path(path))
    if isinstance(node, Mapping) and "monitors" in node:
        raise SettingsError(
            f"{path}: is a file of TrainerMonitorV2 (it has 'monitors'), which writes files of its own form and reads this file as it is"
        )
    kind = kind or recognise(node)
    if kind == "probe":
        raise SettingsError(f"{path}: has no keys of config.json or monitor_config.json; if it is one, say --kind dump or --kind monitor")
    settings, remarks = read_settings(path, kind=kind)
    defaults, _ = read_settings({}, kind="probe")  # in the same environment, which has the last word on both
    notes = [f"{path}: {line}" for line in (unread_sections(node) if kind == "dump" else ())]
    notes += [f"{name}={os.environ[name]} in the environment was taken into account" for name in _ENVIRONMENT if os.environ.get(name)]
    return Migration(changed_keys(settings, defaults), remarks, notes)


def changed_keys(settings: Any, defaults: Any) -> dict[str, Any]:
    """The keys of a section whose values are not those of `defaults`, as plain data for YAML."""
    out: dict[str, Any] = {}
    for key in keys_of(type(settings)):
        value, default = getattr(settings, key.name), getattr(defaults, key.name)
        if value == default:
            continue
        if key.section is None or value is None:
            out[key.name] = _with_ranges(value) if key.ranges else plain(value)
        elif key.many:
            out[key.name] = [_item(key, each) for each in value]
        else:
            out[key.name] = changed_keys(value, default if default is not None else type(value)())
    return out


def _item(key: Key, value: Any) -> dict[str, Any]:
    """One section of a list; the key that names it is there whatever its default."""
    named = {key.item: getattr(value, key.item)} if key.item else {}
    return named | changed_keys(value, type(value)())


def _with_ranges(numbers: tuple[int, ...]) -> list[int | str]:
    """Ascending numbers, with ``"a-b"`` for three and more in a row."""
    out: list[int | str] = []
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        row = [number for _, number in pairs]
        out += [f"{row[0]}-{row[-1]}"] if len(row) >= _SHORTEST_RANGE else row
    return out
