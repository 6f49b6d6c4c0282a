"""Rows of what an optimizer makes of a gradient: agreement with the momentum, the update, Adam's ratio; and histograms.

`PairRows` is the part of `TorchBackend` that writes them. Each is the row of a tensor that never exists as a whole, so that rows of
shards merge as any others do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from msprobe_engine import histograms, hostkernel, pairs
from msprobe_engine import rows as _rows
from msprobe_engine.records import TensorDescription, TensorRef
from msprobe_integrations.common.descriptions import intern
from msprobe_integrations.torch import describe as _describe
from msprobe_integrations.torch import pairkernels
from msprobe_integrations.torch.pairkernels import Factor, Factors
from msprobe_integrations.torch.pending import Step, quiet
from msprobe_integrations.torch.statistics import CODES

_function_modes = torch._C._len_torch_function_stack
_NoFunction = torch._C.DisableTorchFunction
_FAR = 1 << 40  # addresses of memory lie behind; no offset into freed memory reaches so far
_PAGE = 1 << 16


class Pair(NamedTuple):
    """What makes a value: an operation of `msprobe_engine.pairs` on two tensors. Without `b` the values are those of `a`."""

    op: int
    a: Any
    b: Any
    c: Factors


class _Unknown(Exception):
    """A state or a setting is missing, or has a value that nothing can be made of."""


def update_pair(algorithm: str, param: Any, grad: Any, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> Pair | None:
    """What makes the update u; see `PairRows.reduce_update`. None: unknown."""
    make = _UPDATES.get(algorithm)
    try:
        return make(param, grad, states, hyper) if make is not None else None
    except _Unknown:
        return None


def ratio_pair(algorithm: str, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> Pair | None:
    """What makes the ratio r; see `PairRows.reduce_ratio`. None: unknown."""
    made = update_pair(algorithm, None, None, states, hyper) if algorithm in ("adam", "adamw") else None
    return made and made._replace(c=(made.c[0], made.c[1], 0.0))


def _tensor(states: Mapping[str, Any], name: str) -> Any:
    found = states.get(name)
    if not isinstance(found, torch.Tensor):
        raise _Unknown(name)
    return found


def _correction(beta: Any, step: Any) -> Factor:
    """1 - beta**step; on the device where the step is there: reading it would wait."""
    if isinstance(step, torch.Tensor) and step.device.type != "cpu":
        return 1.0 - torch.pow(float(beta), step.detach().to(torch.float64).clamp(min=1.0))
    count = float(step)
    if not count >= 1.0:
        raise _Unknown("step")
    return float(1.0 - float(beta) ** count)


def _adam(param: Any, grad: Any, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> Pair:  # noqa: ARG001
    mean = _tensor(states, "exp_avg")
    square = _tensor(states, "max_exp_avg_sq" if hyper.get("amsgrad") else "exp_avg_sq")
    eps, betas, step = hyper.get("eps", 1e-8), hyper.get("betas"), states.get("step", hyper.get("step"))
    if not hyper.get("bias_correction", True):
        return Pair(pairs.RATIO, mean, square, (1.0, 1.0, float(eps)))
    if betas is None or step is None:
        raise _Unknown("betas")
    return Pair(pairs.RATIO, mean, square, (_correction(betas[0], step) ** -1, _correction(betas[1], step) ** -0.5, float(eps)))


def _sgd(param: Any, grad: Any, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> Pair:
    momentum = float(hyper.get("momentum", 0.0))
    if momentum and not hyper.get("nesterov"):
        return Pair(pairs.LINEAR, _tensor(states, "momentum_buffer"), None, (1.0, 0.0, 0.0))
    if not isinstance(grad, torch.Tensor):
        raise _Unknown("gradient")
    sign = -1.0 if hyper.get("maximize") else 1.0
    decay = float(hyper.get("weight_decay", 0.0))
    if decay:
        return _sgd_decayed(param, grad, states, hyper, sign, momentum, decay)
    if momentum:
        return Pair(pairs.LINEAR, grad, _tensor(states, "momentum_buffer"), (sign, momentum, 0.0))
    return Pair(pairs.LINEAR, grad, None, (1.0, 0.0, 0.0)) if sign > 0 else Pair(pairs.LINEAR, grad, grad, (sign, 0.0, 0.0))


def _sgd_decayed(
    param: Any, grad: torch.Tensor, states: Mapping[str, Any], hyper: Mapping[str, Any], sign: float, momentum: float, decay: float
) -> Pair:
    """u = d + decay p' of the parameter p' before the step. It is gone by now, but p' = p + lr u, so u = (d + decay p) / (1 - decay lr)."""
    rate = hyper.get("lr")
    if not isinstance(param, torch.Tensor) or param.numel() != grad.numel() or rate is None:
        raise _Unknown("parameter")
    rate = rate.detach().to(torch.float64) if isinstance(rate, torch.Tensor) and rate.device.type != "cpu" else float(rate)
    kept = 1.0 - decay * rate
    if not isinstance(kept, torch.Tensor) and kept <= 0.0:
        raise _Unknown("lr")
    if momentum:
        with quiet():
            grad, sign = torch.add(_tensor(states, "momentum_buffer") * momentum, grad, alpha=sign), 1.0
    return Pair(pairs.LINEAR, grad, param, (sign / kept, decay / kept, 0.0))


def _lion(param: Any, grad: Any, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> Pair:  # noqa: ARG001
    if not isinstance(grad, torch.Tensor) or hyper.get("betas") is None:
        raise _Unknown("gradient")
    first, second = (float(beta) for beta in hyper["betas"])
    if second == 0.0:  # the momentum before the step left no trace
        raise _Unknown("betas")
    # b1 m' + (1 - b1) g of the momentum m' before the step, in terms of m = b2 m' + (1 - b2) g
    return Pair(pairs.SIGN, grad, _tensor(states, "exp_avg"), (1.0 - first / second, first / second, 0.0))


def _rooted(state: str) -> Callable[[Any, Any, Mapping[str, Any], Mapping[str, Any]], Pair]:
    def make(param: Any, grad: Any, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> Pair:  # noqa: ARG001
        if not isinstance(grad, torch.Tensor) or hyper.get("centered") or hyper.get("momentum") or hyper.get("weight_decay"):
            raise _Unknown("gradient")
        sign = -1.0 if hyper.get("maximize") else 1.0
        return Pair(pairs.RATIO, grad, _tensor(states, state), (sign, 1.0, float(hyper.get("eps", 0.0))))

    return make


_UPDATES: dict[str, Callable[[Any, Any, Mapping[str, Any], Mapping[str, Any]], Pair]] = {
    "adam": _adam, "adamw": _adam, "sgd": _sgd, "lion": _lion, "rmsprop": _rooted("square_avg"), "adagrad": _rooted("sum"),
}  # fmt: skip


class PairRows:
    """Rows of pairs, and histograms. None of these calls waits for a device, and none raises: what cannot be read has row -1 and is
    counted in `unsupported`."""

    _step: Step
    _want: int
    reduce: Callable[[Any], TensorRef]
    _unfit: Callable[[torch.Tensor], str]
    _without: Callable[[TensorDescription, str], TensorRef]
    _described: Callable[[Any], TensorDescription]
    _device_row: Callable[[Step, torch.Tensor, int, int, int], tuple[torch.Tensor, Any]]
    unsupported: dict[str, int]
    _known_pairs: dict[tuple[Any, ...], tuple[TensorDescription, int, int, int]]

    def reduce_agreement(self, grad: Any, momentum: Any) -> TensorRef:
        """Row of y = (1 + sign(grad) sign(momentum)) / 2: 1 where the signs agree, 0 where they do not, 0.5 where one is zero, NaN
        where one is NaN. Its mean is the share of elements that agree. The description has the shape of `grad`.

        Args:
            grad, momentum: float64, float32, float16 or bfloat16, of as many elements.
        """
        return self._reduce_pair(Pair(pairs.AGREE, grad, momentum, (0.0, 0.0, 0.0)))

    def reduce_update(self, algorithm: str, param: Any, grad: Any, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> TensorRef | None:
        """Row of u, the direction in which the optimizer moves a parameter: without the learning rate, which schedules change, and
        without decoupled weight decay, which is no answer to the gradient. Weight decay that an optimizer adds to the gradient is in u.

        ===============  =================================================================================================
        adam, adamw      m_hat / (sqrt(v_hat) + eps) of exp_avg and exp_avg_sq (amsgrad: max_exp_avg_sq); no gradient needed
        sgd              the gradient; with momentum momentum_buffer; nesterov: gradient + momentum * momentum_buffer; each with
                         weight decay (which needs `param`)
        lion             sign(b1 m' + (1 - b1) g) of the momentum m' before the step, which is computed back from the one after:
                         where the sum is zero but for rounding the sign is not certain
        rmsprop          gradient / (sqrt(square_avg) + eps); neither centered nor with momentum nor with weight decay
        adagrad          gradient / (sqrt(sum) + eps); not with weight decay
        ===============  =================================================================================================

        Where a divisor is zero u is zero: an element that never had a gradient gives no NaN.

        Args:
            algorithm: lower case.
            param: the parameter after ``optimizer.step``, or None; tensors of another number of elements are no states of it.
            grad: as the optimizer saw it, or None where it is not needed.
            states: those after ``optimizer.step``, with ``step`` where the optimizer keeps it per parameter. A ``step`` on a device is
                used there.
            hyper: the parameter group: ``betas``, ``eps``, ``step``, ``amsgrad``, ``bias_correction``, ``momentum``, ``nesterov``, ...

        Returns:
            None when the algorithm is none of these (Muon's update takes matrix products that a probe must not repeat), or what
            it needs is missing: before the first step, or a state that lies elsewhere.
        """
        return self._reduce_known(update_pair(algorithm, param, grad, states, hyper), param)

    def reduce_ratio(
        self,
        algorithm: str,
        param: Any,
        grad: Any,  # noqa: ARG002
        states: Mapping[str, Any],
        hyper: Mapping[str, Any],
    ) -> TensorRef | None:
        """Row of r = m_hat / sqrt(v_hat), for adam and adamw; arguments and None as in `reduce_update`. Where v_hat is zero (no gradient
        ever, or one whose square is below the smallest number) r is zero; NaN and Inf of m stay visible as NaN."""
        return self._reduce_known(ratio_pair(algorithm, states, hyper), param)

    def _reduce_known(self, pair: Pair | None, param: Any) -> TensorRef | None:
        if pair is None or (isinstance(param, torch.Tensor) and param.numel() != pair.a.numel()):
            return None
        if pair.b is None:
            return self.reduce(pair.a)
        return self._reduce_pair(pair) if pair.a.numel() == pair.b.numel() else None

    def _reduce_pair(self, pair: Pair) -> TensorRef:
        if _function_modes():
            with _NoFunction():
                return self._reduce_known_pair(pair)
        return self._reduce_known_pair(pair)

    def _reduce_known_pair(self, pair: Pair) -> TensorRef:
        """Plain CPU tensors that look like a pair seen before, as `TorchBackend.reduce_unshielded`; all others the long way."""
        op, a, b, c = pair
        try:
            description, numel, code_a, code_b = self._known_pairs[_look(a, b)]
            at_a, at_b = a.data_ptr(), b.data_ptr()
            if min(at_a, at_b) > _FAR and a.is_contiguous() and b.is_contiguous() and not (a.is_neg() or b.is_neg()):
                row = next(self._step.numbers)
                want = pairkernels.pair_want(self._want)
                pairs.reduce(op, at_a, code_a, at_b, code_b, numel, self._step.host.address(row), want, c)  # type: ignore[arg-type]
                return TensorRef(row, description)
        except Exception:
            pass
        return self._reduce_any_pair(pair)

    def _reduce_any_pair(self, pair: Pair) -> TensorRef:
        step, row = self._step, -1
        try:
            with quiet():
                a, description, why = _describe.resolve(pair.a)
                b, _, why_b = _describe.resolve(pair.b)
                if a is None or b is None:
                    return self._without(description, why or why_b)
                why = self._unfit(a) or self._unfit(b) or _unpaired(a, b)
                if why:
                    return self._without(description, why)
                made = str(pairkernels.pair_type(a, b))
                description = intern(*description._replace(dtype=made, requires_grad=False))
                row = next(step.numbers)
                want = pairkernels.pair_want(self._want)
                if on_host(a) and on_host(b):
                    pairkernels.pair_cpu(pair.op, a, b, pair.c, step.host.address(row), want)
                    if a is pair.a and b is pair.b:
                        self._learn_pair(a, b, description)
                else:
                    step.host.clear(row)
                    out, _ = self._device_row(step, a, row, a.numel(), _rows.WRITTEN | hostkernel.wanted_flags(want))
                    pairkernels.pair_device(pair.op, a, b, pair.c, out, want)
                return TensorRef(row, description)
        except Exception as error:
            if row >= 0:
                step.host.clear(row)
            return self._without(self._described(pair.a), f"pair: {type(error).__name__}: {str(error)[:80]}")

    def _learn_pair(self, a: torch.Tensor, b: torch.Tensor, description: TensorDescription) -> None:
        if type(a) in _describe._PLAIN and type(b) in _describe._PLAIN:
            if len(self._known_pairs) > _PAGE:
                self._known_pairs.clear()
            self._known_pairs[_look(a, b)] = (description, a.numel(), CODES[a.dtype], CODES[b.dtype])

    def histogram(self, tensor: Any, kind: str) -> int:
        """Count the elements of a tensor in bins (`msprobe_engine.histograms`).

        Args:
            kind: ``linear`` or ``log2``.

        Returns:
            The first of `histograms.row_count` rows of this step, or -1.
        """
        step = self._step
        first, n = -1, 0
        try:
            n = histograms.row_count(kind)
            with quiet():
                data, description, why = _describe.resolve(tensor)
                why = why if data is None else self._unfit(data)
                if data is None or why:
                    return self._without(description, why).row
                first = _consecutive(step, n)
                if on_host(data):
                    step.host.put(first, histograms.to_rows(pairkernels.histogram_cpu(data, kind), data.numel()))
                    return first
                for row in range(first, first + n):
                    step.host.clear(row)
                out = [self._device_row(step, data, row, data.numel(), _rows.WRITTEN)[0] for row in range(first, first + n)]
                pairkernels.histogram_device(data, kind, out)
                return first
        except Exception as error:
            for row in range(first, first + n if first >= 0 else first):
                step.host.clear(row)
            return self._without(self._described(tensor), f"histogram: {type(error).__name__}: {str(error)[:80]}").row

    def histogram_of_update(self, states: Mapping[str, Any], hyper: Mapping[str, Any], eps: float, kind: str) -> int:
        """`histogram` of Adam's m_hat / (sqrt(v_hat) + eps), whose values exist for this only; -1 where the states are others."""
        moments = _moments(states, hyper)
        if moments is None:
            return -1
        first, root = moments
        return self.histogram(torch.where(root == 0, 0.0, first / (root + eps)), kind)


def _look(a: Any, b: Any) -> tuple[Any, ...]:
    """What tells whether a pair is as one before."""
    return type(a), a.dtype, a.shape, a.device, type(b), b.dtype, b.shape, b.device


def on_host(data: torch.Tensor) -> bool:
    """True when reading the values of `data` waits for nothing."""
    return data.device.type == "cpu" and not getattr(type(data), "probe_device", False)


def _unpaired(a: torch.Tensor, b: torch.Tensor) -> str:
    for x in (a, b):
        if x.dtype not in pairkernels.PAIRED:
            return f"no pair kernel: {x.dtype}"
    if a.numel() != b.numel():
        return "pair of different sizes"
    return "" if a.device == b.device else "pair on two devices"


def _consecutive(step: Step, n: int) -> int:
    """The first of `n` row numbers in a row. Other threads may take numbers in between: then those taken here stay empty rows."""
    taken = [next(step.numbers)]
    while len(taken) < n:
        number = next(step.numbers)
        if number != taken[-1] + 1:
            for unused in taken:
                step.host.clear(unused)
            taken = []
        taken.append(number)
    return taken[0]


def _moments(states: Mapping[str, Any], hyper: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Adam's m_hat and sqrt(v_hat), float32; copies, made only for histograms. None without such states."""
    first, second = states.get("exp_avg"), states.get("exp_avg_sq")
    if first is None or second is None or first.shape != second.shape:
        return None
    if hyper.get("amsgrad"):
        second = states.get("max_exp_avg_sq", second)
    first, second = first.detach().float(), second.detach().float()
    if hyper.get("bias_correction", True):
        one, two = hyper["betas"]
        step = hyper["step"]
        first, second = first / (1 - one**step), second / (1 - two**step)
    return first, second.sqrt()
