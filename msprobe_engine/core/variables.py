"""The variables of the environment that are read here, in one table: the reference page lists it, and a mistyped name is told by it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from msprobe_engine.log import current_rank, debug, one_line, warn_once

PREFIX = "MSPROBE_"
VARIABLES = {
    "MSPROBE_CONFIG": "the settings file, where none is named in the code or on the command line",
    "MSPROBE_SET": "`key=value`, one per line: changes to that file, as `--set` of `msprobe run` makes them",
    "MSPROBE_AUTOLOAD": "`0`: no probe is loaded by a launch line, whatever else is set",
    "MSPROBE_CHILDREN": "`1`: processes that a training starts, and that train something themselves, get a probe too",
    "MSPROBE_OWNER": "set by a probe, for the processes that its own starts; not to be set by hand",
    "MSPROBE_LOG_LEVEL": "0 debug, 1 info, 2 warning, 3 error, 4 nothing; wins over `log_level`",
    "MONITOR_OUTPUT_DIR": "where CSV files go if `sinks.csv.path` is empty; with a `monitor_config.json` all (else `./monitor_output`)",
    "DYNAMIC_MONITOR": "`True`: a `monitor_config.json` is followed while the training runs (`monitor.hot` of `probe.yaml`)",
    "MSPROBE_REDACT": "`tokens`: as [`redact`](#the-root), also for what has no settings (`ConfigChecker`, `SingleSave`)",
    "MSPROBE_KEY": "key, 16 to 4096 bytes, of digests of what is redacted, and of configuration values that are not collected",
    "MSPROBE_KEY_FILE": "a file that holds that key",
    "MSPROBE_TLS_PASSPHRASE": "passphrase of the keys of hosts ([online pre-check](online-transport.md))",
    "MSPROBE_CA_PASSPHRASE": "passphrase of the key of the certificate authority (`msprobe certs`)",
}
"""Name to meaning (Markdown), in the order of the page."""
_LIKENESS = 0.75
"""Of what follows the prefix. A name that is like none is not a mistake in one of ours: wrappers have variables with this prefix, too."""


def warn_unknown_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Say once in this process, on rank 0, which variables have a name that is nearly one of ours: they have no effect."""
    if current_rank():
        return
    known = [name.removeprefix(PREFIX) for name in VARIABLES if name.startswith(PREFIX)]
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in VARIABLES:
            continue
        near = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=_LIKENESS)
        if near:
            meant = f"did you mean {PREFIX}{near[0]}?"
            warn_once(f"variable {name}", f"the environment variable {one_line(name)} is not known and has no effect; {meant}")
        else:
            debug(f"the environment variable {one_line(name)} is none of msprobe's")
