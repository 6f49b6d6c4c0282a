"""`SingleSave` with ``fmk="mindspore"``: the same files as with torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mindspore
import numpy as np
import pytest

from msprobe.core import SingleComparator, SingleSave


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    SingleSave._instance = None
    yield
    SingleSave._instance = None


def test_tensors_of_a_loop(tmp_path: Path) -> None:
    """Tensors, lists and dicts of them by key, step and micro step, bfloat16 as float32; other values are left out; two runs compare."""
    for run in ("a", "b"):
        SingleSave._instance = None
        SingleSave(tmp_path / run, fmk="mindspore")
        low = mindspore.Tensor([[1.5, -2.0]], mindspore.bfloat16)
        SingleSave.save({"prompt": mindspore.Tensor([1, 2, 3], mindspore.int32), "no": 3})
        SingleSave.save({"prompt": mindspore.Tensor([4]), "logits": [low, {"x": mindspore.Parameter(mindspore.Tensor([0.5]))}]})
        SingleSave.step()
        SingleSave.save_ex({"prompt": mindspore.Tensor(True)}, 7)
        SingleSave.save_config({"lr": 0.1})
    place = tmp_path / "a" / "data"
    assert np.load(place / "prompt/step0/rank0/micro_step1/prompt.npy").tolist() == [4]
    saved = np.load(place / "logits/step0/rank0/micro_step0/logits.0.npy")
    assert (saved.dtype, saved.tolist()) == (np.float32, [[1.5, -2.0]])
    assert np.load(place / "logits/step0/rank0/micro_step0/logits.1.x.npy").tolist() == [0.5]
    facts = json.loads((place / "logits/step0/rank0/micro_step0/logits.json").read_text())["data"]
    assert facts[0] == {"max": 1.5, "min": -2.0, "mean": -0.25, "norm": 2.5, "shape": [1, 2]}
    assert (place / "prompt/step1/rank0/micro_step7/prompt.npy").exists()
    assert not (place / "no").exists()
    SingleComparator.compare(tmp_path / "a", tmp_path / "b", tmp_path / "result", file_format="csv")
    assert (tmp_path / "result" / "prompt.csv").exists()
