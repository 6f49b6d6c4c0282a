"""From settings to sinks. Dump directories are not built here: they have a writer of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from msprobe_engine.core.errors import ProbeError, SinkError
from msprobe_engine.core.settings.schema import MonitorSettings, ProbeSettings
from msprobe_engine.probe.sinks.anomaly import AnomalySink
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_engine.probe.sinks.one_file import FileSettings, OneFileSink

PLUGINS = "msprobe.sinks"
"""Entry point group of sinks of other packages."""
_ONE_FILE = {"jsonl": "jsonlines:JsonLinesSink", "sqlite": "sqlite:SqliteSink", "parquet": "parquet:ParquetSink"}
"""Section of the settings: module and class of a `OneFileSink`."""
MEMORY_FRAMES = 10_000
"""Frames that sink ``memory`` keeps, the latest ones: a run may have millions of steps."""


def build_sinks(
    settings: ProbeSettings,
    *,
    output_dir: Path,
    rank: int,
    local_rank: int = 0,
    local_world_size: int = 1,
    world_size: int = 0,
    monitor: MonitorSettings | None = None,
) -> tuple[list[Sink], list[ProbeError]]:
    """The sinks that `settings.sinks` asks for, and the errors of those that could not start.

    A sink that cannot start does not keep the others, or the training, from starting. CSV files hold samples only and are
    written when there is a monitor.

    Args:
        output_dir: root of everything that is written.
        rank, local_rank, local_world_size, world_size: where this process is; world_size 0: unknown.
        monitor: what is watched; decides the columns of the CSV files.

    Raises:
        ProbeError: with ``settings.strict``, the first sink that cannot start.
    """
    wanted: list[Callable[[], Sink]] = []
    writes_tensors = not settings.sinks.rank or rank in settings.sinks.rank
    if not writes_tensors:
        settings = _without_layers(settings)
    sinks = settings.sinks
    if sinks.csv.enabled and monitor is not None:
        rules = [rule.rule for rule in settings.rules] or ["nan_inf"]
        wanted.append(lambda: CsvSink(sinks.csv, monitor, output_dir=output_dir, rank=rank, world_size=world_size, rules=rules))
    if sinks.tensorboard.enabled:
        wanted.append(lambda: _tensorboard(settings, monitor, output_dir, rank))
    for section, place in _ONE_FILE.items():
        if (given := getattr(sinks, section)).enabled:
            wanted.append(partial(_one_file, place, given, monitor, output_dir, rank, world_size))
    if sinks.prometheus.enabled:
        wanted.append(lambda: _prometheus(settings, output_dir, rank, local_rank, local_world_size))
    if sinks.tracker.enabled:
        wanted.append(lambda: _tracker(settings, rank))
    for name in sinks.plugins:
        wanted.append(partial(_plugin, name, output_dir, rank, world_size))
    if sinks.memory:
        wanted.append(lambda: MemorySink(MEMORY_FRAMES))
    if sinks.anomalies:
        wanted.append(lambda: AnomalySink(output_dir=output_dir, rank=rank))
    built: list[Sink] = []
    errors: list[ProbeError] = []
    for make in wanted:
        try:
            built.append(make())
        except ProbeError as error:
            if settings.strict:
                for sink in built:
                    sink.close()
                raise
            errors.append(error)
    for sink in built:
        sink.tensors = writes_tensors or sink.home is None
    return built, errors


def _without_layers(settings: ProbeSettings) -> ProbeSettings:
    sinks = settings.sinks
    prometheus, tracker = replace(sinks.prometheus, layers=False), replace(sinks.tracker, layers=False)
    return replace(settings, sinks=replace(sinks, prometheus=prometheus, tracker=tracker))


# Imported when asked for: none of these is needed by most runs.
def _tensorboard(settings: ProbeSettings, monitor: MonitorSettings | None, output_dir: Path, rank: int) -> Sink:
    from msprobe_engine.probe.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(settings.sinks.tensorboard, output_dir=output_dir, rank=rank, monitor=monitor)


def _one_file(place: str, settings: FileSettings, monitor: MonitorSettings | None, output_dir: Path, rank: int, world_size: int) -> Sink:
    module, _, name = place.partition(":")
    kind: type[OneFileSink] = getattr(import_module(f"msprobe_engine.probe.sinks.{module}"), name)
    return kind(settings, monitor, output_dir=output_dir, rank=rank, world_size=world_size)


def _tracker(settings: ProbeSettings, rank: int) -> Sink:
    from msprobe_engine.probe.sinks.tracker.sink import TrackerSink

    return TrackerSink(settings.sinks.tracker, rank=rank)


def _plugin(name: str, output_dir: Path, rank: int, world_size: int) -> Sink:
    """What the entry point `name` of group ``msprobe.sinks`` makes, called with where this rank may write and which rank it is."""
    from importlib.metadata import entry_points

    known = {point.name: point for point in entry_points(group=PLUGINS)}
    if name not in known:
        raise SinkError(f"sinks.plugins: {name!r} is no entry point of group {PLUGINS}; there: {', '.join(sorted(known)) or 'none'}")
    try:
        sink = known[name].load()(output_dir=output_dir, rank=rank, world_size=world_size)
    except Exception as error:
        raise SinkError(f"sinks.plugins: {name}: {type(error).__name__}: {error}") from error
    if not isinstance(sink, Sink):
        raise SinkError(f"sinks.plugins: {name} makes a {type(sink).__name__}, not a {Sink.__module__}.{Sink.__qualname__}")
    return sink


def _prometheus(settings: ProbeSettings, output_dir: Path, rank: int, local_rank: int, local_world_size: int) -> Sink:
    from msprobe_engine.probe.sinks.prometheus.sink import PrometheusSink

    return PrometheusSink(
        settings.sinks.prometheus, output_dir=output_dir, rank=rank, local_rank=local_rank, local_world_size=local_world_size
    )
