"""`diagnose` on a network of another kind than the one it was built with: convolutions, batch norm, a GRU, experts, SGD."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fault_dumps import directory_name
from fault_mixture import DEFECTS, Defect, dump

from msprobe_engine.find.run import diagnose

SOME = ("running statistics of another momentum", "sharper gate", "recurrent weights negated", "one gradient becomes NaN")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "golden"
    dump(path, lambda _: None)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("defect", [d for d in DEFECTS if d.name in SOME], ids=lambda d: directory_name(d.name))
def test_planted(defect: Defect, golden: Path, tmp_path: Path) -> None:
    """The record that the defect is in comes first, in the step where it shows; `benchmarks/faults.py` plants all."""
    dump(tmp_path / "target", defect.plant)
    found = diagnose(tmp_path / "target", golden)
    first = found.first_suspect
    assert first is not None
    assert re.fullmatch(defect.truth, first.record), found.headline()
    assert (first.step, found.finding) == (defect.step, defect.finding)
