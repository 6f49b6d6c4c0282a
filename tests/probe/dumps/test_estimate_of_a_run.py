"""Estimates against real dumps of a small transformer; saved tensors of both formats read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_transformer import train

from msprobe import dump
from msprobe_engine.probe.estimate.forecast import Estimate

TRAINED = [
    *(("statistics", level, "") for level in ("L0", "L1", "mix")),
    ("structure", "mix", ""),
    *(("tensor", level, form) for level in ("L0", "mix") for form in ("files", "packed")),
]
"""Task, level and tensor format of the runs."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Rank directories by ``task-level[-format]``."""
    root = tmp_path_factory.mktemp("runs")
    made = {}
    for task, level, form in TRAINED:
        name = "-".join(filter(None, (task, level, form)))
        section = {"tensor_format": form} if form else {}
        config = {"task": task, "level": level, "dump_path": str(root / name), "rank": [], "step": [1], task: section}
        (made[name],) = train(config)
    return made


def sizes(directory: Path) -> tuple[dict[str, int], int, int]:
    """Bytes of the JSON files, names of tensor files, and their bytes, links once."""
    json_bytes = {p.name: p.stat().st_size for p in directory.glob("*.json")}
    found = list((directory / "dump_tensor_data").glob("*"))
    once = {p.stat().st_ino: p.stat().st_size for p in found}
    return json_bytes, len(found), sum(once.values())


def cost(made: Estimate) -> Any:
    (found,) = made.per_rank.values()
    return found


@pytest.mark.parametrize("source", ["statistics", "structure"])
@pytest.mark.parametrize(("task", "level", "form"), [trained for trained in TRAINED if trained[0] != "structure"])
def test_every_file(runs: dict[str, Path], source: str, task: str, level: str, form: str) -> None:
    """From a mix dump, the size of every JSON file is within 5 %, the number of files exact; bytes of tensor files lie in the range
    given, and are within 5 % where the source says which tensors are the same (task structure)."""
    target = "-".join(filter(None, (task, level, form)))
    settings = {"tensor_format": form} if form else {}
    made = cost(dump.estimate(runs[f"{source}-mix"], task=task, level=level, **settings))
    json_bytes, names, tensor_bytes = sizes(runs[target])
    assert made.json_bytes == pytest.approx(json_bytes, rel=0.05, abs=60)
    assert made.files == len(json_bytes) + names
    low, high = made.tensor_bytes
    assert 0.95 * low <= tensor_bytes <= 1.05 * high
    if source == "structure":
        assert low == high
    assert made.records == len(dump.read(runs[target])[1])


def test_the_structure_dump_itself(runs: dict[str, Path]) -> None:
    """The files of a structure dump, shapes.json too, are estimated from a statistics dump within 5 %."""
    made = cost(dump.estimate(runs["statistics-mix"], task="structure"))
    assert made.json_bytes == pytest.approx(sizes(runs["structure-mix"])[0], rel=0.05, abs=60)


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_both_formats_read_alike(runs: dict[str, Path], level: str) -> None:
    """Every saved tensor, of files and packed, is there under the same name with the same bits, as numpy array and as torch tensor,
    and its statistics are those of the dump."""
    loose, packed = (dump.read(runs[f"tensor-{level}-{form}"])[1] for form in ("files", "packed"))
    assert list(loose) == list(packed)
    seen = set()
    for name, record in loose.items():
        for place, tensor in record.tensors.items():
            other = packed[name].tensor(place)
            array = tensor.load()
            assert array.shape == tensor.shape
            assert np.array_equal(array, other.load(), equal_nan=True)
            ours, theirs = tensor.torch(), other.torch()
            assert torch.equal(ours, theirs)
            assert str(ours.dtype) == str(theirs.dtype) == tensor.dtype
            if array.dtype == np.float32 and array.size:
                assert tensor.max == pytest.approx(float(array.max()))
                assert tensor.norm == pytest.approx(float(np.linalg.norm(array.astype(np.float64))), rel=1e-6)
            assert tensor.path is not None
            assert other.path is not None
            assert other.path.suffix == ".safetensors"
            seen.add(tensor.dtype)
    assert seen >= {"torch.float32", "torch.int64"} | ({"torch.bfloat16"} if level == "mix" else set())
    assert loose.not_saved == {}


def test_a_table_of_saved_tensors(runs: dict[str, Path]) -> None:
    """The table names the file of every saved tensor."""
    pytest.importorskip("pandas")
    table = dump.read(runs["tensor-mix-files"]).frame(kind="module", direction="forward")
    assert table["data_name"].notna().all()
    assert set(table["module"]) >= {"tokens", "blocks.0.mlp.1", "head"}
