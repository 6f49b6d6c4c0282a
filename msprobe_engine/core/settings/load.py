"""`load_settings`: from a file, a mapping or the environment to one checked `ProbeSettings`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.core import log, names
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.process.variables import warn_unknown_variables
from msprobe_engine.core.settings import dump_rules, text, tree
from msprobe_engine.core.settings.changes import apply_changes
from msprobe_engine.core.settings.existing import config_json, grad_probe, monitor_config
from msprobe_engine.core.settings.expressions import element_problem, place_problem
from msprobe_engine.core.settings.schema import DumpSettings, GradProbeSettings, ProbeSettings
from msprobe_engine.core.settings.tree import Report, format_value, join

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
    node = apply_changes(node, changes, source)
    report = tree.Report(f"{source} with {', '.join(change.strip()[:100] for change in changes)}" if changes else source)
    kind = kind or ("dump" if not node and given and path is None else recognise(node))
    if kind == "dump" and grad_probe.is_grad_probe(node, given):
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
    settings = check(settings, report, "" if kind == "dump" else "dump")
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
        raise SettingsError(f"settings: a file name or a mapping is expected, not {tree.format_value(path)} ({tree.type_name(path)})")
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


def check(settings: ProbeSettings, report: Report, dump_section: str = "dump") -> ProbeSettings:
    """`settings` with what follows from combinations. What cannot go together is reported with `dump_section` as the place of dump keys."""
    if settings.monitor is not None:
        for i, pattern in enumerate(settings.monitor.collective_sites):
            if flaw := place_problem(pattern):
                report.error(f"monitor.collective_sites[{i}]", f"{format_value(pattern)} {flaw}")
    if settings.dump is not None:
        settings = replace(settings, dump=_dump(settings.dump, dump_section, report))
    if settings.redact and settings.dump is not None and settings.dump.level == "L2":
        report.error(
            "redact",
            f"{format_value(list(settings.redact))} at level L2, whose files the device writes itself; "
            "use another level or leave out redact",
        )
    if settings.grad_probe is not None:
        grad_probe.check(settings.grad_probe, report)
    if settings.monitor is not None and settings.monitor.eps and {"zeros", "underflow"} <= set(settings.monitor.ops):
        report.error(
            "monitor.eps", f"{settings.monitor.eps!r} with op underflow: rows count below one limit only; leave out eps or underflow"
        )
    prometheus = settings.sinks.prometheus
    if prometheus.enabled and prometheus.mode == "textfile" and not prometheus.textfile_dir:
        report.error("sinks.prometheus.textfile_dir", "is empty, but mode 'textfile' writes there; give the collector's directory")
    if prometheus.enabled and prometheus.mode == "push" and not prometheus.push_url:
        report.error("sinks.prometheus.push_url", "is empty, but mode 'push' sends there; give the gateway's URL")
    if bool(prometheus.tls_cert) != bool(prometheus.tls_key):
        report.error("sinks.prometheus.tls_cert", "and tls_key belong together; give both files or none")
    return settings


def _dump(dump: DumpSettings, section: str, report: Report) -> DumpSettings:
    if len(dump.scope) not in (0, 2):
        report.error(
            join(section, "scope"),
            f"{format_value(list(dump.scope))} is not allowed; allowed: [] or two names, the first and the last record",
        )
    elif dump.level != "debug":
        for i, name in enumerate(dump.scope):
            if wrong := problem(name, dump.level):
                report.error(join(section, f"scope[{i}]"), f"{format_value(name)} {wrong}")
    for key, elements in (("list", dump.list), ("tensor_list", dump.tensor_list)):
        for i, element in enumerate(elements):
            if flaw := element_problem(element):
                report.error(join(section, f"{key}[{i}]"), f"{format_value(element)} {flaw}")
    for i, cut in enumerate(dump.slice):
        if cut.end is not None and (cut.begin < 0) == (cut.end < 0) and cut.begin >= cut.end:
            report.error(join(section, f"slice[{i}].end"), f"{cut.end} is not behind begin {cut.begin}: nothing would be left")
    if "all" in dump.data_mode and len(dump.data_mode) > 1:
        report.error(
            join(section, "data_mode"),
            f"{format_value(list(dump.data_mode))}: 'all' stands alone; leave it out to choose, or write ['all']",
        )
    if not dump.data_mode:
        dump = replace(dump, data_mode=("all",))
    if dump.task == "structure" and dump.level in ("L1", "debug"):
        report.warning(join(section, "level"), f"task 'structure' needs modules: 'mix' is used instead of '{dump.level}'")
        dump = replace(dump, level="mix")
    dump_rules.check(dump, section, report)
    return _debug(dump, section, report) if dump.level == "debug" else dump


def _debug(dump: DumpSettings, section: str, report: Report) -> DumpSettings:
    """At level debug everything that ``save()`` is given is written: keys that choose are taken back."""
    everything = DumpSettings()
    for key in ("scope", "list", "tensor_list", "data_mode", "slice", "request_id"):
        if getattr(dump, key) != getattr(everything, key):
            report.warning(join(section, key), "has no effect at level debug, which writes what save() is given")
            dump = replace(dump, **{key: getattr(everything, key)})
    return dump


FUNCTION, MODULE = "Functional.linear.0.forward", "Module.layers.0.mlp.Mlp.forward.0"
_EXAMPLE = {"L0": f"modules like {MODULE}", "L1": f"functions like {FUNCTION}"}


def problem(name: str, level: str) -> str:
    """What is wrong with one name of ``scope`` at this level, with what is allowed; "" when nothing is.

    Every prefix is allowed (the existing tool knows a fixed list): functions of any package can be recorded.
    """
    kind = _kind(name)
    allowed = _EXAMPLE.get(level, f"functions like {FUNCTION}, modules like {MODULE}")
    if not kind:
        meant = _meant(name)
        hint = f"; did you mean '{meant}'?" if len(name) < 200 and _kind(meant) and not problem(meant, level) else ""
        return f"is no full record name; allowed at level {level}: {allowed}{hint}"
    if level == "L0" and kind == "function":
        return f"names a function, and level L0 records modules; allowed: {allowed}, or level L1 or mix"
    if level == "L1" and kind == "module":
        return f"names a module, and level L1 records functions; allowed: {allowed}, or level L0 or mix"
    return ""


def _kind(name: str) -> str:
    parsed = names.parse(name)
    if isinstance(parsed, names.ModuleName):
        return "module"
    if isinstance(parsed, names.ApiName) and not name.startswith(("Module.", "Cell.")):
        return "function"
    return ""


def _meant(name: str) -> str:
    """`name` with number and direction in their places, and what is missing of them filled in."""
    parts = name.split(".")
    direction, number = names.FORWARD, "0"
    for _ in range(2):  # they are the last two parts, in the right or the wrong order, as far as they are there
        if parts and parts[-1] in (names.FORWARD, names.BACKWARD):
            direction = parts.pop()
        elif parts and parts[-1].isdecimal():
            number = parts.pop()
    last = (direction, number) if name.startswith(("Module.", "Cell.")) else (number, direction)
    return ".".join((*parts, *last))
