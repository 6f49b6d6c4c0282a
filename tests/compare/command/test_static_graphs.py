"""Dumps of MindSpore static graphs: kernels and single points, as directories of files and by the json of 8.1.1."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from msprobe_engine.align.sources import from_json, pair_paths
from msprobe_engine.align.static_graph_sources import kind_of
from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.formats.dump.static_graph import read_graph_side
from msprobe_engine.formats.tensors.blocks import open_file, whole
from msprobe_engine.report.table_files.reading import read_table

RAMP = np.arange(6, dtype=np.float32).reshape(2, 3)


def kernel(where: Path, name: str, time: int, place: str, slot: int, data: np.ndarray) -> None:
    """A tensor file; `name` is ``Type.full_name``."""
    where.mkdir(parents=True, exist_ok=True)
    np.save(where / f"{name}.0.0.{time}.{place}.{slot}.DefaultFormat.Float32.npy", data)


def columns(path: Path) -> dict[str, list[str]]:
    """A table by column."""
    header, *rows = read_table(path)
    return {str(name): [row[at] for row in rows] for at, name in enumerate(header)}


def run_of(root: Path, scale: float, time: int = 1000) -> Path:
    """Two iterations of two graphs; in the second graph `scale` is what differs."""
    for step in range(2):
        first, second = (root / "rank_0" / "Net" / graph / str(step) for graph in "01")
        kernel(first, "Add.Default_Add-op0", time, "input", 0, RAMP)
        kernel(first, "Add.Default_Add-op0", time + 1, "output", 0, RAMP)
        for loop in range(2):
            kernel(second, "Mul.Default_Mul-op0", time + 10 * loop + 2, "input", 0, RAMP)
            kernel(second, "Mul.Default_Mul-op0", time + 10 * loop + 3, "output", 0, RAMP * scale)
        kernel(second, "Parameter.fc_weight", time + 50, "output", 0, RAMP * scale)
    return root


def test_kernels_become_records_in_order_of_execution(tmp_path: Path) -> None:
    """All graphs of an iteration are one side; a kernel that runs again counts; parameters, read at the end, come last."""
    side = read_graph_side(run_of(tmp_path, 2.0) / "rank_0" / "Net" / "*" / "1")
    assert side.ops == [
        "Add.Default_Add-op0.0.forward",
        "Mul.Default_Mul-op0.0.forward",
        "Mul.Default_Mul-op0.1.forward",
        "Parameter.fc_weight.0.forward",
    ]
    assert side.name[:2] == ["Add.Default_Add-op0.0.forward.input.0", "Add.Default_Add-op0.0.forward.output.0"]
    assert (side.mode, side.framework, side.dtype[0], side.shape[0]) == ("tensor", "mindspore", "Float32", [2, 3])
    assert side.stats_of(0) == (5.0, 0.0, 2.5, float(np.linalg.norm(RAMP.astype(np.float64))))


def test_two_runs_are_paired_by_rank_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table per rank and step, under the names of 8.1.1; the kernel that differs is named; times in file names do not matter."""
    target, golden = run_of(tmp_path / "a", 2.1), run_of(tmp_path / "b", 2.0, time=77_000)
    assert main(["compare", str(target), str(golden), "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "Mul.Default_Mul-op0.0.forward" in said
    assert sorted(path.name.rpartition("_")[0] for path in (tmp_path / "out").glob("*.csv")) == ["compare_result_0_0", "compare_result_0_1"]
    settings = {"npu_path": str(target), "bench_path": str(golden), "rank_id": [], "step_id": [1]}
    (tmp_path / "compare.json").write_text(json.dumps(settings))
    arguments = ["-f", "mindspore", "compare", "-i", str(tmp_path / "compare.json"), "-o", str(tmp_path / "old")]
    assert main(arguments) == 1
    (path,) = (tmp_path / "old").glob("*.xlsx")
    assert path.name.startswith("compare_result_0_1_")
    table = columns(path)
    assert list(table["NPU Name"])[:2] == ["Add.Default_Add-op0.0.forward.input.0", "Add.Default_Add-op0.0.forward.output.0"]


def test_single_points_are_paired_by_name(tmp_path: Path) -> None:
    """Names without dtype and number; repeated names in order; map_dict renames; result.csv beside the same path, with tensor columns."""
    for name, point, offset in (("t", "input", 1.0), ("g", "x", 1.5)):
        where = tmp_path / name / "step0" / "rank0"
        where.mkdir(parents=True)
        for number in (0, 2):
            np.save(where / f"{point}_float32_{number}.npy", RAMP + number * offset)
            np.save(where / f"h_bfloat16_{number + 1}.npy", RAMP)
    settings = {"npu_path": str(tmp_path / "t"), "bench_path": str(tmp_path / "g"), "common": True, "map_dict": {"input": "x"}}
    (tmp_path / "compare.json").write_text(json.dumps(settings))
    assert main(["compare", "-i", str(tmp_path / "compare.json"), "-o", str(tmp_path / "out")]) == 1
    table = columns(tmp_path / "out" / "step0" / "rank0" / "result.csv")
    rows = list(zip(table["NPU Name"], table["Bench Name"], table["NPU Dtype"], table["Accuracy Reached or Not"]))
    assert rows == [
        ("input.0.debug", "x.0.debug", "Float32", "Yes"),
        ("h.0.debug", "h.0.debug", "BFloat16", "Yes"),
        ("input.1.debug", "x.1.debug", "Float32", "No"),
        ("h.1.debug", "h.1.debug", "BFloat16", "Yes"),
    ]


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/guide/compare-static-graphs.md run as they stand there."""
    text = (
        (Path(__file__).parents[3] / "docs" / "guide" / "compare-static-graphs.md")
        .read_text(encoding="utf-8")
        .partition("\n## From kernels")[0]
    )
    monkeypatch.chdir(tmp_path)
    run_of(Path("out"), 2.1)
    run_of(Path("golden"), 2.0)
    for name, point in (("points_out", "input"), ("points_golden", "x")):
        Path(name).mkdir()
        np.save(Path(name) / f"{point}_float32_0.npy", RAMP)
    for name, block in zip(("kernels.json", "points.json"), re.findall(r"```json\n(.*?)```", text, re.DOTALL)):
        Path(name).write_text(block)
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert [main(shlex.split(line, comments=True)[1:]) for line in commands.splitlines()] == [1, 1, 0, 1, 0]
    assert Path("points/result.csv").is_file()


STATISTIC = """\
Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,Max Value,Min Value,Avg Value,L2Norm Value,NaN Count
MatMul,Default_fc_MatMul-op0,0,0,10,input,0,64,float32,"(2,8)",3,-3,0.5,{norm},0,
MatMul,Default_fc_MatMul-op0,0,0,20,output,0,64,float32,"(2,8)",nan,-3,nan,nan,2,
"""


def test_statistics_of_kernels_are_compared(tmp_path: Path) -> None:
    """What a device writes as statistic.csv, with its comma at the end of rows."""
    for name, norm in (("a", "5.5"), ("b", "5.0")):
        where = tmp_path / name / "rank_0" / "Net" / "0" / "3"
        where.mkdir(parents=True)
        (where / "statistic.csv").write_text(STATISTIC.format(norm=norm))
    (task,) = pair_paths(tmp_path / "a", tmp_path / "b").tasks
    assert (task.rank, task.step) == (0, 3)
    side = read_graph_side(task.target)
    assert side.mode == "statistics"
    assert side.stats_of(0) == (3.0, -3.0, 0.5, 5.5)
    assert side.nans == {1: 2}
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "out")]) == 1


def test_bfloat16_of_a_kernel_dump_is_read(tmp_path: Path) -> None:
    """MindSpore 2.10 writes the type ``<E2``, which numpy does not know; a file that ends before its tensor is refused."""
    header = "{'descr': '<E2', 'fortran_order': False, 'shape': (2, 2), }"
    head = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117).encode() + b"\n"
    path = tmp_path / "x.npy"
    path.write_bytes(head + np.array([0x3F80, 0x4000, 0xC000, 0x7FC0], np.uint16).tobytes())
    with open_file(path) as tensor:
        assert (tensor.dtype, tensor.shape) == ("bfloat16", (2, 2))
        np.testing.assert_array_equal(whole(tensor), np.array([[1, 2], [-2, np.nan]], np.float32))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DumpFormatError, match="cut off"):
        open_file(path)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    """Two kinds, nothing in common, damaged files and keys of the wrong type."""
    kernels = run_of(tmp_path / "kernels", 2.0)
    points = tmp_path / "points"
    points.mkdir()
    np.save(points / "x_float32_0.npy", RAMP)
    assert kind_of(tmp_path / "none") is None
    with pytest.raises(UsageError, match="two dumps of one kind"):
        pair_paths(kernels, points)
    with pytest.raises(UsageError, match="in common"):
        pair_paths(kernels, kernels, steps=[7])
    for key, value in (("rank_id", "0"), ("step_id", [-1]), ("map_dict", ["x"])):
        (tmp_path / "compare.json").write_text(json.dumps({"npu_path": "a", "bench_path": "b", key: value}))
        with pytest.raises(UsageError, match=key):
            from_json(tmp_path / "compare.json")
    where = kernels / "rank_0" / "Net" / "0" / "0"
    (where / "Mul.Default_Mul-op9.0.0.5.output.0.DefaultFormat.Float32.npy").write_bytes(b"no numbers")
    side = read_graph_side(where)
    assert "Compared without it" in side.problems[0]
    assert len(side) == 3
