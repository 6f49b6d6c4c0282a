"""What a dump will cost before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_engine.probe.estimate.forecast import Estimate


def estimate(
    source: Path | str,
    settings: Path | str | Mapping[str, Any] | None = None,
    *,
    steps: int | None = None,
    ranks: int | None = None,
    from_step: int | None = None,
    disk_speed: float | None = None,
    measure_disk: bool = False,
    **changed: Any,
) -> Estimate:
    """What a dump with these settings will cost in disk and time, from one step of an existing dump.

    Args:
        source: any path of a dump (this tool's or the existing one's, tasks statistics and tensor, this tool's structure) or a
            frame log; the step must have been recorded at the same level, or at level mix.
        settings: ``config.json`` or ``probe.yaml``, or the same as a mapping; None: task statistics at the level of the source.
        steps: how many steps will be dumped; None: as many as `settings` lists, else one.
        ranks: how many ranks will dump; None: as many as `settings` lists, else those of the source.
        from_step: the step of the source; None: the first finished one.
        disk_speed: bytes per second that files are written with; None: 500 MB/s is assumed.
        measure_disk: write up to 64 MiB and 200 files into `dump_path` and remove them again.
        changed: keys of the ``dump`` section (task, level, tensor_format, list, ...) that override `settings`.

    Raises:
        DumpFormatError: there is no dump at `source`, or it is damaged.
        SettingsError: a key or value of `settings` or `changed` is wrong.
        UsageError: `source` does not tell what these settings would record; the message says what does.
    """
    from msprobe_engine.probe.estimate import forecast

    return forecast.estimate(source, settings, steps, ranks, from_step, disk_speed, measure_disk, changed)
