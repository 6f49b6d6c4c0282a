"""The gradient probe: all gradients just before every update of the optimizer that holds the model's parameters.

An update is a call of ``step`` of such an optimizer, found when it is called; optimizers of other models do not count. Where several
optimizers share the parameters of a model, a step is over when one of them is called a second time. Nothing is read from a device and
nothing is written on the training thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from msprobe_engine.errors import NothingCapturedError, UsageError
from msprobe_engine.grad_probe.background import Background
from msprobe_engine.grad_probe.files import StepFiles
from msprobe_engine.grad_probe.layout import SUMMARY
from msprobe_engine.guard import Faults, Guard
from msprobe_engine.log import get_logger, warn_once
from msprobe_engine.settings.schema import ProbeSettings
from msprobe_engine.settings.tree import nearest
from msprobe_engine.window import Window
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.closures import after_closure
from msprobe_integrations.torch.dump_checks import MODELS, Models
from msprobe_integrations.torch.grad_step import GradientStep

PART = "grad_probe"
_log = get_logger()


class GradientProbe:
    """One per process.

    Args:
        settings: with a section ``grad_probe``.
        at_once: hooks go with the last wanted update, from inside of its hooks; False: at the next `settle`.

    Attributes:
        step: number of the newest update, from 0; -1 before the first.
        root: where ``rank{R}`` is.
    """

    def __init__(self, settings: ProbeSettings, *, at_once: bool = True) -> None:
        assert settings.grad_probe is not None
        self.settings = settings.grad_probe
        self._at_once = at_once
        self._over = False
        self.root = root_of(settings)
        self.faults = Faults(settings.strict, PART)
        self.backend = TorchBackend()
        self.backend.want_checksum = "crc32" if self.settings.grad_level == "L0" else ""
        self.step = -1
        self._wanted = frozenset(bare(name) for name in self.settings.param_list)
        self._window = Window(self.settings.rank, self.settings.step)
        self._background = Background(self.faults, f"{PART} files", self.settings.memory_budget_mb << 20)
        self._models: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._names: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._holdings: weakref.WeakKeyDictionary[Any, tuple[int, frozenset[int]]] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._open: GradientStep | None = None
        self._taken: set[int] = set()
        self._sources: list[Any] = []
        self._undo: list[Callable[[], Any]] = []
        self._files: StepFiles | None = None
        self._begun = self._strangers = self._parts = self._empty = 0
        self._off = False
        self._concluded: tuple[int, int, int] | None = None

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
        self._check_names()
        if not self._window.wanted(self.settings.step[0] if self.settings.step else 0, self.backend.rank()):
            _log.info("grad_probe: rank %s is not among the ranks of the settings, nothing is watched here", self.backend.rank())
            return
        self._off = False
        if optimizer is None and any(getattr(m, "optimizer", None) is not None and callable(getattr(m, "step", None)) for m in models):
            self._follow(None, models)  # an engine that holds its optimizer
        elif optimizer is None:
            if not self._undo:
                self._undo.append(register_optimizer_step_pre_hook(self._before_any).remove)
        else:
            for one in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
                self._watch(one, models)
        _log.info("grad_probe: gradients of %d parameters are watched, files go to %s", len(self._names), self.root)

    def settle(self) -> None:
        """Outside of any update: take the hooks off if no update is wanted any more."""
        if self._over and self._undo:
            self._take_off()

    def forget(self) -> None:
        """Watch nothing, until `monitor` is called with other objects; updates go on being counted."""
        self._take_off()
        self._models.clear()
        self._names.clear()
        self._holdings.clear()
        self._stepped.clear()

    def close(self) -> None:
        """Take the hooks off, write what is there, say what was written. Updates after this are not seen until `monitor` is called."""
        self._take_off()
        with self.faults.guard(PART):
            self._finish()
        self._stepped.clear()
        self._background.close()
        self._conclude()

    def forked(self) -> None:
        """In a forked child: it is not the training."""
        self._off = True

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
                if self.listed(name):
                    names[id(parameter)] = (prefix + name, weakref.ref(parameter))
                every.add(bare(name))
        self._names, self._every = names, every

    def _check_names(self) -> None:
        """What of ``param_list`` is there?"""
        missing = [name for name in self.settings.param_list if bare(name) not in self._every]
        if not missing:
            return
        near = nearest(missing[0], self._every)
        text = f"param_list: the model has no parameter '{missing[0]}'" + (f"; did you mean '{near}'?" if near else "")
        if not self._names and self.backend.world_size() == 1:
            raise UsageError(f"monitor(): {text}; none of the list is there. Names are those of model.named_parameters()")
        _log.warning("grad_probe: %s (%d of %d names are not there on this rank)", text, len(missing), len(self.settings.param_list))

    def _parameters(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        for key, (name, ref) in self._names.items():
            if (parameter := ref()) is not None:
                yield key, name, parameter

    # ---- updates ----

    def _watch(self, optimizer: Any, models: Sequence[nn.Module]) -> None:
        """Hooks on this optimizer alone."""
        if isinstance(optimizer, Optimizer) and not _flat(models) and self._held(optimizer):
            self._undo.append(optimizer.register_step_pre_hook(self._before).remove)
            return
        self._follow(optimizer, models)

    def _follow(self, optimizer: Any, models: Sequence[nn.Module]) -> None:
        """Take gradients from where the framework of these objects keeps them."""
        from msprobe_integrations.torch.grad_source import watch_source

        watch, undo = watch_source(self, models, optimizer)
        self._sources.append(watch)
        self._undo.append(undo)

    def _held(self, optimizer: Any) -> frozenset[int]:
        """Parameters of the models that this optimizer updates, by id."""
        groups = optimizer.param_groups
        size = sum(len(group["params"]) for group in groups)
        known = self._holdings.get(optimizer)
        if known is None or known[0] != size or not known[1]:
            if any(ref() is None for _, ref in self._names.values()):
                self._resolve()
            mine = frozenset(id(p) for group in groups for p in group["params"]) & self._names.keys()
            if not mine:
                self._resolve()
                mine = frozenset(id(p) for group in groups for p in group["params"]) & self._names.keys()
            self._holdings[optimizer] = known = (size, mine or self._linked(groups))
        return known[1]

    def _linked(self, groups: Sequence[dict[str, Any]]) -> frozenset[int]:
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
            return bool(self._held(optimizer))
        return False

    def _before(self, optimizer: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """An optimizer of the model is about to update. With a closure (Lightning, LBFGS) the gradients are there after its first call:
        returns the arguments of ``step`` with one that takes them then."""
        if self._off or not self.faults.enabled(PART) or torch.compiler.is_compiling():
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

            def take() -> None:
                if self._open is step:  # a closure may be called several times
                    with self.faults.guard(PART):
                        self._take_all(optimizer)

            changed = after_closure(args, kwargs, take)
            if changed is not None:
                return changed
            self._take_all(optimizer)
        return None

    def _take_all(self, optimizer: Any) -> None:
        """The gradients that `optimizer` is going to use, and those that no other one holds."""
        mine = self._held(optimizer)
        others = frozenset().union(*(held for o, (_, held) in self._holdings.items() if o is not optimizer))
        waits = False
        for key, name, parameter in self._parameters():
            gradient = gradient_of(parameter)
            if gradient is None or key in self._taken:
                continue
            if key in mine or key not in others:
                self._taken.add(key)
                if not self.take(name, gradient):
                    return
            else:
                waits = True
        if not waits:
            self._finish()

    def take(self, name: str, gradient: torch.Tensor, shard: str = "") -> bool:
        """Take one gradient of the open step. False: there is no memory, the step is given up."""
        step = self._open
        if step is None:
            return False
        try:
            step.take(name, gradient, shard)
        except TimeoutError as error:
            self._open = None
            self.backend.finish_step()
            self._background.give_up(step.nbytes, error)
            return False
        return True

    def listed(self, name: str) -> bool:
        """Is this parameter in ``param_list``, or is that empty? The names of wrappers in front make no difference."""
        return not self._wanted or bare(name) in self._wanted

    @property
    def wants(self) -> bool:
        """Are gradients to be taken now?"""
        return self._open is not None and not self._off and self.faults.enabled(PART)

    def guard(self) -> Guard:
        """Around what is done in a hook."""
        return self.faults.guard(PART)

    def end_update(self) -> None:
        """A source has ended its update; the step is over when all have."""
        if all(source in self._stepped for source in self._sources):
            self._finish()

    def begin_update(self, optimizer: Any) -> GradientStep | None:
        """`optimizer` is about to update: the open step, None when it is not wanted (or all of it was taken)."""
        if optimizer in self._stepped:
            self._finish()
            self._stepped.clear()
        if not self._stepped:
            self.step += 1
            self._taken.clear()
            if self._window.wanted(self.step, self.backend.rank()):
                self._begin()
        self._stepped.add(optimizer)
        return self._open

    def _begin(self) -> None:
        level = self.settings.grad_level
        self._begun += 1
        bounds = self.settings.bounds if level == "L2" else ()
        self._open = GradientStep(self.backend, level != "L0", bounds, self._background.reserve)

    def _finish(self) -> None:
        """All of the open step was taken: it goes to the writer."""
        taken, self._open = self._open, None
        if taken is None:
            return
        if not taken.count:
            self._empty += 1
            self.backend.finish_step()
            return
        for name, why in taken.left_out.items():
            warn_once(f"grad_probe {name}", f"grad_probe: the gradient of {name} is left out: {why}")
        write, files, step = taken.finish(), self._directory(), self.step
        self._background.submit(lambda: write(files, step), taken.nbytes)
        self._over = self._window.over(self.step + 1)
        if self._over and self._at_once:
            self._take_off()

    def _take_off(self) -> None:
        """No hook stays."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._sources.clear()

    def _directory(self) -> StepFiles:
        if self._files is None:
            directory = self.root / f"rank{self.backend.rank() or 0}"
            if directory.is_dir() and any(SUMMARY.fullmatch(entry) for entry in os.listdir(directory)):
                _log.warning("%s holds files of an earlier run: equal steps are replaced, other ones stay", directory)
            settings = self.settings
            self._files = StepFiles(directory, settings.grad_level, settings.bounds, settings.direction_format == "files")
        return self._files

    # ---- the end ----

    def _conclude(self) -> None:
        """Say what was written, or why nothing was."""
        written, lost = self._background.done, self._background.lost
        if not self._models or self._off or self._concluded == (written, lost, self.step):
            return
        self._concluded = written, lost, self.step
        if written or lost:
            how = f", {lost} are lost" if lost else ""
            (_log.warning if lost else _log.info)("grad_probe: gradients of %d updates are in %s%s", written, self.root, how)
        elif self._window.wanted(self.settings.step[0] if self.settings.step else 0, self.backend.rank()):
            error = NothingCapturedError(f"grad_probe wrote nothing to {self.root}: {self._why()}")
            _log.error("%s", error)
            if self.faults.strict:
                raise error

    def _why(self) -> str:
        if not self.faults.enabled(PART):
            return "a fault switched it off, see the message above"
        if self._empty:
            return (
                f"in {self._empty} updates no parameter had a gradient: the framework keeps them elsewhere (DeepSpeed, Megatron); give "
                "the optimizer too: monitor(model, optimizer)"
            )
        if self.step >= 0:
            return f"{self.step + 1} updates were seen, none of them is in 'step' of the settings: {list(self.settings.step)[:5]}"
        if self._strangers:
            return (
                f"{self._strangers} updates of optimizers were seen that hold none of the model's parameters; give the model that is "
                "trained, and where the optimizer has copies of its own, the optimizer too: monitor(model, optimizer)"
            )
        return "no optimizer updated after monitor(model); call it before the training loop (torch.optim.Optimizer, or give the optimizer)"


def bare(name: str) -> str:
    """A parameter's name without the names of wrappers in front."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What the optimizer will use: ``main_grad`` where a framework has put one, else ``grad``."""
    main = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main is None else main
    return gradient if isinstance(gradient, torch.Tensor) else None


def _flat(models: Sequence[nn.Module]) -> bool:
    """Does FSDP1 keep the gradients, of many parameters in one tensor?"""
    return any(type(module).__name__ == "FullyShardedDataParallel" for model in models for module in model.modules())


def root_of(settings: ProbeSettings) -> Path:
    """Where the rank directories are."""
    assert settings.grad_probe is not None
    root = settings.grad_probe.dump_path or os.path.join(settings.output_dir, "grad_probe")
    return Path(os.path.abspath(os.path.expanduser(root)))  # the program may change its working directory
