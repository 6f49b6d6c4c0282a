"""Online pre-check, training side: the old keys of ``config.json`` (section ``tensor``), and what does not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msprobe_engine.core.settings.schema import DumpSettings, OnlineSettings
from msprobe_engine.core.settings.tree import BAD, Key, Report, format_value, join, keys_of
from msprobe_engine.core.settings.tree import convert as convert_key

SWITCH = "online_run_ut"
_RENAMED = {"recompute": "online_run_ut_recompute", "policy": "online_policy", "longest_wait": "online_longest_wait"}
_KEYS: dict[str, Key] = {_RENAMED.get(key.name, key.name): key for key in keys_of(OnlineSettings)}
OLD = (SWITCH, *_KEYS)
"""Keys of the section ``tensor``; the first switches the others on."""
_SWITCH_KEY = Key(SWITCH, "bool", False, False, False, None, (), None, None, False, "")


def convert(node: Mapping[str, Any], section: str, report: Report) -> OnlineSettings | None:
    """What the section says of it; None when it is off. Values of the other keys are looked at only when it is on."""
    on = convert_key(_SWITCH_KEY, node[SWITCH], join(section, SWITCH), report) if SWITCH in node else False
    if on is not True:
        return None
    values: dict[str, Any] = {}
    for old, key in _KEYS.items():
        # templates have an empty value where nothing was filled in; no tls_path is the default, not a wish
        if old in node and node[old] is not None and not (old == "port" and node[old] == ""):
            value = convert_key(key, node[old], join(section, old), report)
            if value is not BAD:
                values[key.name] = value
    return OnlineSettings(**values)


def check(dump: DumpSettings, section: str, report: Report) -> None:
    """Report what cannot work. `section`: of the dump keys; empty: the old file."""
    online = dump.online
    assert online is not None

    def place(key: str) -> str:
        return join("tensor", _RENAMED.get(key, key)) if not section else join(join(section, "online"), key)

    switch = join("tensor", SWITCH) if not section else join(section, "online")
    if dump.task != "tensor":
        report.error(switch, f"needs task 'tensor', not {format_value(dump.task)}")
    if dump.level != "L1":
        report.error(join(section, "level"), f"the online pre-check looks at calls of APIs; allowed: 'L1', not {format_value(dump.level)}")
    for key in ("slice", "request_id", "bench_path", "load"):
        if getattr(dump, key):
            report.error(join(section, key), "is not possible with the online pre-check, which needs whole calls; leave it out")
    if dump.data_mode not in ((), ("all",)):
        report.error(
            join(section, "data_mode"),
            f"{format_value(list(dump.data_mode))}: the online pre-check needs inputs and outputs; allowed: ['all']",
        )
    if online.nfs_path:
        return
    if not online.host:
        report.error(place("host"), "is missing; give the benchmark host (or nfs_path, a directory that both hosts have)")
    if online.port < 1:
        report.error(place("port"), f"{online.port} is not allowed; allowed: 1 to 65535, the port of the benchmark host")
