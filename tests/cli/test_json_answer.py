"""``--json`` of every command that answers: one object on the standard output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msprobe_engine.cli.main import all_commands, main, sub_parser

Capture = pytest.CaptureFixture[str]
WITHOUT = {"run", "init", "parse", "settings migrate", "settings schema"}
"""What becomes another program, prints a file, or is interactive."""


def nan_dump(directory: Path) -> Path:
    """A dump of one call that makes a NaN."""
    rank = directory / "step0" / "rank0"
    rank.mkdir(parents=True)
    plain = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "requires_grad": False}
    tensors = [plain | dict.fromkeys(("Max", "Min", "Mean", "Norm"), value) for value in (1.0, float("nan"))]
    record = {"input_args": tensors[:1], "input_kwargs": {}, "output": tensors[1:]}
    head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (rank / "dump.json").write_text(json.dumps({**head, "data": {"Torch.log.0.forward": record}}))
    return directory


@pytest.mark.parametrize("name", sorted(set(all_commands()) - WITHOUT))
def test_every_command_that_answers_has_it(name: str) -> None:
    assert "--json" in {option for action in sub_parser(name)._actions for option in action.option_strings}


def test_an_answer_with_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Exit code, the lines that people read, and what stands in the JSON file of the command."""
    monkeypatch.chdir(tmp_path)
    dump = str(nan_dump(tmp_path / "dump"))
    for command in (["nan_analyze", "-i", dump], ["diagnose", dump]):
        assert main(command) == 1
        text = capsys.readouterr().out.splitlines()
        assert main([*command, "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        assert list(told) == ["command", "exit_code", "meaning", "lines", "answer", "error"]
        assert (told["command"], told["exit_code"], told["meaning"], told["error"]) == (command[0], 1, "something was found", None)
        assert told["lines"][0] == text[0]
        assert isinstance(told["answer"], dict)


@pytest.mark.parametrize(
    "command", [["diagnose", "nothing"], ["graph", "nothing"], ["trends", "nothing"], ["monitor", "analyze", "nothing"]]
)
def test_an_error_is_an_answer(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """It stands in the object, and on the standard error as without it."""
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["exit_code"] == 2
    assert "nothing" in told["error"]
    assert told["error"] in err
