"""The gradient probe: all gradients just before every update of the optimizer that holds the model's parameters.

An update is a call of ``step`` of such an optimizer, found when it is called; optimizers of other models do not count. Where several
optimizers share the parameters of a model, a step is over when one of them is called a second time. Nothing is read from a device and
nothing is written on the training thread.

Where the optimizer holds other tensors than the model, gradients come from the framework's parameter source, just before the inner update,
so as the optimizer uses them: reduced, without loss scale, clipped, and of a sharded parameter the part that this rank updates. An update
that the framework skips is none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import Faults, Guard
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.schema import MonitorSettings, ProbeSettings
from msprobe_integrations.common.gradient_probe.updates import PART, GradientUpdates, bare
from msprobe_integrations.common.parameters.gradients import Piece
from msprobe_integrations.common.parameters.parameter_sampler import ParameterSource
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.closures import after_closure
from msprobe_integrations.torch.dump.checks import MODELS, Models
from msprobe_integrations.torch.gradient_probe.step import GradientStep
from msprobe_integrations.torch.parameters.find import find_source

_log = get_logger()


class GradientProbe(GradientUpdates):
    """See `GradientUpdates`; the probe has a backend of its own."""

    step_type = GradientStep
    backend: TorchBackend

    def __init__(self, settings: ProbeSettings, *, at_once: bool = True) -> None:
        super().__init__(settings, TorchBackend(), at_once=at_once)
        self._models: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._names: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._holdings: weakref.WeakKeyDictionary[Any, tuple[int, frozenset[int]]] = weakref.WeakKeyDictionary()
        self._sources: list[Any] = []
        self._strangers = self._parts = 0

    @property
    def _watching(self) -> bool:
        return bool(self._models)

    def _take_off(self) -> None:
        super()._take_off()
        self._sources.clear()

    def monitor(self, model: Models, optimizer: Any = None) -> None:
        """Watch the gradients of `model` from the next update on.

        Args:
            model: the model, or its virtual pipeline chunks. Called again with another model: that one too.
            optimizer: the one whose updates count, or a list; None: every optimizer that holds parameters of the model. Needed where
                the optimizer holds other tensors than the model (Megatron's distributed optimizer, DeepSpeed ZeRO).

        Raises:
            UsageError: an argument of the wrong kind, two parameters of one name, or no parameter of ``param_list``.
        """
        MODELS.check(model)
        models: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
        self._models += [(f"chunk{i}." if len(models) > 1 else "", weakref.ref(m)) for i, m in enumerate(models)]
        self._resolve()
        self._check_names(self._every, self.backend.world_size() > 1, "model.named_parameters()")
        if not self._window.is_wanted(self.settings.step[0] if self.settings.step else 0, self.backend.rank()):
            _log.info("grad_probe: rank %s is not among the ranks of the settings, nothing is watched here", self.backend.rank())
            return
        self._off = False
        if optimizer is None and any(getattr(m, "optimizer", None) is not None and callable(getattr(m, "step", None)) for m in models):
            self._watch_gradients(None, models)  # an engine that holds its optimizer
        elif optimizer is None:
            if not self._undo:
                self._undo.append(register_optimizer_step_pre_hook(self._before_any).remove)
        else:
            for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
                self._watch(each, models)
        _log.info("grad_probe: gradients of %d parameters are watched, files go to %s", len(self._names), self.root)

    def forget(self) -> None:
        """Watch nothing, until `monitor` is called with other objects; updates go on being counted."""
        self._take_off()
        self._models.clear()
        self._names.clear()
        self._holdings.clear()
        self._stepped.clear()

    # ---- parameters ----

    def _resolve(self) -> None:
        """Find the parameters of the models by name; a wrapper may have put others in place since the last time."""
        names: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        known: dict[str, int] = {}
        every: set[str] = set()
        for prefix, ref in self._models:
            model = ref()
            for name, parameter in model.named_parameters() if model is not None else ():
                if known.setdefault(prefix + name, id(parameter)) != id(parameter):
                    raise UsageError(f"monitor(): two models have a parameter '{name}'; give them as one list to tell them apart")
                if self.is_listed(name):
                    names[id(parameter)] = (prefix + name, weakref.ref(parameter))
                every.add(bare(name))
        self._names, self._every = names, every

    def _parameters(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        for key, (name, ref) in self._names.items():
            if (parameter := ref()) is not None:
                yield key, name, parameter

    # ---- updates ----

    def _watch(self, optimizer: Any, models: Sequence[nn.Module]) -> None:
        """Hooks on this optimizer alone."""
        if isinstance(optimizer, Optimizer) and not _flat(models) and self._find_updated_parameters(optimizer):
            self._undo.append(optimizer.register_step_pre_hook(self._before).remove)
            return
        self._watch_gradients(optimizer, models)

    def _watch_gradients(self, optimizer: Any, models: Sequence[nn.Module]) -> None:
        """Take gradients from where the framework of these objects keeps them."""
        watch, undo = watch_source(self, models, optimizer)
        self._sources.append(watch)
        self._undo.append(undo)

    def _find_updated_parameters(self, optimizer: Any) -> frozenset[int]:
        """Parameters of the models that this optimizer updates, by id."""
        groups = optimizer.param_groups
        size = sum(len(group["params"]) for group in groups)
        known = self._holdings.get(optimizer)
        if known is None or known[0] != size or not known[1]:
            if any(ref() is None for _, ref in self._names.values()):
                self._resolve()
            own = frozenset(id(p) for group in groups for p in group["params"]) & self._names.keys()
            if not own:
                self._resolve()
                own = frozenset(id(p) for group in groups for p in group["params"]) & self._names.keys()
            self._holdings[optimizer] = known = (size, own or self._find_linked_parameters(groups))
        return known[1]

    def _find_linked_parameters(self, groups: Sequence[dict[str, Any]]) -> frozenset[int]:
        """Parameters whose fp32 copy this optimizer updates: Megatron puts a link to it on the parameter."""
        copies = {id(p): p for group in groups for p in group["params"]}
        linked = set()
        for key, _, parameter in self._parameters():
            copy = getattr(parameter, "main_param", None)
            if copy is not None and id(copy) in copies:
                self._parts += copy.numel() != parameter.numel()
                linked.add(key)
        return frozenset(linked)

    def _before_any(self, optimizer: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Any optimizer of the process is about to update."""
        if not self._off and not self._held_or_fail(optimizer):
            self._strangers += 1
            return None
        return self._before(optimizer, args, kwargs)

    def _held_or_fail(self, optimizer: Any) -> bool:
        with self.faults.guard(PART):
            return bool(self._find_updated_parameters(optimizer))
        return False

    def _before(self, optimizer: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """An optimizer of the model is about to update. With a closure (Lightning, LBFGS) the gradients are there after its first call:
        returns the arguments of ``step`` with one that takes them then."""
        if self._off or not self.faults.is_enabled(PART) or torch.compiler.is_compiling():
            return None
        with self.faults.guard(PART):
            if self._parts:
                raise UsageError(
                    "the optimizer holds parts of the parameters (distributed optimizer): gradients are reduced for these parts only; "
                    "give it to the probe: PrecisionDebugger.monitor(model, optimizer)"
                )
            self.begin_update(optimizer)
            if self._open is None:
                return None
            step = self._open

            def take_gradients() -> None:
                if self._open is step:  # a closure may be called several times
                    with self.faults.guard(PART):
                        self._take_all(optimizer)

            changed = after_closure(args, kwargs, take_gradients)
            if changed is not None:
                return changed
            self._take_all(optimizer)
        return None

    def _take_all(self, optimizer: Any) -> None:
        """The gradients that `optimizer` is going to use, and those that no other one holds."""
        own = self._find_updated_parameters(optimizer)
        others = frozenset().union(*(held for o, (_, held) in self._holdings.items() if o is not optimizer))
        waits = False
        for key, name, parameter in self._parameters():
            gradient = gradient_of(parameter)
            if gradient is None or key in self._taken:
                continue
            if key in own or key not in others:
                self._taken.add(key)
                if not self.add_gradient(name, gradient):
                    return
            else:
                waits = True
        if not waits:
            self._finish()

    def end_update(self) -> None:
        """A source has ended its update; the step is over when all have."""
        if all(source in self._stepped for source in self._sources):
            self._finish()

    def _why(self) -> str:
        if self._empty:
            return (
                f"in {self._empty} updates no parameter had a gradient: the framework keeps them elsewhere (DeepSpeed, Megatron); give "
                "the optimizer too: monitor(model, optimizer)"
            )
        if self._strangers:
            return (
                f"{self._strangers} updates of optimizers were seen that hold none of the model's parameters; give the model that is "
                "trained, and where the optimizer has copies of its own, the optimizer too: monitor(model, optimizer)"
            )
        return "no optimizer updated after monitor(model); call it before the training loop (torch.optim.Optimizer, or give the optimizer)"


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What the optimizer will use: ``main_grad`` where a framework has put one, else ``grad``."""
    main = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main is None else main
    return gradient if isinstance(gradient, torch.Tensor) else None


def _flat(models: Sequence[nn.Module]) -> bool:
    """Does FSDP1 keep the gradients, of many parameters in one tensor?"""
    return any(type(module).__name__ == "FullyShardedDataParallel" for model in models for module in model.modules())


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
                if probe.is_listed(piece.name) and (gradient := self._source.gradient(piece)) is not None:
                    name = f"chunk{piece.vpp_stage}.{piece.name}" if self._several else piece.name
                    shard = f"[{piece.lo}, {piece.hi}) of {piece.facts['of']}" if piece.sharded else ""
                    if not probe.add_gradient(name, gradient, shard):
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
