"""The gradient probe where the optimizer holds other tensors than the model: gradients come from the framework's parameter source.

They are taken just before the inner update, so as the optimizer uses them: reduced, without loss scale, clipped, and of a sharded
parameter the part that this rank updates. An update that the framework skips is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import Faults, Guard
from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_integrations.common.parameters.gradients import Piece
from msprobe_integrations.common.parameters.source import ParameterSource
from msprobe_integrations.torch.parameters.find import find_source

if TYPE_CHECKING:
    from msprobe_integrations.torch.gradient_probe.probe import GradientProbe


class _NoExchanges:
    """Parts stay parts: nothing is merged over ranks."""

    def of(self, _ranks: Sequence[int]) -> None:
        return None


class _Parameters:
    """The side of the probe that knows optimizers."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.exchanges = _NoExchanges()
        self.optimizers = list(optimizers)


class _Owner:
    """What sources ask of the probe they belong to."""

    def __init__(self, faults: Faults, optimizers: Sequence[Any]) -> None:
        self.monitor = MonitorSettings(gradients=True)
        self.faults = faults
        self.parameters = _Parameters(optimizers)


class SourceWatch:
    """Follows the updates of one source; stands where a `ParameterSampler` stands. What is not about the inner update is left alone."""

    def __init__(self, probe: GradientProbe, source: ParameterSource, several: bool) -> None:
        self._probe, self._source, self._several = probe, source, several
        self._begun = False

    def ready(self, pieces: Sequence[Piece] | None = None) -> None:
        """The gradients (of these pieces) are what the inner update will use."""
        probe = self._probe
        if not self._begun:
            self._begun = True
            probe.begin_update(self)
        if not probe.wants:
            return
        with probe.guard():
            for piece in self._source.pieces if pieces is None else pieces:
                if probe.listed(piece.name) and (gradient := self._source.gradient(piece)) is not None:
                    name = f"chunk{piece.vpp_stage}.{piece.name}" if self._several else piece.name
                    shard = f"[{piece.lo}, {piece.hi}) of {piece.facts['of']}" if piece.sharded else ""
                    if not probe.take(name, gradient, shard):
                        return

    def after_step(self, *_: Any, **__: Any) -> None:
        """The update is over."""
        if self._begun:
            self._begun = False
            with self._probe.guard():
                self._probe.end_update()

    def guard(self, *_: Any) -> Guard:
        """Around what a source does in a hook."""
        return self._probe.guard()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return _ignore


def _ignore(*_: Any, **__: Any) -> None:
    """A moment that is of no concern here."""


def watch_source(probe: GradientProbe, models: Sequence[nn.Module], optimizer: Any) -> tuple[SourceWatch, Callable[[], None]]:
    """Follow an optimizer that is found by its class; returns the watch, and what takes everything off again.

    Raises:
        UsageError: it is of no framework that is known.
    """
    owner: Any = _Owner(probe.faults, [optimizer])
    source = find_source(owner, models, optimizer)
    if source is None:
        raise UsageError(
            f"monitor(): gradients that {'this model' if optimizer is None else type(optimizer).__qualname__} uses cannot be found; "
            "allowed: a torch.optim.Optimizer that holds parameters of the model, an engine or optimizer of DeepSpeed, one of Megatron"
        )
    watch = SourceWatch(probe, source, len(models) > 1)
    source.connect(watch)  # type: ignore[arg-type]
    return watch, source.close
