"""Pairs of results, of bench and device, for the verdict of the existing tool. numpy alone, and the same numbers everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

APIS = ("add_", "relu", "matmul", "conv1d", "softmax", "__matmul__", "topk")
WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
INF, NAN = float("inf"), float("nan")
EDGES = (
    ([0.0, 0, 0], [0.0, 0, 0]), ([0.0, 0, 0], [1.0, 0, 0]), ([1.0, 0, 0], [0.0, 0, 0]), ([NAN, 1, 2], [NAN, 1, 2]),
    ([NAN, 1, 2], [0.0, 1, 2]), ([INF, 1, 2], [INF, 1, 2]), ([-INF, 1, 2], [-INF, 1, 2]), ([1.0, 1, 2], [NAN, 1, 2]),
    ([1e30, 1, 2], [INF, 1, 2]), ([7e4, 1, 2], [65504.0, 1, 2]), ([1e-40, 1e-45, 2], [0.0, 0, 2]), ([INF, 1, 2], [-INF, 1, 2]),
    ([1e-17, 1e-18], [1e-17, 1e-18]), ([1e-17, 1e-18], [1e-3, 1e-18]),
    ([2.0**-20, 2.0**-10, 2.0**-21], [2.0**-20, 2.0**-10 * 1.001, 2.0**-21]),
)  # fmt: skip


class Case(NamedTuple):
    """Values that are not rounded yet, and the types both sides have."""

    api: str
    bench: Any
    device: Any
    bench_dtype: str
    device_dtype: str


def numbers(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Evenly spread over -1 to 1."""
    words = (np.arange(1, count + 1, dtype=np.uint64) * 2654435761 + seed * 40503) * 2246822519 % 2**32
    return words.astype(np.float64) / 2**31 - 1


def cases(side: str = "npu") -> Iterator[Case]:
    """All pairs; those of the second side have other errors, and some are exact."""
    seed = 0
    for dtype, wide in WIDER.items():
        for api in APIS:
            for shape in ((), (1,), (5,), (2, 3, 4)):
                for size in (1e-5, 1.0, 3e4):
                    for noise in (0.0, 1e-6, 8e-4, 2e-2):
                        seed += 1
                        count = int(np.prod(shape))
                        bench = np.asarray(numbers(count, seed).reshape(shape) * size)
                        error = noise if side == "npu" else (0.0, 1e-6, 1e-3)[seed % 3]
                        device = np.asarray(bench * (1 + error * numbers(count, seed + 7).reshape(shape)))
                        yield Case(api, bench, device, wide, dtype)
            for one, other in EDGES:
                yield Case(api, np.array(one), np.array(other), wide, dtype)
    for api in APIS[:3]:
        bench = numbers(300, 1)
        yield Case(api, bench, bench * (1 + 1e-4 * numbers(300, 2)), "float64", "float64")
        yield Case(api, bench + 0.5j, bench + 0.5j, "complex128", "complex64")
        for dtype in INTEGERS:
            whole = (numbers(10, 3) > 0).astype(np.int64)
            flipped = whole.copy()
            flipped[0] = 1 - flipped[0]
            yield Case(api, whole, whole, dtype, dtype)
            yield Case(api, whole, flipped, dtype, dtype)
        yield Case(api, np.zeros(3), np.zeros(4), "float32", "float32")
        yield Case(api, np.zeros(0), np.zeros(0), "float32", "float32")
        yield Case(api, np.zeros(3), np.zeros(3), "float32", "int64")
        for left, right in ((1, 1), (1.5, 1.5), (1.5, 1.25), (True, False), ("a", "a"), (None, None), (1, 1.0)):
            yield Case(api, left, right, str(type(left)), str(type(right)))


def name(case: Case, number: int) -> str:
    """Two rows a call."""
    return f"Torch.{case.api}.{number // 2}.{'backward' if number % 2 else 'forward'}.output.0"
