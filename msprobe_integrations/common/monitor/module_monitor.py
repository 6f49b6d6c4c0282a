"""The module side of the monitor: activations, features of layers, notes of the first step, collectives. On only in steps that are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.log import warn_once
from msprobe_engine.core.process.garbage_collection import StepCollection
from msprobe_engine.core.settings.schema import LayerFeatureSettings, MonitorSettings
from msprobe_integrations.common.monitor.targets import Named, find_unmatched, is_named, matches, plain

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.probe import Probe

Self = TypeVar("Self", bound="ModuleMonitor")
MOST_PASSES = 2000
"""Passes of a model that are noted in one step."""
Pre = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Called with a module and its positional and keyword arguments."""
Post = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with a module, its arguments and its result."""
_KEYS = (
    "activations", "activation_gradients", "micro_batch_gradients", "layer_features", "stack_info", "print_struct", "targets",
    "collectives", "collective_inputs", "collective_stacks",
)  # fmt: skip
_WITH_COLLECTIVES = ("activations", "activation_gradients", "collectives", "collective_inputs", "collective_stacks")
_FEATURES = ("attention", "linear", "router_weights", "router_logits")


class Hooks(Protocol):
    """What is called before and after calls of modules."""

    def add(self, named: Named, pre: Pre | None, post: Post | None, owner: Any = None) -> None:
        """Call `pre` before and `post` after every call of the module, until `drop(owner)`."""
        ...

    def drop(self, owner: Any) -> None:
        """Forget what belongs to `owner`."""
        ...

    def clear(self) -> None: ...

    def install(self) -> None: ...

    def remove(self) -> None:
        """Take the hooks off; nothing is left behind."""
        ...


class ModuleMonitor:
    """What a probe drives.

    Attributes:
        on: hooks are on and what they see counts.
    """

    def __init__(self, probe: Probe, monitor: MonitorSettings) -> None:
        self.probe = probe
        self.monitor = monitor
        self.on = False
        self._light = False
        self._collector = StepCollection()
        self._hooks = self._make_hooks()
        self._forwards: dict[int, int] = {}
        self._parts: list[Any] = []
        self._collectives: Any = None
        # watched beside activations too, because they change tensors without telling
        if any(getattr(monitor, key) for key in _WITH_COLLECTIVES):
            with probe.guard("collective monitor"):
                self._collectives = self._make_collectives()

    @classmethod
    def build(cls: type[Self], probe: Probe, monitor: MonitorSettings | None) -> Self | None:
        """None when the settings ask for nothing that is seen here."""
        return cls(probe, monitor) if monitor is not None and any(getattr(monitor, key) for key in _KEYS) else None

    # what a framework brings along

    def _make_hooks(self) -> Hooks:
        raise NotImplementedError

    def _make_collectives(self) -> Any:
        """What watches collectives (``install``, ``remove``, ``end_step``); None: nothing does."""
        raise NotImplementedError

    def _make_watch(self) -> Any:
        """What takes activations and their gradients: ``add(named, hooks)``, ``end_step()``."""
        raise NotImplementedError

    def _make_features(self, settings: LayerFeatureSettings) -> Any:
        """What takes features of layers, like `_make_watch`; None: nothing does."""
        raise NotImplementedError

    def _make_notes(self) -> Any:
        """What notes stacks and structures in the first step: ``add(named, hooks, struct=...)``, ``end_step()``; None: nothing does."""
        raise NotImplementedError

    def _named_modules(self, models: Sequence[Any]) -> list[Named]:
        raise NotImplementedError

    def _parameter_names(self, model: Any) -> list[str]:
        raise NotImplementedError

    def _counts(self) -> bool:
        """Is a call of the model that begins now a pass of the training: recorded for gradients, and no recomputation?"""
        raise NotImplementedError

    def _is_training(self, root: Any) -> bool:
        return bool(root.training)

    def _say_sealed(self, count: int) -> None:
        """Modules that cannot be watched."""

    def _set_light_hooks(self, on: bool) -> None:
        """Something is watched from now on, or no longer: what makes that cheap."""

    def attach(self, models: Sequence[Any]) -> None:
        """Choose the modules by the settings."""
        self._hooks.clear()
        self._parts.clear()
        monitor = self.monitor
        everything = self._named_modules(models)
        self._check_targets(models, everything)
        open_ = [named for named in everything if not named.sealed]
        exact = monitor.activation_targets
        wanted = [n for n in everything if (is_named(n.name, exact, n.chunk) if exact else matches(n.name, monitor.targets, n.chunk))]
        if monitor.activations or monitor.activation_gradients or monitor.micro_batch_gradients or monitor.layer_features:
            for named in open_:
                if named.module is named.root or named.hooked is named.root:
                    self._hooks.add(named, self._counter(named), None)
        if monitor.activations or monitor.activation_gradients:
            self._say_sealed(sum(named.sealed for named in wanted))
            watch = self._make_watch()
            self._parts.append(watch)
            for named in wanted:
                if not named.sealed:
                    watch.add(named, self._hooks)
        features = self._make_features(monitor.layer_features) if monitor.layer_features is not None else None
        if features is not None:
            self._parts.append(features)
            for named in open_:
                features.add(named, self._hooks)
        notes = self._make_notes() if monitor.stack_info or monitor.print_struct else None
        if notes is not None:
            self._parts.append(notes)
            for named in open_:
                notes.add(named, self._hooks, struct=matches(named.name, monitor.targets, named.chunk))

    def detach(self) -> None:
        """Let go of the modules."""
        self.remove()
        self._hooks.clear()
        self._parts.clear()

    def begin(self) -> None:
        """A step that is due begins, or goes on after a pause."""
        self.on = True
        self._hooks.install()
        if self._parts:
            self._collector.raise_threshold()
            if not self._light:
                self._light = True
                self._set_light_hooks(True)
        if self._collectives is not None:
            self._collectives.install()

    def pause(self) -> None:
        """Nothing is seen for a while; gradients of what was seen still come."""
        self.on = False
        self._hooks.remove()

    def remove(self) -> None:
        """Take everything off."""
        self.pause()
        self._collector.restore_threshold()
        if self._light:
            self._light = False
            self._set_light_hooks(False)
        if self._collectives is not None:
            self._collectives.remove()

    def end_step(self) -> None:
        """The step is over: what came in part is reported. Hooks stay for the next step, until `remove`, and see nothing."""
        self.on = False
        for part in list(self._parts):
            part.end_step()
        if self._collectives is not None:
            self._collectives.end_step()
        self._forwards.clear()
        self._collector.restore_threshold()

    def count_again(self) -> None:
        """The next pass of a model is its first in this step."""
        self._forwards.clear()

    def drop(self, part: Any) -> None:
        """A part has failed: it sees nothing any more."""
        self._hooks.drop(part)
        self._parts = [p for p in self._parts if p is not part]

    def sees(self, root: Any) -> bool:
        """Does a call of a module of this model count now? Calls in evaluation mode do not."""
        return self.on and self._is_training(root)

    def micro_step(self, chunk: int = -1) -> int:
        """Current micro batch: what the training says, else how often the model was called in this step, from 0; -1 when not known.

        Args:
            chunk: which model; -1: the one that was called most.
        """
        told = self.probe.told_micro_step
        if told >= 0 or not self._forwards:
            return told
        return (max(self._forwards.values()) if chunk < 0 else self._forwards.get(chunk, 0)) - 1

    def _counter(self, named: Named) -> Pre:
        chunk, forwards = named.chunk, self._forwards

        def count(module: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
            with self.probe.guard("micro batches"):
                if self._is_training(named.root) and self._counts():
                    forwards[chunk] = number = forwards.get(chunk, 0) + 1
                    if number > MOST_PASSES:
                        self._no_end()

        return count

    def _no_end(self) -> None:
        """What a step shows is kept until it ends; one that never ends must not fill the memory."""
        self.on = False
        self.probe.pipeline.lose("passes of a step without end")
        for watch in self.probe.parameters.watches:
            watch.no_more_micro_batches()
        warn_once(
            "monitor: no end of the step",
            f"monitor: the model was called {MOST_PASSES} times in one step; of further passes until its end nothing is noted. If another "
            "optimizer than the one that is watched updates the model now, attach that one (TrainerMon: stop() and a new one)",
        )

    def _check_targets(self, models: Sequence[Any], modules: Sequence[Named]) -> None:
        """A name that nothing has is a mistake in the settings, said with the names that look most like it."""
        features = self.monitor.layer_features
        lists = [("targets", self.monitor.targets)]
        if self.monitor.activation_targets != self.monitor.targets:
            lists.append(("activation_targets", self.monitor.activation_targets))
        lists += [(f"layer_features.{key}", getattr(features, key)) for key in _FEATURES] if features is not None else []
        if not any(targets for _, targets in lists):
            return
        names: list[list[str]] = [[] for _ in models]
        for named in modules:
            names[named.chunk].append(named.name)
        with_parameters = [[*known, *(plain(name) for name in self._parameter_names(model))] for known, model in zip(names, models)]
        for key, targets in lists:
            for target, close in find_unmatched(targets, with_parameters if key == "targets" else names).items():
                text = f"monitor.{key}: nothing in the model is called {target!r}; the nearest names are {', '.join(map(repr, close))}"
                if self.probe.backend.world_size() > 1:  # it may be on another pipeline stage
                    warn_once(f"monitor.{key} {target}", f"{text}. Right when it is on another rank")
                else:
                    hint = "correct the settings; a target is whole path components, * and ? allowed"
                    self.probe.faults.fail(f"monitor.{key} {target}", SettingsError(text), disable=False, hint=hint)
