"""The sides of one call against each other: every output, what was written in place, and every gradient is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from msprobe_engine.accuracy.precheck.memory import free_memory
from msprobe_engine.accuracy.results import ERROR, NOT_RUN, PASS, SKIP, WARNING, CallResult, TensorResult, worst
from msprobe_engine.accuracy.verdict.judge import judge
from msprobe_integrations.torch.op_tools.accuracy.arguments import Place
from msprobe_integrations.torch.op_tools.accuracy.execute import Outcome, leaves_of, places_of
from msprobe_integrations.torch.op_tools.accuracy.operators.dropout import compute_expected_output, wrong_share
from msprobe_integrations.torch.op_tools.accuracy.operators.ties import equally_right
from msprobe_integrations.torch.op_tools.accuracy.prepare import Prepared
from msprobe_integrations.torch.op_tools.accuracy.sides import Ran, on_changed
from msprobe_integrations.torch.op_tools.accuracy.types import coarsest
from msprobe_integrations.torch.tensors.arrays import as_array, kind_of

_ABOUT = (str, torch.dtype, torch.device)
"""Results that name a type or a device (``x.type()``, ``torch.result_type``): the bench has others because it is meant to."""


_LARGE = 1 << 28
"""Bytes of results from which on it is asked whether there is memory for more."""
_INSIDE = 7
"""Memory that runs with changes inside take, in sizes of the results."""


class Comparison:
    """Compares the sides of one call."""

    def __init__(
        self, prepared: Prepared, device: Outcome, bench: Ran, second: Outcome | None, autocast: torch.dtype | None, condition: bool,
        given: bool, integer_step: int = 0,
    ) -> None:  # fmt: skip
        self._given, self._integer_step = given, integer_step
        self._prepared, self._device, self._bench, self._second = prepared, device, bench.outcome, second
        self._autocast = autocast
        self._unit = coarsest((*prepared.inputs, *([autocast] if autocast else [])))
        self._changed: list[Outcome] = []
        self._again: Ran | None = None
        if prepared.dropout is not None:
            self._bench = self._build_dropout_outcome(bench)
        elif condition and not _rounds_to(self._bench, device):
            self._changed, self._again = on_changed(bench, self._unit), bench
        self._inside: list[Outcome] | None = None
        self._tied = False

    def _build_dropout_outcome(self, bench: Ran) -> Outcome:
        """What a dropout must give, from what the device has dropped."""
        call, drop = self._prepared.call, self._prepared.dropout
        assert drop is not None
        source = call.args[0] if call.args else call.kwargs["input"]
        wide = source.to(self._bench.outputs[0].dtype)
        out = self._device.outputs[0].cpu()
        outputs = [compute_expected_output(drop, wide, out), *(value.cpu() for value in self._device.outputs[1:])]
        gradients: dict[Place, torch.Tensor | None] = {}
        incoming = call.gradients[0] if call.gradients else torch.ones_like(source)
        for place, gradient in self._device.gradients.items():
            if gradient is not None and incoming is not None:
                dropped = torch.where(source != 0, out, gradient.cpu())  # where 0 came in, the gradient tells
                gradients[place] = compute_expected_output(drop, incoming.to(wide.dtype), dropped)
        return Outcome(outputs, {}, gradients, bench.outcome.problem)

    def result(self) -> tuple[CallResult, dict[str, Any]]:
        prepared, call = self._prepared, self._prepared.call
        inputs = leaves_of([list(call.args), dict(call.kwargs)])
        data: dict[str, Any] = {f"forward.input.{n}": value for n, value in enumerate(inputs)}
        forward, wrong = self._forward(data)
        problems = [*wrong] if forward or wrong else ["there is nothing to compare: the call gives no values"]
        back: list[TensorResult] = []
        lost: list[str] = []
        if call.wanted:
            data |= {f"backward.input.{n}": g for n, g in enumerate(call.gradients)}
            back, why, lost = self._backward(data)
            problems += [*why, *lost]
        if prepared.dropout is not None and forward:
            x: torch.Tensor = call.args[0] if call.args else call.kwargs["input"]
            share = wrong_share(prepared.dropout, x, self._device.outputs[0].cpu())
            if share:
                forward[0] = replace(forward[0], status=ERROR, message=share)
        results = (*forward, *back)
        messages = [*problems, *(f"{r.name.removeprefix(prepared.name + '.')}: {r.message}" for r in results if r.message)]
        direction = (ERROR if lost else worst(back) if back else SKIP) if call.wanted else NOT_RUN
        return CallResult(prepared.name, ERROR if wrong else worst(forward), direction, "\n".join(messages), results), data

    def _forward(self, data: dict[str, Any]) -> tuple[list[TensorResult], list[str]]:
        """Results of the forward, and what is wrong beside them."""
        bench, device, name = self._bench, self._device, self._prepared.name
        results: list[TensorResult] = []
        problems: list[str] = []
        some = self._prepared.operator.reference is not None  # formulas need not give all results
        count = len(device.outputs)
        if (count < len(bench.outputs) and (count or not self._given)) or (count > len(bench.outputs) and not some):
            problems.append(f"the bench has {len(bench.outputs)} outputs, the device {len(device.outputs)}")
        for n, (golden, target) in enumerate(zip(bench.outputs, device.outputs)):
            data[f"forward.output.bench.{n}"], data[f"forward.output.device.{n}"] = _on_cpu(golden), _on_cpu(target)
            if golden is None or (target is None and some) or isinstance(golden, _ABOUT):
                continue
            results.append(self._tensor(f"{name}.forward.output.{n}", golden, target, partial(_output, n)))
        for place, tensor in bench.written.items():
            written = device.written.get(place)
            where = ".".join(map(str, place))
            if written is None:
                if not self._given:
                    problems.append(f"the bench writes to input {where}, the device does not")
                continue
            results.append(self._tensor(f"{name}.forward.input.{where}.written", tensor, written, partial(_get_written, place)))
        return results, problems

    def _backward(self, data: dict[str, Any]) -> tuple[list[TensorResult], list[str], list[str]]:
        """Gradients, what is to be told beside them, and which ones the device has lost."""
        bench, device, prepared = self._bench, self._device, self._prepared
        results: list[TensorResult] = []
        lost: list[str] = []
        problems = list(dict.fromkeys(filter(None, (bench.problem, device.problem))))
        if self._tied:
            return [], [*problems, "backward: equal values at other places, whose gradients go elsewhere"], []
        ran = not problems
        for n, place in enumerate(prepared.places):
            golden, target = bench.gradients.get(place), device.gradients.get(place)
            if golden is None and target is None:
                continue
            data[f"backward.output.bench.{n}"], data[f"backward.output.device.{n}"] = _on_cpu(golden), _on_cpu(target)
            if golden is None or target is None:
                present = target if golden is None else golden
                assert present is not None
                if ran and bool((present != 0).any()):
                    # a dump may lack some, and a formula may give one to what the operator takes for a constant
                    notes = lost if target is None and not self._given and place in prepared.needed else problems
                    notes.append(f"backward: only the {'device' if golden is None else 'bench'} has a gradient for input {n}")
                continue
            results.append(self._tensor(f"{prepared.name}.backward.output.{n}", golden, target, partial(_gradient, place)))
        return results, problems, lost

    def _tensor(self, name: str, bench: Any, device: Any, part: Callable[[Outcome], Any]) -> TensorResult:
        """Judge one tensor; `part` finds it in other runs."""
        result = self._judge(name, bench, device, part, self._changed)
        if result.status in (WARNING, ERROR) and self._again is not None:  # changed inputs do not tell all of an operator's condition
            if self._inside is None:
                self._inside = on_changed(self._again, self._unit, inside=True) if self._has_room() else []
            if self._inside:
                exact = isinstance(device, torch.Tensor) and not (device.is_floating_point() or device.is_complex())
                inside = self._inside[: len(self._changed)] if exact else self._inside  # more of them would only let more indices pass
                result = self._judge(name, bench, device, part, [*self._changed, *inside])
            elif not self._has_room():
                result = replace(result, message=f"{result.message}\nround-off inside the operator was not measured: too little memory")
        call = self._prepared.call
        both_tensors = isinstance(bench, torch.Tensor) and isinstance(device, torch.Tensor)
        if result.status == ERROR and both_tensors and ".forward." in name:
            inputs = [t for _, t in places_of([list(call.args), dict(call.kwargs)])]
            if _lost_in_squares(self._prepared.api, inputs, device.cpu(), bench.cpu()):
                return replace(result, status=PASS, message="")
        if result.status == ERROR and both_tensors and equally_right(self._prepared.api, call.args, call.kwargs, device.cpu(), bench.cpu()):
            self._tied = True
            return replace(result, status=PASS, message="")
        return result

    def _has_room(self) -> bool:
        """Is there memory for the steps of the operator, and for its results once more?"""
        size = sum(8 * t.numel() for t in (*self._bench.outputs, *self._bench.gradients.values()) if isinstance(t, torch.Tensor))
        free = free_memory() if size >= _LARGE else None
        return free is None or _INSIDE * size <= free

    def _judge(self, name: str, bench: Any, device: Any, part: Callable[[Outcome], Any], changed: Sequence[Outcome]) -> TensorResult:
        others = [as_array(value, share=True) for run in changed if isinstance(value := part(run), torch.Tensor)]
        second = part(self._second) if self._second is not None else None
        computed = self._computed_in(device)
        result = judge(
            self._prepared.api, name, as_array(bench, share=True), as_array(device, share=True), kind_of(bench), computed,
            changed=others, second=None if second is None else as_array(second, share=True), input_dtype=_text(self._unit),
            integer_step=self._integer_step,
        )  # fmt: skip
        return result if computed == kind_of(device) else replace(result, device_dtype=kind_of(device))

    def _computed_in(self, device: Any) -> str:
        """Under autocast the gradient of a float32 weight has been computed in 16 bits: then that is its type. One that is the sum of
        several such (an input of both directions of an LSTM, each of which casts it for itself) has more digits, none of them right."""
        low = self._autocast
        if low is None or not isinstance(device, torch.Tensor) or device.dtype is not torch.float32:
            return kind_of(device)
        cast = any(device is gradient for gradient in self._device.gradients.values()) and all(
            not isinstance(out, torch.Tensor) or out.dtype is low for out in self._device.outputs
        )
        return str(low) if cast or torch.equal(device.to(low).float(), device) else kind_of(device)


def _output(number: int, run: Outcome) -> Any:
    return run.outputs[number] if number < len(run.outputs) else None


def _get_written(place: Place, run: Outcome) -> Any:
    return run.written.get(place)


def _gradient(place: Place, run: Outcome) -> Any:
    return run.gradients.get(place)


def _rounds_to(bench: Outcome, device: Outcome) -> bool:
    """Is everything that the device has just what the bench has, rounded? Then there is no error to be related to anything."""

    def same(golden: Any, target: Any) -> bool:
        if not isinstance(golden, torch.Tensor) or not isinstance(target, torch.Tensor) or golden.shape != target.shape:
            return golden is target or not isinstance(golden, torch.Tensor)
        if target.dtype.itemsize == 1 or target.dtype is torch.complex32:  # not all of these can be compared
            return False
        return bool(torch.equal(golden.to("cpu", target.dtype), target.cpu()))

    pairs = [*zip(bench.outputs, device.outputs), *((bench.written[p], device.written.get(p)) for p in bench.written)]
    pairs += [(g, device.gradients.get(p)) for p, g in bench.gradients.items()]
    return all(same(golden, target) for golden, target in pairs)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _text(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype)


# Norms of numbers so small that their squares are no normal numbers: kernels that do not scale first have lost them, on any device.
_NORMS = frozenset(("norm", "vector_norm", "matrix_norm", "_foreach_norm", "dist"))


def _lost_in_squares(api: str, inputs: Iterable[torch.Tensor], device: torch.Tensor, bench: torch.Tensor) -> bool:
    """Are all differences of two results of a norm no more than what squares below the smallest normal number make?

    Args:
        api: last part of the operator's name.
        inputs: of the call; the largest says of how many squares a result may be the sum.
        device, bench: results, on the CPU; the type of `device` is that of the squares.
    """
    sizes = [t.numel() for t in inputs]
    if api not in _NORMS or not sizes or device.shape != bench.shape or not device.dtype.is_floating_point:
        return False
    lost = max(sizes) * torch.finfo(torch.float32 if device.dtype.itemsize < 4 else device.dtype).smallest_normal
    return bool(((device.double().square() - bench.double().square()).abs() <= lost).all())
