"""Base of the sinks that write one file per rank: ``{path, or <output_dir>/<place>}/rank{R}<ending>``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import make_directory
from msprobe_engine.core.io.safe_cells import Names
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_engine.core.statistics.columns import Column, column
from msprobe_engine.formats.monitor.losses import ENDING, LossFile
from msprobe_engine.formats.monitor.series import Key
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.csv.features import FEATURES, pivot
from msprobe_engine.probe.sinks.run_files import RunFile


class FileSettings(Protocol):
    """What the section of such a sink has, beside ``enabled``."""

    @property
    def ops(self) -> tuple[str, ...]: ...

    @property
    def path(self) -> str | None: ...


class OneFileSink(Sink):
    """Where the file is, which statistics it gets, and what the run says about itself.

    Class attributes:
        name: as in the settings.
        place: directory below the run's output.
        ending: of the file's name.
        hidden: prefix of the name of the file of losses.
        left_out: statistics that this format has no column for.

    Args:
        settings: section ``sinks.<name>``.
        monitor: for the names and what the run says about itself.
        output_dir: root of the run's output.
        rank: global rank.
        world_size: number of ranks; 0: unknown.

    Raises:
        SinkError: the file cannot be opened.
    """

    losses: LossFile
    place: ClassVar[str]
    ending: ClassVar[str]
    hidden: ClassVar[str] = ""
    left_out: ClassVar[tuple[str, ...]] = ("shape", "dtype")

    def __init__(
        self,
        settings: FileSettings,
        monitor: MonitorSettings | None,
        *,
        output_dir: Path,
        rank: int,
        world_size: int = 0,
    ) -> None:
        self._ops = tuple(op for op in dict.fromkeys(settings.ops) if op not in self.left_out)
        self._rank = rank
        directory = Path(settings.path or output_dir / self.place)
        make_directory(directory, f"{self.name} sink")
        self.path = directory / f"rank{rank}{self.ending}"
        """The file."""
        self._names = Names(monitor is not None and monitor.squash_name)
        self._run = RunFile(None, rank, world_size, monitor)
        self._open()
        self.losses = LossFile(directory / f"{self.hidden}rank{rank}{ENDING}")

    @property
    def home(self) -> Path:
        return self.path

    def make_again(self) -> None:
        make_directory(self.path.parent, f"{self.name} sink")
        self._shut()
        self._open()
        self.losses.make_again()
        self._run.stale()

    def close(self) -> None:
        with suppress(SinkError):  # a full disk; the file says how far the run came
            if self._run.conclude():
                self._write_run()
        self._shut()
        self.losses.close()

    def _table(self, family: str, frame: Frame, samples: list[Sample]) -> tuple[list[Sample], list[Key], dict[str, Column]]:
        """Of a family's samples those with numbers, what tells them apart, and the numbers by column."""
        if family in FEATURES:
            samples, values = pivot(frame, samples)
        else:
            samples = [s for s in samples if s.ref.row >= 0]
            rows = frame.rows[[s.ref.row for s in samples]]
            values = {op: column(rows, op) for op in self._ops} if samples else {}
        detail = {"opt_state": "state", "other": "tag"}.get(family, "")
        keys = [Key(s.vpp_stage, s.name, s.micro_step, s.phase, str(s.extra.get(detail, "")) if detail else "") for s in samples]
        return samples, keys, values

    def _write_run(self) -> None:
        """Write what the run says about itself; raises `SinkError`."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Close what `_open` has opened; a second call does nothing."""
        raise NotImplementedError

    def _open(self) -> None:
        """Open `path`; raises `SinkError`."""
        raise NotImplementedError

    def watch_info(self, info: Mapping[str, Any]) -> None:
        self._run.watch(info)

    def watch_remark(self, key: str, facts: Mapping[str, Any]) -> None:
        self._run.watch(facts, key)
