"""A parameter that one side does not train: the earliest step in which the runs differ comes first and the parameter is named, whether its
calls, a flag or only the monitor tells; and nothing that was dumped is advised to be dumped."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm

from msprobe_engine.cli.main import main
from msprobe_engine.find.findings import DIVERGENCE, STRUCTURE
from msprobe_engine.find.run import diagnose

CASES = {
    # the calls of the update are there on one side only
    ("mix", "no-update"): (STRUCTURE, "Tensor.", "norm", "parameter norm.bias"),
    # modules alone show nothing of the update: the monitor leads
    ("L0", "no-update"): (DIVERGENCE, "param_updated/norm.bias", "norm", "norm is"),
    ("none", "no-update"): (DIVERGENCE, "param_updated/norm.bias", "norm", "norm is"),
    ("mix", "frozen"): (STRUCTURE, "Functional.linear.0.forward", "fc", "parameter fc.bias"),
    ("L0", "frozen"): (STRUCTURE, "Module.fc.Linear.forward.0", "fc", "parameters.bias requires"),
    ("none", "frozen"): (STRUCTURE, "grad_reduced/fc.bias", "fc", "in every step"),
}
"""Level of the dump and what is left out: the finding, the beginning of the record, its module, and words of the reason."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("left_out")
    done = warm.run(Path(__file__).with_name("left_out_run.py").read_text(), root, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("turned", [False, True], ids=["here", "there"])
@pytest.mark.parametrize(("level", "kind"), CASES)
def test_the_earliest_step_and_the_parameter(level: str, kind: str, turned: bool, runs: Path) -> None:
    """Step 0, on whichever side it is left out."""
    finding, record, module, words = CASES[level, kind]
    sides = [runs / f"{level}-{kind}", runs / f"{level}-good"]
    found = diagnose(*(sides[::-1] if turned else sides))
    first = found.first_suspect
    assert first is not None
    assert (found.finding, first.step, first.module) == (finding, 0, module), found.text()
    assert first.record.startswith(record), found.text()
    assert words in first.why, first.why


@pytest.mark.parametrize(("level", "kind"), [case for case in CASES if case[0] != "none"])
def test_no_dump_of_what_was_dumped(level: str, kind: str, runs: Path) -> None:
    """Step 0 was dumped."""
    text = diagnose(runs / f"{level}-{kind}", runs / f"{level}-good").text()
    assert "dump.step=[0]" not in text
    assert "a dump of step 0 shows" not in text
    assert "next to no calls" not in text


def test_a_dump_of_a_step_that_was_not_dumped(runs: Path) -> None:
    """Without one the advice stays."""
    assert "dump.step=[0]" in diagnose(runs / "none-no-update", runs / "none-good").text()


def test_monitored_runs_of_other_tensors(runs: Path, tmp_path: Path) -> None:
    """Each run has a parameter of its own: these may be one under two names, and are said as what was not compared."""
    for side, name in (("target", "z.bias"), ("golden", "fc.bias")):
        for file in (runs / "none-good" / "monitor").rglob("*.csv"):
            place = tmp_path / side / file.relative_to(runs / "none-good")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(file.read_text().replace("fc.bias", name))
    assert main(["diagnose", str(tmp_path / "target"), str(tmp_path / "golden"), "-o", str(tmp_path / "out")]) == 3


def test_commands_name_the_same(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """compare and graph of the dumps: the same first line as diagnose."""
    target, golden = str(runs / "mix-frozen/dump"), str(runs / "mix-good/dump")
    said = []
    for command in (
        ["diagnose", target, golden, "-o", str(tmp_path / "out")],
        ["compare", "-tp", target, "-gp", golden, "-o", str(tmp_path / "out"), "--workers", "1"],
        ["graph", target, golden, "-o", str(tmp_path / "out"), "--format", "html", "--workers", "1"],
    ):
        assert main(command) == 1
        said.append(capsys.readouterr().out.split("\n")[0])
    assert len(set(said)) == 1, said
    assert "the numbers that both have agree" in said[0]
