"""Functions of torch that torch's own list of operations does not have, in the pre-check."""

from __future__ import annotations

import torch
from call_records import Memory, check

from msprobe_engine.accuracy.results import PASS, SKIP
from msprobe_integrations.torch.accuracy.checker import Checker


def test_functions_that_torch_does_not_list() -> None:
    """Functions that torch has, and has not in its list of operations, are run; those that draw numbers, take files, or are no operations
    are not. A layout, of which a dump says no more than that it is one, is the usual one."""
    x, ones = torch.randn(4, 6, requires_grad=True), torch.ones(3, 2)
    strided = check("Torch.as_strided.0", x, (3, 2), (6, 1), 1, grad=ones)
    lengths = check("Torch.segment_reduce.0", x, "sum", lengths=torch.tensor([1, 3]), grad=torch.ones(2, 6))
    assert {(r.forward, r.backward) for r in (strided, lengths)} == {(PASS, PASS)}
    assert {check(f"Torch.{name}.0", torch.randn(5)).forward for name in ("zero_", "relu_", "exp_")} == {PASS}
    memory = Memory()
    record = memory.record((torch.randn(3),), {}, torch.zeros(3))
    record["input_kwargs"] = {"layout": {"type": "torch.layout", "value": None}}
    assert Checker(memory).check("Torch.zeros_like.0", record, None).result.forward == PASS
    for name in ("rrelu_", "dropout_", "from_file", "set_printoptions", "cudnn_is_acceptable", "resize_as_sparse_"):
        assert check(f"Torch.{name}.0", torch.randn(5)).forward == SKIP, name
