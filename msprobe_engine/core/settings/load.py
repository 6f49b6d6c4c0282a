"""`load_settings`: from a file, a mapping or the environment to one checked `ProbeSettings`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.core import log
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.process.variables import warn_unknown_variables
from msprobe_engine.core.settings import rules_between_keys, text, tree
from msprobe_engine.core.settings.changes import changed
from msprobe_engine.core.settings.existing import config_json, grad_probe, monitor_config
from msprobe_engine.core.settings.schema import DumpSettings, GradProbeSettings, ProbeSettings

KINDS = ("probe", "dump", "monitor")
"""``probe``: this project's tree; ``dump``: the existing ``config.json``; ``monitor``: the existing ``monitor_config.json``."""


def load_settings(
    path: str | Path | Mapping[str, Any] | None = None,
    *,
    kind: str | None = None,
    task: str | None = None,
    dump_path: str | None = None,
    level: str | None = None,
    step: Sequence[int | str] | None = None,
    rank: Sequence[int | str] | None = None,
    changes: Sequence[str] = (),
) -> ProbeSettings:
    """Read, check and complete the settings.

    Args:
        path: YAML or JSON file, or the same as a mapping. None: the file that ``MSPROBE_CONFIG`` names.
        kind: one of `KINDS`; None: recognised by the keys.
        task, dump_path, level, step, rank: override the ``dump`` section (arguments of the debugger's constructor).
        changes: ``key.path=value`` each, made to what the file says (launch arguments).

    The environment has the last word on two values: ``MSPROBE_LOG_LEVEL`` (0..4), and ``MONITOR_OUTPUT_DIR`` where no CSV
    directory is given. Relative directories stay relative to the working directory of the run. The console takes the level
    from the settings, and remarks (accepted keys and mistyped variables without effect) are logged once each; `read_settings` does neither.

    Raises:
        SettingsError: all mistakes, one line each.
    """
    settings, warnings = read_settings(path, kind=kind, changes=changes, task=task, dump_path=dump_path, level=level, step=step, rank=rank)
    log.set_level(settings.log_level)
    warn_unknown_variables()
    for line in warnings:
        log.warn_once(f"settings: {line}", line)
    return settings


def read_settings(
    path: str | Path | Mapping[str, Any] | None = None, *, kind: str | None = None, changes: Sequence[str] = (), **overrides: Any
) -> tuple[ProbeSettings, list[str]]:
    """As `load_settings`, with the remarks returned instead of logged."""
    if kind is not None and kind not in KINDS:
        raise SettingsError(f"kind: '{kind}' is not allowed; allowed: {', '.join(KINDS)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    source, node = _content(path, bool(given) or kind is not None)
    node = changed(node, changes, source)
    report = tree.Report(f"{source} with {', '.join(change.strip()[:100] for change in changes)}" if changes else source)
    kind = kind or ("dump" if not node and given and path is None else recognise(node))
    if kind == "dump" and grad_probe.asked(node, given):
        settings = grad_probe.grad_probe_settings(node, report)
    elif kind == "dump":
        settings = config_json.dump_settings(grad_probe.other_task(node, given), report)
    elif kind == "monitor":
        settings = monitor_config.monitor_settings(node, report)
    else:
        settings = tree.build(ProbeSettings, node, "", report)
    gradients = settings.grad_probe if given.get("task") != grad_probe.TASK else settings.grad_probe or GradProbeSettings()
    if given and gradients is not None and (given.get("task") == grad_probe.TASK or settings.dump is None):
        settings = replace(settings, dump=None, grad_probe=grad_probe.override(gradients, given, report))
    elif given:
        settings = replace(settings, dump=_override(settings.dump or DumpSettings(), given, report))
    settings = rules_between_keys.check(settings, report, "" if kind == "dump" else "dump")
    report.raise_errors()
    return _environment(settings), report.warnings


def _content(path: str | Path | Mapping[str, Any] | None, may_be_empty: bool) -> tuple[str, Any]:
    if isinstance(path, Mapping):
        return "settings", path
    if path is None:
        path = os.environ.get("MSPROBE_CONFIG") or None
        if path is None and may_be_empty:
            return "arguments", {}
    if path is None:
        raise SettingsError("no settings were given: pass a file, or name one in the environment variable MSPROBE_CONFIG")
    if not isinstance(path, (str, Path)):
        raise SettingsError(f"settings: a file name or a mapping is expected, not {tree.show(path)} ({tree.type_name(path)})")
    node = text.read_file(Path(path))
    return str(path), {} if node is None else node


def recognise(node: Any) -> str:
    """Which of `KINDS` a file is, by its top-level keys: most exact hits, then nearest misses, ``probe`` when in doubt."""
    if not isinstance(node, Mapping):
        return "probe"
    known = {"probe": [k.name for k in tree.keys_of(ProbeSettings)], "dump": config_json.DUMP_KEYS, "monitor": monitor_config.MONITOR_KEYS}

    def score(kind: str) -> tuple[int, float]:
        exact = sum(isinstance(name, str) and name in known[kind] for name in node)
        return exact, exact or sum(tree.likeness(name, known[kind]) for name in node)

    return max(KINDS, key=score)


def _override(dump: DumpSettings, given: Mapping[str, Any], report: tree.Report) -> DumpSettings:
    arguments = tree.Report("argument")
    keys = {key.name: key for key in tree.keys_of(DumpSettings)}
    for name, value in given.items():
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        value = config_json.convert_task(value, name, arguments) if name == "task" else tree.convert(keys[name], value, name, arguments)
        if value is not tree.BAD:
            dump = replace(dump, **{name: value})
    report.errors += arguments.errors
    return dump


def _environment(settings: ProbeSettings) -> ProbeSettings:
    level = log.level_from_environment()
    if level is not None:
        settings = replace(settings, log_level=level)
    directory = os.environ.get("MONITOR_OUTPUT_DIR")
    if directory and not settings.sinks.csv.path:
        settings = replace(settings, sinks=replace(settings.sinks, csv=replace(settings.sinks.csv, path=directory)))
    return settings
