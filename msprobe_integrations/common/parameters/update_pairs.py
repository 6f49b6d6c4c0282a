"""What an optimizer makes of a gradient, as pairs of tensors (`msprobe_engine.core.statistics.pairs`): the update, and Adam's ratio of the
moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from msprobe_engine.core.records import TensorRef
from msprobe_engine.core.statistics import pairs

Factor = Any
"""A constant of a pair: a float, or a tensor of one element where the number is on a device."""


class Pair(NamedTuple):
    """What makes a value: an operation of `msprobe_engine.core.statistics.pairs` on two tensors. Without `b` the values are those of
    `a`."""

    op: int
    a: Any
    b: Any
    c: tuple[Factor, Factor, float]


class Tensors(Protocol):
    """What is needed of a framework. Nothing here waits for a device."""

    def is_tensor(self, value: Any) -> bool: ...

    def numel(self, tensor: Any) -> int: ...

    def number(self, value: Any) -> Factor:
        """The number that a tensor of one element holds, or a Python number, as `Factor`."""
        ...

    def correction(self, beta: float, step: Factor) -> Factor:
        """1 - beta**max(step, 1) for a `step` that is on a device."""
        ...

    def add_scaled(self, a: Any, factor: float, b: Any, other: float) -> Any:
        """The tensor factor * a + other * b."""
        ...


class _Unknown(Exception):
    """A state or a setting is missing, or has a value that nothing can be made of."""


def update_pair(
    tensors: Tensors, algorithm: str, param: Any, grad: Any, states: Mapping[str, Any], hyper: Mapping[str, Any]
) -> Pair | None:
    """What makes u, the direction in which the optimizer moves a parameter: without the learning rate, which schedules change, and
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
        param: the parameter after the optimizer's step, or None; tensors of another number of elements are no states of it.
        grad: as the optimizer saw it, or None where it is not needed.
        states: those after the step, with ``step`` where the optimizer keeps it per parameter. A ``step`` on a device is used there.
        hyper: the parameter group: ``betas``, ``eps``, ``step``, ``amsgrad``, ``bias_correction``, ``momentum``, ``nesterov``, ...

    Returns:
        None when the algorithm is none of these (Muon's update takes matrix products that a probe must not repeat), or what
        it needs is missing: before the first step, or a state that lies elsewhere.
    """
    make = getattr(_Updates, algorithm, None) if algorithm in COMPUTED else None
    try:
        return make(_Updates(tensors, param, grad, states, hyper)) if make is not None else None
    except _Unknown:
        return None


def ratio_pair(tensors: Tensors, algorithm: str, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> Pair | None:
    """What makes r = m_hat / sqrt(v_hat), for adam and adamw; None: unknown. Where v_hat is zero (no gradient ever, or one whose square is
    below the smallest number) r is zero; NaN and Inf of m stay visible as NaN."""
    made = update_pair(tensors, algorithm, None, None, states, hyper) if algorithm in ("adam", "adamw") else None
    return made and made._replace(c=(made.c[0], made.c[1], 0.0))


class _Updates:
    """A method for each rule of `algorithms.KNOWN` whose update can be computed, under its name."""

    def __init__(self, tensors: Tensors, param: Any, grad: Any, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._param, self._grad, self._states, self._hyper = param, grad, states, hyper

    def _state(self, name: str) -> Any:
        state = self._states.get(name)
        if not self._tensors.is_tensor(state):
            raise _Unknown(name)
        return state

    def _gradient(self) -> Any:
        if not self._tensors.is_tensor(self._grad):
            raise _Unknown("gradient")
        return self._grad

    def _correction(self, beta: Any, step: Any) -> Factor:
        """1 - beta**step; on the device where the step is there: reading it would wait."""
        count = self._tensors.number(step)
        if not isinstance(count, float):
            return self._tensors.correction(float(beta), count)
        if not count >= 1.0:
            raise _Unknown("step")
        return 1.0 - float(beta) ** count

    def adam(self) -> Pair:
        hyper = self._hyper
        mean = self._state("exp_avg")
        square = self._state("max_exp_avg_sq" if hyper.get("amsgrad") else "exp_avg_sq")
        eps, betas, step = hyper.get("eps", 1e-8), hyper.get("betas"), self._states.get("step", hyper.get("step"))
        if not hyper.get("bias_correction", True):
            return Pair(pairs.RATIO, mean, square, (1.0, 1.0, float(eps)))
        if betas is None or step is None:
            raise _Unknown("betas")
        first_correction, second_correction = (self._correction(beta, step) for beta in betas)
        return Pair(pairs.RATIO, mean, square, (first_correction**-1, second_correction**-0.5, float(eps)))

    adamw = adam

    def sgd(self) -> Pair:
        hyper = self._hyper
        momentum = float(hyper.get("momentum", 0.0))
        if momentum and not hyper.get("nesterov"):
            return Pair(pairs.LINEAR, self._state("momentum_buffer"), None, (1.0, 0.0, 0.0))
        grad = self._gradient()
        sign = -1.0 if hyper.get("maximize") else 1.0
        decay = float(hyper.get("weight_decay", 0.0))
        if decay:
            return self._sgd_decayed(grad, sign, momentum, decay)
        if momentum:
            return Pair(pairs.LINEAR, grad, self._state("momentum_buffer"), (sign, momentum, 0.0))
        return Pair(pairs.LINEAR, grad, None, (1.0, 0.0, 0.0)) if sign > 0 else Pair(pairs.LINEAR, grad, grad, (sign, 0.0, 0.0))

    def _sgd_decayed(self, grad: Any, sign: float, momentum: float, decay: float) -> Pair:
        """u = d + decay p' of the parameter p' before the step: gone by now, but p' = p + lr u, so u = (d + decay p) / (1 - decay lr)."""
        tensors, param, rate = self._tensors, self._param, self._hyper.get("lr")
        if not tensors.is_tensor(param) or tensors.numel(param) != tensors.numel(grad) or rate is None:
            raise _Unknown("parameter")
        kept = 1.0 - decay * tensors.number(rate)
        if isinstance(kept, float) and kept <= 0.0:
            raise _Unknown("lr")
        if momentum:
            grad, sign = tensors.add_scaled(self._state("momentum_buffer"), momentum, grad, sign), 1.0
        return Pair(pairs.LINEAR, grad, param, (sign / kept, decay / kept, 0.0))

    def lion(self) -> Pair:
        grad, betas = self._gradient(), self._hyper.get("betas")
        if betas is None:
            raise _Unknown("betas")
        beta1, beta2 = (float(beta) for beta in betas)
        if beta2 == 0.0:  # the momentum before the step left no trace
            raise _Unknown("betas")
        # b1 m' + (1 - b1) g of the momentum m' before the step, in terms of m = b2 m' + (1 - b2) g
        return Pair(pairs.SIGN, grad, self._state("exp_avg"), (1.0 - beta1 / beta2, beta1 / beta2, 0.0))

    def rmsprop(self) -> Pair:
        return self._find_root_pair("square_avg")

    def adagrad(self) -> Pair:
        return self._find_root_pair("sum")

    def _find_root_pair(self, state: str) -> Pair:
        hyper, grad = self._hyper, self._gradient()
        if hyper.get("centered") or hyper.get("momentum") or hyper.get("weight_decay"):
            raise _Unknown("gradient")
        sign = -1.0 if hyper.get("maximize") else 1.0
        return Pair(pairs.RATIO, grad, self._state(state), (sign, 1.0, float(hyper.get("eps", 0.0))))


COMPUTED = tuple(name for name in vars(_Updates) if not name.startswith("_"))
"""Rules whose update is computed."""


class PairReducer:
    """Rows of what an optimizer makes of a gradient; a backend of a framework says how a row of a pair is made."""

    tensors: Tensors
    reduce: Callable[[Any], TensorRef]

    def reduce_pair(self, pair: Pair) -> TensorRef:
        """Row of the values that a pair makes, in the shape of its first tensor."""
        raise NotImplementedError

    def reduce_agreement(self, grad: Any, momentum: Any) -> TensorRef:
        """Row of y = (1 + sign(grad) sign(momentum)) / 2: 1 where the signs agree, 0 where they do not, 0.5 where one is zero, NaN
        where one is NaN. Its mean is the share of elements that agree. The description has the shape of `grad`.

        Args:
            grad, momentum: of 64, 32 or 16 bits, floating point, of as many elements.
        """
        return self.reduce_pair(Pair(pairs.AGREE, grad, momentum, (0.0, 0.0, 0.0)))

    def reduce_update(self, algorithm: str, param: Any, grad: Any, states: Mapping[str, Any], hyper: Mapping[str, Any]) -> TensorRef | None:
        """Row of u, the direction in which the optimizer moves a parameter; arguments, and when it is None: `update_pair`."""
        return self._reduce_known(update_pair(self.tensors, algorithm, param, grad, states, hyper), param)

    def reduce_ratio(
        self,
        algorithm: str,
        param: Any,
        grad: Any,  # noqa: ARG002
        states: Mapping[str, Any],
        hyper: Mapping[str, Any],
    ) -> TensorRef | None:
        """Row of r = m_hat / sqrt(v_hat), for adam and adamw; arguments and None as in `reduce_update`."""
        return self._reduce_known(ratio_pair(self.tensors, algorithm, states, hyper), param)

    def _reduce_known(self, pair: Pair | None, param: Any) -> TensorRef | None:
        numel = self.tensors.numel
        if pair is None or (self.tensors.is_tensor(param) and numel(param) != numel(pair.a)):
            return None
        if pair.b is None:
            return self.reduce(pair.a)
        return self.reduce_pair(pair) if numel(pair.a) == numel(pair.b) else None
