"""What a call returns: an output that only one side has is another structure; a place without a value is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.find.run import diagnose


def _tensor(mean: float) -> dict[str, Any]:
    numbers = {"Max": 1 + mean, "Min": -1 - mean, "Mean": mean, "Norm": 3 * mean}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 4], **numbers, "requires_grad": False}


def dump(root: Path, output: list[Any], name: str = "Torch.topk.0.forward", **header: Any) -> str:
    """Two calls, the first returns `output`."""
    data = {
        name: {"input_args": [_tensor(1.0)], "input_kwargs": {}, "output": output},
        "Torch.tanh.0.forward": {"input_args": [_tensor(2.0)], "input_kwargs": {}, "output": [_tensor(3.0)]},
    }
    path = root / "step0" / "rank0"
    path.mkdir(parents=True)
    head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (path / "dump.json").write_text(json.dumps(head | header | {"data": data}))
    return str(root)


def test_an_output_more(tmp_path: Path) -> None:
    """The exit code of both commands is 1, and the place is named under its side."""
    two = dump(tmp_path / "two", [_tensor(2.0), _tensor(5.0)])
    one = dump(tmp_path / "one", [_tensor(2.0)])
    for target, golden, word in ((two, one, "target"), (one, two, "golden")):
        found = diagnose(target, golden)
        assert (found.finding, found.unmatched[word]) == ("structure", ["Torch.topk.0.forward.output.1"])
        assert f"{word}: Torch.topk.0.forward.output.1" in found.text()
        assert main(["diagnose", target, golden, "-o", str(tmp_path / "page")]) == 1
        assert main(["compare", "-tp", target, "-gp", golden, "-o", str(tmp_path / "tables")]) == 1


@pytest.mark.parametrize("place", [None, {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 4]}])
def test_a_place_without_a_value(tmp_path: Path, place: Any) -> None:
    """One side has null there, or no numbers: it does not record them."""
    two = dump(tmp_path / "two", [_tensor(2.0), _tensor(5.0)])
    bare = dump(tmp_path / "bare", [_tensor(2.0), place])
    assert [diagnose(*pair).finding for pair in ((two, bare), (bare, two))] == ["none", "none"]
    short = dump(tmp_path / "short", [_tensor(2.0)])
    null = dump(tmp_path / "null", [_tensor(2.0), None])
    assert diagnose(null, short).finding == "none"


def test_other_calls_and_tools(tmp_path: Path) -> None:
    """Gradients are not what a call returns, and another tool may write another number of places."""
    name = "Torch.topk.0.backward"
    two = dump(tmp_path / "two", [_tensor(2.0), _tensor(5.0)], name)
    one = dump(tmp_path / "one", [_tensor(2.0)], name)
    assert diagnose(two, one).finding == "none"
    ours = dump(tmp_path / "ours", [_tensor(2.0), _tensor(5.0)], nonfinite_counts=True)
    theirs = dump(tmp_path / "theirs", [_tensor(2.0)])
    assert diagnose(ours, theirs).finding == "none"
