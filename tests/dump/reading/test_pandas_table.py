"""`frame`: tensors of a dump as a pandas table."""

from __future__ import annotations

import builtins
import json
import math
from pathlib import Path
from typing import Any

import dump_frames as frames
import pytest

from msprobe import dump
from msprobe_engine.core.errors import MissingExtraError, UsageError
from msprobe_engine.formats.dump.notebook.pandas_table import COLUMNS
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

FIXTURES = Path(__file__).parents[2] / "fixtures"
pd = pytest.importorskip("pandas")


@pytest.mark.parametrize("version", ["8.1.1", "26.2.0"])
@pytest.mark.parametrize("kind", ["L0", "mix", "tensor", "debug", "two_ranks"])
def test_one_row_per_tensor(version: str, kind: str) -> None:
    """The table has every tensor of every step and rank once, with the numbers of the file."""
    out = dump.read(FIXTURES / version / kind)
    table = out.frame()
    tensors = [(s, r, t) for s in out for r in s.values() for t in r.tensors.values()]
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == len(tensors)
    for row, (snapshot, record, tensor) in zip(table.itertuples(), tensors):
        assert (row.step, row.rank, row.record, row.place) == (snapshot.step, snapshot.rank, record.name, tensor.place)
        assert (row.shape, row.dtype, row.data_name, row.parent) == (tensor.shape, tensor.dtype, tensor.data_name, record.parent_name)
        expected = math.nan if tensor.max is None else float(tensor.max)
        assert row.max == pytest.approx(expected, nan_ok=True)
        assert row.nonfinite == tensor.nonfinite


def test_types_of_the_columns(tmp_path: Path) -> None:
    """Numbers are numbers: statistics float64, counts Int64 with <NA> where nothing was counted, rank int64."""
    DumpSink(tmp_path, level="mix", rank=2).write(frames.big_frame(1, 4))
    table = dump.read(tmp_path).frame()
    types = {name: str(table[name].dtype) for name in ("step", "rank", "max", "norm", "nan_count", "micro_step", "nonfinite")}
    assert types == {
        **dict.fromkeys(("step", "rank"), "int64"),
        **dict.fromkeys(("max", "norm"), "float64"),
        **dict.fromkeys(("nan_count", "micro_step"), "Int64"),
        "nonfinite": "bool",
    }
    assert table["nan_count"].tolist() == [0] * 12
    theirs = dump.read(FIXTURES / "26.2.0" / "L0").frame()
    assert theirs["nan_count"].isna().all()
    assert theirs["nonfinite"].dtype == bool


def test_nan_is_told_from_nothing(tmp_path: Path) -> None:
    """A statistic that is NaN and one that is missing both read as NaN; `nonfinite` tells which."""
    tensors = [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "Max": v} for v in (math.nan, None, True, 2**60)]
    path = tmp_path / "step0" / "rank0"
    path.mkdir(parents=True)
    (path / "dump.json").write_text(json.dumps({"data": {"Torch.f.0.forward": {"output": tensors}}}))
    table = dump.read(tmp_path).frame()
    assert table["nonfinite"].tolist() == [True, False, False, False]
    assert table["max"].isna().tolist() == [True, True, False, False]
    assert table["max"].tolist()[2:] == [1.0, 2.0**60]


def test_choice_of_steps_ranks_and_records(tmp_path: Path) -> None:
    """Steps, ranks and the conditions of find narrow the table; nothing found is an empty table with all columns."""
    for step in (1, 2):
        for rank in (0, 1):
            DumpSink(tmp_path, level="mix", rank=rank).write(frames.big_frame(step, 4))
    out = dump.read(tmp_path)
    assert len(out.frame()) == 4 * 12
    assert set(out.frame(steps=[2], ranks=[1])[["step", "rank"]].itertuples(index=False, name=None)) == {(2, 1)}
    assert set(out.frame(kind="module")["kind"]) == {"module"}
    assert len(out[1, 0].frame("Functional.linear.1.*")) == 3
    empty = out.frame(pattern="nothing")
    assert (list(empty.columns), len(empty)) == (list(COLUMNS), 0)
    with pytest.raises(UsageError, match="steps 1, 2"):
        out.frame(steps=[9])


def test_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pandas is missing the answer is one line with the pip command, before anything is read."""
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    out = dump.read(FIXTURES / "8.1.1" / "L0")
    with pytest.raises(MissingExtraError, match=r"^a table .* needs the package 'pandas': pip install 'msprobe-integrations\[pandas\]'$"):
        out.frame()
    with pytest.raises(MissingExtraError):
        out[0].frame()
