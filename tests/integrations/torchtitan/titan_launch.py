"""torchtitan's own entry point on the CPU: ``titan_launch.py FOLDER --module titan_launch --config small ...``, in ranks of torchrun."""

import runpy
import sys
from pathlib import Path

import titan_job


def small():
    """What ``--config small`` names."""
    return titan_job.config(Path(sys.modules["__main__"].FOLDER), dp=2, steps=3)


if __name__ == "__main__":
    FOLDER = sys.argv.pop(1)
    titan_job.stand_in()
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=False)
