"""Samples of parameters and what belongs to them (gradients, moments), whole or in shards.

A parameter may live on one rank in part: a flat range [lo, hi) of its elements. `Pieces` takes the statistics of the part and, when
an exchange is given for it, has the rows of all parts merged, so that what is reported is always the whole parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from msprobe_engine.records import Sample, TensorDescription, TensorRef

if TYPE_CHECKING:
    from msprobe_integrations.torch.merge import RowExchange
    from msprobe_integrations.torch.probe import TorchProbe

LOCAL, ACCUMULATED, REDUCED, UNSCALED, CLIPPED = "local", "accumulated", "reduced", "unscaled", "clipped"


@dataclass(frozen=True, eq=False)
class Piece:
    """What this rank holds of one parameter.

    Attributes:
        name: parameter name without wrappers, ``decoder.layers.0.mlp.linear_fc1.weight``.
        parameter: the model's parameter (all of it).
        vpp_stage: virtual pipeline chunk.
        lo, hi: flat range of the elements that are this rank's to reduce; (0, numel) when it is not sharded.
        facts: JSON-ready, goes into every sample's `extra`.
        exchange: merges the rows of all parts; None when the parameter is whole here, or cannot be merged.
        whole: shape of the whole parameter where `parameter` does not have it (ZeRO 3 empties it between its uses).
    """

    name: str
    parameter: torch.Tensor
    vpp_stage: int
    lo: int
    hi: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    exchange: RowExchange | None = None
    whole: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(self.parameter.shape) if self.whole is None else self.whole

    @property
    def sharded(self) -> bool:
        """True when other ranks hold the rest."""
        return "of" in self.facts

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's range of a tensor of the parameter's shape, as a view."""
        return whole.detach().view(-1)[self.lo : self.hi] if self.sharded else whole.detach()


class Pieces:
    """Takes samples of pieces and collects, per exchange, what is to be merged at the end of the step."""

    def __init__(self, probe: TorchProbe) -> None:
        self._probe = probe
        self._shapes: dict[tuple[int, str], TensorDescription] = {}
        self._merges: dict[RowExchange, tuple[list[str], list[int], list[dict[str, Any]]]] = {}

    def take(
        self, family: str, piece: Piece, tensor: torch.Tensor | None, *, phase: str = "", micro_step: int = -1, part: bool = False
    ) -> None:
        """Sample one tensor. No wait.

        Args:
            tensor: the whole tensor, or with `part` this rank's range of it; None when there is none (a rank that holds nothing
                of a merged parameter still takes part with an empty row).
            part: the rows of all ranks are to be merged.
        """
        merge = part and piece.sharded and piece.exchange is not None
        if tensor is None:
            if not merge:
                return
            tensor = piece.parameter.detach().view(-1)[:0]
        if not merge and part and piece.sharded and tensor.numel() == 0:
            return
        data = tensor.detach()  # a new object: rows are remembered per object and version, and collectives raise no version
        ref = self._probe.backend.reduce_part(data, piece.lo if part and piece.sharded else 0)
        extra: dict[str, Any] = dict(piece.facts)
        if part and piece.sharded:
            extra["shard"] = [piece.lo, piece.hi]
            extra["scope"] = "whole" if merge else "shard"
        else:
            extra.pop("of", None)
        description = self._description(piece, data, ref.description) if merge else ref.description
        sample = Sample(family, piece.name, TensorRef(ref.row, description), phase, micro_step, piece.vpp_stage, extra)
        self._probe.pipeline.samples.append(sample)
        if merge and ref.row >= 0:
            assert piece.exchange is not None
            names, places, extras = self._merges.setdefault(piece.exchange, ([], [], []))
            names.append(f"{family} {phase} {piece.vpp_stage} {piece.name}")
            places.append(ref.row)
            extras.append(extra)

    def flush(self, step: int) -> None:
        """Hand the step's merges to the pipeline; to be called just before the step ends."""
        merges, self._merges = self._merges, {}
        for exchange, (names, places, extras) in merges.items():
            self._probe.pipeline.edit_rows(exchange.merge(step, names, places, extras))

    def _description(self, piece: Piece, data: torch.Tensor, seen: TensorDescription) -> TensorDescription:
        key = (id(piece), str(data.dtype))
        if key not in self._shapes:
            self._shapes[key] = seen._replace(shape=piece.shape)
        return self._shapes[key]


def layer_numbers(modules: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, int]:
    """Module path -> global layer index (from 0), for modules that know it: local numbering restarts in every pipeline stage."""
    return {name: number - 1 for name, m in modules if isinstance(number := getattr(m, "layer_number", None), int)}


def layer_of(name: str, numbers: Mapping[str, int]) -> int | None:
    """Global layer index of a parameter, from its nearest enclosing module that knows it; None outside of layers."""
    path = name
    found = None
    while "." in path:
        path = path.rpartition(".")[0]
        if path in numbers:
            found = numbers[path]
    return found
