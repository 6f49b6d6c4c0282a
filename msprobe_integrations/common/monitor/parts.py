"""What a probe is to its parts, and what a framework brings along for it: backend, parameters, modules, ranks, and its own part of the ends
of steps and runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_engine.core.guard import Faults, Guard
    from msprobe_engine.core.records import TensorDescription
    from msprobe_engine.core.settings.schema import DumpSettings, MonitorSettings, ProbeSettings
    from msprobe_engine.core.window import Window
    from msprobe_engine.probe.incident.notify import Notifier
    from msprobe_engine.probe.pipeline import Pipeline
    from msprobe_engine.probe.session import Session


class ProbeBase:
    """What parts of a `Probe` use of it, and what `Probe` asks of its subclass for a framework: what has no default has to be there, the
    others may.

    Attributes:
        number: description of a number that the probe works out.
        micro_step: current micro batch, -1 outside.
    """

    number: TensorDescription
    backend: Any
    settings: ProbeSettings
    session: Session
    pipeline: Pipeline
    faults: Faults
    step: int
    micro_step: int
    _models: list[Any]
    _window: Window | None
    _in_step: bool
    _due: bool
    _paused: int
    _closed: bool

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    @property
    def monitor(self) -> MonitorSettings | None:
        """The monitor section, None when nothing is monitored."""
        return self.settings.monitor

    def wanted(self, part: str) -> bool:
        """Is ``monitor.<switch>`` on and due in this step? (``monitor.gradients``, ``monitor.parameters``, ...)"""
        section, _, switch = part.partition(".")
        if section != "monitor" or not self._due or self._paused:
            return False
        return bool(getattr(self.monitor, switch)) and self.faults.is_enabled(part)

    def guard(self, part: str) -> Guard:
        """Context manager: an exception inside switches `part` off with one message; strict settings re-raise."""
        return self.faults.guard(part)

    backend_type: type[Any]
    """A `msprobe_engine.core.backend.Backend` that has `RowOptions`, too."""

    def _make_membership(self) -> Any:
        """What looks at begin of every step where this rank is: ``update_rank()``, ``close()``, ``rank``."""
        raise NotImplementedError

    def _make_run_config(self) -> Any:
        """What writes the settings of the run: ``begin_step(models, optimizer, step, frame)``, ``close(seconds)``; None: nothing does."""
        return None

    def _make_capture(self, level: str, **options: Any) -> Any:
        """What records the calls of a step; see `CaptureScheduler`."""
        raise NotImplementedError

    def _make_dump(self, dump: DumpSettings) -> tuple[Any, Any]:
        """The capture of a configured dump, and what saves its tensors."""
        raise NotImplementedError

    def _make_watch(self, monitor: MonitorSettings | None) -> Any:
        """What watches modules and collectives; None where the settings ask for nothing of that."""
        raise NotImplementedError

    def make_notifier(self, about: str = "") -> Notifier | None:
        """What tells other ranks something (empty: of incidents), None for one process."""
        raise NotImplementedError

    def chunks_of(self, models: Any, optimizer: Any) -> list[Any]:
        """What `attach` was given as a list of models. Raises `UsageError` for anything else."""
        raise NotImplementedError

    def unseen(self) -> AbstractContextManager[Any]:
        """Operations inside are not shown to modes of the user's."""
        raise NotImplementedError

    def shield(self) -> AbstractContextManager[Any]:
        """Operations inside are neither recorded for gradients nor shown to modes of the user's."""
        raise NotImplementedError

    def at_hand(self, value: Any) -> bool:
        """Is this a tensor whose value can be read without a wait?"""
        raise NotImplementedError

    def finer(self, main: Any, parameter: Any) -> bool:
        """Has the optimizer's copy of a parameter more bits than the parameter itself?"""
        raise NotImplementedError

    def _local_place(self) -> tuple[int, int]:
        """This process among those of its node, and how many there are."""
        return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def _of_user(self) -> None:
        """The user has made this probe himself."""

    def _prepare_models(self) -> None:
        """`attach` has got new models, before anything looks at them."""

    def _step_ends(self) -> None:
        """A monitored step is about to be over."""

    def _numbers(self, scalars: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The numbers of a step that ends, with those that the framework knows."""
        return scalars

    def _further_ends(self) -> Iterator[Callable[[], Any]]:
        """What is left of the framework's at the end, after all hooks are off."""
        return iter(())
