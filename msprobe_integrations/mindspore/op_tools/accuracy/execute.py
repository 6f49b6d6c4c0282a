"""One call on one side: forward, and the gradients of its inputs. See `ExecutionOptions` for what a side is.

MindSpore runs operators behind the caller's back: that a kernel fails, or that there is none, is said by whoever waits next, and may be
said again later. So every run ends by waiting, and a failed one by waiting until nothing is left to be said.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mindspore
import numpy as np
import numpy.typing as npt

from msprobe_integrations.common.capture.nested import leaves_of
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun, Place
from msprobe_integrations.mindspore.hooks import autograd
from msprobe_integrations.mindspore.op_tools.accuracy.arguments import Tensor, type_of

FLOATS = ("Float64", "Float32", "Float16", "BFloat16")
_VALUES = (bool, int, float, complex, str, type(None))
_WORST_LEFT = 100
"""Failures of former calls that are waited for."""


class ExecutionOptions(NamedTuple):
    """How a call runs.

    Attributes:
        types: a floating type's name to that which takes its place; others stay.
        nudge: None, or the number of a change: each input is then changed by one unit of round-off of the type `unit` first.
        unit: relative size of the change.
        compiled: the function goes through ``mindspore.jit``.
    """

    types: Mapping[str, str] = {}
    nudge: int | None = None
    unit: float = 0.0
    compiled: bool = False


class Call(NamedTuple):
    """What is to be run.

    Attributes:
        name: ``Mint.matmul.0``.
        function: takes `args` and `kwargs`.
        args, kwargs: values in the recorded types.
        wanted: places of the tensors whose gradients are asked for; empty: forward only.
        gradients: what comes into the backward, one for each differentiable output, None where nothing does; empty: ones.
    """

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    wanted: tuple[Place, ...]
    gradients: Sequence[Any]


class Outcome(NamedTuple):
    """What came of it.

    Attributes:
        outputs: leaves of the result: tensors, plain values, None.
        gradients: of `Call.wanted`, by place; None where the call does not depend on the tensor.
        problem: why there are no gradients though they were asked for; empty else.
    """

    outputs: list[Any]
    gradients: dict[Place, Any]
    problem: str


def kind_of(value: Any) -> str:
    """``Float32``; of plain values the name of their type."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def array_of(value: Any) -> Any:
    """A tensor as an array of its own, bfloat16 as float32; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    array: npt.NDArray[Any] = value.asnumpy()
    return array.astype(np.float32) if str(value.dtype) == "BFloat16" else array.copy()


def places_of(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The tensors of arguments with their places, in order."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from places_of(child, (*place, str(key)))
    elif isinstance(value, (list, tuple)):
        for n, child in enumerate(value):
            yield from places_of(child, (*place, n))


def run(call: Call, side: ExecutionOptions) -> Outcome:
    """Run a call once.

    Raises:
        CannotRun: MindSpore does not do it; what it says.
    """
    leaves: dict[Place, Any] = {}
    executor = autograd.executor
    recorded = executor.grad_flag()
    try:
        args = tuple(_move_arguments(value, (n,), call, side, leaves) for n, value in enumerate(call.args))
        kwargs = {key: _move_arguments(value, (key,), call, side, leaves) for key, value in call.kwargs.items()}
        executor.set_grad_flag(bool(leaves))
        function = call.function
        if side.compiled:
            function = mindspore.jit(lambda *args, **kwargs: call.function(*args, **kwargs))
        mindspore.set_seed(zlib.crc32(call.name.encode()) & 0x7FFFFFFF)
        result = function(*args, **kwargs)
        outputs = list(leaves_of(result))
        if not any(isinstance(out, Tensor) for out in outputs):  # it writes into its first argument
            outputs += [arg for arg in args[:1] if isinstance(arg, Tensor) and result is None]
        for out in outputs:
            if isinstance(out, Tensor):
                out.asnumpy()
            elif not isinstance(out, _VALUES):
                raise CannotRun(f"its result is a {type(out).__name__}, no tensor")
        executor.sync()
    except CannotRun:
        raise
    except Exception as error:  # whatever MindSpore says
        _clear_failures()
        raise CannotRun(_short(error)) from None
    finally:
        executor.set_grad_flag(recorded)
    if not leaves:
        return Outcome(outputs, {}, "")
    try:
        return Outcome(outputs, _backward(outputs, leaves, call, side), "")
    except CannotRun as error:
        return Outcome(outputs, {}, f"backward: {error}")
    except Exception as error:
        _clear_failures()
        return Outcome(outputs, {}, f"backward: {_short(error)}")


def _move_arguments(value: Any, place: Place, call: Call, side: ExecutionOptions, leaves: dict[Place, Any]) -> Any:
    if isinstance(value, Tensor):
        wide = _wide(value, side, f"{call.name} {place}")
        if place in call.wanted:
            wide._requires_grad = True
            leaves[place] = wide
        return wide
    if type(value) is dict:
        return {key: _move_arguments(child, (*place, key), call, side, leaves) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_move_arguments(child, (*place, n), call, side, leaves) for n, child in enumerate(value))
    if str(value) in side.types and type_of(str(value)) is value:
        return type_of(side.types[str(value)])
    return value


def _wide(value: Any, side: ExecutionOptions, seed: str) -> Any:
    """A copy of a tensor for one side."""
    kind, array = str(value.dtype), array_of(value)
    if kind in FLOATS and side.nudge is not None:
        random = np.random.Generator(np.random.PCG64(zlib.crc32(f"{seed} {side.nudge}".encode())))
        array = array.astype(np.float64) * (1 + side.unit * (random.integers(0, 2, array.shape) * 2 - 1))
    return Tensor(array, type_of(side.types.get(kind, kind)))


def _backward(outputs: Sequence[Any], leaves: dict[Place, Any], call: Call, side: ExecutionOptions) -> dict[Place, Any]:
    run_backward = getattr(mindspore._c_expression, "run_backward", None)
    if run_backward is None:
        raise CannotRun(f"MindSpore {mindspore.__version__} has no backward of single calls; 2.10 has")
    roots = [out for out in outputs if isinstance(out, Tensor) and str(out.dtype) in FLOATS]
    given = list(call.gradients) or [Tensor(np.ones(tuple(out.shape), np.float32), out.dtype) for out in roots]
    if len(given) != len(roots):
        raise CannotRun(f"the dump has {len(given)} gradients for {len(roots)} differentiable outputs")
    pairs = [(root, gradient) for root, gradient in zip(roots, given) if gradient is not None]
    if wrong := [(gradient.shape, root.shape) for root, gradient in pairs if tuple(gradient.shape) != tuple(root.shape)]:
        raise CannotRun(f"the dump has a gradient of shape {tuple(wrong[0][0])} for an output of shape {tuple(wrong[0][1])}")
    if not pairs:
        raise CannotRun("the dump has no gradient for it")
    incoming = [_wide(gradient, side, f"{call.name} gradient {n}").astype(root.dtype) for n, (root, gradient) in enumerate(pairs)]
    gradients = run_backward(
        tuple(root for root, _ in pairs), tuple(incoming), False, False, tuple(leaves.values()), True, accumulate_grad=False
    )
    for gradient in gradients:
        if gradient is not None:
            gradient.asnumpy()
    autograd.executor.sync()
    return dict(zip(leaves, gradients))


def _clear_failures() -> None:
    """Wait until no failure is left that a later call would be told of."""
    for _ in range(_WORST_LEFT):
        try:
            autograd.executor.sync()
        except Exception:
            continue
        return


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip().strip("-")]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
