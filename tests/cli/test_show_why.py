"""``msprobe show RUN --why NAME``: why is it not in my dump?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main

Capture = pytest.CaptureFixture[str]
PLAIN = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "requires_grad": False, "Max": 1, "Min": 1, "Mean": 1, "Norm": 1}
BASE = ("Functional.linear.0.forward", "Functional.linear.1.forward", "Functional.linear.0.backward", "Module.fc.Linear.forward.0")


def write(root: Path, step: int, rank: int, records: tuple[str, ...] = BASE, construct: tuple[str, ...] = (), **header: Any) -> Path:
    """One rank of one step."""
    place = root / f"step{step}" / f"rank{rank}"
    place.mkdir(parents=True)
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, **header}
    data = {name: {"input_args": [PLAIN], "input_kwargs": {}, "output": [PLAIN]} for name in records}
    (place / "dump.json").write_text(json.dumps({**head, "data": data}))
    (place / "construct.json").write_text(json.dumps(dict.fromkeys((*records, *construct))))
    return root


def answer(root: Path, name: str, capsys: Capture) -> tuple[int, str]:
    code = main(["show", str(root), "--why", name])
    return code, capsys.readouterr().out


CASES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "it is there": ("Functional.linear.0.forward", {}, 0, "is in the dump: step 0, rank 0\n  record     Functional.linear.0.forward"),
    "a part of its name": ("linear", {}, 0, "record     Functional.linear.1.forward"),
    "fewer calls": ("Functional.linear.7.forward", {}, 1, "in step 0 of rank0 it has calls 0-1 and no call 7 (forward)"),
    "no gradient": ("Functional.linear.1.backward", {}, 1, "it has calls 0 and no call 1 (backward)"),
    "no backward pass": ("Module.fc.Linear.backward.0", {}, 1, "no gradient went through it (no grad mode, detached"),
    "a name as Python has it": ("torch.nn.functional.linear", {}, 0, "record     Functional.linear.0.forward"),
    "a name as Python has it, level L0": (
        "torch.nn.functional.relu",
        {"level": "L0"},
        1,
        "level L0 records modules, and this is a call of a function",
    ),
    "level L0": ("Functional.relu.0.forward", {"level": "L0"}, 1, "level L0 records modules, and this is a call of a function"),
    "level L1": ("Module.norm.LayerNorm.forward.0", {"level": "L1"}, 1, "level L1 records calls of functions, and this is a module"),
    "a list": ("Functional.relu.0.forward", {"selection": {"list": ["fc"]}}, 1, "dump.list keeps only what ['fc'] names"),
    "a scope": (
        "Functional.relu.0.forward",
        {"selection": {"scope": ["a", "b"]}},
        1,
        "dump.scope keeps only what happens from ['a', 'b'] on",
    ),
    "a risk level": (
        "Torch.relu.0.forward",
        {"selection": {"risk_level": "CORE"}},
        1,
        "dump.risk_level CORE records a part of the functions",
    ),
    "a direction": (
        "Torch.relu.0.backward",
        {"selection": {"data_mode": ["forward"]}},
        1,
        "dump.data_mode ['forward'] leaves out what is backward",
    ),
    "a node": (
        "Functional.relu.0.forward",
        {"construct": ("Functional.relu.0.forward",)},
        1,
        "it was called, and is a node of construct.json",
    ),
    "overflows": ("Functional.relu.0.forward", {"task": "overflow_check"}, 1, "task overflow_check records calls with NaN or Inf"),
    "nothing is known": ("Functional.linaer.0.forward", {}, 3, "perhaps    it was called with no tensor among its arguments and results"),
    "mistyped": ("Functional.linaer.0.forward", {}, 3, "like it    Functional.linear.0.forward"),
}


@pytest.mark.parametrize("case", CASES)
def test_why(case: str, tmp_path: Path, capsys: Capture) -> None:
    """What the dump says, and the exit code: 0 it is there, 1 it is missing and known why, 3 it is not known."""
    name, given, code, said = CASES[case]
    ended, text = answer(write(tmp_path, 0, 0, **given), name, capsys)
    assert said in text
    assert ended == code


def test_another_rank_and_another_step_have_it(tmp_path: Path, capsys: Capture) -> None:
    for step, rank, records in ((0, 0, BASE), (0, 1, BASE[:1]), (1, 0, BASE[:1]), (1, 1, BASE[:1])):
        write(tmp_path, step, rank, records)
    code, text = answer(tmp_path, "Module.fc", capsys)
    assert code == 1
    assert text.splitlines()[0] == "Module.fc is in the dump: step 0, rank 0"
    assert "and not in step 0, rank 1; step 1, ranks 0-1" in text
    assert "it was called in step 0, rank 0" in text


def test_what_cannot_be_read_is_no_answer(tmp_path: Path, capsys: Capture) -> None:
    """A rank whose file is damaged may have it."""
    write(tmp_path, 0, 0)
    (write(tmp_path, 0, 1) / "step0" / "rank1" / "dump.json").write_text("{")
    code, text = answer(tmp_path, "Functional.linear.0.forward", capsys)
    assert code == 3
    assert "unread     " in text


def test_as_json(tmp_path: Path, capsys: Capture) -> None:
    assert main(["show", str(write(tmp_path, 0, 0)), "--why", "relu", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["absent"], told["present"]) == ("relu", {"0": [0]}, {})


def test_without_a_dump(tmp_path: Path, capsys: Capture) -> None:
    assert main(["show", str(tmp_path), "--why", "relu"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
