"""Rules of the keys around a dump: replay of inputs (``load``), a choice of records (``bench_path``, overflow_check), level L2."""

from __future__ import annotations

import os
from collections import Counter

from msprobe_engine.core import names
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.existing import online
from msprobe_engine.core.settings.schema import DumpSettings, FreeBenchmarkSettings, LoadSettings
from msprobe_engine.core.settings.tree import Report, format_value, join

_EXAMPLE = "Module.layers.0.mlp.MLP.forward.0"


def check(dump: DumpSettings, section: str, report: Report) -> None:
    """Report what of these keys cannot work."""
    if dump.load is not None:
        _load(dump.load, join(section, "load"), report)
    if dump.bench_path is not None:
        _bench(dump, section, report)
    if dump.online is not None:
        online.check(dump, section, report)
    if dump.task == "overflow_check":
        _overflow(dump, section, report)
    elif dump.task == "free_benchmark":
        _free_benchmark(dump, section, report)
    elif dump.level == "L2":
        _kernels(dump, section, report)


def _load(load: LoadSettings, path: str, report: Report) -> None:
    if not load.modules:
        report.error(join(path, "modules"), f"is empty; allowed: names of module calls as the dump has them, like '{_EXAMPLE}'")
    for i, name in enumerate(load.modules):
        parsed = names.parse(name)
        if not isinstance(parsed, names.ModuleName) or parsed.kind != "Module" or parsed.direction != names.FORWARD:
            report.error(
                join(path, f"modules[{i}]"), f"{format_value(name)} is no forward call of a module; allowed: names like '{_EXAMPLE}'"
            )
    for name, count in Counter(load.modules).items():
        if count > 1:
            report.error(join(path, "modules"), f"{format_value(name)} is there {count} times; name it once")
    _directory(load.path, join(path, "path"), report)


def _directory(value: str, path: str, report: Report) -> None:
    if not value:
        report.error(path, "is missing; give the dump_path of the run that saved the tensors")
    elif not os.path.isdir(value):
        report.error(path, f"{format_value(value)} is no directory; give the dump_path of an earlier run")


def _bench(dump: DumpSettings, section: str, report: Report) -> None:
    _directory(dump.bench_path or "", join(section, "bench_path"), report)
    if dump.task != "tensor":
        report.error(join(section, "bench_path"), f"needs task 'tensor', not '{dump.task}'")
    if dump.summary_mode == "statistics":
        report.error(
            join(section, "summary_mode"),
            "'statistics' has no checksum to compare; with bench_path use what that dump has: md5, xor or digest",
        )
    if dump.diff_nums == 0:
        report.error(join(section, "diff_nums"), "0 is not allowed; allowed: -1 (never stop) or an integer >= 1")


def _free_benchmark(dump: DumpSettings, section: str, report: Report) -> None:
    """Combinations that the existing tool refuses too."""
    free, path = dump.free_benchmark or FreeBenchmarkSettings(), join(section, "free_benchmark")
    if dump.level != "L1":
        report.error(join(section, "level"), f"task 'free_benchmark' looks at calls of APIs; allowed: 'L1', not {format_value(dump.level)}")
    if (free.pert_mode == "to_cpu") != (free.fuzz_device == "cpu"):
        report.error(
            join(path, "fuzz_device"),
            f"{format_value(free.fuzz_device)} with pert_mode {format_value(free.pert_mode)}; 'cpu' belongs to 'to_cpu' alone",
        )
    if free.handler_type != "fix":
        return
    if free.pert_mode not in ("improve_precision", "to_cpu"):
        report.error(join(path, "pert_mode"), f"{format_value(free.pert_mode)} cannot be a fix; allowed: 'improve_precision', 'to_cpu'")
    if free.fuzz_stage != "forward":
        report.error(join(path, "fuzz_stage"), f"{format_value(free.fuzz_stage)} with handler_type 'fix'; allowed: 'forward'")
    if free.if_preheat:
        report.error(join(path, "if_preheat"), "true with handler_type 'fix', which has no thresholds to learn; leave it out")


def _overflow(dump: DumpSettings, section: str, report: Report) -> None:
    if dump.level not in ("L0", "L1", "mix"):
        report.error(join(section, "level"), f"task 'overflow_check' looks at calls, not at level '{dump.level}'; allowed: L0, L1, mix")
    if dump.overflow_nums == 0:
        report.error(join(section, "overflow_nums"), "0 is not allowed; allowed: -1 (never stop) or an integer >= 1")
    if dump.summary_mode != "statistics":
        report.error(join(section, "summary_mode"), f"'{dump.summary_mode}' has no effect in task 'overflow_check'; leave it out")


def _kernels(dump: DumpSettings, section: str, report: Report) -> None:
    """What holds in every framework; the names that ``list`` takes differ (`kernel_api`, and kernels of a graph with MindSpore)."""
    if dump.task not in ("statistics", "tensor"):
        report.error(join(section, "task"), f"'{dump.task}' is not possible at level L2, which dumps device kernels; use task 'tensor'")
    if dump.scope:
        report.error(join(section, "scope"), "is not possible at level L2; name what is dumped in list")


def kernel_api(dump: DumpSettings) -> str:
    """The API call whose kernels PyTorch dumps at level L2.

    Raises:
        SettingsError: `dump` does not name exactly one, or has another task than ``tensor``.
    """
    if dump.task != "tensor":
        raise SettingsError(f"task '{dump.task}' is not possible at level L2, which dumps device kernels; use task 'tensor'")
    name = dump.list[0] if len(dump.list) == 1 else None
    if name is None or not isinstance(names.parse(name), names.ApiName):
        raise SettingsError(
            f"list: {format_value(list(dump.list))}: level L2 needs exactly one full API name, like 'Functional.linear.0.backward'"
        )
    return name
