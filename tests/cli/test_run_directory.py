"""Every command that takes a dump takes the output directory of a run, too, and gives the same answer of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.dump.find_dumps import holds_dump
from msprobe_engine.formats.dump.reader import open_dump

OF_RUNS = ("diagnose", "trends")
"""Commands that look at all that a run has left: the same code, and more words."""
TENSOR = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Min": 0.0}
COMMANDS = {
    "compare": ["compare", "{run}", "{golden}", "-o", "out"],
    "compare -tp": ["compare", "-tp", "{run}", "-gp", "{golden}", "-o", "out"],
    "compare, one of them its dump": ["compare", "{run}", "{golden}/dump", "-o", "out"],
    "compare -da": ["compare", "-da", "-tp", "{run}", "-gp", "{golden}", "-o", "out"],
    "compare --calibration": ["compare", "{run}", "{golden}", "--calibration", "{run}", "-o", "out"],
    "diagnose": ["diagnose", "{run}", "-o", "out"],
    "diagnose two": ["diagnose", "{run}", "{golden}", "-o", "out"],
    "nan_analyze": ["nan_analyze", "-i", "{run}", "-o", "out"],
    "graph": ["graph", "{run}", "{golden}", "-o", "out"],
    "graph_visualize": ["graph_visualize", "-tp", "{run}", "-gp", "{golden}", "-o", "out"],
    "estimate": ["estimate", "{run}"],
    "op_generate": ["op_generate", "--dump", "{run}", "--api", "Torch.log.0", "-o", "out"],
    "acc_check": ["acc_check", "{run}", "-o", "out"],
    "data2db": ["data2db", "--db", "out", "--data", "{run}"],
    "trends": ["trends", "{run}", "-o", "out"],
}


def write_step(step: Path, top: float) -> None:
    """A step with one rank and one call that turns 1.0 into `top`."""
    rank = step / "rank0"
    rank.mkdir(parents=True)
    first, second = ({**TENSOR, "Max": value, "Mean": value, "Norm": value} for value in (1.0, top))
    record = {"input_args": [first], "input_kwargs": {}, "output": [second]}
    head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (rank / "dump.json").write_text(json.dumps({**head, "data": {"Torch.log.0.forward": record}}))
    (rank / "stack.json").write_text("{}")
    (rank / "construct.json").write_text("{}")


def answer(
    words: list[str], run: str, golden: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    directory.mkdir()
    monkeypatch.chdir(directory)
    code = main([word.format(run=run, golden=golden) for word in words])
    said = capsys.readouterr()
    places = re.sub(r"/(run|golden)/dump\b", r"/\1", said.out + said.err)
    return f"{code}\n" + re.sub(r"\d[\d.:_-]*", "N", places)  # times


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "acc_check" else name for name in COMMANDS])
def test_the_directory_of_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / "run", tmp_path / "golden"]
    for run, top in zip(runs, (2.0, 1.0)):
        write_step(run / "dump" / "step0", top)
    words = COMMANDS[name]
    of_runs = answer(words, *map(str, runs), tmp_path / "1", monkeypatch, capsys)
    of_dumps = answer(
        [word.replace("}/dump", "}") for word in words], *(str(run / "dump") for run in runs), tmp_path / "2", monkeypatch, capsys
    )
    if words[0] in OF_RUNS:
        assert of_runs[0] == of_dumps[0]
    else:
        assert of_runs == of_dumps.replace(str(tmp_path / "2"), str(tmp_path / "1"))
    assert "no dump" not in of_runs


def test_a_dump_is_not_its_run(tmp_path: Path) -> None:
    """What else lies in a run directory is looked at where a run is meant, so the two are told apart."""
    write_step(tmp_path / "dump" / "step3", 1.0)
    assert [holds_dump(tmp_path / place) for place in (".", "dump", "dump/step3", "dump/step3/rank0", "dump/step3/rank0/dump.json")] == [
        False, True, True, True, True,
    ]  # fmt: skip
    assert open_dump(tmp_path).root == tmp_path / "dump"
    assert open_dump(tmp_path).steps == [3]


def test_a_directory_above_runs_names_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_step(tmp_path / name / "dump" / "step3", 1.0)
    with pytest.raises(DumpFormatError, match=re.escape(f"give one of them: {tmp_path}/a/dump, {tmp_path}/b/dump")):
        open_dump(tmp_path)


def test_launches_in_a_directory_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where each launch has a directory of its own, the one above them is none of them: what to choose is said, the last one first."""
    for name in ("20260101-100000-aaaa", "20260102-100000-bbbb"):
        rank = tmp_path / name / "dump" / "step0" / "rank0"
        rank.mkdir(parents=True)
        record = {"input_args": [TENSOR], "input_kwargs": {}, "output": [TENSOR]}
        document = {"task": "statistics", "level": "L1", "dump_data_dir": None, "data": {"Torch.log.0.forward": record}}
        (rank / "dump.json").write_text(json.dumps(document))
    assert main(["diagnose", str(tmp_path)]) == 2
    assert f"give one of them: {tmp_path / '20260102-100000-bbbb'}, {tmp_path / '20260101-100000-aaaa'}" in capsys.readouterr().err
    (tmp_path / "latest").symlink_to("20260101-100000-aaaa")
    assert main(["diagnose", str(tmp_path)]) == 2
    assert f"give one of them: {tmp_path / 'latest'}, " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["compare", "graph", "graph one"])
def test_incidents_are_not_passed_over(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that looks at the dumps alone names the incident that the run in question has, and does not end with 0."""
    for run in ("run", "golden"):
        write_step(tmp_path / run / "dump" / "step0", 1.0)
    for run, step in (("run", 2), ("run", 5), ("golden", 5)):
        write_step(tmp_path / run / "incidents" / f"step{step}-nan_inf" / f"step{step}", float("nan"))
    monkeypatch.chdir(tmp_path)
    words = ["graph", "run", "-o", "out"] if name == "graph one" else COMMANDS[name]
    code = main([word.format(run="run", golden="golden") for word in words])
    said = "".join(capsys.readouterr())
    assert code == 3
    assert "step2-nan_inf" in said
    assert ("step5-nan_inf" in said) is (name == "graph one")


def test_a_nan_in_a_step_of_the_target_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`compare` has nothing to hold it against, and ends as `diagnose`; of chosen steps it is no answer."""
    for run, steps in (("run", (0, 1)), ("golden", (0,))):
        for step in steps:
            write_step(tmp_path / run / "dump" / f"step{step}", float("nan") if step else 1.0)
    monkeypatch.chdir(tmp_path)
    for words, expected in ((["diagnose"], 1), (["compare"], 1), (["compare", "--step", "0"], 0)):
        assert main([*words, "run", "golden", "-o", "out"]) == expected
        assert ("First NaN" in capsys.readouterr().out) is bool(expected)
