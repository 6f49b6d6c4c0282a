"""Weights and inputs of a model for a pack: digests of the bits, and the existing tool's four statistics.

Digests are those of `msprobe_engine.core.statistics.digest`, as 16 hexadecimal digits, of a sharded parameter that of what this rank
holds: nothing is gathered. The four statistics are computed by torch as the existing tool does (weights in float32, inputs of 16 bits in
their own type), so that its packs and ours can be compared; what has no elements has zeros there. Nothing here raises for a tensor that
cannot be read, and nothing changes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from msprobe_engine.config.secrets.masking import mask_setting
from msprobe_engine.core import redaction
from msprobe_engine.core.records import TensorRef
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics.pending import quiet
from msprobe_integrations.torch.tensors import describe
from msprobe_integrations.torch.tensors.dtensors import is_dtensor, local

STATISTICS = ("max", "min", "mean", "norm")
MOST_SAMPLES = 4096
"""Longer first dimensions have no digest per index."""
MOST_SAMPLE_BYTES = 1 << 28
_DEEPEST = 32
_NONFINITE = [_rows.NANS, _rows.POS_INF, _rows.NEG_INF]
_SHARDS = ("ds_tensor",)
"""Attributes of a parameter that is emptied between its uses: what this rank keeps of it (DeepSpeed ZeRO 3)."""


class Collected(NamedTuple):
    """Of one forward pass.

    Attributes:
        existing: content of the existing tool's entry.
        digests: content of ours.
        unread: how many tensors had nothing to read, by reason.
        broken: parameters with NaN or Inf, to how many of how many elements.
    """

    existing: dict[str, Any]
    digests: dict[str, Any]
    unread: dict[str, int]
    broken: dict[str, tuple[int, int]] = {}


class TensorCollector:
    """Takes digests and statistics with one copy from the device for all."""

    def __init__(self) -> None:
        self._backend = TorchBackend(digest=True)
        self._refs: dict[str, TensorRef] = {}
        self._samples: dict[str, list[TensorRef]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._statistics: dict[str, torch.Tensor] = {}
        self._broken: dict[str, tuple[int, int]] = {}

    def weights(self, models: Sequence[nn.Module], *, statistics: bool = True) -> Collected:
        """Parameters and buffers of `models`. The first model's have their own names, those of chunk i ``{i}:name``."""
        with quiet():
            for name, tensor, facts in _iterate_tensors(models):
                self._collect_tensor(name, tensor, facts, statistics and facts.get("kind") == "parameter")
            digests, numbers = self._finish()
        return Collected(numbers, digests, self._unread(), self._broken)

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Collected:
        """What a model is called with. Tags as the existing tool has them: ``args.0``, ``kwargs.labels``, ``kwargs.batch.ids``."""
        values: dict[str, Any] = {}
        args, kwargs = redaction.hide_names(args), redaction.hide_names(kwargs)
        with quiet():
            for tag, value in (*_leaves("args", args), *_leaves("kwargs", kwargs)):
                if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                    value = torch.from_numpy(np.ascontiguousarray(value))
                if isinstance(value, torch.Tensor):
                    hidden = redaction.active() is not None and redaction.is_integer(str(value.dtype))
                    self._collect_tensor(tag, value, {}, not hidden)
                    self._samples[tag] = self._each(value)
                elif value is None or isinstance(value, (bool, int, float, str)):
                    values[tag] = redaction.argument_fact(value) or {"value": mask_setting(tag.rpartition(".")[2], value)}
                else:
                    values[tag] = {"class": type(value).__name__}
            samples = self._samples
            digests, numbers = self._finish(samples)
        existing = {"args": _format_as_existing(args, numbers, "args"), "kwargs": _format_as_existing(dict(kwargs), numbers, "kwargs")}
        return Collected(existing, {**digests, **values}, self._unread())

    def _unread(self) -> dict[str, int]:
        found, self._backend.unsupported = self._backend.unsupported, {}
        return found

    def _collect_tensor(self, name: str, tensor: torch.Tensor, facts: dict[str, Any], statistics: bool) -> None:
        ref = self._refs[name] = self._backend.reduce(tensor)
        about = ref.description
        self._facts[name] = {"shape": list(about.shape), "dtype": about.dtype.removeprefix("torch."), **facts}
        if ref.row >= 0 and statistics:
            made = _statistics(tensor, as_weight="kind" in facts)
            if made is not None:
                self._statistics[name] = made

    def _each(self, tensor: torch.Tensor) -> list[TensorRef]:
        """Rows of ``tensor[0]``, ``tensor[1]``, ..."""
        data, about, _ = describe.resolve(tensor)
        if (
            data is None
            or data.dim() == 0
            or tuple(data.shape) != about.shape
            or not 0 < data.shape[0] <= MOST_SAMPLES
            or data.is_complex()
        ):
            return []
        if data.numel() * data.element_size() > MOST_SAMPLE_BYTES:
            return []
        host = data.detach().cpu()
        return [self._backend.reduce(part) for part in host.unbind(0)]

    def _finish(self, samples: Mapping[str, list[TensorRef]] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = _rows.as_int64(self._backend.finish_step().rows())

        def digest(ref: TensorRef) -> str | None:
            if ref.row < 0 or not int(rows[ref.row, _rows.FLAGS]) & _rows.HAS_DIGEST:
                return None
            return f"{int(rows[ref.row, _rows.DIGEST]) & 0xFFFFFFFFFFFFFFFF:016x}"

        described = {name: {**self._facts[name], "digest": digest(ref)} for name, ref in self._refs.items()}
        bad = {name: int(rows[ref.row, _NONFINITE].sum()) for name, ref in self._refs.items() if ref.row >= 0}
        self._broken = {
            name: (count, int(rows[self._refs[name].row, _rows.COUNT]))
            for name, count in bad.items()
            if count and self._facts[name].get("kind") == "parameter" and "whole" not in self._facts[name]
        }
        for name, refs in (samples or {}).items():
            described[name]["samples"] = [digest(ref) for ref in refs]
        if (hides := redaction.active()) is not None:
            described = {name: fact if "kind" in fact else hides.facts(fact["dtype"], fact) for name, fact in described.items()}
        numbers = _on_host(self._statistics)
        self._refs, self._samples, self._facts, self._statistics = {}, {}, {}, {}
        return described, numbers


def _iterate_tensors(models: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    for number, model in enumerate(models):
        prefix = f"{number}:" if number else ""
        for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                shard = next(
                    (getattr(tensor, attribute) for attribute in _SHARDS if isinstance(getattr(tensor, attribute, None), torch.Tensor)),
                    None,
                )
                facts: dict[str, Any] = {"kind": kind}
                if shard is not None and tensor.numel() == 0:
                    facts["whole"] = [int(n) for n in getattr(tensor, "ds_shape", ())]
                    tensor = shard
                elif is_dtensor(tensor):
                    layout: Any = tensor
                    facts["placements"] = [str(placement) for placement in layout.placements]
                    facts["local_shape"] = list(local(tensor).shape)
                yield prefix + name, tensor, facts


def _leaves(tag: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from _leaves(f"{tag}.{key}", item, depth + 1)
            return
        if isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                yield from _leaves(f"{tag}.{number}", item, depth + 1)
            return
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from _leaves(f"{tag}.{field.name}", getattr(value, field.name, None), depth + 1)
            return
    yield tag, value


def _format_as_existing(value: Any, numbers: Mapping[str, Any], tag: str, depth: int = 0) -> Any:
    """The form of the existing tool: containers as objects, statistics for tensors, an empty text for anything else."""
    if isinstance(value, (list, tuple)) and depth < _DEEPEST:
        return {str(i): _format_as_existing(item, numbers, f"{tag}.{i}", depth + 1) for i, item in enumerate(value)}
    if isinstance(value, dict) and depth < _DEEPEST:
        return {str(key): _format_as_existing(item, numbers, f"{tag}.{key}", depth + 1) for key, item in value.items()}
    return numbers.get(tag, "") if isinstance(value, torch.Tensor) else ""


def _statistics(tensor: torch.Tensor, *, as_weight: bool) -> torch.Tensor | None:
    """[4] float32: max, min, mean, norm; None where torch cannot compute them."""
    data = describe.resolve(tensor)[0]
    if data is None:
        return None
    try:
        if data.numel() == 0:
            return torch.zeros(4, device=data.device)
        data = data.abs() if data.is_complex() else data
        if as_weight or data.dtype not in (torch.float16, torch.bfloat16):
            data = data.float()
        return torch.stack((data.max(), data.min(), data.mean(), data.norm())).float().detach()
    except (RuntimeError, NotImplementedError):
        return None


def _on_host(made: Mapping[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    by_device: dict[torch.device, list[str]] = {}
    for name, values in made.items():
        by_device.setdefault(values.device, []).append(name)
    found: dict[str, dict[str, float]] = {}
    for names in by_device.values():
        table = torch.stack([made[name] for name in names]).cpu().tolist()
        found.update({name: dict(zip(STATISTICS, values)) for name, values in zip(names, table)})
    return {name: found[name] for name in made}
