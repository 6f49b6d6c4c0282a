"""Check one recorded call of MindSpore: on the device in the recorded types and on the bench in float64, every output and gradient
judged. See `msprobe_integrations.torch.op_tools.accuracy.checker`, whose results these are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from msprobe_engine.accuracy.results import ERROR, NOT_RUN, PASS, SKIP, CallResult, TensorResult, worst
from msprobe_engine.accuracy.scripts.source import INDEXED
from msprobe_engine.accuracy.verdict.judge import judge
from msprobe_engine.accuracy.verdict.mindspore_form import existing_metrics, existing_status
from msprobe_engine.core.dtypes import float_type
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.common.capture.nested import leaves_of
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun, Files
from msprobe_integrations.common.op_tools.accuracy.checking import Checked, check_call, is_saved
from msprobe_integrations.mindspore.capture.api_names import Api, apis
from msprobe_integrations.mindspore.op_tools.accuracy.arguments import Arguments
from msprobe_integrations.mindspore.op_tools.accuracy.execute import (
    FLOATS,
    Call,
    ExecutionOptions,
    Outcome,
    array_of,
    kind_of,
    places_of,
    run,
)
from msprobe_integrations.mindspore.op_tools.free_benchmark.calls import left_out

_WIDE = dict.fromkeys(("BFloat16", "Float16", "Float32"), "Float64")
_RAISED = {"BFloat16": "Float32", "Float16": "Float32", "Float32": "Float64"}
BENCHES: Mapping[str, Sequence[Mapping[str, str]]] = {"float64": (_WIDE, _RAISED, {}), "raised": (_RAISED, {})}
"""In which types the bench is tried, one after the other: MindSpore has not every kernel for all of them."""
_CHANGES = 2
_KEPT = frozenset(("eps", "nan_to_num", "nextafter", "histc"))
"""Operators whose result is made for the type: the bench keeps it."""


class Checker:
    """Checks calls of one dump. Not for several threads at once.

    Args:
        files: the saved tensors of the dump; None: all inputs are drawn from statistics.
        bench: a key of `BENCHES`.
        dtype: floating inputs are rounded to this type first (``float16``); None: the recorded ones.
        compiled: the call under test goes through ``mindspore.jit``.
        recorded: where the dump has saved results they are judged, and the call under test is not run.
        seed: of drawn inputs.
        condition: run the bench on changed inputs too.
        compat: the numbers of results are those of the existing tool.
        quantized: bare names of APIs whose integer results may differ by 1.

    Raises:
        UsageError: `dtype` is no floating type of MindSpore.
    """

    def __init__(
        self,
        files: Files | None,
        *,
        bench: str = "float64",
        dtype: str | None = None,
        compiled: bool = False,
        recorded: bool = False,
        seed: int = 0,
        condition: bool = True,
        compat: bool = False,
        quantized: Collection[str] = (),
    ) -> None:
        self._arguments = Arguments(files, seed)
        self._bench, self._compiled, self._recorded, self._condition = bench, compiled, recorded, condition
        self._compat, self._quantized = compat, frozenset(quantized)
        self._dtype = None if dtype is None else next((name for name in FLOATS if name.lower() == dtype.lower()), "")
        if self._dtype == "":
            raise UsageError(f"type of the target: {dtype!r} is no floating type of MindSpore; allowed: {', '.join(FLOATS).lower()}")
        self._apis: dict[str, Api] = {}
        for api in apis():
            self._apis.setdefault(f"{api.prefix}.{api.name}", api)

    def check(self, name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None) -> Checked:
        """Check one call. Never raises for what a call does: what cannot be run is skipped, with the reason as message.

        Args:
            name: ``"Mint.matmul.0"``.
            record: of dump.json: ``input_args``, ``input_kwargs``, ``output``.
            backward: its backward record (``input``, ``output``); None: only forward.
        """
        return check_call(name, self._arguments, lambda: self._check(name, record, backward))

    def _check(self, name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None) -> tuple[CallResult, dict[str, Any]]:
        call = self._call(name, record, backward)
        device = self._read_results(call, record, backward) if self._recorded and is_saved(record.get("output")) else None
        if device is None:
            device = run(call, ExecutionOptions(dict.fromkeys(FLOATS, self._dtype) if self._dtype else {}, compiled=self._compiled))
        bench, first = None, ""
        types: Mapping[str, str] = {}
        for types in [{}] if name.split(".")[-2] in _KEPT else BENCHES[self._bench]:
            try:
                bench = run(call, ExecutionOptions(types))
            except CannotRun as error:
                first = first or str(error)
                continue
            if not (bench.problem and types):  # a forward in float64 whose backward has no kernel is tried again
                break
        if bench is None:
            raise CannotRun(f"bench: {first}")
        kinds = {str(tensor.dtype) for _, tensor in (*places_of(list(call.args)), *places_of(dict(call.kwargs)))} & set(FLOATS)
        unit = max((kind for kind in kinds), key=_round_off, default="")
        changed: list[Outcome] = []
        if self._condition and unit and all(kind in types or kind == "Float64" for kind in kinds):
            try:
                changed = [run(call, ExecutionOptions(types, nudge, _round_off(unit))) for nudge in range(_CHANGES)]
            except CannotRun:  # changed inputs may be outside of what the operator takes
                changed = []
        remark = "" if types or not kinds else f"the bench has the same precision: {first or 'MindSpore has no other kernel'}"
        result, data = _judge_results(call, bench, device, changed, unit, remark, int(name.split(".")[-2] in self._quantized))
        return _with_existing(result, data, self._compat), data

    def _call(self, name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None) -> Call:
        base = name.rpartition(".")[0]
        api = self._apis.get(base)
        if base.startswith("Primitive."):
            raise CannotRun("a primitive that a Cell holds: a dump does not have its attributes")
        if api is None:
            raise CannotRun(f"{base} is no function of the installed MindSpore that calculates with tensors")
        args, kwargs = self._arguments.of(name, record)
        why = left_out(api, tuple(args), kwargs)
        if why in ("communication", "random"):
            raise CannotRun("communication: other ranks take part in it" if why == "communication" else "draws random numbers")
        if api.name in INDEXED and len(args) > 1 and isinstance(args[1], list):
            args[1] = tuple(args[1])
        args = [tuple(value) if isinstance(value, list) and all(type(n) is int for n in value) else value for value in args]
        wanted: tuple[Any, ...] = ()
        incoming: list[Any] = []
        if backward is not None:
            incoming = self._arguments.gradients(name, backward)
            positional = [place for place, tensor in places_of(args) if str(tensor.dtype) in FLOATS]
            named = [place for place, tensor in places_of(kwargs) if str(tensor.dtype) in FLOATS]
            recorded = backward.get("output")
            slots = recorded if isinstance(recorded, list) and len(recorded) >= len(positional) else [{}] * len(positional)
            wanted = tuple(place for place, item in zip((*positional, *named), slots) if item is not None)
        return Call(name, api.function, args, kwargs, wanted, incoming)

    def _read_results(self, call: Call, record: Mapping[str, Any], backward: Mapping[str, Any] | None) -> Outcome | None:
        """The recorded results; None when one of them was not saved."""
        try:
            outputs = self._arguments.read_recorded(record.get("output") or [])
            gradients = self._arguments.read_recorded(backward.get("output") or []) if backward is not None else []
        except CannotRun:
            return None
        return Outcome(outputs, dict(zip(call.wanted, (g for g in gradients if g is not None))), "")


def _with_existing(result: CallResult, data: Mapping[str, Any], compat: bool) -> CallResult:
    """With what the existing tool makes of it, and its numbers instead of those for torch."""
    tensors = []
    for tensor in result.tensors:
        part, _, n = tensor.name.removeprefix(f"{result.name}.").rpartition(".")
        sides = data[f"{part}.bench.{n}"], data[f"{part}.device.{n}"]
        if all(isinstance(side, np.ndarray) for side in sides):
            metrics = existing_metrics(*sides)
            tensor = replace(tensor, old_status=existing_status(metrics), metrics=metrics if compat else tensor.metrics)
        tensors.append(tensor)
    if not compat:
        return replace(result, tensors=tuple(tensors))
    forward, back = ([t.old_status for t in tensors if f".{part}." in t.name] for part in ("forward", "backward"))
    return replace(
        result,
        tensors=tuple(tensors),
        forward=ERROR if ERROR in forward else result.forward if not forward else PASS,
        backward=ERROR if ERROR in back else result.backward if not back else PASS,
    )


def _round_off(kind: str) -> float:
    float_kind = float_type(kind)
    return float_kind.round_off if float_kind is not None else 0.0


def _judge_results(
    call: Call, bench: Outcome, device: Outcome, changed: Sequence[Outcome], unit: str, remark: str, integer_step: int
) -> tuple[CallResult, dict[str, Any]]:
    api = call.name.split(".")[-2]
    inputs = [array_of(value) for value in leaves_of([list(call.args), dict(call.kwargs)])]
    data: dict[str, Any] = {f"forward.input.{n}": value for n, value in enumerate(inputs)}

    def compare_result(name: str, part: str, n: int, golden: Any, target: Any, near: Sequence[Any]) -> TensorResult:
        data[f"{part}.bench.{n}"], data[f"{part}.device.{n}"] = array_of(golden), array_of(target)
        arrays = [array_of(other) for other in near if other is not None]
        sides = array_of(golden), array_of(target), kind_of(golden), kind_of(target)
        return judge(api, f"{call.name}.{name}", *sides, changed=arrays, input_dtype=unit, integer_step=integer_step)

    problems = [remark] if remark else []
    if len(bench.outputs) != len(device.outputs):
        problems.append(f"the bench has {len(bench.outputs)} outputs, the device {len(device.outputs)}")
    forward = [
        compare_result(
            f"forward.output.{n}", "forward.output", n, golden, target, [other.outputs[n] for other in changed if n < len(other.outputs)]
        )
        for n, (golden, target) in enumerate(zip(bench.outputs, device.outputs))
        if golden is not None and target is not None
    ]
    data |= {f"backward.input.{n}": array_of(value) for n, value in enumerate(call.gradients)}
    problems += list(dict.fromkeys(filter(None, (bench.problem, device.problem))))
    back = [
        compare_result(f"backward.output.{n}", "backward.output", n, golden, target, [other.gradients.get(place) for other in changed])
        for n, place in enumerate(call.wanted)
        if (golden := bench.gradients.get(place)) is not None and (target := device.gradients.get(place)) is not None
    ]
    results = (*forward, *back)
    messages = [*problems, *(f"{r.name.removeprefix(call.name + '.')}: {r.message}" for r in results if r.message)]
    direction = (worst(back) if back else SKIP) if call.wanted else NOT_RUN
    return CallResult(call.name, worst(forward), direction, "\n".join(messages), results), data
