"""The runs of a call: on the target, on the bench, and on the bench with changed inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun
from msprobe_integrations.torch.op_tools.accuracy.execute import Call, ExecutionOptions, Nudge, Outcome, run
from msprobe_integrations.torch.op_tools.accuracy.prepare import Prepared
from msprobe_integrations.torch.op_tools.accuracy.references.formula import NotChecked
from msprobe_integrations.torch.op_tools.accuracy.types import BLOCK, LOW, attempts
from msprobe_integrations.torch.op_tools.dispatch_compare import references

_CHANGES, _INSIDE = 2, 4
"""Runs of the bench on changed inputs, and with changes inside as well: few calls need these, and what cancels in two by chance does not in
four."""
_COARSE = 2.0**-12
"""Types with at least this distance from 1 to the next number are coarse beside float32."""


class Ran(NamedTuple):
    """A run that has succeeded.

    Attributes:
        function, call, side: by which it can be repeated.
    """

    outcome: Outcome
    function: Callable[..., Any]
    call: Call
    side: ExecutionOptions


def on_target(prepared: Prepared, side: ExecutionOptions, as_recorded: bool) -> Ran:
    """Run on the device under test.

    A call that was recorded under autocast has float32 inputs and a 16 bit result (or the other way round): it runs under autocast when
    it does not give the recorded types without. Where that fails, its inputs are cast as autocast would have done.

    Args:
        as_recorded: results must have the recorded types (they are not rounded to another one).

    Raises:
        CannotRun: it does not run; what torch says.
    """
    ran = _first(prepared, prepared.operator.functions, [side])
    if isinstance(ran, Ran) and (not as_recorded or _types_fit(prepared, ran.outcome)):
        return ran
    low = {t for t in (*prepared.inputs, *(out.dtype for out in prepared.outputs if out is not None)) if t in LOW}
    if as_recorded:
        for dtype in sorted(low, key=str):
            again = _first(prepared, prepared.operator.functions, [side._replace(autocast=dtype)])
            if isinstance(again, Ran) and (_types_fit(prepared, again.outcome) or not isinstance(ran, Ran)):
                return again
            if not isinstance(again, Ran):  # the kernel that autocast picks is not there (oneDNN's LSTM: not on every processor)
                cast = side._replace(autocast=dtype, types={**side.types, torch.float32: dtype})
                again = _first(prepared, prepared.operator.functions, [cast])
                if isinstance(again, Ran) and _types_fit(prepared, again.outcome):
                    return again
        if low and any(out is not None and out.dtype is torch.float32 for out in prepared.outputs):  # what autocast computes in float32
            again = _first(prepared, prepared.operator.functions, [side._replace(types=dict.fromkeys(low, torch.float32))])
            if isinstance(again, Ran) and _types_fit(prepared, again.outcome):
                return again
    if isinstance(ran, Ran):
        return ran
    raise CannotRun(_short(ran))


def _types_fit(prepared: Prepared, outcome: Outcome) -> bool:
    pairs = zip(prepared.outputs, outcome.outputs)
    return all(out is None or not isinstance(got, torch.Tensor) or got.dtype == out.dtype for out, got in pairs)


def on_bench(prepared: Prepared, device: torch.device, kind: str, autocast: torch.dtype | None) -> Ran:
    """Run on the bench, in the widest types that it has kernels for.

    Args:
        kind: a key of `types.BENCHES`.
        autocast: type of the autocast region that the target needed. Where it rounds the inputs, the bench's are rounded as well.

    Raises:
        CannotRun: it does not run in any type.
    """
    operator = prepared.operator
    functions = (operator.reference,) if operator.reference is not None else tuple(map(_with_formula, operator.functions))
    if autocast is not None and any(out is not None and out.dtype == autocast for out in prepared.outputs):
        prepared = prepared._replace(call=_to(prepared.call, autocast))
    types = attempts(kind, prepared.api)
    if prepared.api == "view" and any(isinstance(value, torch.dtype) for value in (*prepared.call.args, *prepared.call.kwargs.values())):
        types = [{}]  # the bits seen as another type
    sides = [ExecutionOptions(device, each) for each in types]
    ran = _first(prepared, functions, sides)
    if isinstance(ran, Ran):
        return ran
    raise ran if isinstance(ran, NotChecked) else CannotRun(f"bench: {_short(ran)}")


def _with_formula(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of aten that does not run in wide types (fused attention, products in 8 bits) is its formula there."""
    packet = function if isinstance(function, torch._ops.OpOverloadPacket) else getattr(torch.ops.aten, _private(function), None)
    overload = getattr(packet, "default", None)
    if not isinstance(overload, torch._ops.OpOverload):
        return function

    def run_or_formula(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, NotImplementedError, ValueError):
            return references.run(overload, overload.overloadpacket.__name__, list(args), kwargs)

    return run_or_formula


def _private(function: Callable[..., Any]) -> str:
    """Name of one of torch's private functions, which are operators of aten; empty for others."""
    name = getattr(function, "__name__", "")
    return name if name.startswith("_") and not name.startswith("__") and getattr(torch, name, None) is function else ""


def on_changed(ran: Ran, unit: torch.dtype | None, *, inside: bool = False) -> list[Outcome]:
    """Repeat a run of the bench on inputs that are changed by one unit of round-off.

    Args:
        unit: of which type; None: there is nothing that could be changed.
        inside: change every intermediate result as well.
    """
    if unit is None or not ran.side.types:
        return []
    outcomes = []
    for number in range(_INSIDE if inside else _CHANGES):
        nudge = Nudge(unit, ran.call.seed + number)
        try:
            outcomes.append(
                _narrow_large_results(run(ran.function, ran.call, ran.side._replace(nudge=nudge, inside=nudge if inside else None)), unit)
            )
        except Exception:  # changed inputs may be outside of what the operator takes: then nothing is known of its condition
            return []
    return outcomes


def _narrow_large_results(outcome: Outcome, unit: torch.dtype) -> Outcome:
    """Large results in float32 where the changes are those of a coarser type: their round-off is nothing beside."""

    def small(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64 or value.numel() <= BLOCK:
            return value
        narrow = value.float()
        return value if narrow.isinf().any() else narrow

    if torch.finfo(unit).eps < _COARSE:
        return outcome
    outputs = outcome.outputs
    for number in range(len(outputs)):
        outputs[number] = small(outputs[number])
    for results in (outcome.written, outcome.gradients):
        for place in results:
            results[place] = small(results[place])
    return outcome


def _to(call: Call, dtype: torch.dtype) -> Call:
    def round_float32(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
            return value.to(dtype)
        if isinstance(value, dict):
            return {key: round_float32(child) for key, child in value.items()}
        return type(value)(map(round_float32, value)) if type(value) in (list, tuple) else value

    return call._replace(args=round_float32(list(call.args)), kwargs=round_float32(dict(call.kwargs)))


def _first(prepared: Prepared, functions: Iterable[Callable[..., Any]], sides: Iterable[ExecutionOptions]) -> Ran | Exception:
    """The first run that succeeds and gives the recorded shapes; else the first that succeeds, else the first error."""
    error: Exception | None = None
    other: Ran | None = None
    for side in sides:
        for function in functions:
            for call in prepared.variants():
                try:
                    ran = Ran(run(function, call, side), function, call, side)
                except Exception as problem:  # whatever torch says
                    error = error or problem
                    continue
                if prepared.operator.reference is not None or prepared.fits(ran.outcome.outputs):
                    return ran
                other = other or ran
        if other is not None:
            return other
    return error or CannotRun("there is nothing to run")


def _short(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0][:300]
    return text if isinstance(error, CannotRun) else f"{type(error).__name__}: {text}"
