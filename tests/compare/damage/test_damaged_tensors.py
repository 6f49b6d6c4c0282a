"""Saved tensors that are damaged or no tensors: their rows say so, the summary counts them, the exit code is 3, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_dumps import pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msprobe_engine.cli.main import main
from msprobe_engine.find.run import diagnose
from msprobe_engine.measure.options import OLD, CompareOptions
from msprobe_engine.report.table.api import compare_dumps
from msprobe_engine.report.table_files.reading import read_table

torch = pytest.importorskip("torch")
RANK = "step0/rank0"
NAME = "Functional.linear.2.forward.output.0"


def saved(root: Path) -> tuple[Path, Path]:
    """Two equal runs with a saved tensor each: the output of the third call."""
    runs = pair(root, 1, calls=4)
    for run in runs:
        file = run / RANK / "dump.json"
        document = json.loads(file.read_text()) | {"task": "tensor"}
        values = torch.arange(16.0).reshape(4, 4)
        facts = {"Max": 15.0, "Min": 0.0, "Mean": 7.5, "Norm": float(values.norm()), "data_name": f"{NAME}.pt"}
        document["data"]["Functional.linear.2.forward"]["output"][0] |= facts | {"shape": [4, 4]}
        file.write_text(json.dumps(document, indent=1))
        (run / RANK / "dump_tensor_data").mkdir()
        torch.save(values, tensor(run))
    return runs


def tensor(run: Path) -> Path:
    return run / RANK / "dump_tensor_data" / f"{NAME}.pt"


def put(run: Path, value: Any) -> None:
    """Another saved tensor, of which dump.json says the type and the shape."""
    file = run / RANK / "dump.json"
    document = json.loads(file.read_text())
    facts = {"dtype": str(value.dtype), "shape": list(value.shape)}
    nothing = {} if value.numel() else dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    document["data"]["Functional.linear.2.forward"]["output"][0] |= facts | nothing
    file.write_text(json.dumps(document, indent=1))
    torch.save(value, tensor(run))


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


SPOILS: dict[str, Callable[[Path, Path], Any]] = {
    "removed": lambda file, _: file.unlink(),
    "empty": lambda file, _: file.write_bytes(b""),
    "cut off": lambda file, _: file.write_bytes(file.read_bytes()[:-30]),
    "no tensor": lambda file, _: torch.save([torch.ones(2)], file),
    "a pickle": lambda file, mark: file.write_bytes(pickle.dumps(Harmful(mark))),
    "a pickle in a zip": lambda file, mark: torch.save(Harmful(mark), file),
    "a pickle of old": lambda file, mark: torch.save(Harmful(mark), file, _use_new_zipfile_serialization=False),
    "a pipe": lambda file, _: (file.unlink(), os.mkfifo(file)),
    "a link": lambda file, _: (file.rename(file.with_name("x.pt")), file.symlink_to("x.pt")),
    "a directory": lambda file, _: (file.unlink(), file.mkdir()),
    "sparse": lambda file, _: torch.save(torch.eye(4).to_sparse(), file),
    "endless": lambda file, _: torch.save(torch.ones(1).expand(10**6, 10**6, 10), file),
}


@pytest.mark.parametrize("how", SPOILS)
def test_a_tensor_that_cannot_be_read(tmp_path: Path, how: str) -> None:
    """Of both generations: exit code 3, the row and the reason among the problems, a message in the row, and nothing was run."""
    target, golden = saved(tmp_path)
    assert compare_dumps(target, golden, tmp_path / "out").exit_code == 0
    SPOILS[how](tensor(target), tmp_path / "mark")
    for options in (CompareOptions(), CompareOptions(columns=OLD), CompareOptions(compat=True), CompareOptions(columns=OLD, compat=True)):
        found = compare_dumps(target, golden, tmp_path / str(options.columns + str(options.compat)), options)
        assert found.exit_code == 3
        assert f"1 rows have a saved tensor that could not be read, the first is {NAME}" in found.all_problems[0]
        header, *rows = read_table(Path(found.files[0]))
        row = next(row for row in rows if row[0] == NAME)
        assert row[header.index("Err_message")]
    seen = diagnose(target, golden)
    assert seen.finding == "none"
    assert NAME in seen.problems[0]
    assert main(["diagnose", str(target), str(golden), "-o", str(tmp_path)]) == 3
    assert main(["compare", "-da", "-tp", str(target), "-gp", str(golden), "-o", str(tmp_path)]) == 3
    assert not (tmp_path / "mark").exists()


@given(data=st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_bytes_of_a_file_that_changed(data: st.DataObject) -> None:
    """Cut off anywhere, or with any bytes changed: the comparison ends with a table of all rows."""
    with tempfile.TemporaryDirectory() as root:
        target, golden = saved(Path(root))
        content = bytearray(tensor(target).read_bytes())
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
            content[at] = data.draw(st.integers(0, 255))
        tensor(target).write_bytes(content[: data.draw(st.integers(0, len(content)))])
        found = compare_dumps(target, golden, Path(root) / "out")
        assert found.results[0].rows == 16
        assert found.exit_code in (0, 1, 3)
        assert not any("unexpected" in problem for problem in found.all_problems)


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd", "..", "a\0b", "x" * 5000, "\ud800.pt", "../dump.json"])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    """A data_name is a file of the rank's directory or nothing."""
    target, golden = saved(tmp_path)
    for run in (target, golden):
        file = run / RANK / "dump.json"
        document = json.loads(file.read_text())
        document["data"]["Functional.linear.2.forward"]["output"][0]["data_name"] = name
        file.write_text(json.dumps(document, indent=1))
    found = compare_dumps(target, golden, tmp_path / "out")
    assert found.exit_code == 3
    assert "root:" not in (tmp_path / "out").joinpath(Path(found.files[0]).name).read_text()


@pytest.mark.parametrize("one", ["complex64", "float8_e4m3fn", "bfloat16", "int64", "bool", "float64", "uint8"])
def test_types_against_each_other(tmp_path: Path, one: str) -> None:
    """Any two types are compared by value; complex against real too. The existing tool does not look whether they are those of the dump."""
    target, golden = saved(tmp_path)
    values = torch.ones(4, 4).to(getattr(torch, one)), torch.ones(4, 4)
    for run, value in zip((target, golden), values):
        torch.save(value, tensor(run))
    found = compare_dumps(target, golden, tmp_path / "out", CompareOptions(compat=True), diagnose=False)
    header, *rows = read_table(Path(found.files[0]))
    assert float(next(row for row in rows if row[0] == NAME)[header.index("MaxAbsErr")]) == 0.0
    assert found.all_problems == []
    for run, value in zip((target, golden), values):
        put(run, value)
    assert compare_dumps(target, golden, tmp_path / "out").all_problems == []


def test_no_rows(tmp_path: Path) -> None:
    """Tensors without elements are equal."""
    target, golden = saved(tmp_path)
    for run in (target, golden):
        put(run, torch.ones(0, 4))
    assert compare_dumps(target, golden, tmp_path / "out").exit_code == 0


def test_an_array_of_objects(tmp_path: Path) -> None:
    """A .npy with pickled objects is not unpickled."""
    target, golden = saved(tmp_path)
    for run in (target, golden):
        file = run / RANK / "dump.json"
        file.write_text(file.read_text().replace(f"{NAME}.pt", f"{NAME}.npy"))
        np.save(tensor(run).with_suffix(".npy"), np.ones(3, np.float32))
    np.save(tensor(target).with_suffix(".npy"), np.array([Harmful(tmp_path / "mark")], dtype=object), allow_pickle=True)
    found = compare_dumps(target, golden, tmp_path / "out")
    assert found.exit_code == 3
    assert "nothing in it is executed" in found.all_problems[0]
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("mode", ["csv", "xlsx", "html", "parquet"])
def test_a_disk_that_is_full(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line, and no part of a table is left, nor anything in the directory for temporary files."""
    target, golden = pair(tmp_path, 2, calls=1000)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    command = ["compare", "-tp", str(target), "-gp", str(golden), "-o", str(tmp_path / "out"), f"--{mode}", "--no_diagnose"]
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a module that is compiled meanwhile would be kept, cut off
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # of this process and of those that it starts
    try:
        code = main(command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert code == 2, said
    assert "a file of this process may have 20,000 bytes and no more" in said
    assert "Traceback" not in said
    assert list((tmp_path / "out").iterdir()) == []
    assert list(scratch.iterdir()) == []
