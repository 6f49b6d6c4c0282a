"""Check one recorded call: run it on the target and on the bench, and judge every output and gradient.

What a dump holds of a call (its record, and tensors or statistics) is enough. See `Checker`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from msprobe_engine.accuracy.results import CallResult
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun
from msprobe_integrations.common.op_tools.accuracy.checking import Checked, check_call, is_saved
from msprobe_integrations.torch.op_tools.accuracy.arguments import Arguments, Files, Place
from msprobe_integrations.torch.op_tools.accuracy.comparison import Comparison
from msprobe_integrations.torch.op_tools.accuracy.execute import ExecutionOptions, Outcome, memory_of, places_of
from msprobe_integrations.torch.op_tools.accuracy.prepare import Prepared, given_leaves, has_communicated, prepare, slots
from msprobe_integrations.torch.op_tools.accuracy.sides import Ran, on_bench, on_target
from msprobe_integrations.torch.op_tools.accuracy.types import BENCHES, LOW


class Target(NamedTuple):
    """What is tested.

    Attributes:
        device: of torch, ``"cpu"``, ``"cuda:1"``, ``"npu"``.
        dtype: type that all floating inputs are rounded to, for both sides; None: the recorded ones.
        compiled: the call goes through ``torch.compile``.
    """

    device: str = "cpu"
    dtype: str | None = None
    compiled: bool = False


class Bench(NamedTuple):
    """What it is tested against.

    Attributes:
        dtype: ``"float64"``; ``"raised"``: one step up (float16 and bfloat16 to float32, float32 to float64), like the existing tool;
            ``"same"``: the recorded types, for two devices.
    """

    device: str = "cpu"
    dtype: str = "float64"


class Checker:
    """Checks calls of one dump. Not for several threads at once.

    Args:
        files: the saved tensors of the dump; None: all inputs are drawn from statistics.
        target: what is tested; None: the CPU.
        bench: what it is tested against; None: the CPU in float64.
        seed: of drawn inputs and random state.
        condition: run the bench on changed inputs too, to know how much the operator makes of an error.
        second: another implementation beside the target; what it gets wrong as well is not held against the target.
        quantized: bare names of APIs whose integer results may differ by 1.

    Raises:
        UsageError: a type is not one of torch, or not a bench's.
    """

    def __init__(
        self,
        files: Files | None,
        target: Target | None = None,
        bench: Bench | None = None,
        *,
        seed: int = 0,
        condition: bool = True,
        second: Target | None = None,
        quantized: Collection[str] = (),
    ) -> None:
        self._arguments = Arguments(files, seed)
        self._target, self._bench, self._second = target or Target(), bench or Bench(), second
        self._seed, self._condition, self._quantized = seed, condition, frozenset(quantized)
        self._dtype = _float_type(self._target.dtype)
        if self._bench.dtype not in BENCHES:
            raise UsageError(f"type of the bench: {self._bench.dtype!r}; allowed: {', '.join(BENCHES)}")

    def check(
        self,
        name: str,
        record: Mapping[str, Any],
        backward: Mapping[str, Any] | None,
        outputs: Any = None,
        gradients: Any = None,
        *,
        recorded: bool = False,
    ) -> Checked:
        """Check one call. Never raises for what a call does: what cannot be run is skipped, with the reason as message.

        Args:
            name: ``"Torch.matmul.0"``.
            record: of dump.json: ``input_args``, ``input_kwargs``, ``output``.
            backward: its backward record (``input``, ``output``); None: only forward.
            outputs: results that the device had when it was recorded; then the target is not run, they are judged.
            gradients: of its inputs, likewise, in the order of a backward record.
            recorded: judge the results that the records name and the dump has saved (`outputs` and `gradients` are not needed).
        """
        name = name.removesuffix(".forward")
        return check_call(name, self._arguments, lambda: self._check(name, record, backward, outputs, gradients, recorded))

    def _check(
        self, name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None, outputs: Any, gradients: Any, recorded: bool
    ) -> tuple[CallResult, dict[str, Any]]:
        try:
            prepared = prepare(name, record, backward, self._arguments, self._dtype, self._seed)
        except (RuntimeError, ValueError, OverflowError) as error:  # torch makes no tensor of what the record says
            raise CannotRun(f"inputs cannot be made: {type(error).__name__}: {str(error)[:200]}") from error
        if not recorded and not prepared.operator.functions and outputs is None:
            recorded = True
            if not is_saved(record.get("output")):
                raise CannotRun(f"{prepared.api} cannot be run here, and the dump has no tensors of its results to be judged")
        if (recorded or outputs is not None) and has_communicated(record):
            raise CannotRun("an operator on DTensors that has communicated: its result is not that of the tensors of this rank")
        if recorded and record.get("output") in (None, [None]) and record.get("stopped_early"):
            raise CannotRun("recomputation was stopped inside this call: it has no result")
        if recorded:
            outputs = self._arguments.read_recorded(record.get("output") or [])
            gradients = self._arguments.read_recorded((backward or {}).get("output") or []) if backward is not None else None
        autocast = None
        given = outputs is not None or gradients is not None
        if given:
            device, autocast = _build_recorded_outcome(prepared, outputs, gradients), self._autocast_of(prepared)
        else:
            ran = self._run(prepared, self._target)
            device, autocast = ran.outcome, ran.side.autocast
        bench = on_bench(prepared, torch.device(self._bench.device), self._bench.dtype, autocast)
        if bench.outcome.drew and prepared.dropout is None:
            raise CannotRun("draws random numbers: no two devices draw the same")
        second = self._run(prepared, self._second).outcome if self._second is not None else None
        step = int(prepared.api in self._quantized)
        return Comparison(prepared, device, bench, second, autocast, self._condition, given, step).result()

    def _autocast_of(self, prepared: Prepared) -> torch.dtype | None:
        """Type of the autocast region that recorded results come from: a run here needs one to give their types."""
        outputs = {out.dtype for out in prepared.outputs if out is not None}
        if not (outputs.intersection(LOW) and torch.float32 in prepared.inputs and prepared.operator.functions):
            return None
        try:
            return on_target(prepared, ExecutionOptions(torch.device(self._bench.device)), as_recorded=True).side.autocast
        except CannotRun:
            return None

    def _run(self, prepared: Prepared, target: Target) -> Ran:
        side = ExecutionOptions(torch.device(target.device), compiled=target.compiled)
        return on_target(prepared, side, as_recorded=self._dtype is None)


def _float_type(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"type of the target: {name!r} is no floating type of torch; allowed: float64, float32, bfloat16, float16, ...")
    return found


def _build_recorded_outcome(prepared: Prepared, outputs: Any, gradients: Any) -> Outcome:
    """What was recorded on the device, in place of a run. Results of an operator that writes into its argument and returns nothing are
    not in a record: there is nothing to compare then."""
    call = prepared.call
    tensors = [*places_of(list(call.args)), *places_of(dict(call.kwargs))]
    found = _together(tensors, slots(tensors, call.wanted, given_leaves(gradients))) if gradients is not None else {}
    return Outcome(given_leaves(outputs) if outputs is not None else [], {}, found, "")


def _together(
    tensors: Sequence[tuple[Place, torch.Tensor]], gradients: Mapping[Place, torch.Tensor | None]
) -> dict[Place, torch.Tensor | None]:
    """Recorded gradients where `execute.run` has them: those of one tensor at several places are one, at the first."""
    first: dict[object, Place] = {}
    made: dict[Place, torch.Tensor | None] = {}
    for place, tensor in tensors:
        memory = memory_of(tensor)
        where = place if memory is None else first.setdefault(memory, place)
        gradient, before = gradients.get(place), made.get(where)
        if gradient is not None:
            made[where] = gradient if before is None else before + gradient
    return made
