"""The gradient probe of MindSpore: all gradients that an optimizer is called with, just before its update.

As the optimizer uses them: reduced over ranks, unscaled and clipped by the program. Names are those of the Parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import mindspore

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.common.gradient_probe.updates import PART, GradientUpdates, bare
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.gradient_probe.step import GradientStep
from msprobe_integrations.mindspore.hooks import eager as hooks
from msprobe_integrations.mindspore.parameters.optimizers import OptimizerView, is_optimizer

_log = get_logger()


class GradientProbe(GradientUpdates):
    """One per process. Where several optimizers are watched, a step is over when all of them have been called, or one a second time.

    Args:
        settings: with a section ``grad_probe``.
        at_once: hooks go with the last wanted update, from inside of its hooks; False: at the next `settle`.
    """

    backend: MindSporeBackend

    def __init__(self, settings: ProbeSettings, *, at_once: bool = True) -> None:
        super().__init__(settings, MindSporeBackend(), at_once=at_once)
        self._views: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._ever = False

    def monitor(self, optimizer: Any) -> None:
        """Watch what an optimizer, or each of a list of them, is called with from its next update on.

        Raises:
            UsageError: it is no optimizer, two parameters of one name, or no parameter of ``param_list``.
        """
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        for one in given:
            if not is_optimizer(one):
                raise UsageError(
                    f"monitor(): {type(one).__name__} is no optimizer; give the one that updates the network: of mindspore.nn, "
                    "mint.optim or experimental.optim"
                )
        for one in given:
            self._views[one] = tuple(str(p.name) for p in OptimizerView(one).parameters)
        names = [name for held in self._views.values() for name in held]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"monitor(): two parameters are called '{twice}'; give the networks other names, or watch one optimizer")
        self._check_names({bare(name) for name in names}, self.backend.world_size() > 1, "the Parameters")
        if not self._window.wanted(self.settings.step[0] if self.settings.step else 0, self.backend.rank()):
            _log.info("grad_probe: rank %s is not among the ranks of the settings, nothing is watched here", self.backend.rank())
            return
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            _log.warning("grad_probe: in GRAPH_MODE the update is a part of the graph and its gradients are not seen; use PYNATIVE_MODE")
        self._off, self._ever = False, True
        for one in given:
            self._undo.append(hooks.before_call(one, self._before).remove)
            self._undo.append(hooks.after_call(one, self._after).remove)
        _log.info("grad_probe: gradients of %d parameters are watched, files go to %s", sum(map(self.listed, names)), self.root)

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._off or not self.faults.enabled(PART):
            return
        with self.faults.guard(PART):
            self.begin_update(optimizer)
            given = args[0] if args else kwargs.get("gradients")
            for name, gradient in zip(self._views.get(optimizer, ()), given if isinstance(given, (tuple, list)) else ()):
                if self._open is None:
                    return
                if self.listed(name) and isinstance(gradient, mindspore.Tensor) and not self.take(name, gradient):
                    return

    def _after(self, *_: Any) -> None:
        if not self._off and all(one in self._stepped for one in self._views):
            with self.faults.guard(PART):
                self._finish()

    def _make_step(self, signs: bool, bounds: tuple[float, ...]) -> GradientStep:
        return GradientStep(self.backend, signs, bounds, self._background.reserve)

    @property
    def _watching(self) -> bool:
        return self._ever

    def _why(self) -> str:
        if self._empty:
            return f"{self._empty} updates were seen, and the optimizer was not called with gradients of floating point"
        return (
            "no update of the optimizer was seen; call monitor(optimizer) before the training loop. An update that is compiled "
            "(GRAPH_MODE, or jit around the whole training step) cannot be seen"
        )
