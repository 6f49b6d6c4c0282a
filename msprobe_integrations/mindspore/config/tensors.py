"""Weights and inputs of a cell for a pack: digests of the bits, and the existing tool's four statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt

from msprobe_engine.config.secrets.masking import mask_setting
from msprobe_engine.core import redaction
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.statistics.digest import digest_array
from msprobe_integrations.mindspore.hooks.autograd import wait_for_operators
from msprobe_integrations.mindspore.models import named_parameters

_DEEPEST = 32
_MOST_SAMPLES = 4096


def weights(cells: Sequence[Any], *, statistics: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the existing tool's entry, ours) of the parameters. Those of the first cell have their own names, those of cell i ``{i}:name``.

    Raises:
        Exception: of the training, see `autograd.wait_for_operators`; no other.
    """
    wait_for_operators()
    existing: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        prefix = f"{number}:" if number else ""
        for name, parameter in named_parameters(cell):
            own[prefix + name] = {"kind": "parameter", **_describe_tensor(parameter)}
            if statistics and (made := _statistics(parameter, as_weight=True)) is not None:
                existing[prefix + name] = made
    return existing, own


def inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the existing tool's entry, ours) of what a cell is called with. Raises as `weights`."""
    wait_for_operators()
    args, kwargs = redaction.hide_names(args), redaction.hide_names(kwargs)
    own: dict[str, Any] = {}
    for tag, value in (*_leaves("args", args, 0), *_leaves("kwargs", kwargs, 0)):
        if isinstance(value, (mindspore.Tensor, np.ndarray)):
            own[tag] = _describe_tensor(value, samples=True)
            if (hides := redaction.active()) is not None:
                own[tag] = hides.facts(own[tag]["dtype"], own[tag])
        elif value is None or isinstance(value, (bool, int, float, str)):
            own[tag] = redaction.argument_fact(value) or {"value": mask_setting(tag.rpartition(".")[2], value)}
        else:
            own[tag] = {"class": type(value).__name__}
    return {"args": _describe_for_existing_tool(args, 0), "kwargs": _describe_for_existing_tool(dict(kwargs), 0)}, own


def _leaves(tag: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    items: list[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    if items is None or depth >= _DEEPEST:
        yield tag, value
        return
    for key, item in items:
        yield from _leaves(f"{tag}.{key}", item, depth + 1)


def _describe_tensor(tensor: Any, samples: bool = False) -> dict[str, Any]:
    described: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).lower(), "digest": None}
    try:
        data = _bits(tensor)
        described["digest"] = f"{digest_array(data):016x}"
        if samples:
            several = data.ndim > 0 and 0 < data.shape[0] <= _MOST_SAMPLES
            described["samples"] = [f"{digest_array(part):016x}" for part in data] if several else []
    except Exception as error:  # a parameter that is not initialised yet, a type without a copy on the host
        raise_of_training(error)
        described["unread"] = type(error).__name__
    return described


def _bits(tensor: Any) -> npt.NDArray[Any]:
    data: npt.NDArray[Any] = np.ascontiguousarray(tensor if isinstance(tensor, np.ndarray) else tensor.asnumpy())
    return data if data.dtype.kind in "biufc" else data.view(f"u{data.dtype.itemsize}")


def _describe_for_existing_tool(value: Any, depth: int) -> Any:
    if isinstance(value, (list, tuple)) and depth < _DEEPEST:
        return {str(i): _describe_for_existing_tool(item, depth + 1) for i, item in enumerate(value)}
    if isinstance(value, dict) and depth < _DEEPEST:
        return {str(key): _describe_for_existing_tool(item, depth + 1) for key, item in value.items()}
    if isinstance(value, mindspore.Tensor):
        if redaction.active() is not None and redaction.is_integer(str(value.dtype)):
            return ""
        return _statistics(value, as_weight=False) or ""
    return ""


def _statistics(tensor: Any, *, as_weight: bool) -> dict[str, float] | None:
    try:
        if 0 in tensor.shape:
            return {"max": 0.0, "min": 0.0, "mean": 0.0, "norm": 0.0}
        data = tensor.float() if as_weight or str(tensor.dtype).lower() not in ("float16", "bfloat16", "float32") else tensor
        values = data.max(), data.min(), data.mean(), data.norm()
        return dict(zip(("max", "min", "mean", "norm"), (float(one.float().asnumpy()) for one in values)))
    except Exception as error:
        raise_of_training(error)
        return None
