"""The vocabulary of two frameworks: every function of mindspore.mint has its counterpart in PyTorch, and no name has two meanings."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from msprobe_engine.align.frameworks import vocabulary
from msprobe_engine.align.frameworks.vocabulary import of_class, of_function, of_parameter

LIST = """
import json
from mindspore import mint, ops
import mindspore.mint.nn.functional as F
names = lambda m: [n for n in dir(m) if not n.startswith("_") and callable(getattr(m, n)) and not isinstance(getattr(m, n), type)]
print(json.dumps({"Mint": names(mint), "MintFunctional": names(F), "Functional": names(ops)}))
"""
INTERNAL = {"constexpr", "equal_ext_op", "jit_forbidden_register", "jit_view_unsupported", "npu_gelu", "squeeze_impl"}
"""Names in mindspore.mint that are no functions of its documentation."""


SAME_MEANING = [
    (("Primitive.matmul", "BatchMatMul"), ("Torch", "bmm")), (("Tensor", "__matmul__"), ("Torch", "matmul")),
    (("Mint", "gather"), ("Torch", "gather")), (("Functional", "gather_d"), ("Torch", "gather")),
    (("Functional", "gather"), ("Torch", "index_select")), (("Functional", "select"), ("Torch", "where")),
    (("Functional", "dense"), ("Functional", "linear")), (("Primitive.softmax", "Softmax"), ("Functional", "softmax")),
    (("Tensor", "__radd__"), ("Tensor", "add_")), (("Functional", "expand_dims"), ("Tensor", "unsqueeze")),
]  # fmt: skip


def test_one_meaning() -> None:
    """Functions that compute the same have one word, whatever their name and form."""
    assert [pair for pair in SAME_MEANING if of_function(*pair[0], "mindspore") != of_function(*pair[1], "pytorch")] == []


def test_no_name_has_two_meanings() -> None:
    """A name stands in the tables once; classes and parameters have the names of PyTorch."""
    names = Counter(
        vocabulary._plain(name)
        for line in vocabulary._FUNCTIONS.strip().splitlines()
        for name in (line.partition(":")[0], *line.partition(":")[2].split())
    )
    assert [name for name, number in names.items() if number > 1] == []
    assert (of_class("Dense"), of_class("SequentialCell")) == (of_class("Linear"), of_class("Sequential"))
    assert [of_parameter(name) for name in ("gamma", "beta", "embedding_table", "0.moving_mean", "scale")] == [
        "weight", "bias", "weight", "0.running_mean", "scale",
    ]  # fmt: skip


@pytest.mark.skipif("MINDSPORE_ENVIRONMENT" not in os.environ, reason="MINDSPORE_ENVIRONMENT names no environment with mindspore")
@pytest.mark.slow
def test_all_of_mint(tmp_path: Path) -> None:
    """Every function of mindspore.mint and mint.nn.functional, and most of mindspore.ops, mean something that PyTorch has."""
    python = str(Path(os.environ["MINDSPORE_ENVIRONMENT"]) / "bin" / "python")
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    done = subprocess.run([python, "-c", LIST], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    listed = json.loads(done.stdout.splitlines()[-1])
    places = {"Torch": torch, "Functional": torch.nn.functional, "Tensor": torch.Tensor}
    known = {of_function(kind, name, "pytorch") for kind, place in places.items() for name in dir(place)}
    without = {kind: {name for name in some if of_function(kind, name, "mindspore") not in known} for kind, some in listed.items()}
    assert without["Mint"] <= INTERNAL
    assert not without["MintFunctional"]
    assert len(without["Functional"]) < 0.42 * len(listed["Functional"])  # sparse tensors, lists, operators of one platform
