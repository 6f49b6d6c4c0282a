"""Metrics of saved tensors as the existing tool has them, against tables that it wrote (`tests/fixtures/make_existing_tensors.py`)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_engine.measure.options import NEW, OLD
from msprobe_engine.measure.tensors.mode import Pair, TensorMode

FIXTURES = Path(__file__).parents[2] / "fixtures"
SPEC = importlib.util.spec_from_file_location("make_existing_tensors", FIXTURES / "make_existing_tensors.py")
assert SPEC is not None
assert SPEC.loader is not None
MAKER = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MAKER)


def close(ours: object, theirs: str) -> bool:
    """Equal text, or the number that the cell shows: a sheet keeps 16 digits of it."""
    theirs = theirs.strip()
    if isinstance(ours, str):
        return ours == theirs
    try:
        return ours == pytest.approx(float(theirs), rel=1e-14, abs=0)
    except ValueError:
        return False


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for side, which in (("target", 0), ("golden", 1)):
        folder = tmp_path_factory.mktemp(side)
        (folder / "dump_tensor_data").mkdir()
        for number, pair in enumerate(MAKER.pairs().values()):
            if pair[which] is not None:
                torch.save(pair[which], folder / "dump_tensor_data" / f"{number}.pt")
        found[side] = folder
    return found


@pytest.mark.parametrize("rule", [OLD, NEW])
def test_every_cell_is_the_existing_tools(rule: str, sides: dict[str, Path]) -> None:
    """Odd pairs: all dtypes, zeros, NaN, Inf, single elements, views, missing files. The messages of 26.2.0 are not in its table."""
    expected = json.loads((FIXTURES / "compare" / f"odd_tensors_{rule}.json").read_text())
    mode = TensorMode(TensorFiles(sides["target"]), TensorFiles(sides["golden"]), rule)
    wrong = {}
    for number, name in enumerate(MAKER.pairs()):
        if name not in expected:
            continue
        found = mode.measure(Pair(f"{number}.pt", f"{number}.pt"))
        theirs = expected[name]
        if not all(map(close, found.cells, theirs[:6])):
            wrong[name] = found.cells, theirs[:6]
        if rule == OLD and not name.endswith("file missing"):
            reason = theirs[7].split("\nmaximum absolute error")[0]  # of the colours
            if found.message.strip() != reason.strip():
                wrong[name, "message"] = found.message, reason
    assert not wrong
    assert len(expected) >= 45
