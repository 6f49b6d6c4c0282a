"""F2: the operator pre-check of a recorded training step: the device against the CPU in float64. There is no error where the device
computes rightly."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import torch

from msprobe_engine.accuracy.precheck.options import Options
from msprobe_engine.accuracy.precheck.run import check_dump
from msprobe_engine.accuracy.settings import PrecheckSettings
from msprobe_engine.workflow.doctor import Line, Verdict
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import attach_probe, dump_files

_GOAL = 60.0
"""Seconds."""


def run(device: Device) -> Iterator[Line]:
    """One line per type."""
    for dtype in (torch.float32, torch.bfloat16) if device.full else (torch.float32,):
        with tempfile.TemporaryDirectory() as folder, _register_backend(Path(folder)):
            job = Job("tiny", str(device.device), dtype)
            with attach_probe(job, "tensor", Path(folder) / "dump", level="L1") as step:
                step()
            file = dump_files(Path(folder) / "dump")[0]
            options = Options(devices=(str(device.device),), processes=4 if device.full else 1)
            begin = time.perf_counter()
            checked = check_dump(file, PrecheckSettings(), options, Path(folder) / "out")
            seconds = time.perf_counter() - begin
            tally = checked.tally
            total, wrong = (
                sum(tally.forward.values()),
                [result.name for result in tally.found if "error" in (result.forward, result.backward)],
            )
            broken = [result.name for result in (*tally.broken, *tally.unjudged)]
            why = "; ".join(f"{what}: {', '.join(names[:5])}" for what, names in (("errors", wrong), ("not checked", broken)) if names)
            verdict: Verdict = "WRONG" if wrong or broken or not tally.checked else "ok" if seconds <= _GOAL else "slow"
            figure = f"{tally.checked} of {total} calls checked, {len(wrong)} errors, {seconds:.0f} s"
            yield Line(f"pre-check, {str(dtype).removeprefix('torch.')}", verdict, figure, f"0 errors, {_GOAL:.0f} s", why)


# What an installed package tells Python and a source tree does not: where the backend of torch is.
_POINTS = """\
[msprobe.backends]
torch = msprobe_integrations.torch.backend:TorchBackend
"""


@contextmanager
def _register_backend(folder: Path) -> Iterator[None]:
    """Inside, and in processes that get the path of this one, a folder on the path says it."""
    if any(point.name == "torch" for point in entry_points(group="msprobe.backends")):
        yield
        return
    place = folder / "msprobe_source_tree-0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: msprobe-source-tree\nVersion: 0\n")
    (place / "entry_points.txt").write_text(_POINTS)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
