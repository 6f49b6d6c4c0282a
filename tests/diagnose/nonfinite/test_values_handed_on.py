"""Values from nowhere that are only handed on."""

import json
from pathlib import Path

from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze


def tensor(bad: bool) -> dict[str, object]:
    value = float("nan") if bad else 1.0
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4], "Max": value, "Min": value, "Mean": value, "Norm": value}


def entry(inputs: list[bool], output: bool) -> dict[str, object]:
    return {"input_args": [tensor(b) for b in inputs], "input_kwargs": {}, "output": [tensor(output)]}


def write(root: Path, data: dict[str, object]) -> Path:
    directory = root / "step0" / "rank0"
    directory.mkdir(parents=True)
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (directory / "dump.json").write_text(json.dumps({**header, "data": data}))
    (directory / "stack.json").write_text("{}")
    (directory / "construct.json").write_text("{}")
    return root


def test_a_view_of_old_garbage_is_no_origin(tmp_path: Path) -> None:
    """A buffer made before the record began holds NaN and is only sliced and viewed: the operation that computes one is named."""
    data = {
        "Tensor.__getitem__.0.forward": entry([True], True),
        "Tensor.view.0.forward": entry([True], True),
        "Torch.matmul.0.forward": entry([False, False], False),
        "Torch.log.0.forward": entry([False], True),
        "Torch.mul.0.forward": entry([True], True),
    }
    finding = nan_analyze(write(tmp_path, data)).findings[0]
    assert (finding["cause"], finding["operator"]) == ("operator", "log")


def test_bad_data_is_named_where_it_is_used(tmp_path: Path) -> None:
    """The same slices of bad input data, followed by an operation that computes with it: data is the cause."""
    data = {
        "Tensor.__getitem__.0.forward": entry([True], True),
        "Torch.mul.0.forward": entry([True, False], True),
        "Torch.sum.0.forward": entry([True], True),
    }
    assert nan_analyze(write(tmp_path, data)).findings[0]["cause"] == "data"


def test_what_a_rank_puts_into_a_collective_is_no_data(tmp_path: Path) -> None:
    """A shard of a parameter that was bad before the step: nobody looks for it in the batch."""
    data = {
        "Distributed.all_gather_into_tensor.0.forward": entry([False, True], True),
        "Functional.linear.0.forward": entry([False, True], True),
    }
    finding = nan_analyze(write(tmp_path, data)).findings[0]
    assert (finding["cause"], finding["operator"]) == ("held", "all_gather_into_tensor")
    assert "a parameter or its shard" in finding["explanation"]


def test_a_gradient_buffer_that_is_zeroed_is_no_origin(tmp_path: Path) -> None:
    """The buffer still holds the NaN of the step before, is zeroed, and garbage is sliced before the real fault: the fault is named."""
    data = {
        "Tensor.zero_.0.forward": entry([True], False),
        "Tensor.__getitem__.0.forward": entry([True], True),
        "Tensor.copy_.0.forward": entry([True, False], False),
        "Tensor.__truediv__.0.forward": entry([False, False], True),
        "Torch.mul.0.forward": entry([True], True),
    }
    finding = nan_analyze(write(tmp_path, data)).findings[0]
    assert (finding["cause"], finding["operator"]) == ("operator", "__truediv__")


def test_a_nan_that_is_copied_is_an_input(tmp_path: Path) -> None:
    """What `copy_` reads counts: bad data that is copied and used is bad data."""
    data = {"Tensor.copy_.0.forward": entry([False, True], True), "Torch.mul.0.forward": entry([True, False], True)}
    assert nan_analyze(write(tmp_path, data)).findings[0]["cause"] == "data"
