"""Functions of MindSpore that a program pickles while they are looked at."""

from __future__ import annotations

import pickle

from mindspore import Tensor, mint, ops
from ms_capturing import capture, tensor


def test_functions_are_pickled_in_a_window() -> None:
    """pickle takes functions and methods while a capture looks at them, and gives the functions themselves afterwards."""
    kept: list[bytes] = []
    own = (ops.relu, mint.matmul, Tensor.sum)

    def work() -> None:
        ops.relu(tensor())
        kept.extend(pickle.dumps(function) for function in (ops.relu, mint.matmul, Tensor.sum))

    capture(None, work, "L1")
    assert [pickle.loads(data) for data in kept] == list(own)
