"""`diagnose` on real trainings of a small GPT: the planted defect is named first, and what is no defect is called round-off."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from fault_cases import CASES, HARMLESS, Case, Harmless
from fault_dumps import directory_name, dump
from fault_model import Shape
from page_blocks import blocks, commands, run

from msprobe_engine.cli.main import main
from msprobe_engine.find.run import diagnose

SOME = (
    "wrong eps of a norm",
    "NaN in a fused softmax",
    "branch detached",
    "missing sum after a row-parallel product",
    "one rank's collective corrupted",
    "one parameter not updated",
)
"""Forward, backward, non-finite, structure, one and two ranks, first and second step; `benchmarks/faults.py` runs all."""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def golden(dumps: Path, shape: Shape) -> Path:
    path = dumps / directory_name(f"golden {shape.parallel} {shape.micro}")
    dump(path, shape, lambda _: None)
    return path


@pytest.mark.fast_cells("wrong-eps-of-a-norm")
@pytest.mark.parametrize("case", [case for case in CASES if case.name in SOME], ids=lambda case: directory_name(case.name))
def test_planted(case: Case, dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first suspect is the record that the defect is in or its direct producer, in the step and on a rank where it began."""
    path = dumps / directory_name(case.name)
    dump(path, case.shape, case.plant)
    code = main(["diagnose", str(path), str(golden(dumps, case.shape)), "-o", str(tmp_path)])
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    first = found["first_suspect"]
    assert code == 1
    assert any(re.fullmatch(pattern, first["record"]) for pattern in case.truth), first
    assert first["step"] == case.step
    assert not case.ranks or first["rank"] in case.ranks
    assert found["finding"] in case.finding
    assert first["source"]
    assert capsys.readouterr().out.startswith(found["headline"])
    page = (tmp_path / "diagnosis.html").read_text()
    assert first["record"] in page


@pytest.mark.parametrize("case", HARMLESS[:1], ids=lambda case: directory_name(case.name))
@pytest.mark.slow
def test_harmless(case: Harmless, dumps: Path) -> None:
    """A variation that is none is called no difference beyond round-off, and the numbers did differ."""
    path = dumps / directory_name(case.name)
    dump(path, case.shape, case.plant)
    found = diagnose(path, golden(dumps, case.golden))
    assert found.finding == "none", found.headline()
    assert any("largest difference" in line for line in found.evidence)


def test_page(dumps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of docs/guide/diagnose.md run on directories of these names."""
    case = next(case for case in CASES if case.name == SOME[0])
    for name, path in (("out", dumps / directory_name(case.name)), ("golden", golden(dumps, case.shape))):
        dump(path, case.shape, case.plant)
        (tmp_path / name).mkdir()
        (tmp_path / name / "dump").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    lines = [line for code in blocks("docs/guide/diagnose.md", "bash") for line in commands(code)]
    assert [main(line) for line in lines] == [1, 1, 0]
    *_, code = blocks("docs/guide/diagnose.md", "python")  # the script before it has a test of its own: test_calibration_page.py
    assert run(code, "docs/guide/diagnose.md", {})["found"].finding == "divergence"


@pytest.mark.parametrize("command", ["diagnose {} {} -o {}", "compare {} {} -o {} --workers 1"], ids=lambda text: text.partition(" ")[0])
def test_one_product_that_is_off_is_not_fewer_bits(command: str, dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device with fewer bits of mantissa (TF32) computes all products with them: one gradient that is off by as little, where all other
    products are equal to the last bit, is a finding."""
    right = golden(dumps, Shape())
    shutil.copytree(right, tmp_path / "run")
    (file,) = (tmp_path / "run/step0").glob("*/dump.json")
    document = json.loads(file.read_text())
    record = "Module.layers.0.attention.qkv.Linear.parameters_grad.0"
    gradient = document["data"][record]["weight"][0]
    gradient["Mean"] += 3e-4 * gradient["Norm"] / math.sqrt(math.prod(gradient["shape"]))
    file.write_text(json.dumps(document))
    code = main(command.format(tmp_path / "run", right, tmp_path / "out").split())
    assert (code, record in capsys.readouterr().out.split("\n")[0]) == (1, True)
