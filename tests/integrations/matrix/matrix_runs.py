"""What runs in a rank: one layout's training under each part of the probe; gives plain numbers."""

from __future__ import annotations

import atexit
import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import matrix_layouts as ml
import torch
import torch.distributed as dist
from matrix_truth import Part
from restored import snapshot

from msprobe_engine import rows
from msprobe_engine.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, ReplicaCheckSettings, SinkSettings
from msprobe_integrations.torch.debugger import PrecisionDebugger
from msprobe_integrations.torch.probe import TorchProbe

MONITOR = MonitorSettings(
    activations=True,
    activation_gradients=True,
    gradient_phases=("reduced", "unscaled"),
    parameters=True,
    optimizer_states=True,
    collectives=True,
    replica_check=ReplicaCheckSettings(interval=1, gradients=True),
)
Samples = dict[tuple[str, str, str], list[Part]]
"""(family, name, phase or tag) to what this rank has of it, all micro batches."""


class Result(NamedTuple):
    """Of one rank."""

    same: dict[str, bool]
    """Part of the probe to: the training ended with the same bits as without."""
    left: list[str]
    """Names and hooks that were not put back, after all parts of the probe."""
    steps: list[Samples]
    """What the monitor saw."""
    alerts: list[str]
    """What the replica check said of a healthy training."""
    planted: list[tuple[int, str]]
    """Step and parameter that it said of one with a flipped bit."""
    dumps: dict[str, dict[str, Any]]
    """Level to the records of step 1."""
    gradients: list[dict[str, str]]
    """Rows of grad probe of step 1."""


class _Ears:
    name = "ears"

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.alerts: list[Any] = []

    def write(self, frame: Any, alerts: Any) -> None:
        self.frames.append(frame)
        self.alerts += alerts

    def flush(self) -> None: ...
    def close(self) -> None: ...


def _settings(place: str, monitor: MonitorSettings, **incident: Any) -> ProbeSettings:
    return ProbeSettings(
        output_dir=place,
        strict=True,
        log_level="silent",
        monitor=monitor,
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(enabled=bool(incident), **incident),
    )


def _probed(layout: ml.Layout, settings: ProbeSettings, flip: bool = False, nan: bool = False) -> tuple[ml.Training, _Ears]:
    """Train under a probe: the training and what was said."""
    training, ears = layout.build(), _Ears()
    probe = TorchProbe(settings, extra_sinks=[ears])
    probe.attach(training.model, training.optimizer)
    for number in range(ml.STEPS + (3 if nan else 0)):
        probe.begin_step(number)
        training.step(number, nan=nan and number == ml.NAN_STEP)
        if flip and number == 0 and dist.get_rank() == layout.ranks - 1:
            ml.local(dict(_named(training))[layout.copies[0]].data).view(-1)[0] += 1e-3
        probe.end_step()
        if dist.get_world_size() > 1:
            dist.barrier()
    probe.close()
    return training, ears


def _hooks(training: ml.Training) -> dict[str, int]:
    """How many hooks there are, by owner."""
    owners = {"optimizer": training.optimizer, **dict(training.model.named_modules()), **dict(training.model.named_parameters())}
    return {f"{name}.{key}": len(value) for name, owner in owners.items() for key, value in _attributes(owner) if "hooks" in key and value}


def _attributes(owner: Any) -> Any:
    names = ("_backward_hooks", "_post_accumulate_grad_hooks") if isinstance(owner, torch.Tensor) else vars(owner)
    return ((name, getattr(owner, name)) for name in names if isinstance(getattr(owner, name), dict))


def _named(training: ml.Training) -> Any:
    return ((ml.plain(name), p) for name, p in training.model.named_parameters())


def _samples(frame: Any) -> Samples:
    found: Samples = {}
    for sample in frame.samples:
        if sample.ref.row < 0:
            continue
        s = rows.read(frame.rows[sample.ref.row])
        detail = sample.phase or sample.extra.get("state") or sample.extra.get("tag") or ""
        if s.count and s.norm is not None:  # a rank may hold nothing of a parameter
            found.setdefault((sample.family, sample.name, detail), []).append(Part(s.count, s.norm, s.min, s.max, s.mean))
    return found


def _debugged(layout: ml.Layout, document: dict[str, Any]) -> ml.Training:
    training = layout.build()
    debugger = PrecisionDebugger(document)
    watches = document["task"] == "grad_probe"
    if watches:
        debugger.monitor(training.model, training.optimizer)
    for number in range(ml.STEPS):
        if not watches:
            debugger.start(training.model)
        training.step(number)
        if not watches:
            debugger.stop()
            debugger.step()
    if watches:
        debugger.stop()
    debugger._at_exit()
    atexit.unregister(debugger._at_exit)
    PrecisionDebugger._instance = None
    return training


def everything(layout: ml.Layout, place: str) -> Result:
    """All parts of the probe, one training each."""
    rank = dist.get_rank()
    alone = layout.build()
    for number in range(ml.STEPS):
        alone.step(number)
    truth, hooks = list(ml.bits(alone)), _hooks(alone)
    before = snapshot()
    same: dict[str, bool] = {}
    left: list[str] = []
    dumps = {}

    def ended(part: str, training: ml.Training) -> None:
        same[part] = list(ml.bits(training)) == truth
        left.extend(f"{part}: {name}" for name, number in _hooks(training).items() if hooks.get(name) != number)

    training, ears = _probed(layout, _settings(f"{place}/monitor", MONITOR))
    ended("monitor", training)
    for level in ("L0", "L1", "mix"):
        document = {"task": "statistics", "dump_path": f"{place}/{level}", "rank": [], "step": [1], "level": level, "statistics": {}}
        ended(level, _debugged(layout, document))
        dumps[level] = _records(Path(place) / level, rank)
    document = {"task": "grad_probe", "dump_path": f"{place}/grad", "rank": [], "step": [], "grad_probe": {"grad_level": "L1"}}
    ended("grad probe", _debugged(layout, document))
    (table,) = (Path(place) / "grad").glob(f"rank{rank}/grad_summary_1.csv")
    gradients = list(csv.DictReader(table.read_text("utf-8-sig").splitlines()))

    planted: list[tuple[int, str]] = []
    if layout.copies:
        check = MonitorSettings(gradients=False, replica_check=ReplicaCheckSettings(interval=1))
        planted = [(a.step, a.name) for a in _probed(layout, _settings(f"{place}/flip", check), flip=True)[1].alerts]
    _probed(layout, _settings(f"{place}/incident", MonitorSettings(), level="mix", ring_steps=3), nan=True)
    alerts = [f"{a.rule} {a.name}" for a in ears.alerts]
    return Result(same, left + before.changed(), [_samples(frame) for frame in ears.frames], alerts, planted, dumps, gradients)


def _records(place: Path, rank: int) -> dict[str, Any]:
    (file,) = (f for f in place.glob("step1/*/dump.json") if f.parent.name in (f"rank{rank}", f"rank_{rank}") or dist.get_world_size() == 1)
    return dict(json.loads(file.read_text())["data"])
