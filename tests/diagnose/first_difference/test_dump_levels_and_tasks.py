"""A sample of the fault set where it is dumped otherwise: modules alone, calls alone, checksums, saved tensors; compiled code; and how
answers of the existing tool are judged. `benchmarks/faults.py` runs all."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import Any

import fault_defects as plant
import pytest
from fault_cases import CASES, SINGLE
from fault_dumps import dump
from fault_existing import judge
from fault_levels import MODULES
from fault_mixture import DEFECTS
from fault_settings import SETTINGS, Truth, cases, dumps, truth

from msprobe_engine.find.run import diagnose
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.api import compare_dumps
from msprobe_engine.report.table.summary import Comparison

SAMPLE = (
    ("L0", "scores not scaled"),
    ("L0", "heads merged without transposing"),
    ("L0", "one parameter not updated"),
    ("L0", "gradient scaled by 1.3"),
    ("L1", "overflow in a float16 gradient"),
    ("md5", "other gelu formula"),
    ("digest", "query and key weights swapped"),
    ("tensor", "query and key weights swapped"),
)
"""Setting and defect: forward and backward, made in a module's own code, first and second step, exchanged rows of a weight."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("levels")


@pytest.mark.fast_cells("L0-one parameter not updated")
@pytest.mark.parametrize(("name", "defect"), SAMPLE)
def test_named(name: str, defect: str, root: Path) -> None:
    """The culprit comes first: at level L0 the innermost module that holds the defect."""
    setting, case = SETTINGS[name], next(case for case in CASES if case.name == defect)
    found, true = diagnose(*dumps(root, setting, case)), truth(setting, case)
    first = found.first_suspect
    assert first is not None
    assert any(re.fullmatch(pattern, first.record) for pattern in true.records), found.headline()
    assert first.step == true.step


@pytest.mark.fast_cells("tf32")
@pytest.mark.parametrize(
    "noise", [plant.tf32_noise, plant.two_halves, lambda t: plant.compiled(t, "aot_eager")], ids=["tf32", "halves", "compiled"]
)
def test_harmless(noise: Any, root: Path, request: pytest.FixtureRequest) -> None:
    """Rounding of products and compiled code are no difference, whichever of the two is called golden."""
    golden, path = root / "golden", root / request.node.callspec.id
    dump(golden, SINGLE, lambda _: None)
    dump(path, SINGLE, noise)
    for pair in ((path, golden), (golden, path)):
        found = diagnose(*pair)
        assert found.finding in ("none", "structure"), found.headline()


def test_a_wrong_factor_that_is_said_to_show_is_found(root: Path) -> None:
    """Where nothing is found, a sentence says which factor on a result would have been: half as much again is named."""
    golden, healthy, wrong = (root / name for name in ("golden L0", "halves L0", "halves and a factor L0"))
    dump(golden, SINGLE, lambda _: None, "L0")
    dump(healthy, SINGLE, plant.two_halves, "L0")
    found = diagnose(healthy, golden)
    assert found.finding == "none", found.headline()
    said = re.search(r"all show one of ([\d.]+);", found.text())
    assert said, found.text()
    factor = 1 + 1.5 * (float(said[1]) - 1)

    def off(t: Any) -> None:
        plant.two_halves(t)
        t.model.layers[1].mlp.up.register_forward_hook(lambda _module, _given, out: out * factor)

    dump(wrong, SINGLE, off, "L0")
    first = diagnose(wrong, golden).first_suspect
    assert first is not None
    assert first.record == "Module.layers.1.mlp.up.Linear.forward.0"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # dumps and compares some sixty trainings
@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_first_error_of_the_tables_is_the_first_suspect(name: str, root: Path, tmp_path: Path) -> None:
    """Of every planted case: the tables are projections of the finding, so they name no other place before it; where nothing is found no
    row is an error."""
    for number, case in enumerate(cases(SETTINGS[name])):
        found = compare_dumps(*dumps(root, SETTINGS[name], case), tmp_path / str(number), CompareOptions(workers=1))
        errors = first_errors(found)
        assert found.diagnosis is not None
        first = found.diagnosis.first_suspect
        if first is None:
            assert not errors, case.name
        else:
            assert errors.get((first.step, first.rank), "").startswith(f"{first.record}."), (case.name, first, errors)


def first_errors(found: Comparison) -> dict[tuple[int, int], str]:
    """(step, rank) -> name of the first row of its table that is an error."""
    errors = {}
    for file in map(Path, found.files):
        step, rank = (re.search(word, text) for word, text in ((r"step(\d+)", file.parent.name), (r"rank(\d+)", file.name)))
        with open(file, newline="") as stream:
            rows = (row for row in csv.DictReader(stream) if row["Result"] == "error")
            for row in itertools.islice(rows, 1):
                name = row["NPU Name"] if row["NPU Name"] != "N/A" else row["Bench Name"]
                errors[int(step[1]) if step else 0, int(rank[1]) if rank else 0] = name
    return errors


def test_every_defect_has_a_truth_at_every_level() -> None:
    """No defect of the set is left out where modules alone are recorded, and none is there that does not exist."""
    assert set(MODULES) == {case.name for case in (*CASES, *DEFECTS)}
    assert len({case.name for case in cases(SETTINGS["mix"])}) == len(cases(SETTINGS["mix"]))


def test_answers_of_the_existing_tool() -> None:
    """The first marked row, the first marked worse and what the searches name count each for itself; NaN only where it was made."""
    true = Truth((r"Torch\.softmax\.1\.forward",), ("nonfinite",), 0)
    answer = {
        "marked": [[4, 0, "Torch.add.0.forward", 1], [7, 0, "Torch.softmax.1.forward", 2]],
        "rows": 20,
        "analysed": [],
        "nonfinite": ["Torch.softmax.1.forward"],
        "problem": "",
    }
    found = judge(true, answer)
    assert (found.first, found.worst, found.analysed, found.nonfinite, found.anywhere) == (False, True, False, True, True)
    assert (found.marked, found.rows, found.best, found.named) == (2, 20, True, "Torch.softmax.1.forward")
    nothing = judge(Truth(true.records, ("divergence",), 0), answer | {"marked": []})
    assert not nothing.best
    assert nothing.named == "-"
