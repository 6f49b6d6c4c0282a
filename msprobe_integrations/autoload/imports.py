"""What is done before and after a module is imported, by one finder for the whole process.

Every interpreter of the environment reads this file at its start, so it imports nothing (`typing` alone would take milliseconds): until a
module of the tables is asked for, the price of an import is two look-ups.
"""

from __future__ import annotations

import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, TypeAlias

    After: TypeAlias = Callable[[ModuleType], None]
_before: dict[str, Callable[[], None]] = {}
_after: dict[str, list[After]] = {}
_looking: set[tuple[str, int]] = set()


def before_import(name: str, hook: Callable[[], None]) -> None:
    """Call `hook` once, when module `name` is about to be imported; at once when it is there already."""
    if name in sys.modules:
        _safely(name, hook)
        return
    _before[name] = hook
    _watch()


def after_import(name: str, hook: After) -> None:
    """Call ``hook(module)`` once, right after module `name` has been executed and before anybody can take a name from it; at once
    when it is there already. A second hook for the same module that equals the first one replaces it."""
    module = sys.modules.get(name)
    if module is not None and not being_imported(module):
        hook(module)
        return
    hooks = _after.setdefault(name, [])
    if hook not in hooks:
        hooks.append(hook)
    _watch()


def forget(name: str, hook: After) -> None:
    """Take back `after_import`, if the module has not been imported since."""
    hooks = _after.get(name, [])
    if hook in hooks:
        hooks.remove(hook)
    if not hooks:
        _after.pop(name, None)


def being_imported(module: ModuleType) -> bool:
    """Is the module half way through its own code?"""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class Finder:
    """Stands before all others and finds nothing itself."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        before = _before.pop(name, None)
        if before is not None:
            _safely(name, before)
        if name not in _after or (name, get_ident()) in _looking:
            return None
        from importlib.util import find_spec

        _looking.add((name, get_ident()))
        try:
            spec = find_spec(name)
        finally:
            _looking.discard((name, get_ident()))
        loader = None if spec is None else spec.loader
        if loader is not None and not isinstance(loader, type):  # neither missing nor one of the interpreter's own
            _safely(name, _run_hooks_after_load, name, loader)
        return spec


def _run_hooks_after_load(name: str, loader: Any) -> None:
    """Let `loader` call the hooks when it has executed the module. Who only asks whether there is such a module executes nothing."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        if module.__name__ != name:  # archives have one loader for all their modules
            execute(module)
            return
        loader.__dict__.pop("exec_module", None)
        execute(module)
        for hook in _after.pop(name, ()):
            _safely(name, hook, module)

    loader.exec_module = exec_module


def _watch() -> None:
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def _safely(name: str, hook: Callable[..., None], *args: Any) -> None:
    """A fault of ours must not make the import of a framework fail."""
    try:
        hook(*args)
    except Exception as error:
        print(f"msprobe: cannot follow {name}, which works without the probe: {type(error).__name__}: {error}", file=sys.stderr)
