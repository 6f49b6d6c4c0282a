"""Replay: the inputs of chosen module calls are replaced by the tensors an earlier dump saved (``load`` of the dump settings).

Two runs that differ at the end may differ everywhere behind the first wrong call. With the same inputs given to one module in both, what
still differs was made by that module.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError, ProbeError, UsageError
from msprobe_engine.core.guard import Faults, raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.schema import LoadSettings
from msprobe_engine.core.window import Window
from msprobe_engine.formats.dump.reader import DumpDirectory, open_dump
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_integrations.common.dump.dump_plugins import DumpPlugin
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.modules import ModuleInfo, named_infos
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task
from msprobe_integrations.torch.hooks.modules import OwnHook
from msprobe_integrations.torch.tensors.structure import MAX_DEPTH

_log = get_logger()
_PART = "replay of inputs"


class Replay(DumpPlugin):
    """Replaces inputs of the listed calls in the steps and on the ranks where it is wanted.

    Tensors among the arguments are replaced, positional and keyword ones, also inside lists, tuples, dicts and dataclasses, which
    are copied and not changed. A replaced tensor has the values, type and shape of the saved one and lies on the device of the
    original. Where the original needs a gradient, the gradient of the replacement goes on to it: the whole model gets gradients, as
    data-parallel training needs. Only when the shape differs it ends at the replacement.

    Calls are numbered as in the dump: calls of a module between `begin` and `pause`, from 0 in every step. The saved tensors are
    those of the same step and rank; without ranks, of the one directory of the step.

    Args:
        settings: section ``load``.
        faults: an error in here ends the replay, not the training.
    """

    def __init__(self, settings: LoadSettings, faults: Faults) -> None:
        self._settings = settings
        self._faults = faults
        self._window = Window(settings.rank, settings.step)
        self._wanted: dict[str, set[int]] = {}
        for name in settings.modules:
            parsed = names.parse(name)
            if isinstance(parsed, names.ModuleName):
                self._wanted.setdefault(f"{parsed.kind}.{parsed.path}.{parsed.cls}", set()).add(parsed.number)
        self._hooks: dict[str, tuple[nn.Module, Any]] = {}
        self._attached: Any = None
        self._counts: dict[str, int] = {}
        self._missed = set(settings.modules)
        self._said: set[str] = set()
        self._active = False
        self._on = False
        self._source: tuple[int, int | None] = (0, None)
        self._files: TensorFiles | None = None
        self._backend = TorchBackend()
        self._dump: DumpDirectory | None = None

    @property
    def alone(self) -> bool:
        """True unless the settings want a dump too."""
        return not self._settings.dump_after_load

    @property
    def installed(self) -> bool:
        """True while hooks are on modules."""
        return bool(self._hooks)

    def begin(self, model: nn.Module | Sequence[nn.Module] | None, step: int, rank: int | None) -> None:
        """Replace from now on, when this step and rank are wanted. Hooks go on with the first call, before those of a dump, so that a
        dump sees what the module sees.

        Raises:
            UsageError: there is no model.
        """
        if model is None:
            raise UsageError("start(): 'load' replaces inputs of modules and needs the model: PrecisionDebugger.start(model)")
        if (
            self._faults.is_enabled(_PART)
            and not self._window.over(step)
            and (not self._settings.rank or (rank or 0) in self._settings.rank)
        ):
            self._attach(model)
        wanted = self._window.is_wanted(step, rank)
        if wanted and not self._active:
            self._active = True
            self._source, self._files = (step, rank), None
            _log.info("inputs of %d module calls are replaced in step %d", len(self._settings.modules), step)
        self._on = wanted and self._faults.is_enabled(_PART)

    def pause(self) -> None:
        """Replace nothing until the next `begin`."""
        self._on = False

    def end_step(self, next_step: int) -> None:
        """The step is over. Says which calls never came, and takes the hooks off when no later step is wanted."""
        self._report()
        self._on = self._active = False
        self._attached = None
        self._counts.clear()
        if self._window.over(next_step):
            self.close()

    def close(self) -> None:
        """Take the hooks off."""
        self._report()
        self._on = self._active = False
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._attached = None

    def _attach(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Once in a step: modules may have been replaced since the last one."""
        if model is self._attached:
            return
        self._attached = model
        for info in named_infos(model):
            if info.base not in self._wanted:
                continue
            before = self._hooks.get(info.base)
            if before is not None and before[0] is info.module:
                continue
            if before is not None:
                before[1].remove()
            self._hooks[info.base] = info.module, info.module.register_forward_pre_hook(OwnHook(self._hook(info)), with_kwargs=True)

    def _hook(self, info: ModuleInfo) -> Callable[..., Any]:
        numbers = self._wanted[info.base]

        def pre(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_compiling() or not self._on:
                return None
            number = self._counts.get(info.base, 0)
            self._counts[info.base] = number + 1
            name = f"{info.base}.forward.{number}"
            if number not in numbers:
                if current_graph_task() != -1:
                    self._warn_once(
                        name, f"{name} recomputes an earlier call with this run's own inputs, and so are its gradients; list it too"
                    )
                return None
            self._missed.discard(name)
            try:
                with torch._C.DisableTorchFunction():  # a dump at level L1 or mix must not see these calls
                    return self._arguments(name, args, kwargs)
            except Exception as error:
                raise_of_training(error)
                self.close()
                self._faults.fail(_PART, error)
                return None

        return pre

    def _arguments(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        new = tuple(self._value(name, f"input.{i}", a, 0) for i, a in enumerate(args))
        return new, {k: self._value(name, f"kwargs.{k}", v, 0) for k, v in kwargs.items()}

    def _value(self, name: str, place: str, value: Any, depth: int) -> Any:
        """`value` with its tensors replaced; the same object when none was."""
        if isinstance(value, torch.Tensor):
            saved = self._load_saved(name, place)
            return value if saved is None else self._replace_value(f"{name}.{place}", saved, value)
        if depth >= MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float)):
            return value
        members = _members(value)
        changed = {k: new for k, v in members.items() if (new := self._value(name, f"{place}.{k}", v, depth + 1)) is not v}
        return _with(value, members, changed) if changed else value

    def _load_saved(self, name: str, place: str) -> torch.Tensor | None:
        """The saved tensor, on the host; None with a warning when there is none that can be used."""
        step, rank = self._source
        try:
            if self._files is None:
                self._files = TensorFiles(self._find(step, rank))
            saved = self._files.load(names.tensor_file(name, place, ".pt"), self._backend)
            if not isinstance(saved, torch.Tensor):
                raise DumpFormatError(f"its file holds a {type(saved).__name__}, no tensor")
        except ProbeError as error:
            self._warn_once(f"{name}.{place}", f"the value of {name}.{place} is kept: {error}")
            return None
        return saved

    def _find(self, step: int, rank: int | None) -> Path:
        if self._dump is None:
            self._dump = open_dump(self._settings.path)
        ranks = self._dump.ranks(step)
        # a dump made without a process group does not know its rank
        return self._dump.path(step, rank if rank in ranks or len(ranks) > 1 or isinstance(ranks[0], int) else None)

    def _replace_value(self, place: str, saved: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
        local = getattr(original, "to_local", None)
        current = original if local is None else local()
        same_shape = saved.shape == current.shape
        if not same_shape and local is not None:
            self._warn_once(
                place, f"{place} is kept: a part of a distributed tensor is {_kind(saved)} in the dump and {_kind(current)} here"
            )
            return original
        if not same_shape or saved.dtype != current.dtype:
            self._warn_once(
                place, f"{place} is {_kind(saved)} in the dump and {_kind(current)} here; it is replaced, the module may not take it"
            )
        if not same_shape:
            return saved.to(current.device).requires_grad_(original.requires_grad and saved.is_floating_point())
        # a copy of the original with other contents: strides, distribution and the way of the gradient are those of the original
        new = original.to(saved.dtype) if saved.dtype != current.dtype else original.clone()
        if original.requires_grad and not new.requires_grad and new.is_floating_point():
            new.requires_grad_()  # gradients are off now
        with torch.no_grad():
            target: Any = new.detach()
            (target if local is None else target.to_local()).copy_(saved)
        return new

    def _report(self) -> None:
        if not self._active:
            return
        for name in sorted(self._missed):
            self._warn_once(name, f"{name}: no such call in this step. Is it the name that the dump has, and the module not compiled?")

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("replay: %s", text)


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _members(value: Any) -> dict[Any, Any]:
    """What a container holds, by the name that a dump gives it; empty for what is no container."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value))
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return {}


def _with(value: Any, members: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """A copy of the container `value` in which `changed` stand in place of the old ones."""
    if isinstance(value, tuple):
        new = [changed.get(k, v) for k, v in members.items()]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    made = copy.copy(value)
    if isinstance(value, (list, Mapping)):
        for key, item in changed.items():
            made[key] = item
    else:
        for key, item in changed.items():
            object.__setattr__(made, key, item)  # frozen dataclasses too
    return made
