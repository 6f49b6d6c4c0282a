"""Rules that concern more than one key."""

from __future__ import annotations

from dataclasses import replace

from msprobe_engine.core import names
from msprobe_engine.core.settings import dump_rules
from msprobe_engine.core.settings.existing import grad_probe
from msprobe_engine.core.settings.expressions import element_problem, place_problem
from msprobe_engine.core.settings.schema import DumpSettings, ProbeSettings
from msprobe_engine.core.settings.tree import Report, join, show


def check(settings: ProbeSettings, report: Report, dump_section: str = "dump") -> ProbeSettings:
    """`settings` with what follows from combinations. What cannot go together is reported with `dump_section` as the place of dump keys."""
    if settings.monitor is not None:
        for i, pattern in enumerate(settings.monitor.collective_sites):
            if flaw := place_problem(pattern):
                report.error(f"monitor.collective_sites[{i}]", f"{show(pattern)} {flaw}")
    if settings.dump is not None:
        settings = replace(settings, dump=_dump(settings.dump, dump_section, report))
    if settings.redact and settings.dump is not None and settings.dump.level == "L2":
        report.error(
            "redact",
            f"{show(list(settings.redact))} at level L2, whose files the device writes itself; use another level or leave out redact",
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
            join(section, "scope"), f"{show(list(dump.scope))} is not allowed; allowed: [] or two names, the first and the last record"
        )
    elif dump.level != "debug":
        for i, name in enumerate(dump.scope):
            if wrong := problem(name, dump.level):
                report.error(join(section, f"scope[{i}]"), f"{show(name)} {wrong}")
    for key, elements in (("list", dump.list), ("tensor_list", dump.tensor_list)):
        for i, element in enumerate(elements):
            if flaw := element_problem(element):
                report.error(join(section, f"{key}[{i}]"), f"{show(element)} {flaw}")
    for i, cut in enumerate(dump.slice):
        if cut.end is not None and (cut.begin < 0) == (cut.end < 0) and cut.begin >= cut.end:
            report.error(join(section, f"slice[{i}].end"), f"{cut.end} is not behind begin {cut.begin}: nothing would be left")
    if "all" in dump.data_mode and len(dump.data_mode) > 1:
        report.error(
            join(section, "data_mode"), f"{show(list(dump.data_mode))}: 'all' stands alone; leave it out to choose, or write ['all']"
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
