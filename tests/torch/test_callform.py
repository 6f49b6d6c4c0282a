"""Arguments stand in a record as the caller wrote them, though torch's Python functions hand them on with their defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import capture
from torch import nn

from msprobe_engine.records import Opaque, TensorRef

X = torch.arange(16.0).reshape(2, 8)
T = "tensor"
OPTIONS = {"eps": 1e-4}
NORM = nn.LayerNorm(8)


def shown(value: Any) -> Any:
    """A structure with tensors as `T` and scalars bare."""
    if isinstance(value, TensorRef):
        return T
    if isinstance(value, Opaque):
        return value.json["value"] if isinstance(value.json, dict) else value.json
    if isinstance(value, dict):
        return {k: shown(v) for k, v in value.items()}
    return [shown(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("call", "args", "kwargs"),
    [
        (lambda: F.softmax(X, -1), [T, -1], {}),
        (lambda: F.softmax(X, dim=-1), [T], {"dim": -1}),
        (lambda: F.layer_norm(X, (8,)), [T, [8]], {}),
        (lambda: F.layer_norm(X, (8,), eps=1e-3), [T, [8]], {"eps": 1e-3}),
        (lambda: NORM(X), [T, [8], T, T, 1e-5], {}),
        (lambda: F.cross_entropy(input=X, target=torch.ones(2, dtype=torch.int64)), [], {"input": T, "target": T}),
        (lambda: F.max_pool2d(X[None, None], 2, stride=1), [T, 2], {"stride": 1}),
        (lambda: X.norm(), [T], {}),
        (lambda: X.norm(2), [T, 2], {}),
        (lambda: X.norm(dim=0), [T], {"dim": 0}),
        (lambda: torch.norm(X, 2), [T, 2], {}),
        (lambda: torch.Tensor.norm(X, 2), [T, 2], {}),
        (lambda: torch.Tensor.norm(X, p=2), [T], {"p": 2}),
        (lambda: torch.Tensor.split(X, split_size=2), [T], {"split_size": 2}),
        (lambda: torch.Tensor.norm(self=X, p=2), [], {"self": T, "p": 2}),
        (lambda: torch.Tensor.norm(X, 2, dim=0, keepdim=True), [T, 2], {"dim": 0, "keepdim": True}),
        # where the instruction does not tell, nothing that was given is lost
        (lambda: F.layer_norm(X, (8,), **OPTIONS), [T, [8]], {"weight": None, "bias": None, "eps": 1e-4}),
        (lambda: functools.partial(F.softmax, dim=0)(X), [T], {"dim": 0, "_stacklevel": 3, "dtype": None}),
        (lambda: list(map(F.softmax, [X], [0])), [T], {"dim": 0, "_stacklevel": 3, "dtype": None}),
    ],
)
def test_arguments(call: Callable[[], Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    """The last record of the call has these arguments."""
    frame = capture(None, call, "L1")[0]
    entry = next(e for e in reversed(frame.entries) if e.name.endswith(".forward"))
    assert shown(entry.sections["input_args"]) == args
    assert shown(entry.sections["input_kwargs"]) == kwargs
