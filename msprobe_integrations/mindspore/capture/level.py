"""One capture level put on and taken off a model in MindSpore's dynamic graph: Cells, APIs, primitives, compiled functions and
communication together.

Primitives that are members of Cells (``self.matmul = ops.MatMul()``): records ``Primitive.{attribute}.{Class}.{N}``.

Their calls are seen where the class has its ``__call__``; the objects keep their class, and the graph compiler, which does not call
them, sees nothing of it.

Compiled functions (``@mindspore.jit``) in the dynamic graph: one record ``Jit.{function or Cell class}.{N}`` per call.

What runs inside is compiled and called by nobody; what a function in the mode ``bytecode`` still does in Python belongs to its call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mindspore import nn
from mindspore.ops import Primitive

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import warn_once
from msprobe_engine.core.process.garbage_collection import StepCollection
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_integrations.common.capture.filters import RecordFilter
from msprobe_integrations.common.capture.recorder import Keeps
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.capture.api import ApiCapture, Note
from msprobe_integrations.mindspore.capture.cells import CellCapture
from msprobe_integrations.mindspore.capture.recorder import Recorder
from msprobe_integrations.mindspore.hooks import autograd
from msprobe_integrations.mindspore.models import as_list, iterate_named_cells
from msprobe_integrations.patching import FunctionPatches


class Capture:
    """Everything a dump of one level sees.

    Args:
        level: ``L0`` Cells, ``L1`` APIs, ``mix`` both.
        stacks, data_mode, kept, keeper: see `Recorder`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        level: str,
        *,
        stacks: bool = True,
        data_mode: Sequence[str] = ("all",),
        kept: RecordFilter | None = None,
        keeper: Keeps | None = None,
    ) -> None:
        if level not in ("L0", "L1", "mix"):
            raise UsageError(f"capture level is '{level}'; allowed: L0, L1, mix")
        self.level = level
        self.on = False
        self._collecting = False
        self._collector = StepCollection()
        self._pipeline = pipeline
        self.recorder = Recorder(pipeline, stacks=stacks, data_mode=data_mode, kept=kept, keeper=keeper)
        self.modules = CellCapture(self.recorder, self._is_on, lambda: self._collecting) if level in ("L0", "mix") else None
        self.api = ApiCapture(self.recorder, self._is_on) if level in ("L1", "mix") else None
        self._primitives = PrimitiveCapture(self.api) if self.api is not None else None
        self._jit = JitCapture(self.api) if self.api is not None else None
        self._cells: list[Any] = []

    def attach(self, models: Any, anew: bool = False) -> None:
        """Name the Cells of the model (or of a list of models); `anew`: see `NamedModules.attach`."""
        if self.modules is not None:
            self.modules.attach(models, anew)
        if self.api is not None and (anew or models):
            self._members(models, anew)

    def _members(self, models: Any, anew: bool) -> None:
        """Cells whose primitives and functions are looked at: those of the models, and these themselves."""
        known = {} if anew else {id(cell): cell for cell in self._cells}
        known |= {id(cell): cell for model in as_list(models) for _, cell in iterate_named_cells(model)}
        if list(known) != [id(cell) for cell in self._cells]:
            self._cells = list(known.values())
            if self._primitives is not None:
                self._primitives.remove()

    def open(self) -> None:
        """Begin to see calls (nothing happens when it has begun)."""
        self.on = self._collecting = True
        self._collector.raise_threshold()
        self._pipeline.level = self.level
        if not autograd.available:
            warn_once(
                "mindspore backward",
                "backward records of functions need MindSpore 2.10 or later; this version has those of Cells and of parameters",
            )
        if self.modules is not None:
            self.modules.install()
        if self.api is not None:
            self.api.install(self._cells)
        if self._primitives is not None and self._jit is not None:
            self._primitives.install(self._cells)
            self._jit.install()

    def pause(self) -> None:
        """Stop seeing new calls; gradients of calls already seen still come."""
        self.on = False
        if self.api is not None:
            self.api.remove()
        if self._primitives is not None and self._jit is not None:
            self._primitives.remove()
            self._jit.remove()

    def close(self) -> None:
        """Take everything off: what is left costs nothing."""
        self.pause()
        self._collector.restore_threshold()
        if self.modules is not None:
            self.modules.remove()
        if self.api is not None:
            self.api.waiting.close()
        if self.recorder.keeper is not None:
            self.recorder.keeper.rest()

    def end_step(self) -> list[list[str]]:
        """Close the step's numbering; returns the texts of all stacks."""
        self._collecting = False
        if self.api is not None:
            self.api.waiting.end_step()
        self.recorder.end_step()
        self._collector.restore_threshold()
        if self.modules is not None:
            self.modules.end_step()
        if self.recorder.keeper is not None:
            self.recorder.keeper.end_step(self._pipeline.entries)
        return self.recorder.stacks.texts() if self.recorder.stacks is not None else []

    def _is_on(self) -> bool:
        return self.on


class PrimitiveCapture:
    """Sees calls of the primitives of some Cells while it is installed."""

    def __init__(self, api: ApiCapture) -> None:
        self._api = api
        self._patches = FunctionPatches()
        self._known: dict[int, tuple[Any, str, str, type]] = {}

    def install(self, cells: Iterable[Any]) -> None:
        """Start seeing calls; nothing happens when it has begun."""
        if self._patches:
            return
        self._known = known = {}
        for cell in cells:
            own = getattr(cell, "_primitives", None)  # which a Cell keeps; a module of MSAdapter has them among its attributes
            for name, member in (vars(cell) if own is None else own).items():
                if isinstance(member, Primitive) and id(member) not in known:
                    entrance = next(c for c in type(member).__mro__ if "__call__" in vars(c))
                    known[id(member)] = (member, f"Primitive.{name}", type(member).__name__, entrance)
        for entrance in dict.fromkeys(primitive[3] for primitive in known.values()):
            self._patches.add(entrance, "__call__", self._handler(entrance))

    def remove(self) -> None:
        self._patches.close()
        self._known = {}

    def _handler(self, entrance: type) -> Callable[..., Any]:
        api = self._api

        def record_call(following: Callable[..., Any], primitive: Any, *args: Any, **kwargs: Any) -> Any:
            primitive_call = self._known.get(id(primitive))
            if primitive_call is None or primitive_call[3] is not entrance or not api.sees():
                return following(primitive, *args, **kwargs)
            return api.around(primitive_call[1], primitive_call[2], following, (primitive, *args), kwargs, skip=1)

        return record_call


_PLACES = ("mindspore.graph._utils.pijit_context", "mindspore.common._pijit_context")
"""Where the mode ``bytecode`` is; the first that exists, from 2.9 on the second is only an alias."""


def _module() -> Any:
    for place in _PLACES:
        try:
            return importlib.import_module(place)
        except ImportError:
            continue
    return None


_bytecode: Any = _module()


class JitCapture:
    """Sees calls of compiled functions while it is installed."""

    def __init__(self, api: ApiCapture) -> None:
        self._api = api
        self._patches = FunctionPatches()
        self._given: tuple[Any, Any] = ((), {})
        self._open: list[Note | None] = []

    def install(self) -> None:
        """Start seeing calls; nothing happens when it has begun."""
        if self._patches:
            return
        executor = getattr(environment.api_module(), "_JitExecutor", None)
        if executor is not None:
            self._patches.add(executor, "__call__", self._record_call)
        if _bytecode is not None:
            self._patches.add(_bytecode, "PreJit", self._arguments)
            self._patches.add(_bytecode.PIJitCaptureContext, "__enter__", self._enter)
            self._patches.add(_bytecode.PIJitCaptureContext, "__exit__", self._exit)

    def remove(self) -> None:
        self._patches.close()
        self._open.clear()

    def _record_call(self, following: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
        api = self._api
        if not api.sees():
            return following(executor, *args, **kwargs)
        owner = executor.obj
        skip = 1 if owner is None or not args or args[0] is not owner else 2
        return api.around("Jit", _name(executor.fn, owner), following, (executor, *args), kwargs, skip=skip)

    # mode bytecode: PreJit(args, kwargs), __enter__, the function, __exit__

    def _arguments(self, following: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._given = (args, kwargs)
        return following(args, kwargs)

    def _enter(self, following: Callable[..., Any], context: Any) -> Any:
        (args, kwargs), self._given = self._given, ((), {})
        note = None
        if self._api.sees():
            owner = args[0] if args and isinstance(args[0], nn.Cell) else None
            note = self._api.begin_call("Jit", _name(context.fn, owner), args[1:] if owner is not None else args, kwargs)
        self._open.append(note)
        return following(context)

    def _exit(self, following: Callable[..., Any], context: Any, kind: Any, error: Any, trace: Any) -> Any:
        result = following(context, kind, error, trace)
        note = self._open.pop() if self._open else None
        if note is not None:
            self._api.end_call(note, None if kind is not None else context.ret, failed=kind is not None)
        return result


def _name(function: Any, owner: Any) -> str:
    return type(owner).__name__ if isinstance(owner, nn.Cell) else str(getattr(function, "__name__", "function"))
