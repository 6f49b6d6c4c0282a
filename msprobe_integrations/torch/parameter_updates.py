"""What an update does: its direction, the ratio of the moments, and whether gradient and momentum agree."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from msprobe_engine.log import get_logger
from msprobe_engine.records import TensorDescription, TensorRef
from msprobe_integrations.torch.gradients import Piece, Pieces

if TYPE_CHECKING:
    from msprobe_integrations.torch.parameters import ParameterSource
    from msprobe_integrations.torch.probe import TorchProbe

_log = get_logger()
KNOWN = ("adam", "adamw", "sgd", "lion", "rmsprop", "adagrad")
AGREEMENT_TAG = "mg_direction"


@functools.cache
def _number(device: str) -> TensorDescription:
    return TensorDescription("torch.Tensor", "torch.float32", (), False, device)


class Updates:
    """Families ``update``, ``ratio`` and momentum agreement of one source."""

    def __init__(self, probe: TorchProbe, pieces: Pieces, source: ParameterSource) -> None:
        self._probe = probe
        self._pieces = pieces
        self._source = source
        self._done: set[Piece] = set()
        self._unknown: set[str] = set()

    def fresh(self) -> None:
        """A step begins."""
        self._done.clear()

    def agreement(self, pieces: Sequence[Piece]) -> None:
        """Share of elements whose gradient has the sign of the first moment as it is before the update (no sign at all: half). A
        parameter without a gradient, or without a moment yet, has no row."""
        source, reduce = self._source, self._probe.backend.reduce_agreement
        for piece in pieces:
            states = source.states(piece)
            moment = states.get("exp_avg")
            if moment is None:
                moment = states.get("momentum_buffer")
            if moment is None or (gradient := source.gradient(piece)) is None:
                continue
            ref = reduce(gradient, moment)
            if ref.row >= 0:
                self._pieces.value(ref.row)
            number = TensorRef(ref.row, _number(ref.description.device))
            self._pieces.add("other", piece, number, part=True, extra={"tag": AGREEMENT_TAG}, state=AGREEMENT_TAG)

    def take(self, pieces: Sequence[Piece] | None) -> None:
        """Update and, for Adam, ratio of these pieces, each once a step; None: of all others."""
        source, done, backend = self._source, self._done, self._probe.backend
        for piece in source.pieces if pieces is None else pieces:
            if piece in done:
                continue
            done.add(piece)
            gradient = source.gradient(piece)
            if gradient is None:
                continue  # the optimizer has passed it by
            hyper = source.hyper(piece)
            algorithm, main, states = hyper["algorithm"], source.main(piece), source.states(piece)
            update = backend.reduce_update(algorithm, main, gradient, states, hyper)
            if update is None:
                self._without(algorithm, hyper)
                continue
            drawn = self._pieces.drawn
            moments = _moments(states, hyper) if "update" in drawn or "ratio" in drawn else None
            self._add("update", piece, update, moments, float(hyper.get("eps", 0.0)))
            ratio = backend.reduce_ratio(algorithm, main, gradient, states, hyper)
            if ratio is not None:
                self._add("ratio", piece, ratio, moments, 0.0)

    def _add(self, family: str, piece: Piece, ref: TensorRef, moments: tuple[torch.Tensor, torch.Tensor] | None, eps: float) -> None:
        histogram = (-1, "")
        if moments is not None and family in self._pieces.drawn:
            first, root = moments
            drawn = torch.where(root == 0, 0.0, first / (root + eps))
            kind = self._pieces.drawn[family]
            histogram = self._probe.backend.histogram(drawn, kind), kind
        self._pieces.add(family, piece, ref, part=True, histogram=histogram)

    def _without(self, algorithm: str, hyper: Mapping[str, Any]) -> None:
        name = algorithm or str(hyper.get("optimizer", "of unknown kind"))
        self._probe.pipeline.lose(f"update: optimizer {name}")
        if algorithm not in KNOWN and name not in self._unknown:
            self._unknown.add(name)
            _log.warning(
                "monitor.updates: how the optimizer %s makes its update is not known, so there are no rows of it (known: %s); "
                "the other families are not concerned",
                name,
                ", ".join(KNOWN),
            )


def _moments(states: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Adam's m_hat and sqrt(v_hat), float32; copies, made only for histograms. None without such states."""
    first, second = states.get("exp_avg"), states.get("exp_avg_sq")
    if first is None or second is None or first.shape != second.shape:
        return None
    if hyper.get("amsgrad"):
        second = states.get("max_exp_avg_sq", second)
    first, second = first.detach().float(), second.detach().float()
    if hyper.get("bias_correction", True):
        one, two = hyper["betas"]
        step = hyper["step"]
        first, second = first / (1 - one**step), second / (1 - two**step)
    return first, second.sqrt()
