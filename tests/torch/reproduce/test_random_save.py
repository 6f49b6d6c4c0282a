"""`random_save`: the list of calls that draw random numbers."""

from __future__ import annotations

import csv
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from existing_environment import environment_of, existing_tool
from torch import nn
from torch.nn import functional

from msprobe.pytorch import random_save, random_save_end, seed_all, undo_seed_all
from msprobe_engine.core.errors import SinkError, UsageError
from msprobe_engine.core.io.safe_cells import safe_cell


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    random_save_end()
    undo_seed_all()


def listed(directory: Path) -> list[dict[str, str]]:
    """The rows of the one file."""
    (path,) = directory.iterdir()
    assert path.read_bytes().startswith(b"\xef\xbb\xbfapi_name,stack\r\n")
    with open(path, newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def test_calls_and_stacks(tmp_path: Path) -> None:
    """One row per call in order, numbered per function, with the program's lines innermost first; the file is named after the process
    and is complete after every call."""
    random_save(str(tmp_path / "out"))
    torch.rand(1)
    random.random()
    np.random.rand()
    torch.rand(1)
    nn.init.xavier_uniform_(torch.empty(2, 2))
    rows = listed(tmp_path / "out")
    assert [r["api_name"] for r in rows] == [
        "torch_random.rand.0",
        "python_random.random.0",
        "numpy_random.rand.0",
        "torch_random.rand.1",
        "tensor_random.uniform_.0",
    ]
    assert re.fullmatch(rf"random_proc{os.getpid()}_\d{{14}}\.csv", next((tmp_path / "out").iterdir()).name)
    lines = rows[0]["stack"].split(" \nFile ")
    assert re.match(rf"File {re.escape(__file__)}, line \d+, in test_calls_and_stacks, \n torch.rand\(1\)", lines[0])
    assert "torch/nn/init.py" in rows[4]["stack"].split("\n")[0]


def test_only_what_draws(tmp_path: Path) -> None:
    """Functions that draw with some arguments only are listed when they did: dropout in training, attention with dropout, a recurrent
    layer with dropout between its layers; calls with a generator of their own are listed too."""
    x = torch.ones(1, 2, 4)
    dropped, plain = nn.LSTM(4, 4, 2, dropout=0.5), nn.LSTM(4, 4, 2)
    random_save(tmp_path)
    functional.dropout(x, 0.5, training=False)
    functional.scaled_dot_product_attention(x, x, x)
    plain(x)
    functional.dropout(x, 0.5)
    functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    dropped(x)
    torch.randperm(3, generator=torch.Generator())
    assert [r["api_name"].split(".", 1)[1] for r in listed(tmp_path)] == [
        "dropout.0",
        "scaled_dot_product_attention.0",
        "lstm.0",
        "randperm.0",
    ]


def test_numbers_are_the_same(tmp_path: Path) -> None:
    """Listing draws nothing itself."""

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.random(), np.random.rand(), functional.dropout(torch.ones(9)).tolist()

    seed_all(5)
    expected = draw()
    seed_all(5)
    random_save(tmp_path)
    assert draw() == expected


def test_together_with_seed_all(tmp_path: Path) -> None:
    """Listing, fixed states and removed dropout work together, whichever comes first, and all are gone in the end."""
    rand, dropout = torch.rand, functional.dropout
    random_save(tmp_path)
    seed_all(5, rm_dropout=True, is_enhanced=True)
    assert torch.equal(torch.rand(2), torch.rand(2))
    assert torch.equal(functional.dropout(torch.ones(9)), torch.ones(9))
    undo_seed_all()
    assert not torch.equal(torch.rand(2), torch.rand(2))
    functional.dropout(torch.ones(9))
    assert [r["api_name"] for r in listed(tmp_path)] == [*(f"torch_random.rand.{i}" for i in range(4)), "functional_random.dropout.0"]
    random_save_end()
    assert (torch.rand, functional.dropout) == (rand, dropout)


def test_ended(tmp_path: Path) -> None:
    """After the end nothing is listed; ending twice does nothing."""
    random_save(tmp_path)
    torch.rand(1)
    random_save_end()
    torch.rand(1)
    random_save_end()
    assert len(listed(tmp_path)) == 1


def test_two_in_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every list has a file of its own, however soon it follows the one before."""
    monkeypatch.setattr("time.strftime", lambda _: "20260101000000")
    for _ in range(3):
        random_save(tmp_path)
        torch.rand(1)
        random_save_end()
    assert sorted(p.stem.rpartition("20260101000000")[2] for p in tmp_path.iterdir()) == ["", "_2", "_3"]
    assert all(p.read_text().count("torch_random.rand.0") == 1 for p in tmp_path.iterdir())


def test_forked_workers_are_not_listed(tmp_path: Path) -> None:
    """A forked child's calls are not this process': its rows would share the numbers."""
    random_save(tmp_path)
    if (child := os.fork()) == 0:
        torch.rand(1)
        os._exit(0)
    os.waitpid(child, 0)
    assert listed(tmp_path) == []


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@x", "\tx", "\rx"])
def test_no_cell_is_a_formula(cell: str) -> None:
    """A cell that a spreadsheet would run gets an apostrophe in front."""
    assert next(csv.reader([safe_cell(cell)]))[0] == "'" + cell


def test_source_lines_are_cells(tmp_path: Path) -> None:
    """Quotes, commas and line breaks of the program's lines come back from the file as they were."""
    random_save(tmp_path)
    torch.rand(1), '"quoted", twice'
    assert "torch.rand(1), '\"quoted\", twice'" in listed(tmp_path)[0]["stack"]


def test_bad_places(tmp_path: Path) -> None:
    """What is no path is refused with the value; a directory that cannot be made is named. Nothing is wrapped then."""
    rand = torch.rand
    with pytest.raises(UsageError, match="output_path is 3"):
        random_save(3)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    with pytest.raises(SinkError, match="file"):
        random_save(tmp_path / "file" / "deeper")
    assert torch.rand is rand


def test_full_disk_ends_the_list_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """When a row cannot be written, listing is off with one message and the program goes on."""
    random_save(tmp_path)
    from msprobe_engine.core.io.output_files import AppendFile

    def full(*_: Any) -> None:
        raise SinkError("cannot write: no space left; free some space")

    monkeypatch.setattr(AppendFile, "append", full)
    torch.rand(1)
    torch.rand(1)
    assert capsys.readouterr().err.count("no space left") == 1


EXISTING = """
import random, numpy as np, torch
from msprobe.pytorch import random_save
random_save("out")
def draw():
    torch.rand(1); torch.rand(1); random.random(); np.random.rand(); torch.empty(2).uniform_(); random.shuffle([1, 2])
draw()
"""


@pytest.mark.slow
@pytest.mark.existing_tool
def test_file_of_the_existing_tool(tmp_path: Path) -> None:
    """The file is byte for byte that of the existing tool for functions that both know."""
    made = []
    script = tmp_path / "script.py"
    script.write_text(EXISTING)
    for name, python in (("ours", sys.executable), ("theirs", str(existing_tool("26.2.0").python))):
        (tmp_path / name).mkdir()
        subprocess.run([python, str(script)], capture_output=True, env=environment_of(python), timeout=240, check=True, cwd=tmp_path / name)
        (path,) = (tmp_path / name / "out").iterdir()
        made.append(path.read_bytes())
    assert made[0] == made[1]
