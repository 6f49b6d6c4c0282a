"""Rows of what an optimizer makes of a gradient: agreement with the momentum, the update, Adam's ratio; and histograms.

`PairRows` is the part of `MindSporeBackend` that writes them, by the engine's kernels, without an operator of the framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mindspore
import numpy as np

from msprobe_engine.core.guard import is_of_training
from msprobe_engine.core.records import TensorDescription, TensorRef
from msprobe_engine.core.statistics import histograms, host_kernel, pairs
from msprobe_engine.core.statistics.rows import Rows
from msprobe_integrations.common.capture.descriptions import intern
from msprobe_integrations.common.parameters.update_pairs import Factor, Pair, PairReducer, ratio_pair
from msprobe_integrations.mindspore.statistics.pending import Step
from msprobe_integrations.mindspore.tensors import npy
from msprobe_integrations.mindspore.tensors.memory import memory_of

_WITHOUT = ~(host_kernel.WANT_DIGEST | host_kernel.WANT_CRC | host_kernel.WANT_XOR)


class _MindSpore:
    """`update_pairs.Tensors` of MindSpore: all numbers are read on the host."""

    @staticmethod
    def is_tensor(value: Any) -> bool:
        return isinstance(value, mindspore.Tensor)

    @staticmethod
    def numel(tensor: Any) -> int:
        return math.prod(tensor.shape)

    @staticmethod
    def number(value: Any) -> Factor:
        return float(npy.array_of(value).reshape(())) if isinstance(value, mindspore.Tensor) else float(value)

    @staticmethod
    def correction(beta: float, step: Factor) -> Factor:
        return 1.0 - beta ** max(float(step), 1.0)

    @staticmethod
    def add_scaled(a: Any, factor: float, b: Any, other: float) -> Any:
        return mindspore.Tensor(npy.array_of(a) * factor + npy.array_of(b) * other)


class PairRows(PairReducer):
    """Rows of pairs, and histograms. None of these calls raises but what the training itself has failed with: what cannot be read has
    row -1 and is counted in `unsupported`."""

    _step: Step
    _want: int
    tensors = _MindSpore()
    describe: Callable[[Any], TensorDescription]
    _without: Callable[[TensorDescription, str], TensorRef]

    def reduce_pair(self, pair: Pair) -> TensorRef:
        step, row = self._step, -1
        try:
            a, b = memory_of(pair.a), memory_of(pair.b)
            for memory in (a, b):
                if memory.code not in pairs.CODES:
                    return self._without(a.description, f"no pair kernel: {memory.description.dtype}")
                if not memory.pointer:
                    return self._without(a.description, "not initialised")
            if a.numel != b.numel:
                return self._without(a.description, "pair of different sizes")
            packed_a, packed_b = a.pack(), b.pack()
            made = "Float64" if host_kernel.CODES["float64"] in (a.code, b.code) else "Float32"
            row = next(step.numbers)
            c = (float(pair.c[0]), float(pair.c[1]), float(pair.c[2]))
            address, want = step.host.address(row), self._want & _WITHOUT
            pairs.reduce(pair.op, packed_a.pointer, a.code, packed_b.pointer, b.code, a.numel, address, want, c)
            return TensorRef(row, intern(*a.description._replace(dtype=made)))
        except Exception as error:
            if is_of_training(error):
                raise
            if row >= 0:
                step.host.clear(row)
            return self._without(self.describe(pair.a), f"pair: {type(error).__name__}: {str(error)[:80]}")

    def histogram(self, tensor: Any, kind: str) -> int:
        """Count the elements of a tensor in bins (`msprobe_engine.core.statistics.histograms`).

        Args:
            kind: ``linear`` or ``log2``.

        Returns:
            The first of `histograms.row_count` rows of this step, or -1.
        """
        try:
            memory = memory_of(tensor)
            if memory.code < 0 or not memory.pointer:
                why = "not initialised" if memory.code >= 0 else f"no kernel: {memory.description.dtype}"
                return self._without(memory.description, why).row
            counts = histograms.count(memory.pointer, memory.description.shape, memory.steps(), memory.code, kind)
            return self._write_rows(histograms.to_rows(counts, memory.numel))
        except Exception as error:
            if is_of_training(error):
                raise
            return self._without(self.describe(tensor), f"histogram: {type(error).__name__}: {str(error)[:80]}").row

    def histogram_of_update(self, states: Mapping[str, Any], hyper: Mapping[str, Any], eps: float, kind: str) -> int:
        """`histogram` of Adam's m_hat / (sqrt(v_hat) + eps); -1 where the states are others."""
        pair = ratio_pair(self.tensors, "adam", states, hyper)
        if pair is None:
            return -1
        a, b = (npy.array_of(tensor).astype(np.float32).reshape(-1) for tensor in (pair.a, pair.b))
        values = pairs.values(pairs.RATIO, a, b, (float(pair.c[0]), float(pair.c[1]), eps))
        return self._write_rows(histograms.to_rows(histograms.count_values(values, kind), values.size))

    def _write_rows(self, rows: Rows) -> int:
        """Write rows to numbers that follow each other; the first of them."""
        step = self._step
        first = step.host.consecutive(step.numbers, len(rows))
        step.host.write_rows(first, rows)
        return first
