"""``#SBATCH`` lines: how many nodes and processes a job of Slurm has, and the variables it gets from that."""

from __future__ import annotations

import re

from msprobe_engine.config.launch_scripts.static_values import Found

_LINE = re.compile(r"#SBATCH\s+(.*)")
_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus"}
_KEPT = frozenset({"nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres", "cpus-per-task"})
"""Paths, times, accounts and mail addresses of a job say nothing about the training."""
_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}


def read_sbatch(text: str, file: str) -> tuple[dict[str, Found], dict[str, str]]:
    """Options of ``#SBATCH`` lines before the first command, and the variables Slurm sets from them."""
    settings: dict[str, Found] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        match = _LINE.match(line)
        if match is None:
            continue
        words = match[1].split(" #")[0].split()
        for i, word in enumerate(words):
            if not word.startswith("-"):
                continue
            if word.startswith("--"):
                name, _, value = word[2:].partition("=")
            else:
                name, value = _SHORT.get(word[1:2], ""), word[2:].lstrip("=")
            if not value and i + 1 < len(words) and not words[i + 1].startswith("-"):
                value = words[i + 1]
            if name in _KEPT and value:
                settings[name] = Found(value.strip("\"'"), "sbatch", file, number)
    variables = {variable: str(setting.value) for name, setting in settings.items() for variable in _VARIABLES.get(name, ())}
    gres = re.search(r"gpu(?::[\w.-]+)?:(\d+)", str(settings["gres"].value)) if "gres" in settings else None
    if gres:
        variables.setdefault("SLURM_GPUS_ON_NODE", gres[1])
    return settings, variables
