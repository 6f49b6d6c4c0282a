"""Checks a call the way the existing tool does, for ``--compat``: which inputs are raised to which type, which gradients are looked at and
under which numbers. Its choices are kept, the questionable ones too; `checker.Checker` is what is right.

Rules (spec of the pre-check, a.4, a.5 and a.8): one floating type among the inputs is raised one step for the bench; of several types all
become float32, and the device's call runs in an autocast region of one that is none; the same where the recorded result is of another type
than the inputs. Gradients are those of tensors among the positional arguments, by their place there, and only where the result is a single
tensor. Dropout is the identity, and only its zeros are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from msprobe_engine.accuracy.results import ERROR, NOT_RUN, PASS, SKIP, WARNING, CallResult, TensorResult, build_skipped_result
from msprobe_engine.accuracy.verdict.existing import comparable, old_status
from msprobe_engine.accuracy.verdict.judge import judge
from msprobe_engine.accuracy.verdict.metrics import convert_to_working_types
from msprobe_engine.accuracy.verdict.standards import NEW, OLD
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_integrations.common.capture.nested import mapper
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun
from msprobe_integrations.common.op_tools.accuracy.checking import Checked, check_call
from msprobe_integrations.torch.op_tools.accuracy.arguments import Arguments
from msprobe_integrations.torch.op_tools.accuracy.execute import leaves_of
from msprobe_integrations.torch.op_tools.accuracy.resolve import find
from msprobe_integrations.torch.tensors.arrays import as_array

_mapped = mapper(torch.Tensor)
_RAISED = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
_EXECUTED = ("Functional", "Tensor", "Torch", "NPU", "Aten")
_SINGLE = ("conv1d", "conv2d")
"""float32 inputs of these are rounded to 11 bits behind the point, and the bench keeps their type."""
_AS_THEY_ARE = ("type_as",)
_ATTACHED = frozenset(("resize_", "resize_as_", "set_", "transpose_", "t_", "squeeze_", "unsqueeze_"))
_NO_BACKWARD = {
    "repeat_interleave": "the existing tool runs no backward of this API",
    "masked_select": "the existing tool runs no backward of this API",
}
_GRADIENT_OF = {"topk": 0, "npu_fusion_attention": 0}
"""APIs with several results whose backward is run all the same, from this result."""
_FEW_ZEROS, _ENOUGH = 0.1, 100


class _Sides(NamedTuple):
    """Arguments of both sides."""

    bench: tuple[list[Any], dict[str, Any]]
    device: tuple[list[Any], dict[str, Any]]
    autocast: torch.dtype | None


class CheckerAsExisting:
    """As `checker.Checker`, by the existing tool's rules; statuses are those that it gives.

    Args:
        files: the saved tensors of the dump; None: inputs are drawn (as ours, which is not how that tool draws them).
        seed: of drawn inputs and random state.
        version: of the existing tool, one of `standards.VERSIONS`.
        quantized: bare names of APIs whose integer results may differ by 1; 8.1.1 has no such list.
    """

    def __init__(
        self, files: TensorFiles | None, device: str = "cpu", *, seed: int = 0, version: str = OLD, quantized: Collection[str] = ()
    ) -> None:
        self._arguments = Arguments(files, seed)
        self._device = torch.device(device)
        self._seed, self._version = seed, version
        self._quantized = frozenset(quantized) if version == NEW else frozenset()

    def check(self, name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None) -> Checked:
        """Check one call: its name without direction, its records as in dump.json."""
        return check_call(name, self._arguments, lambda: self._check(name, record, backward))

    def _check(self, name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None) -> tuple[CallResult, dict[str, Any]]:
        kind, _, rest = name.partition(".")
        api = rest.rpartition(".")[0]
        function = find(f"{name}.forward") if kind in _EXECUTED else None
        if function is None:
            return build_skipped_result(name, "the API is not known here"), {}
        if "dropout" in api:
            function = _identity
        args, kwargs = self._arguments.of(name, record)
        reason = "results with out= have no gradients" if "out" in kwargs else _NO_BACKWARD.get(api, "")
        wants = backward is not None and not reason
        needs = wants and _flags(record.get("input_args"))
        sides = self._sides(api, args, kwargs, needs if wants else False, record)
        torch.manual_seed(self._seed)
        bench = _run_operator(function, *sides.bench[0], **sides.bench[1])
        with torch.autocast(self._device.type, sides.autocast, enabled=sides.autocast is not None):
            device = _run_operator(function, *sides.device[0], **sides.device[1])
        grads: tuple[list[Any], list[Any]] = ([], [])
        incoming = None
        if wants:
            assert backward is not None
            if isinstance(bench, (list, tuple)) and api not in _GRADIENT_OF:
                reason = "the existing tool runs no backward of several results"
            else:
                incoming = self._arguments.gradients(name, backward)[0]
                if incoming is None:
                    raise CannotRun("there is no gradient in the record")
                grads = (
                    _run_operator(_backward, api, bench, incoming, sides.bench[0]),
                    _run_operator(_backward, api, device, incoming, sides.device[0]),
                )
        data = _data([args, kwargs], bench, device, incoming, grads)
        return _result(name, api, bench, device, grads, reason, self._version, api in self._quantized), data

    def _sides(self, api: str, args: list[Any], kwargs: dict[str, Any], needs: Any, record: Mapping[str, Any]) -> _Sides:
        if api in _SINGLE:
            args, kwargs = _mapped(args, _round_to_11_bits), _mapped(kwargs, _round_to_11_bits)
        types = {value.dtype for value in leaves_of([args, kwargs]) if isinstance(value, torch.Tensor)} & _RAISED.keys()
        autocast: torch.dtype | None = None
        raised: dict[torch.dtype, torch.dtype] = {}
        recorded = _output_type(record)
        region = False
        if len(types) == 1:
            (autocast,) = types
            raised = {autocast: _RAISED[autocast]}
        elif types:
            raised, region = dict.fromkeys(_RAISED, torch.float32), True
            autocast = sorted(types - {torch.float32}, key=str)[0]
        if not region and recorded is not None:
            region, autocast = autocast != recorded, recorded
        if api in _AS_THEY_ARE:
            raised = {}
        if api in _SINGLE:
            raised.pop(torch.float32, None)
        attached = api in _ATTACHED
        bench = _copies(args, needs, lambda t: t.to(raised.get(t.dtype, t.dtype)), attached), _plain(kwargs, raised)
        device = (
            _copies(args, needs, lambda t: t.to(self._device), attached),
            _mapped(kwargs, lambda t: t.detach().clone().to(self._device)),
        )
        if kwargs.get("device") is not None:
            device[1]["device"] = self._device
            bench[1].pop("device")
        return _Sides(bench, device, autocast if region else None)


def _run_operator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator; what it says of its arguments is the reason that it cannot be run."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # of torch, of any kind
        raise CannotRun(f"{type(error).__name__}: {error}"[:500]) from error


def _identity(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return input * 1


def _flags(items: Any) -> Any:
    """Which values of recorded arguments had gradients; the structure of the record."""
    if isinstance(items, list):
        return [_flags(item) for item in items]
    return isinstance(items, Mapping) and bool(items.get("requires_grad"))


def _copies(value: Any, needs: Any, move: Callable[[torch.Tensor], torch.Tensor], attached: bool) -> Any:
    """Tensors of one side: copies, and where a gradient is wanted results of a multiplication, so that operations may write to them."""
    if isinstance(value, torch.Tensor):
        copy = move(value.detach().clone())
        if needs is True:
            copy = (copy.requires_grad_() * 1).type_as(copy)
            copy.retain_grad()
        return copy
    if type(value) in (list, tuple):
        inner = needs if isinstance(needs, list) else [needs] * len(value)
        return type(value)(_copies(child, n, move, attached) for child, n in zip(value, inner))
    return value


def _plain(kwargs: dict[str, Any], raised: Mapping[torch.dtype, torch.dtype]) -> dict[str, Any]:
    found: dict[str, Any] = _mapped(kwargs, lambda t: t.detach().clone().to(raised.get(t.dtype, t.dtype)))
    return found


def _round_to_11_bits(tensor: torch.Tensor) -> torch.Tensor:
    """float32 with 11 bits behind the point, rounded half up."""
    if tensor.dtype is not torch.float32:
        return tensor
    bits = tensor.detach().contiguous().view(torch.int32)
    return ((((bits >> 11) + 1) >> 1) << 12).view(torch.float32)


def _output_type(record: Mapping[str, Any]) -> torch.dtype | None:
    items = record.get("output")
    first = items[0] if isinstance(items, list) and items else None
    dtype = getattr(torch, str(first.get("dtype")).removeprefix("torch."), None) if isinstance(first, Mapping) else None
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _backward(api: str, out: Any, incoming: torch.Tensor, args: Sequence[Any]) -> list[Any]:
    """Gradients of all tensors among the positional arguments; None for those that have none."""
    root = out[_GRADIENT_OF[api]] if api in _GRADIENT_OF else out
    root.backward(incoming.to(root.device, _RAISED.get(incoming.dtype, incoming.dtype) if root.dtype in _RAISED.values() else root.dtype))
    return [value.grad for value in leaves_of(list(args)) if isinstance(value, torch.Tensor)]


def _result(
    name: str, api: str, bench: Any, device: Any, grads: tuple[list[Any], list[Any]], reason: str, version: str, quantized: bool
) -> CallResult:
    dropout = "dropout" in name
    forward, forward_results = (
        (_zeros(bench, device), []) if dropout else _compare_results(api, f"{name}.forward.output", bench, device, version, quantized)
    )
    backward, backward_results = NOT_RUN, list[TensorResult]()
    if reason:
        backward, backward_results = (
            SKIP,
            [TensorResult(f"{name}.backward.output.0", (), "", "", status=SKIP, message=reason, old_status=SKIP)],
        )
    elif grads[0] and grads[1]:
        if dropout:
            backward = _zeros(grads[0][0], grads[1][0])
        else:
            backward, backward_results = _compare_results(api, f"{name}.backward.output", *grads, version, quantized)
    return CallResult(name, forward, backward, reason, (*forward_results, *backward_results))


def _compare_results(api: str, prefix: str, bench: Any, device: Any, version: str, quantized: bool) -> tuple[str, list[TensorResult]]:
    """Status of a direction, the last one that is no pass, and the rows."""
    pairs = list(zip(bench, device)) if isinstance(bench, (list, tuple)) else [(bench, device)]
    rows = [_row(api, f"{prefix}.{n}", golden, target, version, quantized) for n, (golden, target) in enumerate(pairs)]
    status = PASS
    for row in rows:
        status = row.old_status if row.old_status in (ERROR, WARNING) else status
    return status, rows


def _row(api: str, name: str, bench: Any, device: Any, version: str, quantized: bool) -> TensorResult:
    if bench is None and device is None:
        return TensorResult(name, (), "", "", status=SKIP, message="the bench has no result", old_status=SKIP)
    if isinstance(bench, (list, tuple, dict)):
        return TensorResult(name, (), "", "", status=ERROR, message="a result within a result is not compared", old_status=ERROR)
    golden, target = as_array(bench), as_array(device)
    result = judge(api, name, golden, target, _kind(bench), _kind(device))
    metrics, status = result.metrics, result.old_status
    if isinstance(bench, torch.Tensor) and isinstance(device, torch.Tensor):
        golden, target = convert_to_working_types(golden, target, result.device_dtype)
        metrics = metrics if comparable(golden.dtype.name, target.dtype.name, version) else {}
        status = old_status(golden, target, result.device_dtype, metrics, version)
        if quantized and "error_rate" in metrics and golden.dtype.kind in "iu":
            largest = float(np.abs(target - golden).max())  # of unsigned types that wrap, too
            metrics, status = {"max_abs": largest}, PASS if largest <= 1 else ERROR
    return replace(result, metrics=metrics, status=status, old_status=status, message="")


def _zeros(bench: torch.Tensor, device: torch.Tensor) -> str:
    share = abs(int((bench == 0).sum()) - int((device == 0).sum())) / max(bench.numel(), 1)
    return PASS if bench.numel() < _ENOUGH or share < _FEW_ZEROS else ERROR


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else str(type(value))


def _data(inputs: Any, bench: Any, device: Any, incoming: Any, grads: tuple[list[Any], list[Any]]) -> dict[str, Any]:
    sides = (
        ("forward.input", inputs), ("forward.output.bench", bench), ("forward.output.device", device),
        ("backward.input", incoming), ("backward.output.bench", grads[0]), ("backward.output.device", grads[1]),
    )  # fmt: skip
    return {f"{part}.{n}": value for part, values in sides for n, value in enumerate(leaves_of(values))}
