"""Every file of a run has at most mode 0640 and every directory 0750, less what the umask of the user takes away."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
from all_sinks import settings

from msprobe_engine.core.settings.schema import DumpSettings, ProbeSettings

pytestmark = pytest.mark.framework
STEPS = 3
TEXTFILE = 0o644
"""Of a text file for the node exporter, which is another user."""
RUNS = ("probe", "statistics", "tensor", "packed", "free_benchmark")


def work(run: str, root: Path, umask: int) -> None:
    os.umask(umask)
    if run == "probe":
        setup: ProbeSettings = settings(root)
        pr.train_with_probe(replace(setup, dump=DumpSettings(level="mix"), incident=replace(setup.incident, capture_level="mix")), STEPS)
    elif run == "packed":
        config = pr.write_config(root, "L0", task="tensor", dump_path=str(root / "dump"))
        config.write_text(json.dumps({**json.loads(config.read_text()), "tensor": {"tensor_format": "packed"}}))
        pr.train_with_debugger(config, STEPS)
    else:
        pr.train_with_debugger(pr.write_config(root, "L1", task=run, dump_path=str(root / "dump")), STEPS)


MASKS = (0o000, 0o022, 0o027, 0o077)


def cells() -> Iterator[Any]:
    """Every run with every mask; in the fast tier one mask each, which are all masks."""
    for number, run in enumerate(RUNS):
        for mask in MASKS:
            yield pytest.param(run, mask, marks=[] if mask == MASKS[number % len(MASKS)] else [pytest.mark.slow], id=f"{run}-{mask:03o}")


@pytest.mark.parametrize(("run", "umask"), cells())
def test_modes_of_a_run(tmp_path: Path, run: str, umask: int) -> None:
    root = tmp_path / "out"
    root.mkdir()
    pr.run(work, run, root, umask, directory=tmp_path)
    found = [path for path in root.rglob("*") if path.name != "config.json"]
    assert any(path.is_file() for path in found)
    for path in found:
        allowed = 0o750 if path.is_dir() else TEXTFILE if path.suffix == ".prom" else 0o640
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & ~(allowed & ~umask), f"{path}: {mode:o} with umask {umask:03o}"
        assert mode & 0o600 == 0o600, f"{path}: {mode:o}"
