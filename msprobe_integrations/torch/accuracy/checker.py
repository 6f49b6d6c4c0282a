"""Check one recorded call: run it on the target and on the bench, and judge every output and gradient.

What a dump holds of a call (its record, and tensors or statistics) is enough. See `Checker`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from msprobe_engine.accuracy.judge import judge
from msprobe_engine.accuracy.results import NOT_RUN, SKIP, CallResult, TensorResult, skipped, worst
from msprobe_engine.dump.tensor_reader import TensorFiles
from msprobe_integrations.torch.accuracy.arguments import Arguments
from msprobe_integrations.torch.accuracy.execute import Call, Outcome, Path, Side, leaves_of, run, stirred
from msprobe_integrations.torch.accuracy.resolve import CannotRun, find

_LOW = (torch.float16, torch.bfloat16)
_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64, torch.complex64: torch.complex128}
_RAISED = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.complex64: torch.complex128}
_BENCHES = {"float64": _WIDER, "raised": _RAISED}
_CHANGES = 2
"""Runs of the bench on changed inputs."""


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
        device: of torch.
        dtype: ``"float64"``; ``"raised"``: one step up (float16 and bfloat16 to float32, float32 to float64), as the existing tool does.
    """

    device: str = "cpu"
    dtype: str = "float64"


class Checked(NamedTuple):
    """What came of a call.

    Attributes:
        result: the verdict.
        data: tensors (on the CPU) and other values of both sides, by the part of a file name that follows the name of the call:
            ``forward.input.0``, ``forward.output.bench.0``, ``forward.output.device.0``, ``backward.input.0``, ...
    """

    result: CallResult
    data: Mapping[str, Any]


class Checker:
    """Checks calls of one dump. Not for several threads at once.

    Args:
        files: the saved tensors of the dump; None: all inputs are drawn from statistics.
        target: what is tested.
        bench: what it is tested against.
        seed: of drawn inputs and random state.
        condition: run the bench on changed inputs too, to know how much the operator makes of an error.
        second: another implementation beside the target; what it gets wrong as well is not held against the target.
    """

    def __init__(
        self,
        files: TensorFiles | None,
        target: Target | None = None,
        bench: Bench | None = None,
        *,
        seed: int = 0,
        condition: bool = True,
        second: Target | None = None,
    ) -> None:
        self._arguments = Arguments(files, seed)
        self._target, self._bench, self._second = target or Target(), bench or Bench(), second
        self._seed, self._condition = seed, condition

    def check(
        self,
        name: str,
        record: Mapping[str, Any],
        backward: Mapping[str, Any] | None,
        outputs: Any = None,
        gradients: Any = None,
    ) -> Checked:
        """Check one call.

        Args:
            name: ``"Torch.matmul.0"``.
            record: of dump.json: ``input_args``, ``input_kwargs``, ``output``.
            backward: its backward record (``input``, ``output``); None: only forward.
            outputs: results that the device had when it was recorded; then the target is not run, they are judged.
            gradients: of its inputs, as recorded, likewise.
        """
        start = time.perf_counter()
        name = name.removesuffix(".forward")
        try:
            result, data = self._check(name, record, backward, outputs, gradients)
        except CannotRun as error:
            result, data = skipped(name, str(error)), {}
        except Exception as error:  # of torch, of any kind
            result, data = skipped(name, _short(error)), {}
        return Checked(_timed(result, time.perf_counter() - start), data)

    def _check(
        self, name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None, outputs: Any, gradients: Any
    ) -> tuple[CallResult, dict[str, Any]]:
        function = find(f"{name}.forward")
        if function is None:
            return skipped(name, "API is not known to this version of torch"), {}
        call = self._call(name, function, record, backward)
        bench_side = Side(torch.device(self._bench.device), _BENCHES[self._bench.dtype])
        bench = run(call, bench_side)
        if outputs is None and gradients is None:
            target = run(call, Side(torch.device(self._target.device), compiled=self._target.compiled))
        else:
            target = _given(outputs, gradients, call.wanted)
        coarsest = _coarsest(call)
        changed = [run(_changed(call, n, coarsest), bench_side) for n in range(_CHANGES)] if self._condition else []
        return _judged(name, call, bench, target, changed, "" if coarsest is None else str(coarsest))

    def _call(self, name: str, function: Any, record: Mapping[str, Any], backward: Mapping[str, Any] | None) -> Call:
        args, kwargs = self._arguments.of(name, record)
        if name.split(".")[1] in ("__getitem__", "__setitem__") and len(args) > 1 and isinstance(args[1], list):
            args[1] = tuple(args[1])
        incoming: list[torch.Tensor | None] = []
        wanted: tuple[Path, ...] = ()
        if backward is not None:
            incoming = self._arguments.gradients(name, backward)
            wanted = tuple(_wanted([args, kwargs], record))
        return Call(function, args, kwargs, wanted, incoming, zlib.crc32(f"{self._seed} {name}".encode()))


def _wanted(values: Sequence[Any], record: Mapping[str, Any]) -> list[Path]:
    """Places of the tensors that had a gradient."""
    found: list[Path] = []

    def look(value: Any, item: Any, path: Path) -> None:
        if isinstance(value, torch.Tensor):
            if (value.dtype.is_floating_point or value.dtype.is_complex) and isinstance(item, Mapping) and item.get("requires_grad"):
                found.append(path)
        elif isinstance(value, dict) and isinstance(item, Mapping):
            for key, child in value.items():
                look(child, item.get(key), (*path, key))
        elif isinstance(value, (list, tuple)) and isinstance(item, list):
            for n, (child, inner) in enumerate(zip(value, item)):
                look(child, inner, (*path, n))

    look(values[0], record.get("input_args"), ())
    look(values[1], record.get("input_kwargs"), ())
    return found


def _changed(call: Call, number: int, coarsest: torch.dtype | None) -> Call:
    """The call with floating inputs, and what autograd saves of it, changed by one unit of round-off of their coarsest type."""
    generator = torch.Generator().manual_seed(call.seed + number)
    unit = 0.0 if coarsest is None else torch.finfo(coarsest).eps / 2
    unit = max(unit, 2.0**-52)  # 1 + 2**-53 is 1 in float64

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex) and value.dtype.itemsize > 1:
            return stirred(value.to(torch.complex128 if value.dtype.is_complex else torch.float64), unit, generator)
        if type(value) is dict:
            return {key: change(child) for key, child in value.items()}
        return type(value)(map(change, value)) if type(value) in (list, tuple) else value

    args, kwargs, gradients = change(list(call.args)), change(dict(call.kwargs)), change(list(call.gradients))
    return call._replace(args=args, kwargs=kwargs, gradients=gradients, stir=unit, turn=number)


def _coarsest(call: Call) -> torch.dtype | None:
    """Of the floating types of the inputs (of the parts, for complex ones) the one with the largest round-off; float8 ones aside."""
    tensors = [t for t in leaves_of([call.args, call.kwargs]) if isinstance(t, torch.Tensor)]
    kinds = {t.dtype.to_real() for t in tensors if (t.dtype.is_floating_point or t.dtype.is_complex) and t.dtype.itemsize > 1}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=None)


def _given(outputs: Any, gradients: Any, wanted: Sequence[Path]) -> Outcome:
    """What was recorded on the device, in place of a run."""
    found = [g for g in leaves_of(gradients) if g is not None]
    return Outcome(list(leaves_of(outputs)), {}, dict(zip(wanted, found)), "")


def _judged(
    name: str, call: Call, bench: Outcome, target: Outcome, changed: Sequence[Outcome], coarsest: str
) -> tuple[CallResult, dict[str, Any]]:
    api = name.split(".")[1]
    data: dict[str, Any] = {f"forward.input.{n}": value for n, value in enumerate(leaves_of([call.args, call.kwargs]))}
    forward: list[TensorResult] = []
    for n, (b, d) in enumerate(zip(bench.outputs, target.outputs)):
        data[f"forward.output.bench.{n}"], data[f"forward.output.device.{n}"] = b, d
        if b is not None and d is not None:
            forward.append(_compared(api, f"{name}.forward.output.{n}", b, d, [c.outputs[n] for c in changed], coarsest))
    for place, tensor in bench.written.items():
        if place in target.written:
            text = ".".join(map(str, place))
            what = [c.written[place] for c in changed if place in c.written]
            forward.append(_compared(api, f"{name}.forward.input.{text}.written", tensor, target.written[place], what, coarsest))
    back: list[TensorResult] = []
    data |= {f"backward.input.{n}": g for n, g in enumerate(call.gradients)}
    for n, place in enumerate(p for p in bench.gradients if bench.gradients[p] is not None and target.gradients.get(p) is not None):
        b, d = bench.gradients[place], target.gradients[place]
        data[f"backward.output.bench.{n}"], data[f"backward.output.device.{n}"] = b, d
        what = [g for c in changed if (g := c.gradients.get(place)) is not None]
        back.append(_compared(api, f"{name}.backward.output.{n}", b, d, what, coarsest))
    problem = bench.backward_error or target.backward_error
    results = (*forward, *back)
    message = "\n".join(filter(None, (problem, *(r.message for r in results))))
    direction = worst(back) if back else (SKIP if call.wanted else NOT_RUN)
    return CallResult(name, worst(forward), direction, message, results), data


def _compared(api: str, name: str, bench: Any, device: Any, changed: Sequence[Any], coarsest: str) -> TensorResult:
    arrays = [_array(c) for c in changed if isinstance(c, torch.Tensor) and isinstance(bench, torch.Tensor) and c.shape == bench.shape]
    return judge(api, name, _array(bench), _array(device), _kind(bench), _kind(device), changed=arrays, input_dtype=coarsest)


def _array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().resolve_conj().resolve_neg().cpu()
    if value.dtype.is_floating_point and (value.dtype.itemsize == 1 or value.dtype is torch.bfloat16):
        value = value.float()
    array: np.ndarray[Any, Any] = value.numpy()
    return array


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def _timed(result: CallResult, seconds: float) -> CallResult:
    return CallResult(result.name, result.forward, result.backward, result.message, result.tensors, seconds)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
