"""Rules that concern more than one key."""

from __future__ import annotations

from dataclasses import replace

from msprobe_engine.core.settings import dump_rules, scope
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
            if wrong := scope.problem(name, dump.level):
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
