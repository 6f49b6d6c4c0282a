"""docs/guide/cross-framework.md: its commands run on a small pair of runs and print what the page shows; its mapping is taken."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "cross-framework.md").read_text(encoding="utf-8")
BASH = [shlex.split(line)[1:] for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.strip().splitlines()]
SHOWN = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def tensor(value: float, *shape: int, framework: str) -> dict[str, Any]:
    """A tensor whose numbers follow from one value."""
    kind, dtype = ("torch.Tensor", "torch.float32") if framework == "pytorch" else ("mindspore.Tensor", "Float32")
    return {"type": kind, "dtype": dtype, "shape": list(shape), "Max": value, "Min": -value / 2, "Mean": value / 8, "Norm": 2 * value}


def write(root: Path, framework: str, calls: dict[str, tuple[str | None, list[dict[str, Any]], dict[str, Any], dict[str, Any]]]) -> None:
    """One rank: record -> (parent, inputs, parameters, output)."""
    place = root / "step0" / "proc1"
    place.mkdir(parents=True)
    data = {
        name: {"input_args": inputs, "input_kwargs": {}, "output": [output]} | ({"parameters": held} if held else {})
        for name, (_, inputs, held, output) in calls.items()
    }
    header = {"task": "statistics", "level": "mix", "framework": framework, "dump_data_dir": None, "nonfinite_counts": True}
    (place / "dump.json").write_text(json.dumps(header | {"data": data}))
    (place / "construct.json").write_text(json.dumps({name: parent for name, (parent, *_) in calls.items()}))
    (place / "stack.json").write_text(
        json.dumps({"0": [list(calls), ["File train.py, line 7, in construct, return self.act(self.fc(x))"]]})
    )


def runs(root: Path, bias: float = 0.5) -> None:
    """``golden/dump`` of PyTorch and ``out/dump`` of MindSpore, whose bias may be another one."""
    t = lambda value, *shape: tensor(value, *shape, framework="pytorch")  # noqa: E731
    m = lambda value, *shape: tensor(value, *shape, framework="mindspore")  # noqa: E731
    net, fc, dense = "Module.net.Net.forward.0", "Module.net.fc.Linear.forward.0", "Cell.net.dense.Dense.forward.0"
    write(
        root / "golden" / "dump",
        "pytorch",
        {
            "Functional.linear.0.forward": (fc, [t(1, 2, 4), t(3, 8, 4), t(0.5, 8)], {}, t(5, 2, 8)),
            fc: (net, [t(1, 2, 4)], {"weight": t(3, 8, 4), "bias": t(0.5, 8)}, t(5, 2, 8)),
            "Functional.gelu.0.forward": (net, [t(5, 2, 8)], {}, t(4, 2, 8)),
            net: (None, [t(1, 2, 4)], {}, t(4, 2, 8)),
        },
    )
    off = 0.0 if bias == 0.5 else 0.1
    top = "Cell.net.Net.forward.0"
    write(
        root / "out" / "dump",
        "mindspore",
        {
            "Primitive.matmul.MatMul.0.forward": (dense, [m(1, 2, 4), m(3, 8, 4)], {}, m(4.5, 2, 8)),
            "Primitive.bias_add.BiasAdd.0.forward": (dense, [m(4.5, 2, 8), m(bias, 8)], {}, m(5 + off, 2, 8)),
            dense: (top, [m(1, 2, 4)], {"weight": m(3, 8, 4), "bias": m(bias, 8)}, m(5 + off, 2, 8)),
            "Functional.my_gelu.0.forward": (top, [m(5 + off, 2, 8)], {}, m(4 + off, 2, 8)),
            top: (None, [m(1, 2, 4)], {}, m(4 + off, 2, 8)),
        },
    )


def test_nothing_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command of the page ends with 0 on a pair that is the same, and the first prints what the page shows."""
    runs(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("functions.yaml").write_text(YAML[0])
    for number, command in enumerate(BASH):
        assert main(command) == 0, command
        text = capsys.readouterr().out
        if not number:
            assert text.startswith(SHOWN[0])
            assert "my_gelu" in Path("msprobe_diagnosis/api_mapping.yaml").read_text()
            assert Path("msprobe_diagnosis/cell_mapping.yaml").read_text().strip() == "net.dense.Dense: net.fc.Linear"


def test_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Another bias on the MindSpore side is the first suspect."""
    runs(tmp_path, bias=0.6)
    monkeypatch.chdir(tmp_path)
    assert main(BASH[0]) == 1
    assert capsys.readouterr().out.startswith(SHOWN[1].rstrip())
