"""Whatever a run has left, by one name: ``msprobe.open(path)``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.text.notebook import text_block
from msprobe_engine.find import detect

if TYPE_CHECKING:
    from msprobe_engine.formats.dump.notebook.api import Dump
    from msprobe_engine.formats.monitor.reader import Run

_DIAGNOSIS = "diagnosis.json"
_LARGEST = 1 << 30


class Opened:
    """A run directory, or one thing in it: a dump, what a monitor has written, an incident, a diagnosis. Files are read when asked for.

    Attributes:
        path: what was opened.
    """

    def __init__(self, path: Path, found: detect.Run | None) -> None:
        self.path = path
        self._found = found

    @cached_property
    def dump(self) -> Dump | None:
        """Records and tensors: ``run.dump[step, rank]``; None: nothing was dumped."""
        from msprobe_engine.formats.dump import read

        records = self._found.records if self._found is not None else None
        return None if records is None else read(records.path)

    @cached_property
    def monitor(self) -> Run | None:
        """Series, scalars and alerts: ``run.monitor.scalars(0)["loss"]``; None: nothing was monitored."""
        return self._found.monitor if self._found is not None and self._found.has_monitor else None

    @cached_property
    def incidents(self) -> tuple[Opened, ...]:
        """What was kept around alerts, the earliest step first."""
        return tuple(Opened(incident.path, incident) for incident in (self._found.incidents if self._found is not None else ()))

    @cached_property
    def findings(self) -> dict[str, Mapping[str, Any]]:
        """What ``msprobe diagnose`` has written here (``diagnosis.json``), by its file.

        Raises:
            UsageError: such a file cannot be read.
        """
        if self.path.name == _DIAGNOSIS:
            files = [self.path]
        else:
            files = [self.path / _DIAGNOSIS, *sorted(self.path.glob(f"analysis/*/{_DIAGNOSIS}"))]
        return {str(file): _diagnosis(file) for file in files if file.exists()}

    def __repr__(self) -> str:
        from msprobe_engine.formats.dump.layout import DUMP
        from msprobe_engine.formats.run.overview import read_overview

        said = [str(self.path)] if self.path.is_file() or self.path.name == DUMP else [read_overview(self.path).text()]
        return "\n".join([*said, *(f"finding {file}: {diagnosis.get('headline')}" for file, diagnosis in self.findings.items())])

    def _repr_html_(self) -> str:
        return text_block(repr(self))


def open_path(path: str | os.PathLike[str]) -> Opened:
    """Open what a run has left: the run directory (``msprobe_output/latest``), a dump, the directory of a monitor, an incident, or a
    ``diagnosis.json``. Formats of this tool and of the existing one are told apart by their content.

    Raises:
        UsageError: there is no such path, or nothing that can be opened.
    """
    place = Path(path)
    if place.name == _DIAGNOSIS and place.is_file():
        return Opened(place, None)
    try:
        run = detect.Run(place)
        nothing = run.records is None and not run.has_monitor and not run.incidents
    except DumpFormatError as error:
        raise UsageError(str(error)) from error
    opened = Opened(place, run)
    if nothing and not (place.is_dir() and opened.findings):
        raise UsageError(
            f"{place}: holds no dump, monitor output, incident or diagnosis; give the directory of a run (msprobe show lists them)"
        )
    return opened


def _diagnosis(file: Path) -> Mapping[str, Any]:
    try:
        document = parse_json(read_input(file, _LARGEST).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(document, dict) or "finding" not in document:
        raise UsageError(f"{file}: is no diagnosis; msprobe diagnose RUN writes one")
    return document
