"""The protocol through which the engine reaches a framework. Implementations live in `msprobe_integrations` and are found by
the entry-point group ``msprobe.backends``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import TensorDescription, TensorRef
from msprobe_engine.core.statistics.rows import Rows


@runtime_checkable
class PendingRows(Protocol):
    """Statistics rows on their way to the host."""

    def ready(self) -> bool:
        """True when `rows` will not wait. Never waits itself."""
        ...

    def rows(self) -> Rows:
        """The rows, [n, 16] float64, on the host. Waits for the one copy if it is still under way."""
        ...


@runtime_checkable
class Backend(Protocol):
    """What the engine needs from a framework. One instance per process."""

    name: str
    """``torch`` or ``mindspore``."""

    @property
    def framework(self) -> str:
        """As dump files have it: ``pytorch``, ``mindspore``, ``mindtorch``."""
        ...

    def is_tensor(self, value: Any) -> bool: ...

    def describe(self, tensor: Any) -> TensorDescription:
        """Description without touching data. Equal descriptions are the same object."""
        ...

    def reduce(self, tensor: Any) -> TensorRef:
        """Start the reduction of one tensor into the current step's buffer; no wait, no copy to the host. The same version of
        the same tensor in one step gives the same row."""
        ...

    def batched(self) -> AbstractContextManager[None]:
        """Rows of what is reduced inside of the block may be written at its end, all at once: nothing inside may write to these tensors."""
        ...

    def forget(self, tensor: Any = None, *, views: bool = True) -> None:
        """`tensor` (None: every tensor) may have changed without a new version: reduce it again when it is seen next, and, unless
        nobody looks at them, its `views`."""
        ...

    def finish_step(self) -> PendingRows:
        """Hand over all rows since the last call, by one device-to-host copy that is started here and not waited for."""
        ...

    def save(self, tensor: Any, path: Path) -> None: ...

    def load(self, path: Path) -> Any: ...

    def rank(self) -> int | None:
        """Global rank, None outside a distributed run."""
        ...

    def world_size(self) -> int: ...

    def random_state(self) -> Any: ...

    def set_random_state(self, state: Any) -> None: ...


def load_backend(name: str) -> Backend:
    """Import the backend called `name` (``torch``, ``mindspore``).

    Raises:
        UsageError: no such backend is registered.
    """
    return _maker(name)()


@functools.cache
def _maker(name: str) -> Callable[[], Backend]:
    """Looked up once: it reads the metadata of every installed package, and readers of a dump ask for each tensor."""
    matching: Sequence[Any] = [e for e in entry_points(group="msprobe.backends") if e.name == name]
    if not matching:
        known = sorted({e.name for e in entry_points(group="msprobe.backends")})
        raise UsageError(f"backend '{name}' is not registered; registered: {', '.join(known) or 'none (is msprobe installed?)'}")
    maker: Callable[[], Backend] = matching[0].load()
    return maker
