"""`module_dump` ... `module_dump_end`: for a while only chosen modules are recorded, under names the user gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msprobe_engine.core.errors import UsageError
from msprobe_integrations.common.dump.checks import ModelKind


class ModuleRecords(Protocol):
    """Records of some modules, under chosen names."""

    def add(self, module: Any, name: str, /) -> None: ...

    def install(self) -> None: ...

    def remove(self) -> None: ...

    def end_step(self) -> None: ...


class ModuleSelection:
    """The chosen modules of one capture. Their children, other modules and all APIs are not recorded meanwhile.

    Args:
        make: records of modules by the numbers and filters of the capture, for as long as the function it is given says so.
    """

    def __init__(self, make: Callable[[Callable[[], bool]], ModuleRecords]) -> None:
        self._make = make
        self._on = False
        self._current: ModuleRecords | None = None
        self._ended: list[ModuleRecords] = []
        self.chosen: list[tuple[Any, str]] = []

    @property
    def active(self) -> bool:
        """True between `module_dump` and `module_dump_end`."""
        return bool(self.chosen)

    def add(self, module: Any, name: str) -> None:
        """One more chosen module."""
        self.chosen.append((module, name))
        if self._current is None:
            self._current = self._make(lambda: self._on)
        self._current.add(module, name)
        if self._on:
            self._current.install()

    def clear(self) -> None:
        """No module is chosen any more; gradients of calls that were seen still come until the end of the step."""
        self._on = False
        self.chosen = []
        if self._current is not None:
            self._ended.append(self._current)
            self._current = None

    def open(self) -> None:
        """See the chosen modules."""
        self._on = True
        if self._current is not None:
            self._current.install()

    def pause(self) -> None:
        """See nothing."""
        self._on = False

    def end_step(self) -> None:
        """The step is over: emit gradients that came in part, take off what was ended."""
        for modules in (*self._ended, *([self._current] if self._current is not None else [])):
            modules.end_step()
        for modules in self._ended:
            modules.remove()
        self._ended = []

    def close(self) -> None:
        """Take every hook off."""
        self._on = False
        for modules in (*self._ended, *([self._current] if self._current is not None else [])):
            modules.remove()
        self._ended = []


def check(kind: ModelKind, module: Any, name: Any) -> None:
    """Raises:
    UsageError: no module, or no name for it.
    """
    if not kind.is_model(module):
        raise UsageError(f"module_dump: module is a {type(module).__name__}; allowed: {kind.text}")
    if not isinstance(name, str) or not name:
        raise UsageError(f"module_dump: dump_name is {name!r}; allowed: a text that is not empty, it takes the place of the module's path")
