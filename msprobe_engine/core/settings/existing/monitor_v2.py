"""The configuration of `TrainerMonitorV2`: one JSON object with a section per monitor, as the existing tool's monitor_v2 has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core import log
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings import text
from msprobe_engine.core.settings.existing.config_json import convert_redact
from msprobe_engine.core.settings.existing.monitor_config import Old
from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.core.settings.tree import Report, join

OPS = ("min", "max", "mean", "norm", "nans")
"""Statistics of this format, in its default order."""
MONITORS = ("module", "weight_grad", "optimizer", "param", "cc")
_FRAMEWORKS = {"pytorch": "pytorch", "pt": "pytorch", "torch": "pytorch", "mindspore": "mindspore", "ms": "mindspore"}
_TOP = (
    *("framework", "output_dir", "rank", "start_step", "stop_step", "step_interval", "collect_times", "step_count_per_record"),
    *("patch_optimizer_step", "format", "async_write", "monitors", "redact"),
)
_COMMON = ("enabled", "ops", "eps")
_KEYS = {
    "module": ("targets",),
    "weight_grad": ("monitor_mbs_grad", "micro_batch_number", "grad_acc_steps"),
    "optimizer": ("mv_distribution",),
    "param": ("param_distribution",),
    "cc": ("cc_distribution", "cc_codeline", "cc_log_only", "cc_pre_hook", "module_ranks"),
}


@dataclass(frozen=True, kw_only=True)
class V2Settings:
    """What a file asks for.

    Attributes:
        output_dir: root of the files.
        start_step: first step; file blocks are counted from it.
        patch_optimizer_step: steps end with the optimizer's update; None: when an optimizer is given.
        micro_batches: micro batches per step, 0: as `start` says.
        ops: monitor to its statistics; those that are on.
        cc_ranks: ranks whose collectives are written, empty is all.
    """

    probe: ProbeSettings
    output_dir: str
    start_step: int
    steps_per_file: int
    patch_optimizer_step: bool | None
    micro_batches: int
    ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cc_ranks: tuple[int, ...] = ()


def read_v2(path: str | Path, framework: str | None = None) -> V2Settings:
    """Read and check the file.

    Args:
        framework: ``pytorch`` (also ``pt``, ``torch``); None: as the file says.

    Raises:
        SettingsError: all mistakes, one line each; also for MindSpore, which this class does not watch.
    """
    node = text.read_file(Path(path))
    report = Report(str(path))
    if not isinstance(node, Mapping):
        raise SettingsError(f"{path}: holds no mapping; allowed: an object with the keys {', '.join(_TOP)}")
    for name in node:
        if name not in _TOP:
            report.unknown("", name, _TOP)
    old = Old(node, "", report)
    named = str(framework or node.get("framework", "pytorch")).strip().lower()
    if named not in _FRAMEWORKS:
        report.wrong("framework", framework or node.get("framework"), "one of " + ", ".join(_FRAMEWORKS))
    elif _FRAMEWORKS[named] != "pytorch":
        report.error("framework", "'mindspore' is not watched by TrainerMonitorV2 here; use 'pytorch'")
    if old.get("format", "str", "csv") != "csv":
        report.wrong("format", node["format"], "'csv'")
    if old.flag("async_write"):
        report.warning("async_write", "has no effect: writing never holds the training here")
    start, interval = old.get("start_step", "int", 0, minimum=0), old.get("step_interval", "int", 1, minimum=1)
    monitors = _monitors(node, report)
    sections = {name: Old(section, f"monitors.{name}", report) for name, section in monitors.items()}
    settings = V2Settings(
        probe=_probe(sections, old, start, interval),
        output_dir=old.get("output_dir", "str", "./"),
        start_step=start,
        steps_per_file=old.get("step_count_per_record", "int", 1, minimum=1, maximum=1_000_000),
        patch_optimizer_step=old.get("patch_optimizer_step", "bool", None),
        micro_batches=_micro_batches(sections),
        ops={name: tuple(section.get("ops", "str", OPS, many=True, choices=OPS)) or OPS for name, section in sections.items()},
        cc_ranks=_cc(sections).get("module_ranks", "int", (), many=True, ranges=True, minimum=0, maximum=1_000_000),
    )
    report.raise_errors()
    for line in report.warnings:
        log.warn_once(f"settings: {line}", line)
    return settings


def _monitors(node: Mapping[str, Any], report: Report) -> dict[str, Mapping[str, Any]]:
    """The sections that are on; ``module`` is unless it says otherwise."""
    monitors = node.get("monitors", {})
    if not isinstance(monitors, Mapping):
        report.wrong("monitors", monitors, "an object with the keys " + ", ".join(MONITORS))
        return {}
    out: dict[str, Mapping[str, Any]] = {}
    for name, section in monitors.items():
        path = join("monitors", name)
        if name not in MONITORS:
            report.unknown("monitors", name, MONITORS)
        elif not isinstance(section, Mapping):
            report.wrong(path, section, "an object")
        else:
            for key in section:
                if key not in (*_COMMON, *_KEYS[name]):
                    report.unknown(path, key, (*_COMMON, *_KEYS[name]))
            inner = Old(section, path, report)
            inner.get("eps", "float", 0.0, minimum=0)  # none of the statistics of this format needs it
            if inner.get("enabled", "bool", name == "module"):
                out[name] = section
    return out


def _cc(sections: Mapping[str, Old]) -> Old:
    """Keys of collectives stand in the section or in ``cc_distribution`` inside it."""
    section = sections.get("cc")
    if section is None:
        return Old({}, "", Report(""))
    inner = section.node.get("cc_distribution")
    return Old({**section.node, **inner} if isinstance(inner, Mapping) else section.node, section.path, section.report)


def _micro_batches(sections: Mapping[str, Old]) -> int:
    section = sections.get("weight_grad")
    if section is None:
        return 0
    return int(section.get("micro_batch_number", "int", 0, minimum=0) or section.get("grad_acc_steps", "int", 0, minimum=0))


def _probe(sections: Mapping[str, Old], old: Old, start: int, interval: int) -> ProbeSettings:
    def on(name: str, switch: str, default: bool) -> bool:
        return name in sections and bool(sections[name].get(switch, "bool", default))

    gradients, cc = "weight_grad" in sections, _cc(sections)
    words = tuple(sections["module"].get("targets", "str", (), many=True)) if "module" in sections else ()
    times = old.get("collect_times", "int", 100_000_000, minimum=1)
    stop = old.get("stop_step", "int", None, minimum=start)
    if stop is not None:
        times = min(times, max(0, -(-(stop - start) // interval)))
    node = dict(old.node)
    if isinstance(node.get("rank"), int):
        node["rank"] = [node["rank"]]
    monitor = MonitorSettings(
        activations="module" in sections,
        activation_gradients="module" in sections,
        activation_targets=tuple(f"*{word}*" for word in words),  # targets are parts of names here
        gradients=gradients,
        unreduced_gradients=gradients,
        micro_batch_gradients=on("weight_grad", "monitor_mbs_grad", False),
        optimizer_states=on("optimizer", "mv_distribution", True),
        parameters=on("param", "param_distribution", True),
        collectives="cc" in sections,
        collective_inputs="cc" in sections and cc.flag("cc_pre_hook"),
        collective_sites=tuple(cc.get("cc_codeline", "str", (), many=True)),
        collective_stacks="cc" in sections and cc.flag("cc_log_only"),
        start_step=start,
        interval=interval,
        collect_times=times,
        rank=Old(node, "", old.report).get("rank", "int", (), many=True, ranges=True, minimum=0, maximum=1_000_000),
        ops=OPS,
    )
    return ProbeSettings(
        output_dir=old.get("output_dir", "str", "./"),
        redact=convert_redact(node, old.report),
        monitor=monitor,
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(enabled=False),
    )
