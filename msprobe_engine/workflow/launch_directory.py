"""A directory of its own for each launch, by a name that all nodes of the launch give it without asking each other."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence

from msprobe_engine.core.process.launch import RANK, SAME_ON_ALL_RANKS

_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "PET_NNODES", "NNODES")
_IDS = ("--rdzv-id", "--rdzv_id")
_SHARED = (*_IDS, "--rdzv-endpoint", "--rdzv_endpoint", "--master-addr", "--master_addr", "--master-port", "--master_port")
"""Options of launchers that all nodes are given alike."""


def name_launch(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """The name of the directory: the time and a random part where this is the only command of the launch. Where the launch line or the
    environment says that the same command runs on several nodes, or as several ranks, what they share names it: the job's id where there
    is one.

    A launch of several nodes that has no id of its own has the name of the one before.
    """
    if not _is_one_of_several(command, environment):
        return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    options = {name: value for name in _SHARED if (value := _option(command, name))}
    job = next((options[name] for name in _IDS if name in options), "") or environment.get("SLURM_JOB_ID", "")
    if job:
        step = environment.get("SLURM_STEP_ID", "")
        return "job-" + re.sub(r"[^\w.-]", "_", f"{job}.{step}" if step else job)[:100]
    shared = [f"{name}={environment[name]}" for name in SAME_ON_ALL_RANKS if name in environment] + [*options.values()]
    return "job-" + hashlib.sha256("\n".join(shared).encode()).hexdigest()[:8]


def _is_one_of_several(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    if any(name in environment for name in RANK if name != "RANK_ID") and environment.get("WORLD_SIZE") != "1":
        return True
    counts = [environment.get(name, "1") for name in _NODES] + [_option(command, "--nnodes") or "1"]
    return any(count not in ("1", "1:1") for count in counts)


def _option(command: Sequence[str], name: str) -> str:
    """The value of an option of the launch line, ``--name value`` or ``--name=value``; empty without it."""
    for word, following in zip(command, [*command[1:], ""]):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""
