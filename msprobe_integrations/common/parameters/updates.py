"""What an update does: its direction, the ratio of the moments, and whether gradient and momentum agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import TensorRef
from msprobe_integrations.common.parameters.gradients import Piece, Pieces
from msprobe_integrations.common.parameters.update_pairs import COMPUTED

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.parts import ProbeBase
    from msprobe_integrations.common.parameters.source import ParameterValues

_log = get_logger()
AGREEMENT_TAG = "mg_direction"
IN_NO_OPTIMIZER = "in_no_optimizer"
"""Key of `ParameterValues.hyper` of a parameter that no optimizer updates."""
_NAMED = 3
"""Such parameters that the log names."""


class Updates:
    """Families ``update``, ``ratio`` and momentum agreement of one source."""

    def __init__(self, probe: ProbeBase, pieces: Pieces, source: ParameterValues) -> None:
        self._probe = probe
        self._pieces = pieces
        self._source = source
        self._done: set[Piece] = set()
        self._unknown: set[str] = set()
        self._told: set[Piece] = set()

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
            number = TensorRef(ref.row, self._probe.number._replace(device=ref.description.device))
            self._pieces.add("other", piece, number, part=True, extra={"tag": AGREEMENT_TAG}, state=AGREEMENT_TAG)

    def sample_updates(self, pieces: Sequence[Piece] | None) -> None:
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
            if hyper.get(IN_NO_OPTIMIZER):
                self._note_unowned(piece)
                continue
            algorithm, main, states = hyper["algorithm"], source.main(piece), source.states(piece)
            update = backend.reduce_update(algorithm, main, gradient, states, hyper)
            if update is None:
                self._without(algorithm, hyper)
                continue
            self._add("update", piece, update, states, hyper, float(hyper.get("eps", 0.0)))
            ratio = backend.reduce_ratio(algorithm, main, gradient, states, hyper)
            if ratio is not None:
                self._add("ratio", piece, ratio, states, hyper, 0.0)

    def _add(self, family: str, piece: Piece, ref: TensorRef, states: Mapping[str, Any], hyper: Mapping[str, Any], eps: float) -> None:
        kind = self._pieces.drawn.get(family)
        first = self._probe.backend.histogram_of_update(states, hyper, eps, kind) if kind is not None else -1
        self._pieces.add(family, piece, ref, part=True, histogram=(first, kind or ""))

    def _note_unowned(self, piece: Piece) -> None:
        """Nothing is lost: nobody updates it."""
        if piece in self._told:
            return
        self._told.add(piece)
        remark = self._probe.pipeline.without_optimizer
        remark.update(parameters=remark.get("parameters", 0) + 1, first=remark.get("first", piece.name))
        if len(self._told) <= _NAMED:
            _log.warning("monitor.updates: parameter %s is in no optimizer; it has no update statistics", piece.name)

    def _without(self, algorithm: str, hyper: Mapping[str, Any]) -> None:
        name = algorithm or str(hyper.get("optimizer", "of unknown kind"))
        self._probe.pipeline.lose(f"update: optimizer {name}")
        if algorithm not in COMPUTED and name not in self._unknown:
            self._unknown.add(name)
            _log.warning(
                "monitor.updates: how the optimizer %s makes its update is not known, so there are no rows of it (known: %s); "
                "the other families are not concerned",
                name,
                ", ".join(COMPUTED),
            )
