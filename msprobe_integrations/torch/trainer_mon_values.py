"""Statistics of the monitor as plain values: what the in-memory calls of `TrainerMon` give; and what only its files have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from msprobe_engine import columns
from msprobe_engine.records import Sample
from msprobe_engine.rows import Rows
from msprobe_engine.sinks.tensorboard import tag_of
from msprobe_integrations.common.gradients import CLIPPED, UNSCALED
from msprobe_integrations.torch.backend import TorchBackend

if TYPE_CHECKING:
    from msprobe_integrations.torch.probe import TorchProbe

AGREEMENT = "mg_direction"
"""Tag of the share of elements whose gradient has the sign of the first moment."""
Values = dict[str, dict[str, Any]]
"""Tag (as in TensorBoard, ``0:fc.weight/rank0/post_grad``) to statistic to value: a float64 tensor without dimensions, for ``shape`` a
`torch.Size` and for ``dtype`` a `torch.dtype`."""


def values_of(samples: Iterable[Sample], rows: Rows, ops: Sequence[str], rank: int, families: Sequence[str]) -> Values:
    """The statistics `ops` of the samples of some families. `rows`: [n, 16], what the samples refer to."""
    chosen = [s for s in samples if s.family in families and s.ref.row >= 0]
    if not chosen:
        return {}
    mine = rows[[s.ref.row for s in chosen]]
    numbers = {op: columns.column(mine, op).tolist() for op in ops if op in columns.OPS}
    digests = columns.digests(mine) if "digest" in ops else []
    out: Values = {}
    for i, sample in enumerate(chosen):
        entry: dict[str, Any] = {}
        for op in ops:
            if op == "shape":
                entry[op] = torch.Size(sample.ref.description.shape)
            elif op == "dtype":
                name = sample.ref.description.dtype
                entry[op] = getattr(torch, name.removeprefix("torch."), name)
            elif op == "digest":
                entry[op] = digests[i]
            else:
                entry[op] = torch.tensor(numbers[op][i], dtype=torch.float64)
        out[tag_of(sample, rank)] = entry
    return out


def values_of_tensors(tensors: Mapping[str, Any], ops: Sequence[str]) -> Values:
    """The statistics `ops` of tensors given by tag. Waits for the device; what is no tensor is left out."""
    backend = TorchBackend()
    refs = {tag: backend.reduce(t) for tag, t in tensors.items() if isinstance(t, torch.Tensor)}
    rows = backend.finish_step().rows()
    out: Values = {}
    for tag, ref in refs.items():
        for entry in values_of([Sample("grad_reduced", tag, ref)], rows, ops, 0, ("grad_reduced",)).values():
            out[tag] = entry
    return out


def note_first_agreement(probe: TorchProbe) -> None:
    """In the first step of a run there is no first moment yet; the existing tool writes 1 for every parameter that has a gradient."""
    if not probe.wanted("monitor.momentum_agreement"):
        return
    seen = {(s.vpp_stage, s.name) for s in probe.pipeline.samples if s.extra.get("tag") == AGREEMENT}
    one = torch.ones(())
    for watch in probe.parameters.watches:
        for piece in watch.source.pieces:
            if (piece.vpp_stage, piece.name) not in seen and watch.source.gradient(piece) is not None:
                probe.sample("other", piece.name, one, vpp_stage=piece.vpp_stage, extra={"tag": AGREEMENT})


def note_entry(samples: list[Sample]) -> None:
    """Reduced gradients that were unscaled or clipped before the optimizer's step keep their known tag; their phase says what they are."""
    for i, sample in enumerate(samples):
        if sample.family == "grad_reduced" and sample.phase in (UNSCALED, CLIPPED):
            samples[i] = sample._replace(extra={**sample.extra, "entry": True})
