"""Statistics that cannot be right are said: of tensors with one checksum they are other ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msprobe_engine.cli.main import main

CHECKSUM, OTHER = "00c0ffee", "0badcafe"


def dumped(root: Path, changed: dict[str, object]) -> Path:
    """Three calls, the result of the second one with these facts."""
    place = root / "step0" / "rank0"
    place.mkdir(parents=True)
    shown = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 4], "requires_grad": False}
    leaf: dict[str, object] = {**shown, "Max": 1.0, "Min": -1.0, "Mean": 0.2, "Norm": 2.0, "md5": CHECKSUM}
    names = [f"Functional.relu.{i}.forward" for i in range(3)]
    data = {name: {"input_args": [leaf], "input_kwargs": {}, "output": [leaf | changed if ".1." in name else leaf]} for name in names}
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (place / "dump.json").write_text(json.dumps({**header, "data": data}))
    (place / "construct.json").write_text(json.dumps(dict.fromkeys(names)))
    (place / "stack.json").write_text("{}")
    return root


COMMANDS = {
    "diagnose": "diagnose {0} {1} -o {2}",
    "compare": "compare -tp {0} -gp {1} -o {2}",
    "tables": "compare -tp {0} -gp {1} -o {2} --no_diagnose",
    "compat": "compare -tp {0} -gp {1} -o {2} --compat",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"Max": 1.5}, 3),
        ({"Min": -0.5}, 3),
        ({"Mean": 0.3}, 3),
        ({"Norm": 3.0}, 3),
        ({"Norm": 2.00002}, 0),
        ({"Norm": 3.0, "md5": OTHER}, 1),
    ],
    ids=["Max", "Min", "Mean", "Norm", "a sum in another order", "another tensor"],
)
def test_statistics_that_are_not_those_of_their_checksum_are_said(
    command: str, changed: dict[str, object], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal bytes have equal statistics, but for digits that a sum in another order changes; of other bytes that is a difference, of which
    the exit code says nothing with --compat, as theirs."""
    code = 0 if code == 1 and command == "compat" else code
    target, golden = str(dumped(tmp_path / "target", changed)), str(dumped(tmp_path / "golden", {}))
    assert main([word.format(target, golden, tmp_path / "out") for word in COMMANDS[command].split()]) == code
    shown = " ".join("".join(capsys.readouterr()).split())
    assert shown.count("the statistics of 1 rows contradict their checksums") == (code == 3)
    assert ("All numbers are the same" in shown) == (code == 0 and command != "tables" and "md5" not in changed)
