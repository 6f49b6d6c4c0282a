"""Every check finds a defect that is planted in what it watches, and none where none is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import planted_defects
import pytest

from msprobe_integrations.doctor import environment, kernels
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.effects import waits

PROGRAM = Path(planted_defects.__file__)


FAST = ("numbers.special_tensors", "effects.waits", "environment")


def modules(names: Iterable[str]) -> list[Any]:
    """One parameter per check; those that Triton's interpreter takes long for belong to the full tier."""
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in dict.fromkeys(names)]


@pytest.mark.parametrize("module", modules(planted_defects.RIGHT))
@pytest.mark.fast_cells("effects.waits", "numbers.special_tensors")
def test_planted_defects_are_found_and_nothing_else(module: str) -> None:
    """With a defect at least one line is WRONG and names it. Without, all lines are ok, or skipped with a reason; the machine that runs the
    tests may have too little of something."""
    pytest.importorskip("triton")
    cases = {name: case for name, case in planted_defects.CASES.items() if case.module == module}
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(PROGRAM), module, *cases]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = {name: lines for line in ran.stdout.splitlines() for name, lines in json.loads(line).items()}
    assert cases
    for name, case in cases.items():
        lines = said[name]
        assert any(case.found in f"{line['name']} {line.get('why')}" for line in lines if line["verdict"] == "WRONG"), (name, lines)
    others = ("skipped", "slow") if module == "environment" else ("skipped",)
    assert any(line["verdict"] == "ok" for line in said[module])
    assert all(line["verdict"] == "ok" or (line["verdict"] in others and line["why"]) for line in said[module]), said[module]


def test_waits_of_this_thread_are_counted_by_the_place_in_the_probe() -> None:
    """Torch's warnings of operations that wait count where this thread got them; other warnings and other threads do not."""
    modes: list[str] = []
    device: Any = SimpleNamespace(module=SimpleNamespace(set_sync_debug_mode=modes.append))
    text = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:150.)"
    with waits._record_waits(device) as places:
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)
        warnings.warn(text, stacklevel=1)
        other = threading.Thread(target=lambda: warnings.warn(text, stacklevel=1))
        other.start()
        other.join()
    assert places == ["the training"]
    assert modes == ["warn", "default"]


def test_what_the_machine_has_too_little_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few open files, a small or missing /dev/shm and no C kernel are no ok, with what to do."""
    monkeypatch.setattr(environment.host_kernel, "available", False)
    monkeypatch.setattr(environment.resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(environment.os, "statvfs", lambda _: SimpleNamespace(f_bavail=1 << 10, f_frsize=1 << 10))
    found = {line.name: line for line in environment.run(Device())}
    slow = {name: line.why for name, line in found.items() if line.verdict == "slow"}
    assert set(slow) == {"C kernel of the host", "open files of a process", "free in /dev/shm"}
    assert "ulimit -n" in slow["open files of a process"]


def test_rows_by_operators_can_be_made_everywhere() -> None:
    """No machine lacks what they need, so these lines are never skipped."""
    assert kernels.why_not(Device(), "operators") == ""
