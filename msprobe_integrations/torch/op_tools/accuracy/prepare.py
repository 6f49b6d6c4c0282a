"""From a record to a call that can be run on any side: the functions, the arguments, and what the record says of the results."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun
from msprobe_integrations.torch.op_tools.accuracy import references
from msprobe_integrations.torch.op_tools.accuracy.arguments import Arguments, Place
from msprobe_integrations.torch.op_tools.accuracy.execute import Call, leaves_of, places_of
from msprobe_integrations.torch.op_tools.accuracy.operators.dropout import Dropout, draws, dropout_of
from msprobe_integrations.torch.op_tools.accuracy.resolve import Operator, resolve
from msprobe_integrations.torch.op_tools.accuracy.types import floats_of

_NOT_DIFFERENTIABLE = ("out",)
_SILENT: dict[str, tuple[Place, ...]] = dict.fromkeys(
    ("batch_norm", "instance_norm"), ((1,), (2,), (3,), (4,), ("running_mean",), ("running_var",))
)
"""Running statistics, in torch.nn.functional and in torch."""


class Recorded(NamedTuple):
    """Type and shape of a recorded result."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]


class Prepared(NamedTuple):
    """A call that can be run.

    Attributes:
        name: ``"Torch.matmul.0"``.
        call: arguments and gradients.
        places: of all tensors among the arguments, in order: a gradient is numbered by that of its tensor.
        inputs: floating types of the arguments.
        outputs: what the record says of the leaves of the result; None for what is no tensor; an empty list: nothing.
        dropout: what it drops, if that is what it does.
        needed: places of which the record says that they needed a gradient.
    """

    name: str
    operator: Operator
    call: Call
    places: tuple[Place, ...]
    inputs: set[torch.dtype]
    outputs: list[Recorded | None]
    dropout: Dropout | None
    needed: frozenset[Place]

    @property
    def api(self) -> str:
        """Last part of the operator's name."""
        return self.operator.api

    def variants(self) -> Iterator[Call]:
        """The call, and other forms that its record may stand for: JSON has lists where the call had tuples."""
        call = self.call
        if self.api in ("__getitem__", "__setitem__") and len(call.args) > 1 and isinstance(call.args[1], list):
            args = list(call.args)
            yield call._replace(args=[args[0], tuple(args[1]), *args[2:]])
            if not any(item is None or item is ... or isinstance(item, slice) for item in args[1]):
                yield call
            return
        yield call
        changed = [_tuples(value) for value in call.args], {key: _tuples(value) for key, value in call.kwargs.items()}
        if any(type(value) in (list, dict) for value in (*call.args, *call.kwargs.values())):
            yield call._replace(args=changed[0], kwargs=changed[1])

    def fits(self, outputs: Sequence[Any]) -> bool:
        """Have these results the recorded shapes?"""
        shapes = [tuple(out.shape) if isinstance(out, torch.Tensor) else None for out in outputs]
        wanted = [None if out is None else out.shape for out in self.outputs]
        return not wanted or shapes == wanted or (len(wanted) == 1 and wanted[0] is None)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(child) for key, child in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def prepare(
    name: str,
    record: Mapping[str, Any],
    backward: Mapping[str, Any] | None,
    arguments: Arguments,
    dtype: torch.dtype | None,
    seed: int,
) -> Prepared:
    """Prepare a recorded call.

    Args:
        name: ``"Torch.matmul.0"``.
        record, backward: of dump.json.
        dtype: what all floating inputs are rounded to; None: the recorded types.
        seed: of random state.

    Raises:
        CannotRun: why it is not to be run.
    """
    operator = resolve(name.rpartition(".")[0], references.find)
    args, kwargs = arguments.of(name, record)
    if operator.inputs is not None and arguments.drawn:
        try:
            made = operator.inputs(args, kwargs)
        except Exception as error:  # the user's code
            raise CannotRun(f"inputs registered for {operator.name}: {type(error).__name__}: {str(error)[:200]}") from error
        if not (isinstance(made, tuple) and len(made) == 2):
            raise CannotRun(f"inputs registered for {operator.name}: must return (args, kwargs)")
        args, kwargs = list(made[0]), dict(made[1])
    if draws(operator.api, args, kwargs):
        raise CannotRun("draws random numbers (dropout): no two devices draw the same")
    if dtype is not None:
        args, kwargs = _cast_floats(args, dtype), _cast_floats(kwargs, dtype)
    kwargs = {key: value for key, value in kwargs.items() if not (key == "generator" and value is None)}
    tensors = [*places_of(args), *places_of(kwargs)]
    incoming: list[torch.Tensor | None] = []
    wanted: tuple[Place, ...] = ()
    needed: frozenset[Place] = frozenset()
    if backward is not None:
        incoming = arguments.gradients(name, backward)
        incoming = _cast_floats(incoming, dtype) if dtype is not None else incoming
        can = [p for p, t in tensors if (t.dtype.is_floating_point or t.dtype.is_complex) and p[0] not in _NOT_DIFFERENTIABLE]
        needed = frozenset(place for place in can if _needs(record, place))
        wanted = tuple(place for place in can if place in needed or not needed)  # all of them where the record does not say
    silent = tuple(p for p in _silent(operator.api, tensors) if p not in wanted)
    call = Call(args, kwargs, wanted, incoming, zlib.crc32(f"{seed} {name}".encode()), silent)
    return Prepared(
        name, operator, call, tuple(place for place, _ in tensors), floats_of(t for _, t in tensors),
        _outputs(record.get("output"), dtype), dropout_of(operator.api, args, kwargs), needed,
    )  # fmt: skip


def _silent(api: str, tensors: Sequence[tuple[Place, torch.Tensor]]) -> Sequence[Place]:
    """See `Call.silent`; optimizers (``_fused_adamw_``) write to lists of tensors."""
    if api.startswith("_") and api.endswith("_") and not api.endswith("__"):
        return [place for place, _ in tensors]
    return _SILENT.get(api, ())


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype.is_floating_point else value
    if isinstance(value, torch.dtype):
        return dtype if value.is_floating_point else value
    if isinstance(value, dict):
        return {key: _cast_floats(child, dtype) for key, child in value.items()}
    return type(value)(_cast_floats(child, dtype) for child in value) if type(value) in (list, tuple) else value


def _needs(record: Mapping[str, Any], place: Place) -> bool:
    found: Any = record.get("input_args") if isinstance(place[0], int) else record.get("input_kwargs")
    for step in place:
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError):
            return False
    return isinstance(found, Mapping) and bool(found.get("requires_grad"))


def _outputs(items: Any, dtype: torch.dtype | None) -> list[Recorded | None]:
    found: list[Recorded | None] = []
    for item in _items(items if isinstance(items, list) else [items] if items is not None else []):
        kind = getattr(torch, str(item.get("dtype")).removeprefix("torch."), None) if isinstance(item, Mapping) else None
        shape = item.get("shape") if isinstance(item, Mapping) else None
        if not isinstance(kind, torch.dtype) or not isinstance(shape, list):
            found.append(None)
        else:
            found.append(Recorded(dtype if dtype is not None and kind.is_floating_point else kind, tuple(shape)))
    return found


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping) and not ("type" in value or "dtype" in value):
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            yield from _items(child)
    else:
        yield value


def has_communicated(record: Mapping[str, Any]) -> bool:
    """Has an operator on DTensors asked other ranks for its result? Then that is not what comes of the recorded local tensors: partial sums
    went in and none came out (the norm of partial norms), or shards went in and whole tensors came out."""
    inputs = set(_placements([record.get("input_args"), record.get("input_kwargs")]))
    outputs = set(_placements(record.get("output")))
    return bool(outputs) and (("Partial" in inputs and "Partial" not in outputs) or ("Shard" in inputs and outputs == {"Replicate"}))


def _placements(node: Any) -> Iterator[str]:
    """Kinds of the placements in a record: ``[{"Shard": {"dim": 0}}, {"Replicate": {}}]``."""
    if isinstance(node, Mapping):
        found = node.get("placements")
        if isinstance(found, list):
            yield from (kind for each in found if isinstance(each, Mapping) for kind in each)
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _placements(child)


def slots(tensors: Sequence[tuple[Place, torch.Tensor]], wanted: Sequence[Place], found: Sequence[Any]) -> dict[Place, torch.Tensor | None]:
    """Recorded gradients by the place of their tensor (`msprobe_integrations.common.capture.gradient_layout`): one for each floating
    tensor among the positional arguments, null where none was needed, then those of keyword tensors that needed one."""
    can = [p for p, t in tensors if isinstance(p[0], int) and (t.dtype.is_floating_point or t.dtype.is_complex)]
    can += [p for p in wanted if not isinstance(p[0], int)]
    places = can if len(found) == len(can) else list(wanted)
    return {place: value for place, value in zip(places, found) if isinstance(value, torch.Tensor)}


def given_leaves(values: Any) -> list[Any]:
    """Leaves of results that somebody else has computed."""
    return list(leaves_of(values))
