"""What a dump is made of in a framework: the parts that the life of a dump (`DumpRun`) asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry, TensorRef
from msprobe_engine.core.settings.schema import DumpSettings, SliceSettings
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_integrations.common.capture.custom_api import CustomApis
from msprobe_integrations.common.config.run import RunConfig
from msprobe_integrations.common.dump.checks import ModelKind
from msprobe_integrations.common.dump.debug_save import SavedVariables
from msprobe_integrations.common.dump.dump_plugins import DumpPlugin
from msprobe_integrations.common.dump.files import DumpFiles, RankedBackend
from msprobe_integrations.common.dump.module_selection import ModuleSelection


class DumpBackend(RankedBackend, Protocol):
    """A backend that also fills the words of checksums."""

    want_digest: bool
    want_checksum: str


class Capture(Protocol):
    """What sees the calls of a step."""

    on: bool

    def attach(self, models: Any, anew: bool = False) -> None:
        """Name the modules of the model (or of a list of models); `anew`: the step has just begun."""
        ...

    def open(self) -> None:
        """Begin to see calls."""
        ...

    def pause(self) -> None:
        """See no new calls; gradients of those that were seen still come."""
        ...

    def close(self) -> None:
        """Take everything off."""
        ...

    def end_step(self) -> list[list[str]]:
        """Close the step's numbering; returns the texts of all stacks."""
        ...


class TensorSaver(Protocol):
    store: TensorStore

    def begin_step(self, number: int) -> None: ...

    def reduce(self, tensor: Any) -> TensorRef: ...

    def hand_over(self, entry: Entry) -> None: ...

    def end_step(self, entries: list[Entry], /) -> None: ...


class Slices(Protocol):
    """Cuts of tensors."""

    extra: SliceSettings | None


class DumpParts(ABC):
    """Makes the parts. What is abstract every framework has; a method with a body is for what some have.

    Attributes:
        files, pipeline: the way from records to files.
        capture, keeper, slices: the parts in use, None where the settings need none.
        backend_type, config_type, saved_type: what reduces tensors, what takes the settings, environment and packages of the run, and what
            keeps records of ``save()``.
    """

    models: ClassVar[ModelKind]
    backend_type: ClassVar[type[DumpBackend]]
    config_type: ClassVar[type[RunConfig]]
    saved_type: ClassVar[type[SavedVariables]]
    faults: Faults
    backend: DumpBackend
    files: DumpFiles
    pipeline: Pipeline
    capture: Capture | None
    keeper: TensorSaver | None
    slices: Slices | None

    @abstractmethod
    def make_keeper(self, dump: DumpSettings, before: Any) -> TensorSaver | None:
        """What saves tensors as `dump` asks for, None when it asks for none; `before`: what did until now, under other settings."""

    @abstractmethod
    def make_capture(self, dump: DumpSettings) -> Capture:
        """What sees the calls that the level of `dump` asks for."""

    @abstractmethod
    def make_focus(self) -> ModuleSelection:
        """The chosen modules of the capture there is."""

    @abstractmethod
    def make_custom_apis(self) -> CustomApis:
        """The functions that the user wants to see as records."""

    @abstractmethod
    def before_forward(self, model: Any, call: Callable[..., None]) -> Any:
        """Have `call` called before each forward call of a model; returns what has a ``remove()``."""

    def make_extras(self, dump: DumpSettings, root: Path) -> list[DumpPlugin]:  # noqa: ARG002  # a framework may have none
        """What the settings ask for besides a dump.

        Raises:
            UsageError: it cannot be had here.
        """
        return []

    def make_slices(self, dump: DumpSettings) -> Slices | None:  # noqa: ARG002
        """The cuts that `dump` asks for."""
        return None

    def prepare(self, model: Any) -> None:
        """``start()`` was called, and there is a model."""

    def open_capture(self, capture: Any, inside: bool) -> None:  # noqa: ARG002
        """Begin to see calls; `inside`: a forward call of the model has begun."""
        capture.open()
