"""Our figures, words and distances of saved tensors, where the existing tool is silent or wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.align.calls.match import match
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.tensors.blocks import InMemoryTensor
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_engine.measure.columns import COSINE, EUCLID, MAX_ABS, MAX_REL, MESSAGE, ONE_THOUSANDTH, RESULT
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.measure.tensors.metrics import BLOCK, TensorDiff
from msprobe_engine.measure.tensors.mode import Measured, Pair, TensorMode, metrics, plugin_names
from msprobe_engine.measure.tensors.postprocess import Postprocess
from msprobe_engine.report.table.pairs import compare_pair

NAN, INF = math.nan, math.inf


def compared(root: Path, target: Any, golden: Any, **options: Any) -> Measured:
    for side, tensor in (("target", target), ("golden", golden)):
        folder = root / side / "dump_tensor_data"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(tensor, folder / "x.pt")
    return TensorMode(TensorFiles(root / "target"), TensorFiles(root / "golden"), **options).measure(Pair("x.pt", "x.pt"))


def test_single_elements_have_figures_and_a_distance(tmp_path: Path) -> None:
    """The loss, and one-element tensors: all six metrics are numbers; a difference beyond round-off is off."""
    for shape in ((), (1,), (1, 1)):
        found = compared(tmp_path, torch.full(shape, 2.5), torch.full(shape, 2.0))
        assert found.cells == [1.0, 0.5, 0.5, 0.25, 0.0, 0.0]
        assert found.distance == pytest.approx(0.2)
        assert "2.5 against 2.0" in found.message
    assert compared(tmp_path, torch.tensor(NAN), torch.tensor(1.0)).distance == INF


def test_signs_of_infinity_and_nan_against_infinity_are_differences(tmp_path: Path) -> None:
    """+Inf against -Inf, NaN against Inf, NaN on one side: infinitely far apart, and the message counts them."""
    for a, b in ((INF, -INF), (NAN, INF), (NAN, 1.0), (1.0, NAN)):
        found = compared(tmp_path, torch.tensor([1.0, a, 2.0]), torch.tensor([1.0, b, 2.0]))
        assert found.distance == INF
        assert "1 of 3 elements are NaN or Inf on one side only" in found.message
        assert found.cells[2] == 0.0
        assert found.cells[4] == pytest.approx(2 / 3)


def test_equal_nan_is_no_difference_and_is_said(tmp_path: Path) -> None:
    """All NaN on both sides is not called similar without a word."""
    found = compared(tmp_path, torch.full((4,), NAN), torch.full((4,), NAN))
    assert found.distance == 0
    assert found.message == "all elements are the same NaN or Inf on both sides"


def test_imaginary_parts_count(tmp_path: Path) -> None:
    """Complex tensors that differ in their imaginary parts only differ."""
    found = compared(tmp_path, torch.tensor([1 + 2j, 3.0]), torch.tensor([1 - 2j, 3.0]))
    assert found.cells[2] == 4.0
    assert found.distance > found.limit
    assert isinstance(found.cells[0], float)
    assert found.cells[0] < 0.9


def test_large_integers_are_exact(tmp_path: Path) -> None:
    """One off above 2**53, where float64 has no such number."""
    found = compared(tmp_path, torch.tensor([2**60 + 1, 5]), torch.tensor([2**60, 5]))
    assert found.cells[2] == 1.0
    assert found.distance > found.limit == 0
    assert str(2**60 + 1) in found.message


def test_other_shapes_with_as_many_elements_are_compared(tmp_path: Path) -> None:
    """The figures are there, and the message says both shapes; with other counts there are none."""
    found = compared(tmp_path, torch.arange(6.0), torch.arange(6.0).reshape(2, 3))
    assert found.cells[2] == 0.0
    assert "shape [6] against [2, 3]" in found.message
    assert math.isnan(found.distance)
    found = compared(tmp_path, torch.arange(6.0), torch.arange(7.0))
    assert found.cells == [None] * 6


def test_thirty_percent_and_tiny_tensors_are_off_and_round_off_is_not(tmp_path: Path) -> None:
    """The distance has no units: a scaled tensor is off whatever its cosine, also below 1e-3; one rounding of bfloat16 is not."""
    torch.manual_seed(0)
    base = torch.randn(64, 64)
    for scale in (1.0, 1e-12):
        found = compared(tmp_path, 1.3 * scale * base, scale * base)
        assert found.cells[0] == pytest.approx(1.0)
        assert found.distance > found.limit
    found = compared(tmp_path, base.bfloat16(), base)
    assert 0 < found.distance <= found.limit
    assert "bfloat16 against float32" in found.message
    found = compared(tmp_path, base @ base, (base.double() @ base.double()).float())
    assert 0 < found.distance <= found.limit
    assert found.message == ""


def test_a_mask_does_not_hide_what_it_is_added_to(tmp_path: Path) -> None:
    """Constants of a mask dwarf everything else; the elements below them are measured by themselves."""
    torch.manual_seed(0)
    scores = torch.randn(32, 32)
    mask = torch.full((32, 32), -10_000.0).triu(1)
    found = compared(tmp_path, scores * 1.01 + mask, scores + mask)
    assert found.distance > 5e-3


@given(
    st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=40),
    st.integers(0, 2 * BLOCK),
)
def test_figures_do_not_depend_on_where_blocks_end(values: list[tuple[float, float]], before: int) -> None:
    """Equal elements put before others move them to another block and change no maximum, no count and no sum of differences."""
    a, b = (np.array(side, np.float32) for side in zip(*values))
    pad = np.ones(before, np.float32)
    small, large = (
        TensorDiff(InMemoryTensor(x, "float32"), InMemoryTensor(y, "float32"), None).run()
        for x, y in ((a, b), (np.append(pad, a), np.append(pad, b)))
    )
    assert large.apart == small.apart
    assert large.worst == small.worst
    assert large.relative == small.relative
    assert (large.bad_target, large.bad_golden) == (small.bad_target, small.bad_golden)
    assert large.thousandth == small.thousandth + before
    assert large.difference == pytest.approx(small.difference, rel=1e-12)
    if small.worst:
        assert large.at == small.at + before
    both = np.isfinite(a) & np.isfinite(b)
    with np.errstate(all="ignore"):
        same = both | (np.isnan(a) & np.isnan(b)) | (a == b)
        assert small.apart == int((~same).sum())
        assert small.worst == np.abs(a[both].astype(np.float64) - b[both]).max(initial=0.0)


def sides(root: Path, tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> tuple[DumpTable, DumpTable]:
    found = []
    for which, side in enumerate(("target", "golden")):
        folder = root / side / "dump_tensor_data"
        folder.mkdir(parents=True)
        data = {}
        for name, pair in tensors.items():
            entry = {"type": "torch.Tensor", "dtype": str(pair[which].dtype), "shape": list(pair[which].shape), "Max": 1.0, "Min": 0.0}
            entry |= {"Mean": 0.5, "Norm": 1.0, "requires_grad": False, "data_name": f"{name}.output.0.pt"}
            data[name] = {"input_args": [{"type": "int", "value": 3}], "input_kwargs": {}, "output": [entry]}
            torch.save(pair[which], folder / f"{name}.output.0.pt")
        (root / side / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L1", "framework": "pytorch", "data": data}))
        found.append(read_side(root / side / "dump.json"))
    return found[0], found[1]


def test_rows_are_columns_in_order_and_damage_is_marked(tmp_path: Path) -> None:
    """One list per column in the order of the rows; a pickle in place of a tensor, a link and a missing file are marked."""
    good = torch.randn(3, 4)
    target, golden = sides(tmp_path, {f"Torch.add.{i}.forward": (good + i, good) for i in range(4)})
    folder = tmp_path / "target" / "dump_tensor_data"
    torch.save([good], folder / target.data_name[1])
    (folder / target.data_name[3]).unlink()
    (folder / target.data_name[5]).unlink()
    (folder / target.data_name[5]).symlink_to(tmp_path / "golden" / "dump_tensor_data" / golden.data_name[5])
    rows = [(i, i) for i in range(len(target))] + [(7, -1), (-1, 7)]
    found = metrics(target, golden, rows, CompareOptions(workers=2))
    assert [bool(d) for d in found.damaged] == [False, True, False, True, False, True, False, False, False, False]
    assert found.columns[MAX_ABS][7] == pytest.approx(3, rel=1e-6)
    assert all(found.columns[name][1] is None for name in (COSINE, EUCLID, MAX_ABS, MAX_REL, ONE_THOUSANDTH))
    for at, word in ((1, "holds a list, no tensor"), (3, "there is no tensor"), (5, "link"), (0, ""), (8, "")):
        assert word in str(found.columns[MESSAGE][at])
    assert found.columns[MESSAGE][0] == ""


def test_a_tensor_that_cannot_be_read_does_not_pass(tmp_path: Path) -> None:
    """Its row is a warning with the reason, even when the statistics agree."""
    target, golden = sides(tmp_path, {"Torch.add.0.forward": (torch.ones(4), torch.ones(4))})
    (tmp_path / "target" / "dump_tensor_data" / target.data_name[1]).write_bytes(b"")
    options = CompareOptions()
    (block,) = compare_pair(target, golden, match(target, golden, options), options)
    assert block[RESULT] == ["pass", "warning"]
    assert "damaged" in block[MESSAGE][1]


METRIC = """
def column_name():
    return "Mean diff of both"


def compare(n, b):
    if n.shape[0] == 5:
        raise RuntimeError("five")
    return float((n - b).double().mean()), "taken"
"""


def test_metrics_of_the_user(tmp_path: Path) -> None:
    """A file named by the user adds a column; one that fails says so in its row; nothing else in the directory is loaded."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "alg_mean_diff.py").write_text(METRIC)
    (tmp_path / "m" / "other.py").write_text("raise SystemExit('loaded')")
    made = sides(
        tmp_path, {"Torch.add.0.forward": (torch.ones(4) + 1, torch.ones(4)), "Torch.add.1.forward": (torch.ones(5), torch.ones(5))}
    )
    options = CompareOptions(metrics=(tmp_path / "m",))
    assert plugin_names(options) == ("Mean diff of both",)
    found = metrics(*made, [(1, 1), (3, 3)], options)
    assert found.columns["Mean diff of both"] == [1.0, "unsupported"]
    assert "taken" in str(found.columns[MESSAGE][0])
    assert "five" in str(found.columns[MESSAGE][1])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("alg_a.py", "def column_name(): return 'Cosine'\ndef compare(n, b): return 1"),
        ("alg_a.py", "def compare(n, b): return 1"),
        ("alg_a.py", "def column_name(): return 'x'\ndef compare(n): return 1"),
        ("alg_a.py", "def"),
        ("metric.py", METRIC),
    ],
)
def test_wrong_metrics_are_refused(tmp_path: Path, name: str, text: str) -> None:
    """Names that are taken, functions that are missing, syntax errors, other file names."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        plugin_names(CompareOptions(metrics=(tmp_path / name,)))


def test_products_before_comparing(tmp_path: Path) -> None:
    """The products that 26.2.0 takes: right, left, both; a matrix that does not fit leaves the tensor as it is and says so."""
    torch.manual_seed(0)
    x, right, left = torch.randn(3, 4), torch.randn(4, 4), torch.randn(3, 3)
    torch.save(right, tmp_path / "right.pt")
    np.save(tmp_path / "left.npy", left.numpy())
    config = tmp_path / "config.yaml"
    config.write_text("right_matmul:\n  target_tensor_map:\n    right.pt: [x.pt]\n")
    found = compared(tmp_path, x, x @ right, postprocess=Postprocess(config))
    assert found.distance <= found.limit
    config.write_text("left_right_matmul:\n  left_golden_tensor_map: {left.npy: [x.pt]}\n  right_golden_tensor_map: {right.pt: [x.pt]}\n")
    found = compared(tmp_path, left @ x @ right, x, postprocess=Postprocess(str(config)))
    assert found.distance <= found.limit
    config.write_text("left_matmul: {golden_tensor_map: {right.pt: [x.pt]}}\n")
    found = compared(tmp_path, x, x, postprocess=Postprocess(config))
    assert found.distance == 0
    assert "could not be multiplied" in found.message


@pytest.mark.parametrize(
    "text",
    ["middle_matmul: {}", "right_matmul: {map: {}}", "right_matmul: [1]", "right_matmul: {target_tensor_map: {a.pt: x}}", "a: [", "[1]"],
)
def test_wrong_products_are_refused(tmp_path: Path, text: str) -> None:
    """Unknown keys and other shapes of the file are named."""
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"c\.yaml"):
        Postprocess(tmp_path / "c.yaml")


def test_parts_compared_as_one(tmp_path: Path) -> None:
    """q, k and v of a training against the one tensor of an inference: parameters along the first dimension, results along the second."""
    for name, axis in (("Module.q.Linear.forward.0.parameters.weight", 0), ("Module.q.Linear.forward.0.output.0", 1)):
        parts = [torch.randn(4, 4) for _ in range(3)]
        for side, tensors in (("target", parts), ("golden", [torch.cat(parts, axis)])):
            folder = tmp_path / name / side / "dump_tensor_data"
            folder.mkdir(parents=True)
            for number, tensor in enumerate(tensors):
                torch.save(tensor, folder / f"{name}{number}.pt")
        mode = TensorMode(TensorFiles(tmp_path / name / "target"), TensorFiles(tmp_path / name / "golden"))
        found = mode.measure(Pair(";".join(f"{name}{number}.pt" for number in range(3)), f"{name}0.pt"))
        assert found.distance == 0
