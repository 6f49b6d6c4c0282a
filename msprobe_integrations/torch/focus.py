"""`module_dump` ... `module_dump_end`: for a while only chosen modules are recorded, under names the user gives them."""

from __future__ import annotations

from typing import Any

from torch import nn

from msprobe_engine.errors import UsageError
from msprobe_integrations.torch.capture import Capture
from msprobe_integrations.torch.modules import ModuleCapture


class Focus:
    """The chosen modules of one capture. Their children, other modules and all APIs are not recorded meanwhile.

    Args:
        capture: whose records, numbers and filters are used.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._on = False
        self._current: ModuleCapture | None = None
        self._ended: list[ModuleCapture] = []
        self.chosen: list[tuple[nn.Module, str]] = []

    @property
    def active(self) -> bool:
        """True between `module_dump` and `module_dump_end`."""
        return bool(self.chosen)

    def add(self, module: nn.Module, name: str) -> None:
        """One more chosen module."""
        self.chosen.append((module, name))
        if self._current is None:
            self._current = ModuleCapture(self._capture.recorder, lambda: self._on, lambda: True)
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


def check(module: Any, name: Any) -> None:
    """Raises:
    UsageError: no module, or no name for it.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"module_dump: module is a {type(module).__name__}; allowed: torch.nn.Module")
    if not isinstance(name, str) or not name:
        raise UsageError(f"module_dump: dump_name is {name!r}; allowed: a text that is not empty, it takes the place of the module's path")
