"""Which launch this process is of, and which rank, as far as the launcher's environment says. A framework knows more once it has a
process group."""

from __future__ import annotations

import multiprocessing
import os

from msprobe_engine.core.process.processes import start_time, this_process

RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK_ID")
WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "RANK_SIZE")
SAME_ON_ALL_RANKS = (
    *("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    *("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "MS_SCHED_HOST", "MS_SCHED_PORT"),
)
"""Also the same after an elastic restart."""


_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables of launchers that start a job again: above 0 the earlier files are those of the same job."""


def number_of(names: tuple[str, ...]) -> int | None:
    """The first of these variables of the environment that holds a number."""
    for name in names:
        text = os.environ.get(name, "")
        if text.isdecimal() and len(text) < 10:
            return int(text)
    return None


def environment_rank() -> int | None:
    """As the launcher says, None without one."""
    return number_of(RANK)


def number_of_processes(known: int) -> int:
    """How many the job has, 0 where that is not known.

    Args:
        known: to the framework, which says 1 also where it has no process group and nobody has told it.
    """
    pair = next(((rank, size) for rank, size in zip(RANK, WORLD_SIZE) if number_of((rank,)) is not None), None)
    return known if known != 1 or pair is None else number_of((pair[1],)) or 0


def is_restart() -> bool:
    """Does the launcher say that it has started this job again?"""
    return any((text := os.environ.get(name, "")).isdecimal() and int(text[:9]) > 0 for name in _RESTARTS)


def job_id() -> dict[str, str]:
    """What the launcher or scheduler calls the job; empty where it says nothing."""
    return {
        name: os.environ[name] for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE") if name in os.environ
    }


def launch_key(rank: int | None) -> str:
    """What the processes of one launch have in common and two launches rather not. Where the environment says nothing, ranks that know
    their number are taken for ranks of one launch, since their numbers tell them apart, and processes without a number are of one launch
    when the same process has started them.

    Args:
        rank: of this process, None when it is not known (yet).
    """
    variables = [f"{name}={os.environ[name]}" for name in SAME_ON_ALL_RANKS if name in os.environ]
    if variables and environment_rank() is not None:
        return ";".join(variables)
    if rank is not None and multiprocessing.parent_process() is None:
        return "ranks"
    parent = os.getppid()
    return f"started by {this_process()._replace(pid=parent, start=start_time(parent) or '')}"
