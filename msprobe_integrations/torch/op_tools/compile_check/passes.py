"""Two whole passes of a program: what every module got and gave in each, and the gradients of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from msprobe_engine.accuracy.compile_report import ModuleDiff, TensorDiff
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.torch.op_tools.compile_check.graphs import disable_compile
from msprobe_integrations.torch.op_tools.compile_check.runs import put_streams, same_buffers, same_streams
from msprobe_integrations.torch.op_tools.compile_check.taker import Key, Taker
from msprobe_integrations.torch.op_tools.compile_check.truth import build_nudge, changed_parameters, copy_in_float64, wide
from msprobe_integrations.torch.op_tools.compile_check.verdict import noise, verdict
from msprobe_integrations.torch.op_tools.compile_check.watch import Watched

Program = Callable[[nn.Module], torch.Tensor]
_FIELDS = ("fwd_input", "fwd_output", "grad_input", "grad_output")


class Pass(NamedTuple):
    """What one pass gave.

    Attributes:
        loss: of the program, detached.
        values: leaves by (name of the call, kind), in the order of execution; gradients may be None.
        parameters: gradients by name.
    """

    loss: torch.Tensor
    values: dict[Key, list[Any]]
    parameters: dict[str, torch.Tensor | None]


@contextmanager
def looked_at(modules: dict[nn.Module, str], taker: Taker, apart: Sequence[nn.Module]) -> Iterator[None]:
    """Calls of these modules are taken, by hooks around each.

    Args:
        apart: modules whose results are given on as views. Of a compiled module a result that it also uses inside has the gradient
            from outside alone; so it has then uncompiled.
    """
    running: list[str] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(taker.record_inputs(module, args, kwargs))

    def after(module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> Any:
        if any(module is excluded for excluded in apart):
            result = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.view_as(tensor), result)
        taker.record_outputs(running.pop(), result)
        return result

    handles = []
    for module in modules:
        handles += [
            module.register_forward_pre_hook(disable_compile(before), with_kwargs=True),
            module.register_forward_hook(disable_compile(after), with_kwargs=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def one_pass(
    program: Program,
    model: nn.Module,
    modules: dict[nn.Module, str],
    state: Any,
    cast: Callable[[], Any] | None = None,
    apart: Sequence[nn.Module] = (),
    compiled: Sequence[Watched] = (),
) -> Pass:
    """Run the program and the backward of its loss. Gradients, buffers and random streams are afterwards as before.

    Args:
        modules: whose calls are taken, with their names.
        state: of the random streams at its start.
        cast: entered around it.
        apart: of `looked_at`.
        compiled: modules whose calls are taken where they are made; hooks would be compiled.

    Raises:
        UsageError: the program gives no loss.
    """
    before = [parameter.grad for parameter in model.parameters()]
    taker = Taker({**modules, **{watched.module: watched.name for watched in compiled}})
    try:
        for watched in compiled:
            watched.taker = taker
        for parameter in model.parameters():
            parameter.grad = None
        with same_streams(state), same_buffers(model), looked_at(modules, taker, apart), ExitStack() as stack:
            if cast is not None:
                stack.enter_context(cast())
            loss = program(model)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise UsageError(f"PrecisionChecker.compare: the function gave {type(loss).__name__}, not a loss of one element")
            if loss.requires_grad and all(parameter.grad is None for parameter in model.parameters()):
                loss.backward()
        grads = {name: None if p.grad is None else p.grad.detach() for name, p in model.named_parameters()}
        return Pass(loss.detach(), taker.values, grads)
    finally:
        for watched in compiled:
            watched.taker = None
        for parameter, grad in zip(model.parameters(), before):
            parameter.grad = grad


def exact_passes(
    program: Program, model: nn.Module, names: dict[nn.Module, str], state: Any, unit: torch.dtype | None, apart: Sequence[str]
) -> tuple[Pass, list[Pass]]:
    """The program with the model in float64, and with changed parameters.

    Raises:
        Exception: it does not run so.
    """
    made = copy_in_float64(model)
    modules = {made.get_submodule(name): name for name in names.values()}
    ends = [made.get_submodule(name) for name in apart]
    handle = made.register_forward_pre_hook(_widen_arguments, with_kwargs=True)
    try:
        truth = one_pass(program, made, modules, state, apart=ends)
        changed = []
        for n in (1, 2):
            with changed_parameters(made, build_nudge(unit, n)):
                changed.append(one_pass(program, made, modules, state, apart=ends))
    finally:
        handle.remove()
        put_streams(state)
    return truth, changed


def _widen_arguments(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, wide, (args, kwargs))


def compare(
    eager: Pass, compiled: Pass, truth: Pass | None, changed: Sequence[Pass], *, threshold: float | None, unit: str, inputs: bool
) -> tuple[list[ModuleDiff], TensorDiff]:
    """Verdicts on all calls, in the order in which they ended, on the gradients of all parameters, and on the loss."""
    kinds = _FIELDS if inputs else _FIELDS[1:]
    diffs: dict[str, ModuleDiff] = {}
    rates = [noise(e, t) for key in eager.values if truth is not None for e, t in zip(eager.values[key], truth.values.get(key, ()))]
    known = sorted(rate for rate in rates if rate is not None)
    usual = known[len(known) // 2] if known else 0.0

    def one(e: Any, c: Any, t: Any, others: Sequence[Any], name: str = "") -> TensorDiff:
        return verdict(e, c, t, others, threshold=threshold, unit=unit, usual=usual, name=name)

    for name, kind in eager.values:
        if kind not in kinds:
            continue
        diff = diffs.setdefault(name, ModuleDiff(name))
        eager_tensors, compiled_tensors = eager.values[name, kind], compiled.values.get((name, kind))
        if compiled_tensors is None:
            diff.note = "SKIP_inside_compiled"
        elif len(eager_tensors) != len(compiled_tensors):
            diff.note = f"FAIL: {kind}: {len(eager_tensors)} tensors uncompiled, {len(compiled_tensors)} compiled"
        else:
            exact = _like(truth, (name, kind), len(eager_tensors))
            others = [_like(run, (name, kind), len(eager_tensors)) for run in changed]
            rows = [
                one(e, c, exact[n], [other[n] for other in others])
                for n, (e, c) in enumerate(zip(eager_tensors, compiled_tensors))
                if not (_is_zero_gradient(e) and _is_zero_gradient(c))
            ]
            setattr(diff, kind, rows or None)
    for only, _ in compiled.values.keys() - eager.values.keys():
        diffs.setdefault(only, ModuleDiff(only)).note = "MISSING_fwd_in_eager"
    rows = [
        one(
            g,
            compiled.parameters.get(name),
            truth.parameters.get(name) if truth else None,
            [run.parameters.get(name) for run in changed],
            name,
        )
        for name, g in eager.parameters.items()
        if g is not None or compiled.parameters.get(name) is not None
    ]
    if rows:
        diffs.setdefault("", ModuleDiff("")).grad_parameter = rows
    loss = one(eager.loss, compiled.loss, truth.loss if truth else None, [run.loss for run in changed], "loss")
    ended = {name: n for n, (name, kind) in enumerate(eager.values) if kind == "fwd_output"}
    return sorted(diffs.values(), key=lambda diff: ended.get(diff.name, len(eager.values))), loss


def _is_zero_gradient(gradient: Any) -> bool:
    """No gradient, or one that is zero everywhere: compiled code gives the one where uncompiled code gives the other."""
    return gradient is None or (isinstance(gradient, torch.Tensor) and not bool(gradient.any()))


def _like(run: Pass | None, key: Key, length: int) -> list[Any]:
    values = run.values.get(key, []) if run is not None else []
    return values if len(values) == length else [None] * length
