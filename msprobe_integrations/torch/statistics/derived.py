"""Rows of what an optimizer makes of a gradient: agreement with the momentum, the update, Adam's ratio; and histograms.

`PairRows` is the part of `TorchBackend` that writes them. Each is the row of a tensor that never exists as a whole, so that rows of
shards merge as any others do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import TensorDescription, TensorRef
from msprobe_engine.core.statistics import histograms, host_kernel, pairs
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.common.capture.descriptions import intern
from msprobe_integrations.common.parameters.update_pairs import Pair, PairReducer
from msprobe_integrations.torch.statistics import pair_kernels as pairkernels
from msprobe_integrations.torch.statistics.device_rows import Taker
from msprobe_integrations.torch.statistics.pair_kernels import PAIR_LAUNCHERS, Correction
from msprobe_integrations.torch.statistics.pending import Step, quiet
from msprobe_integrations.torch.statistics.rows import CODES, PIECE
from msprobe_integrations.torch.tensors import describe as _describe
from msprobe_integrations.torch.tensors.stretches import stretch

_function_modes = torch._C._len_torch_function_stack
_NoFunction = torch._C.DisableTorchFunction
_FAR = 1 << 40  # addresses of memory lie behind; no offset into freed memory reaches so far
_PAGE = 1 << 16


class _Torch:
    """`update_pairs.Tensors` of torch."""

    @staticmethod
    def is_tensor(value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    @staticmethod
    def numel(tensor: Any) -> int:
        return int(tensor.numel())

    @staticmethod
    def number(value: Any) -> float | torch.Tensor:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value
        return float(value)

    @staticmethod
    def correction(beta: float, step: torch.Tensor) -> Correction:
        return Correction(step, beta, 1.0)

    @staticmethod
    def add_scaled(a: Any, factor: float, b: Any, other: float) -> Any:
        with quiet():
            return torch.add(a * factor, b, alpha=other)


class PairRows(PairReducer):
    """Rows of pairs, and histograms. None of these calls waits for a device, and none raises: what cannot be read has row -1 and is
    counted in `unsupported`."""

    _step: Step
    _want: int
    tensors = _Torch()
    _unfit: Callable[[torch.Tensor], str]
    _without: Callable[[TensorDescription, str], TensorRef]
    _describe_tensor: Callable[[Any], TensorDescription]
    _start: Callable[..., None]
    _device_rows: Callable[[Step, torch.Tensor, int, int], tuple[Taker, Any]]
    unsupported: dict[str, int]
    _known_pairs: dict[tuple[Any, ...], tuple[TensorDescription, int, int, int]]

    def reduce_pair(self, pair: Pair) -> TensorRef:
        if _function_modes():
            with _NoFunction():
                return self._reduce_known_pair(pair)
        return self._reduce_known_pair(pair)

    def _reduce_known_pair(self, pair: Pair) -> TensorRef:
        """Plain CPU tensors that look like a pair seen before, as `TorchBackend.reduce_unshielded`; all others the long way."""
        op, a, b, c = pair
        try:
            description, numel, code_a, code_b = self._known_pairs[_build_pair_key(a, b)]
            at_a, at_b = a.data_ptr(), b.data_ptr()
            if numel < 0:
                return self._pair_on_device(pair, at_a, at_b, description)
            if min(at_a, at_b) > _FAR and a.is_contiguous() and b.is_contiguous() and not (a.is_neg() or b.is_neg()):
                row = next(self._step.numbers)
                want = pairkernels.pair_want(self._want)
                pairs.reduce(op, at_a, code_a, at_b, code_b, numel, self._step.host.address(row), want, c)
                return TensorRef(row, description)
        except Exception as error:
            raise_of_training(error)
        return self._reduce_any_pair(pair)

    def _pair_on_device(self, pair: Pair, at_a: int, at_b: int, description: TensorDescription) -> TensorRef:
        """As `DeviceReduce._reduce_on_device`."""
        (op, a, b, c), step = pair, self._step
        numbers = pairkernels.factors(c, a.device)
        count = c[0].step.dtype if isinstance(c[0], Correction) else None
        launcher = PAIR_LAUNCHERS.get((a.device, op, a.dtype, b.dtype, count, pairkernels.pair_want(self._want)))
        n = a.numel()
        there = min(at_a - a.storage_offset() * a.element_size(), at_b - b.storage_offset() * b.element_size()) > 0
        if launcher and numbers and n and there and a.is_contiguous() and b.is_contiguous() and not (a.is_neg() or b.is_neg()):
            aligned = (at_a % 16 == 0) + 2 * (at_b % 16 == 0)
            direct, rows, stream = launcher.find(aligned, n), step.devices.get(launcher.key), launcher.stream()
            if direct is not None and rows is not None and stream >= 0:
                row = next(step.numbers)
                address = rows.take_address(a, row, n, launcher.flags, stream)
                line = (at_a, address, n, at_b, *numbers)
                kept = (a, b) if count is None else (a, b, c[0].step)
                self._start(launcher, direct, aligned, line, stream, rows, *kept)
                return TensorRef(row, description)
        return self._reduce_any_pair(pair)

    def _reduce_any_pair(self, pair: Pair) -> TensorRef:
        step, row = self._step, -1
        try:
            with quiet():
                a, description, why = _describe.resolve(pair.a)
                b, _, why_b = _describe.resolve(pair.b)
                if a is None or b is None:
                    return self._without(description, why or why_b)
                why = self._unfit(a) or self._unfit(b) or _explain_unpaired(a, b)
                if why:
                    return self._without(description, why)
                made = str(pairkernels.pair_type(a, b))
                description = intern(*description._replace(dtype=made, requires_grad=False))
                row = next(step.numbers)
                want = pairkernels.pair_want(self._want)
                if on_host(a) and on_host(b):
                    pairkernels.pair_cpu(pair.op, a, b, pair.c, step.host.address(row), want)
                    if a is pair.a and b is pair.b:
                        self._learn_pair(a, b, description, a.numel())
                else:
                    step.host.clear(row)
                    take, _ = self._device_rows(step, a, row, _rows.WRITTEN | host_kernel.wanted_flags(want))
                    pairkernels.pair_device(pair.op, a, b, pair.c, take, want)
                    if a is pair.a and b is pair.b and PAIR_LAUNCHERS and a.device == b.device:
                        self._learn_pair(a, b, description, -1)
                return TensorRef(row, description)
        except Exception as error:
            raise_of_training(error)
            if row >= 0:
                step.host.clear(row)
            return self._without(self._describe_tensor(pair.a), f"pair: {type(error).__name__}: {str(error)[:80]}")

    def _learn_pair(self, a: torch.Tensor, b: torch.Tensor, description: TensorDescription, numel: int) -> None:
        if type(a) in _describe._PLAIN and type(b) in _describe._PLAIN:
            if len(self._known_pairs) > _PAGE:
                self._known_pairs.clear()
            self._known_pairs[_build_pair_key(a, b)] = (description, numel, CODES[a.dtype], CODES[b.dtype])

    def histogram(self, tensor: Any, kind: str) -> int:
        """Count the elements of a tensor in bins (`msprobe_engine.core.statistics.histograms`).

        Args:
            kind: ``linear`` or ``log2``.

        Returns:
            The first of `histograms.row_count` rows of this step, or -1.
        """
        return self._histogram((tensor,), lambda data: data, kind)

    def histogram_of_update(self, states: Mapping[str, Any], hyper: Mapping[str, Any], eps: float, kind: str) -> int:
        """`histogram` of Adam's m_hat / (sqrt(v_hat) + eps), whose values exist for this only; -1 where the states are others."""
        first = states.get("exp_avg")
        second = states.get("max_exp_avg_sq", states.get("exp_avg_sq")) if hyper.get("amsgrad") else states.get("exp_avg_sq")
        if first is None or second is None or first.shape != second.shape:
            return -1
        return self._histogram((first, second), lambda m, v: _direction(m, v, hyper, eps), kind)

    def _histogram(self, tensors: tuple[Any, ...], make: Callable[..., torch.Tensor], kind: str) -> int:
        """`histogram` of what `make` makes of tensors of one shape, of one of them at once, of several in pieces."""
        step = self._step
        first, n = -1, 0
        try:
            n = histograms.row_count(kind)
            with quiet():
                resolved = [_describe.resolve(tensor) for tensor in tensors]
                found = [data for data, _, _ in resolved if data is not None]
                why = next(filter(None, [*(why for data, _, why in resolved if data is None), *map(self._unfit, found)]), "")
                if len(found) < len(tensors) or why:
                    return self._without(resolved[0][1], why).row
                data, count = found[0], found[0].numel()
                size = count if len(found) == 1 else PIECE
                parts = (
                    make(*(one if size == count else stretch(one, at, min(at + size, count)) for one in found))
                    for at in range(0, count, max(1, size))
                )
                first = step.host.consecutive(step.numbers, n)
                if on_host(data):
                    counted = sum((pairkernels.histogram_cpu(part, kind) for part in parts), np.zeros(histograms.bins(kind), np.int64))
                    step.host.write_rows(first, histograms.to_rows(counted, count))
                    return first
                for row in range(first, first + n):
                    step.host.clear(row)
                for part in parts if count else (data,):
                    takers = [self._device_rows(step, data, row, _rows.WRITTEN)[0] for row in range(first, first + n)]
                    pairkernels.histogram_device(part, kind, takers)
                return first
        except Exception as error:
            raise_of_training(error)
            for row in range(first, first + n if first >= 0 else first):
                step.host.clear(row)
            return self._without(self._describe_tensor(tensors[0]), f"histogram: {type(error).__name__}: {str(error)[:80]}").row


def _build_pair_key(a: Any, b: Any) -> tuple[Any, ...]:
    """What tells whether a pair is as one before."""
    return type(a), a.dtype, a.shape, a.device, type(b), b.dtype, b.shape, b.device


def on_host(data: torch.Tensor) -> bool:
    """True when reading the values of `data` waits for nothing."""
    return data.device.type == "cpu" and not getattr(type(data), "probe_device", False)


def _explain_unpaired(a: torch.Tensor, b: torch.Tensor) -> str:
    for x in (a, b):
        if x.dtype not in pairkernels.PAIRED:
            return f"no pair kernel: {x.dtype}"
    if a.numel() != b.numel():
        return "pair of different sizes"
    return "" if a.device == b.device else "pair on two devices"


def _direction(first: torch.Tensor, second: torch.Tensor, hyper: Mapping[str, Any], eps: float) -> torch.Tensor:
    """Adam's m_hat / (sqrt(v_hat) + eps), float32, 0 where v_hat is."""
    (one, two), step = (hyper["betas"], hyper["step"]) if hyper.get("bias_correction", True) else ((0.0, 0.0), 1)
    root = (second.float() / (1 - two**step)).sqrt_()
    none = root == 0
    return (first.float() / (1 - one**step)).div_(root.add_(eps)).masked_fill_(none, 0.0)
