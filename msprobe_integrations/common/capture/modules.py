"""Module level (L0), what is the same for every framework: which modules have which record names, which of them get hooks, and the records
of their parameters' gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from msprobe_engine.core.records import Entry, TensorRef
from msprobe_integrations.common.capture.calls import ALWAYS, Call
from msprobe_integrations.common.capture.filters import RecordFilter
from msprobe_integrations.common.capture.recorder import CallRecorder
from msprobe_integrations.common.hooks.unchanged import Parts


class ModuleInfo:
    """A module and its record names.

    Attributes:
        module: what has the parameters.
        path: in record names.
        base: ``{Module|Cell}.{path}.{Class}``.
        kind: what the filter knows of its calls.
        parameters: its own ones by name, while hooks are on.
        expected: how many of them have a gradient.
        inside: some call of the step is kept because of an enclosing one.
        last: the call whose backward record came last.
    """

    __slots__ = ("base", "expected", "inside", "kind", "last", "module", "parameters", "path")

    def __init__(self, module: Any, path: str, base: str) -> None:
        self.module = module
        self.path = path
        self.base = base
        self.kind = ALWAYS
        self.parameters: dict[str, Any] = {}
        self.expected = 0
        self.inside = False
        self.last: Call | None = None


Info = TypeVar("Info", bound=ModuleInfo)


class NamedModules(ABC, Generic[Info]):
    """The modules of the models of a capture.

    Args:
        is_on: one cheap call that says whether the current moment is inside the capture window.
        is_collecting: the same for gradients, which still come after the window was closed.
    """

    def __init__(self, recorder: CallRecorder, is_on: Callable[[], bool], is_collecting: Callable[[], bool]) -> None:
        self._recorder: Any = recorder
        self._on = is_on
        self._collecting = is_collecting
        self._models: dict[int, Any] = {}
        self._parts = Parts([])
        self._infos: list[Info] = []
        self._installed = False
        self._grad_counts: dict[str, int] = {}
        self._grads: dict[Info, dict[str, TensorRef]] = {}

    # what a framework says

    @abstractmethod
    def find_modules(self, models: Any) -> list[Info]:
        """Every module of the models that has a record name."""

    @abstractmethod
    def single(self, module: Any, path: str) -> Info:
        """One module by itself."""

    @abstractmethod
    def list_models(self, models: Any) -> list[Any]:
        """The argument of `attach` as a list."""

    @abstractmethod
    def dicts(self, models: Sequence[Any]) -> list[Mapping[str, Any]]:
        """Where the modules of the models keep their modules and parameters."""

    @abstractmethod
    def _put_on(self, around: Sequence[Info], own: Sequence[Info]) -> None:
        """Begin to see calls of `around`, and gradients of the parameters of `own`."""

    @abstractmethod
    def _take_off(self) -> None:
        """See nothing any more."""

    # what is the same for all

    def attach(self, models: Any, anew: bool = False) -> None:
        """Name the modules; a second model is added to the first. A model that is known costs nothing.

        Args:
            anew: a step begins: a model that was changed is named again, and a new one, or none, takes the place of all others.
        """
        given = self.list_models(models)
        fresh = [m for m in given if id(m) not in self._models]
        was_installed = self.installed
        if anew and self._models and (fresh or not given or not self._parts.is_unchanged()):
            self.remove()
            self._models, self._parts, self._infos, fresh = {}, Parts([]), [], given
        if not fresh:
            return
        self.remove()
        self._models |= {id(m): m for m in fresh}
        self._parts = Parts(self.dicts(list(self._models.values())))
        known = {id(i.module) for i in self._infos}
        for info in self.find_modules(models):
            if id(info.module) not in known:  # a module has one name, the first
                known.add(id(info.module))
                self._infos.append(info)
        if was_installed:
            self.install()

    def add(self, module: Any, path: str) -> None:
        """Name one module by itself, whatever is around and inside it."""
        was_installed = self.installed
        self.remove()
        self._infos.append(self.single(module, path))
        if was_installed:
            self.install()

    @property
    def infos(self) -> list[Info]:
        """The modules that are named; the same list until other models take their place."""
        return self._infos

    @property
    def installed(self) -> bool:
        """True while hooks are on the modules."""
        return self._installed

    def install(self) -> None:
        """Put the hooks on: on modules of which a record can be kept, and on those around them, whose calls are parents."""
        if self._installed:
            return
        self._installed = True
        kept = self._recorder.kept
        around, own = self._select_modules(kept)
        if kept is not None:
            for info in self._infos:
                info.kind = kept.module(info.base)
        self._put_on([info for info in self._infos if id(info) in around], [info for info in self._infos if id(info) in own])

    def remove(self) -> None:
        """Take all hooks off."""
        self._take_off()
        self._installed = False

    def _select_modules(self, kept: RecordFilter | None) -> tuple[set[int], set[int]]:
        """Modules that get hooks, and those of which records can be kept."""
        everything = {id(info) for info in self._infos}
        if kept is None or kept.names is None:
            return everything, everything
        listed = [info for info in self._infos if kept.module(info.base).possible]
        own = {id(info) for info in listed}
        if kept.expands:
            inside = tuple(f"{info.path}." for info in listed)
            own |= {id(info) for info in self._infos if info.path.startswith(inside)}
            if kept.keeps_apis:
                return everything, own
        paths = [info.path for info in self._infos if id(info) in own or kept.bounds(info.base)]
        above = {path[:i] for path in paths for i in range(len(path) + 1) if path[i : i + 1] in (".", "")}
        return {id(info) for info in self._infos if info.path in above}, own

    def call(self, info: Info) -> Call:
        """A call of a module begins: its name and place."""
        recorder = self._recorder
        calls = recorder.stack.calls
        n = recorder.numbers.take_number(info.base)
        parent = calls[-1] if calls else None
        return Call(f"{info.base}.forward.{n}", f"{info.base}.backward.{n}", info, parent, info.kind, True)

    def gradient(self, info: Info, name: str, gradient: Any) -> None:
        """The gradient of a parameter has arrived."""
        recorder = self._recorder
        if recorder.kept is not None and not self._keeps_gradients(info, recorder.kept):
            return
        reduce = recorder.reduce_gradient if recorder.keeper is None else recorder.reduce_gradient_for(self._gradients_name(info))
        ref = reduce(gradient)
        grads = self._grads.get(info)
        if grads is not None and name in grads:  # this parameter is a round ahead: shared parameter or a module with unused ones
            self._emit_grads(info)
            grads = None
        if grads is None:
            grads = self._grads[info] = {}
        grads[name] = ref
        if len(grads) == info.expected:
            self._emit_grads(info)

    def end_step(self) -> None:
        """Emit parameter gradients of modules of which not all parameters got one, restart numbering."""
        for info in list(self._grads):
            self._emit_grads(info)
        self._grad_counts.clear()
        for info in self._infos:
            info.inside = False
            info.last = None

    def _keeps_gradients(self, info: Info, kept: RecordFilter) -> bool:
        if kept.range is not None and not kept.range.holds(None, info.path):
            return False
        if kept.names is None or info.inside or info.kind.certain:
            return True
        return kept.names(self._gradients_name(info))

    def _gradients_name(self, info: Info) -> str:
        return f"{info.base}.parameters_grad.{self._grad_counts.get(info.base, 0)}"

    def _emit_grads(self, info: Info) -> None:
        grads = self._grads.pop(info, None)
        if not grads:
            return
        recorder = self._recorder
        name = self._gradients_name(info)
        self._grad_counts[info.base] = self._grad_counts.get(info.base, 0) + 1
        sections: dict[str, Any] = {n: [ref] for n, ref in grads.items()}
        recorder.record(Entry(name, sections, None, -1, recorder.micro_step))
        recorder.tree.gradients_of(name, info.last)
