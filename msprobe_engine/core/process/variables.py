"""The variables of the environment that are read here, in one table: the reference page lists it, and a mistyped name is told by it."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping

from msprobe_engine.core.log import current_rank, debug, one_line, warn_once
from msprobe_engine.core.process.launch import environment_rank

PREFIX = "MSPROBE_"
LAUNCH_LINE = "MSPROBE_LAUNCH_LINE"
VARIABLES = {
    "MSPROBE_CONFIG": "the settings file, where nothing else names one",
    "MSPROBE_SET": "`key=value`, one per line: changes to that file (`--set` of `msprobe run`)",
    "MSPROBE_AUTOLOAD": "`0`: a launch line loads no probe",
    "MSPROBE_CHILDREN": "`1`: a training that a training starts gets a probe, too",
    "MSPROBE_OWNER": "set by a probe; not to be set by hand",
    "MSPROBE_LAUNCH": "set by `msprobe run`; not to be set by hand",
    LAUNCH_LINE: "set by `msprobe run`: the launch line, without secrets; not to be set by hand",
    "MSPROBE_LOG_LEVEL": "0 debug, 1 info, 2 warning, 3 error, 4 nothing; wins over `log_level`",
    "MONITOR_OUTPUT_DIR": "where CSV files go if `sinks.csv.path` is empty; with a `monitor_config.json` all (else `./monitor_output`)",
    "DYNAMIC_MONITOR": "`True`: a `monitor_config.json` is followed while the training runs (`monitor.hot` of `probe.yaml`)",
    "MSPROBE_REDACT": "`tokens`: as [`redact`](#the-root), also for what has no settings (`ConfigChecker`, `SingleSave`)",
    "MSPROBE_KEY": "key, 16 to 4096 bytes, of digests of what is redacted, and of configuration values that are not collected",
    "MSPROBE_KEY_FILE": "a file that holds that key",
    "MSPROBE_TLS_PASSPHRASE": "passphrase of the keys of hosts ([online pre-check](../guide/online-accuracy.md))",
    "MSPROBE_CA_PASSPHRASE": "passphrase of the key of the certificate authority (`msprobe certs`)",
}
"""Name to meaning (Markdown), in the order of the page."""
_LIKENESS = 0.75
"""Of what follows the prefix. A name that is like none is not a mistake in one of ours: wrappers have variables with this prefix, too."""
_LIKENESS_OF_ALL = 0.9
"""Of whole names, where the prefix is mistyped or in lower case."""


def warn_unknown_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Say once in this process, on rank 0, which variables have a name that is nearly one of ours: they have no effect."""
    if current_rank() or (current_rank() is None and environment_rank()):
        return
    for name in sorted(environment):
        if name in VARIABLES:
            continue
        meant = _find_meant(name)
        if meant:
            text = f"the environment variable {one_line(name)} is not known and has no effect; did you mean {meant}?"
            warn_once(f"variable {name}", text)
        elif name.startswith(PREFIX):
            debug(f"the environment variable {one_line(name)} is none of msprobe's")


@functools.lru_cache(maxsize=1024)  # a process may run many commands, and its variables stay
def _find_meant(name: str) -> str:
    """The known name that is nearest; empty where none is near."""
    if name.startswith(PREFIX):
        known = [each.removeprefix(PREFIX) for each in VARIABLES if each.startswith(PREFIX)]
        near = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=_LIKENESS)
        return PREFIX + near[0] if near else ""
    return next(iter(difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=_LIKENESS_OF_ALL)), "")
