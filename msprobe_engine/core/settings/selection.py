"""Which settings leave records, or parts of them, out of a dump."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from msprobe_engine.core.settings.schema import DumpSettings


def selection(dump: DumpSettings) -> dict[str, Any]:
    """The keys of `dump` that leave something out, with their values as plain data; empty when everything is recorded."""
    chosen: dict[str, Any] = {}
    if dump.scope or dump.list:
        chosen |= {key: list(value) for key, value in (("scope", dump.scope), ("list", dump.list)) if value}
    elif dump.risk_level != "ALL" and dump.level in ("L1", "mix"):
        chosen["risk_level"] = dump.risk_level
    if "all" not in dump.data_mode:
        chosen["data_mode"] = list(dump.data_mode)
    if dump.slice:
        chosen["slice"] = [asdict(cut) for cut in dump.slice]
    if dump.request_id is not None:
        chosen["request_id"] = dump.request_id
    return chosen


def written_by_each(dump: DumpSettings) -> bool:
    """Has each rank that is chosen files of each step? Not where only what is found is kept (overflows, differences from an earlier dump),
    what belongs to one request, or what is saved by hand."""
    return dump.task != "overflow_check" and dump.bench_path is None and dump.request_id is None and dump.level != "debug"
