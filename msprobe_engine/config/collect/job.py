"""Which process of which job this is, as far as the launcher's environment says. A framework knows more once it has a process group."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from typing import Any

from msprobe_engine.core.process.launch import RANK, WORLD_SIZE, number_of
from msprobe_engine.core.process.processes import start_time

_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "DEVICE_ID")
_NODE = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")
_LAUNCH = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    *("OMPI_MCA_ess_base_jobid", "PMI_ID", "MS_SCHED_HOST", "MS_SCHED_PORT"),
)
"""Equal on all ranks of one launch, and often different between two."""
_started = f"{time.time():.3f}"


def rank() -> int:
    """From the launcher's environment, 0 without."""
    return number_of(RANK) or 0


def world_size() -> int:
    """From the launcher's environment, 1 without."""
    return number_of(WORLD_SIZE) or 1


def process() -> str:
    """This process among all there are and were: host, process id and the time it began."""
    return f"{platform.node()}:{os.getpid()}:{start_time(os.getpid()) or _started}"


def launch(environ: Mapping[str, str] = os.environ) -> str:
    """What all ranks of one launch have in common; of a process that was started alone: `process`."""
    if world_size() < 2:
        return process()
    return ";".join([f"WORLD_SIZE={world_size()}", *(f"{name}={environ[name]}" for name in _LAUNCH if name in environ)])


def place(rank: int, world_size: int) -> dict[str, Any]:
    """Who writes: for ``msprobe/ranks/rank{r}.json``."""
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": number_of(_LOCAL),
        "node": number_of(_NODE),
        "host": platform.node(),
        "process": process(),
    }
