"""`--compat` side by side with the existing tool: its result files, written on a CPU by `tests/fixtures/make_existing_precheck.py`,
have the cells that ours have, for a small transformer and a sweep over torch's operators."""

from __future__ import annotations

import csv
import lzma
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from msprobe_engine.accuracy.precheck.calls import read_calls
from msprobe_engine.accuracy.precheck.options import Work
from msprobe_engine.accuracy.precheck.worker import make_check
from msprobe_engine.accuracy.result_files import ResultFiles
from msprobe_engine.accuracy.result_forms import form_of
from msprobe_engine.accuracy.results import SKIP

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "precheck_existing.tar.xz"
LEFT_OUT = {
    "Tensor.cauchy_": "draws random numbers",
    "Tensor.exponential_": "draws random numbers",
    "Tensor.geometric_": "draws random numbers",
    "Tensor.log_normal_": "draws random numbers",
    "Functional.multi_head_attention_forward": "draws random numbers inside",
    "Torch.resize_as_": "gives memory that nobody has written to",
    "Functional.triplet_margin_with_distance_loss": "an argument is a module; the existing tool calls it without",
}
COMPARED = {"transformer_float32": 3_000, "transformer_bfloat16": 3_000, "sweep_float32": 20_000, "sweep_bfloat16": 18_000}
"""Cells that are equal, at least."""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("existing")
    with lzma.open(ARCHIVE) as file, tarfile.open(fileobj=file) as tar:
        tar.extractall(place, filter="data")
    return place


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A process of a check is set up for nothing else."""
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(threads)


def rows(path: Path) -> dict[str, dict[str, str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        found = list(csv.DictReader(file))
    return {next(iter(row.values())): row for row in found}


def _same_number(one: str, other: str) -> bool:
    """Of results without dimensions: what numpy 1 takes in float64, numpy 2 takes in float32; the two versions were run with one each."""
    try:
        return float(one) == pytest.approx(float(other), rel=1e-6)
    except ValueError:
        return False


@pytest.mark.parametrize("version", ["8.1.1", "26.2.0"])
@pytest.mark.parametrize("case", COMPARED)
def test_the_columns_are_those_of_the_existing_tool(dumps: Path, tmp_path: Path, case: str, version: str) -> None:
    """All columns but the messages, in every row of a call that it could run; calls that draw random numbers cannot be equal."""
    dump = read_calls(dumps / case / "rank0" / "dump.json")
    work = Work(
        framework=dump.framework, directory=str(dump.file.parent), device="cpu", dtype=None, compiled=False, bench="cpu",
        bench_dtype="raised", jit_compile=False, seed=1, condition=False, compat=version, error_data="", quantized=(), threads=1,
    )  # fmt: skip
    check = make_check(work)
    with ResultFiles.new(tmp_path, form_of(version)) as files:
        for call in dump.calls:
            files.append(check(call.name, call.record, call.backward))
    equal, calls = 0, set()
    different: list[tuple[str, str, str, str]] = []
    for theirs, ours in (("result.csv", files.result_path), ("details.csv", files.details_path)):
        found = rows(ours)
        for name, row in rows(dumps / case / version / theirs).items():
            if any(name.startswith(f"{api}.") for api in LEFT_OUT) or SKIP in (row.get("Status"), row.get("Forward Test Success")):
                continue
            calls.add(".".join(name.split(".")[:2]))
            for column, cell in row.items():
                if column != "Message":
                    same = cell == found[name][column] or (row.get("Shape") == "()" and _same_number(cell, found[name][column]))
                    equal += same
                    different += [] if same else [(name, column, cell, found[name][column])]
    assert not different
    assert equal >= COMPARED[case]
    assert len(calls) >= (300 if case.startswith("sweep") else 15)
