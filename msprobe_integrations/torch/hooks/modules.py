"""Forward hooks of the monitor: on the modules only in steps that are due, and never inside of compiled code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from msprobe_engine.core.log import get_logger
from msprobe_integrations.common.hooks import recursion_room
from msprobe_integrations.common.monitor.targets import Named
from msprobe_integrations.torch.hooks.compiled import CallBoundary, CompiledCode, has_call_boundary
from msprobe_integrations.torch.hooks.graphed import graphed_modules

Pre = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
Post = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
_log = get_logger()


class OwnHook(functools.partial):  # type: ignore[type-arg]
    """A hook that stays with this module in this process. A copy of the model, or one that is saved whole (``torch.save(model)``), gets in
    its place a function of Python itself that does nothing, so it is loaded where there is no msprobe."""

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, "msprobe.hook")


class _Place(NamedTuple):
    module: nn.Module
    pre: Pre | None
    post: Post | None
    handles: list[Any]
    owner: Any


class ModuleHooks:
    """What is to be called before and after modules. `install` and `remove` as often as one likes.

    It is what `CompiledCode` needs of a capture: hooks that are there while code is compiled would become a part of it.

    Args:
        fail: told about a fault where compiled code begins and ends.
    """

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self._places: list[_Place] = []
        self._sealed: set[int] = set()
        self._compiled = CompiledCode(None, self, fail)
        self._compiled.seen = True  # what is said about compiled modules is said here
        self._installed = False
        self._boundaries: dict[int, CallBoundary] = {}

    def add(self, named: Named, pre: Pre | None, post: Post | None, owner: Any = None) -> None:
        self._places.append(_Place(named.hooked, pre, post, [], owner))

    def drop(self, owner: Any) -> None:
        self._forget([p for p in self._places if p.owner is owner])

    def clear(self) -> None:
        self.remove()
        self._places.clear()

    def install(self) -> None:
        if not self._installed and self._places:
            self._installed = True
            recursion_room.raise_recursion_limit(self)
            self.show()
            self._compiled.install()
            graphed_modules.join(self)

    def remove(self) -> None:
        if self._installed:
            self._installed = False
            graphed_modules.leave(self)
            self._compiled.remove()
            self.hide()
            recursion_room.narrow(self)

    def show(self) -> None:
        """Put the hooks on that are wanted."""
        for place in self._places if self._installed else ():
            module, pre, post, handles, _ = place
            if has_call_boundary(module):
                if id(module) not in self._boundaries:
                    self._boundaries[id(module)] = CallBoundary(module, self._before, self._after)
            elif not handles:
                if pre is not None:
                    handles.append(module.register_forward_pre_hook(OwnHook(pre), with_kwargs=True))
                if post is not None:
                    handles.append(module.register_forward_hook(OwnHook(post), with_kwargs=True))

    def hide(self) -> None:
        """Take the hooks off for a while."""
        for place in self._places:
            for handle in place.handles:
                handle.remove()
            place.handles.clear()
        for boundary in self._boundaries.values():
            boundary.remove()
        self._boundaries.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place in self._places:
            if place.module is module and place.pre is not None:
                place.pre(module, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for place in self._places if result is not None else ():  # None: it has raised
            if place.module is module and place.post is not None:
                place.post(module, args, kwargs, result)

    def seal(self, module: nn.Module) -> None:
        """`module` is compiled, together with what is inside it: hooks there see nothing, from now on there are none."""
        if id(module) in self._sealed:
            return
        self._sealed.add(id(module))
        inside = {id(m) for m in module.modules()}
        lost = [p for p in self._places if id(p.module) in inside and not has_call_boundary(p.module)]
        self._forget(lost)
        say_sealed(len({id(p.module) for p in lost}))

    def _forget(self, places: list[_Place]) -> None:
        for place in places:
            for handle in place.handles:
                handle.remove()
        gone = {id(place) for place in places}
        self._places = [p for p in self._places if id(p) not in gone]

    def hook_codes(self) -> list[CodeType]:
        """Code that must not be compiled."""
        functions = {f for place in self._places[:1] for f in (place.pre, place.post) if f is not None}
        return [f.__code__ for f in functions if hasattr(f, "__code__")]


def say_sealed(count: int) -> None:
    """Say that modules cannot be watched."""
    if count:
        _log.warning(
            "monitor: %d modules lie inside of compiled, scripted or graphed code and are not seen; the compiled or graphed modules "
            "themselves are, at their inputs and outputs. Run without torch.compile and CUDA graphs to see them",
            count,
        )
