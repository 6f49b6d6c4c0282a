"""Every check finds a defect that is planted in what it watches, and none where none is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import planted_defects
import pytest

from msprobe_integrations.doctor.effects import waits

PROGRAM = Path(planted_defects.__file__)


@lru_cache(None)
def said(group: str) -> dict[str, list[dict[str, Any]]]:
    """Lines of the checks and cases of a group, the first part of a module's name."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    cases = [*planted_defects.RIGHT, *(name for name, case in planted_defects.CASES.items() if case.module.startswith(group))]
    names = [name for name in cases if name in planted_defects.CASES or name.startswith(group)]
    command = [sys.executable, "-W", "ignore", str(PROGRAM), *names]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {name: lines for line in ran.stdout.splitlines() for name, lines in json.loads(line).items()}


@pytest.mark.parametrize("case", planted_defects.CASES)
def test_a_planted_defect_is_found(case: str) -> None:
    """At least one line is WRONG and names it."""
    module, _, found = planted_defects.CASES[case]
    lines = said(module.split(".")[0])[case]
    assert any(found in f"{line['name']} {line.get('why')}" for line in lines if line["verdict"] == "WRONG"), lines


@pytest.mark.parametrize("module", planted_defects.RIGHT)
def test_nothing_is_found_where_nothing_is_wrong(module: str) -> None:
    """All lines are ok, or skipped with a reason."""
    lines = said(module.split(".")[0])[module]
    assert any(line["verdict"] == "ok" for line in lines)
    assert all(line["verdict"] == "ok" or (line["verdict"] == "skipped" and line["why"]) for line in lines), lines


def test_waits_of_this_thread_are_counted_by_the_place_in_the_probe() -> None:
    """Torch's warnings of operations that wait count where this thread got them; other warnings and other threads do not."""
    modes: list[str] = []
    device: Any = SimpleNamespace(module=SimpleNamespace(set_sync_debug_mode=modes.append))
    text = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:150.)"
    with waits._counting(device) as places:
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)
        warnings.warn(text, stacklevel=1)
        other = threading.Thread(target=lambda: warnings.warn(text, stacklevel=1))
        other.start()
        other.join()
    assert places == ["the training"]
    assert modes == ["warn", "default"]
