"""Monitor files, dumps or both into a trend data base."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.formats.dump.ring_file import kept_at
from msprobe_engine.formats.monitor.convert.dump2db import dump2db
from msprobe_engine.formats.monitor.convert.monitor2db import Imported, NothingHere, Options, monitor2db

FORMATS = ("auto", "dump", "monitor")


def data2db(db: Path | str, data: Path | str, kind: str = "auto", options: Options | None = None) -> list[Imported]:
    """Convert what is at `data` into data bases in the directory `db`.

    Args:
        kind: ``monitor``, ``dump``, or ``auto``: what there is, of both.

    Raises:
        UsageError: nothing to convert, or a data base of something else is there.
        SinkError: it cannot be written.
    """
    options = options or Options()
    target, source = Path(db), Path(data)
    if kind not in FORMATS:
        raise UsageError(f"format is {kind!r}; allowed: {', '.join(FORMATS)}")
    if not source.is_dir() and not (kind != "dump" and source.is_file()) and not kept_at(source):
        raise UsageError(f"{source}: no such directory; give what --data should read")
    done, reasons = [], []
    for name, convert in (("dump", dump2db), ("monitor", monitor2db)):
        if kind in ("auto", name):
            try:
                done.append(convert(target, source, options))
            except (DumpFormatError, NothingHere) as error:
                if kind != "auto":
                    raise
                reasons.append(str(error))
    if not done:
        raise UsageError(f"{source}: holds neither a dump nor files of a monitor. " + " ".join(reasons))
    return done
