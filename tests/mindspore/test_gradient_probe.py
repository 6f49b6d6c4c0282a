"""`PrecisionDebugger.monitor(optimizer)`: the files of the existing tool, levels L0 to L2, and the tools that read them."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import monitor_programs as programs
import numpy as np
import pytest
from mindspore import nn

from msprobe_engine.errors import UsageError
from msprobe_engine.grad_probe.compare import GradComparator
from msprobe_integrations.mindspore.debugger import PrecisionDebugger
from msprobe_integrations.mindspore.grad_step import count_below, pack_signs


@pytest.fixture(autouse=True)
def _one_debugger() -> Iterator[None]:
    """Each test makes its own."""
    PrecisionDebugger._instance = None
    yield
    PrecisionDebugger._instance = None


def run(level: str, out: str = "out", **keys: Any) -> list[Any]:
    """Train three steps with the probe; gives what numpy has seen."""
    PrecisionDebugger._instance = None
    probe = {"grad_level": level, "param_list": [], "bounds": [-1, 0, 1], **keys}
    Path("config.json").write_text(json.dumps({"task": "grad_probe", "dump_path": out, "rank": [], "step": [], "grad_probe": probe}))
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    debugger = PrecisionDebugger("config.json")
    PrecisionDebugger.monitor(optimizer)
    seen: list[Any] = []
    result = programs.train(net, optimizer, None, seen=seen)
    debugger.stop()
    plain = programs.build(lambda p: nn.Adam(p, 1e-2))
    assert result == programs.train(*plain, None)
    return seen


def table(path: str) -> list[dict[str, str]]:
    """Rows of a summary."""
    with open(path, encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_files(level: str) -> None:
    """Columns, numbers, checksums, shares and signs are those of the gradients; training has the same bits."""
    seen = run(level)
    names = [p.name for p in programs.build(lambda p: nn.SGD(p))[1].parameters]
    for step, (gradients, _, _) in enumerate(seen):
        rows = table(f"out/rank0/grad_summary_{step}.csv")
        columns = {
            "L0": ["param_name", "MD5", "max", "min", "norm", "shape"],
            "L1": ["param_name", "max", "min", "norm", "shape"],
            "L2": ["param_name", "(-inf, -1]", "(-1, 0]", "(0, 1]", "(1, inf)", "=0", "max", "min", "norm", "shape"],
        }[level]
        assert list(rows[0])[: len(columns)] == columns
        assert [row["param_name"] for row in rows] == names
        for row, gradient in zip(rows, gradients):
            assert float(row["max"]) == pytest.approx(float(gradient.max()))
            assert float(row["norm"]) == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-6)
            assert row["shape"] == str(list(gradient.shape))
            if level == "L0":
                assert row["MD5"] == f"{zlib.crc32(gradient.tobytes()):08x}"
            else:
                sign = np.load(f"out/rank0/step{step}/{row['param_name']}.npy")
                assert np.array_equal(sign, gradient > 0)
            if level == "L2":
                assert float(row["(0, 1]"]) == pytest.approx(float(((gradient > 0) & (gradient <= 1)).mean()))


def test_two_runs_are_compared() -> None:
    """The comparison of two runs reads the files; equal runs agree."""
    run("L1", "first")
    run("L1", "second")
    GradComparator.compare_distributed("first", "second", "compared")
    rows = list(csv.reader(open("compared/rank0/similarities.csv", encoding="utf-8-sig")))  # noqa: SIM115
    assert rows[-1][0] == "summary"
    assert {float(value) for value in rows[-1][1:]} == {1.0}


def test_chosen_parameters_and_steps() -> None:
    """param_list and step choose; a name that is not there is said with the nearest one."""
    PrecisionDebugger._instance = None
    run("L1", param_list=["first.weight"])
    assert [row["param_name"] for row in table("out/rank0/grad_summary_0.csv")] == ["first.weight"]
    with pytest.raises(UsageError, match=r"first.weigt.*did you mean 'first.weight'"):
        run("L1", param_list=["first.weigt"])


def test_what_is_no_optimizer() -> None:
    """A network in the place of the optimizer is said."""
    Path("config.json").write_text(json.dumps({"task": "grad_probe", "dump_path": "out", "grad_probe": {"grad_level": "L0"}}))
    PrecisionDebugger("config.json")
    with pytest.raises(UsageError, match="Net is no optimizer"):
        PrecisionDebugger.monitor(programs.Net())


def test_short_floats_and_nan() -> None:
    """Signs and counts of bfloat16, of numbers that are none, and of a size that four does not divide."""
    values = np.array([0.0, -0.0, 1.5, -2.0, np.nan, np.inf, -np.inf], np.float32)
    assert [int(pack_signs(values)[i // 4] >> 2 * (i % 4) & 3) for i in range(7)] == [0, 0, 1, 2, 3, 1, 2]
    assert count_below(values, [-1, 0, 1]).tolist() == [2, 4, 4]
    assert pack_signs(values[:0]).size == 0
    net, optimizer = programs.build(lambda p: nn.SGD(p))
    del net
    Path("config.json").write_text(json.dumps({"task": "grad_probe", "dump_path": "out", "grad_probe": {"grad_level": "L0"}}))
    debugger = PrecisionDebugger("config.json")
    PrecisionDebugger.monitor(optimizer)
    optimizer(tuple(ms.Tensor(np.ones(p.shape, np.float32)).astype(ms.bfloat16).astype(ms.float32) for p in optimizer.parameters))
    debugger.stop()
    assert len(table("out/rank0/grad_summary_0.csv")) == 6
