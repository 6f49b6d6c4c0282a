"""Prints the folders of tests whose slow tests a change may break: ``python tests/frameworks/touched.py BASE``.

A changed test folder is its own; a changed package of the product has the test folder of its name, or those of `PLACES`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath

TESTS = Path(__file__).parents[1]
PLACES = {
    "msprobe_engine/formats/checkpoint": ("checkpoint",),
    "msprobe_engine/formats/dump": ("dump", "compare", "diagnose"),
    "msprobe_engine/formats/grad_probe": ("grad_probe",),
    "msprobe_engine/formats/legacy": ("parse",),
    "msprobe_engine/formats/monitor": ("monitor_analyze", "monitor_files", "trends"),
    "msprobe_engine/formats/pack": ("config_check",),
    "msprobe_engine/formats/tensors": ("dump", "checkpoint", "readers"),
    "msprobe_engine/config": ("config_check",),
    "msprobe_engine/measure": ("compare", "diagnose", "checkpoint"),
    "msprobe_engine/align": ("compare", "diagnose", "graph", "cross_framework"),
    "msprobe_engine/align/parameters": ("checkpoint",),
    "msprobe_engine/find": ("diagnose", "compare", "graph"),
    "msprobe_engine/find/checkpoint": ("checkpoint",),
    "msprobe_engine/find/config": ("config_check",),
    "msprobe_engine/find/monitor": ("diagnose", "monitor_analyze"),
    "msprobe_engine/probe": ("engine", "probe", "monitor_torch"),
    "msprobe_engine/probe/rules": ("rules", "monitor_rules", "monitor_faults"),
    "msprobe_engine/probe/sinks": ("sinks", "monitor_files"),
    "msprobe_engine/probe/incident": ("incident",),
    "msprobe_engine/report/checkpoint": ("checkpoint",),
    "msprobe_engine/report/code_mapping": ("code_mapping",),
    "msprobe_engine/report/config": ("config_check",),
    "msprobe_engine/report/diagnosis": ("diagnose",),
    "msprobe_engine/report/graph": ("graph", "web"),
    "msprobe_engine/report/table": ("compare",),
    "msprobe_engine/report/table_files": ("compare",),
    "msprobe_engine/report/trends": ("trends",),
    "msprobe_engine/report/web": ("web",),
    "msprobe_engine/workflow": ("doctor",),
    "msprobe_integrations/autoload": ("launch",),
    "msprobe_integrations/common": ("probe", "torch", "megatron"),
    "msprobe_integrations/megatron": ("megatron", "monitor_faults"),
    "msprobe_integrations/mindspeed": ("integrations",),
    "msprobe_integrations/transformers": ("integrations",),
    "msprobe_integrations/accelerate": ("integrations",),
    "msprobe_integrations/lightning": ("integrations",),
    "msprobe_integrations/torchtitan": ("integrations",),
}
"""Package of the product -> folders of tests, where it has not the name of its folder; the deepest package that is named counts."""


def folders(changed: list[str]) -> list[str]:
    """Folders of tests for paths of changed files."""
    found: set[str] = set()
    for path in map(PurePosixPath, changed):
        if len(path.parts) < 2 or path.parts[0] not in ("tests", "msprobe_engine", "msprobe_integrations"):
            continue
        named = next((PLACES[str(place)] for place in path.parents if str(place) in PLACES), (path.parts[1].removesuffix(".py"),))
        found |= {name for name in named if (TESTS / name).is_dir()}
    return sorted(f"tests/{name}" for name in found if any((TESTS / name).rglob("test_*.py")) and name != "mindspore")


if __name__ == "__main__":
    if not sys.argv[1:] or not sys.argv[1]:
        sys.exit("touched.py needs the commit that the change began with: make test-touched BASE=COMMIT")
    said = subprocess.run(["git", "diff", "--name-only", sys.argv[1], "HEAD"], capture_output=True, text=True, check=True)
    print("\n".join(folders(said.stdout.split())))
