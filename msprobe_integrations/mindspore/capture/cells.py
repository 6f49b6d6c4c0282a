"""Cell level (L0): forward calls of every Cell below ``Cell.__call__``, gradients through `autograd.Watch`, parameter gradients.

Hooks of MindSpore are not used: one that returns anything replaces the output, one on a Cell inside a compiled function is compiled
itself (a lambda ends the training), and backward hooks insert operators. The calls are seen where Python calls a Cell; what is inside a
compiled function is called by nobody, and its parameters' gradients are seen all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.common.capture.calls import Call
from msprobe_integrations.common.capture.modules import ModuleInfo, NamedModules
from msprobe_integrations.common.hooks import recursion_room
from msprobe_integrations.mindspore import models as models_of
from msprobe_integrations.mindspore.capture.recorder import Recorder
from msprobe_integrations.mindspore.hooks import identity_ops
from msprobe_integrations.mindspore.hooks.autograd import recording
from msprobe_integrations.mindspore.hooks.cells import FRAMES
from msprobe_integrations.mindspore.hooks.eager import at_gradient
from msprobe_integrations.patching import FunctionPatches

_DEPTH = 3  # recorder.begin_call, _begin, the handler, the patch: the user's frame is the next
_RECOMPUTE = "_recompute_cell"
Models = Any


class CellInfo(ModuleInfo):
    """A Cell and its record names.

    Attributes:
        entrance: the class whose ``__call__`` is called.
    """

    __slots__ = ("entrance",)

    def __init__(self, cell: Any, path: str) -> None:
        super().__init__(cell, path, f"{models_of.prefix_of(cell)}.{path}.{type(cell).__name__}")
        self.entrance = next(c for c in type(cell).__mro__ if "__call__" in vars(c))


def named_infos(models: Models) -> list[CellInfo]:
    """Every Cell inside the model (which is no record itself), without those that MindSpore makes for a recomputation; with several
    models the index comes first in the path."""
    many = not models_of.is_model(models)
    infos = []
    for index, model in enumerate(models if many else [models]):
        for path, cell in models_of.iterate_named_cells(model):
            if path and _RECOMPUTE not in path:
                infos.append(CellInfo(cell, f"{index}.{path}" if many else path))
    return infos


class CellCapture(NamedModules[CellInfo]):
    """Sees the calls of the named Cells while it is installed."""

    _recorder: Recorder

    def __init__(self, recorder: Recorder, is_on: Callable[[], bool], is_collecting: Callable[[], bool]) -> None:
        super().__init__(recorder, is_on, is_collecting)
        self._known: dict[int, CellInfo] = {}
        self._patches = FunctionPatches()
        self._handles: list[Any] = []

    def list_models(self, models: Models) -> list[Any]:
        return models_of.as_list(models)

    def find_modules(self, models: Models) -> list[CellInfo]:
        return named_infos(models)

    def single(self, module: Any, path: str) -> CellInfo:
        return CellInfo(module, path)

    def dicts(self, models: Sequence[Any]) -> list[Mapping[str, Any]]:
        return models_of.parts_of(models)

    def _put_on(self, around: Sequence[CellInfo], own: Sequence[CellInfo]) -> None:
        self._known = {id(info.module): info for info in around}
        recursion_room.raise_recursion_limit(self, FRAMES)
        if self._recorder.taps:
            identity_ops.PASSES.install()
        for entrance in dict.fromkeys(info.entrance for info in around):
            self._patches.add(entrance, "__call__", self._handler(entrance))
        for info in own:
            info.parameters = {name: p for name, p in models_of.parameters_of(info.module).items() if p is not None}
            if self._recorder.backward or self._recorder.taps:
                self._watch_parameters(info)

    def _take_off(self) -> None:
        self._patches.close()
        identity_ops.PASSES.remove()
        self._known = {}
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        recursion_room.narrow(self)

    def _handler(self, entrance: type) -> Callable[..., Any]:
        def record_call(following: Callable[..., Any], cell: Any, *args: Any, **kwargs: Any) -> Any:
            info = self._known.get(id(cell))
            if info is None or info.entrance is not entrance or info.module is not cell or not self._on():
                return following(cell, *args, **kwargs)
            recorded = recording()
            call = self._begin_call(info, args, kwargs)
            if call is not None and self._recorder.taps:
                return self._call_with_taps(call, following, cell, args, kwargs)
            try:
                result = following(cell, *args, **kwargs)
            except BaseException:
                self._end_call(call, None, failed=True)
                raise
            if not recorded and call is not None and call.watch:  # its inputs are followed since it was called
                self._record_edges(call, args, kwargs)
            self._end_call(call, result)
            return result

        return record_call

    def _call_with_taps(self, call: Call, following: Callable[..., Any], cell: Any, args: Any, kwargs: Any) -> Any:
        """The call of a Cell where gradients come from operators around it."""
        recorder = self._recorder
        try:
            args, kwargs = recorder.tap_inputs(call, args, kwargs)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
        try:
            result = following(cell, *args, **kwargs)
        except BaseException:
            self._end_call(call, None, failed=True)
            raise
        self._end_call(call, result)
        try:
            return recorder.tap_output(call, result)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
            return result

    def _begin_call(self, info: CellInfo, args: Any, kwargs: Any) -> Call | None:
        try:
            call = self.call(info)
            self._recorder.begin_call(call, args, kwargs, _DEPTH)
            if call.inside:
                info.inside = True
            return call
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
            return None

    def _record_edges(self, call: Call, args: Any, kwargs: Any) -> None:
        try:
            call.edges = self._recorder.edges(args, kwargs, False)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)

    def _end_call(self, call: Call | None, result: Any, failed: bool = False) -> None:
        if call is None:
            return
        try:
            self._recorder.pop(call)
            self._recorder.end_call(call, result, models_of.parameters_of(call.owner.module), failed=failed)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)

    def _watch_parameters(self, info: CellInfo) -> None:
        info.expected = 0
        for name, parameter in info.parameters.items():
            if parameter.requires_grad:
                info.expected += 1
                self._handles.append(at_gradient(parameter, self._hook(info, name)))

    def _hook(self, info: CellInfo, name: str) -> Callable[[Any], None]:
        def hook(gradient: Any) -> None:
            try:
                if self._collecting():
                    self.gradient(info, name, gradient)
            except Exception as error:
                raise_of_training(error)
                self._fail(error)

        return hook

    def _fail(self, error: Exception) -> None:
        self._recorder.pipeline.faults.fail("Cell capture", error)
        self.remove()
