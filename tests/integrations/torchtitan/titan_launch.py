"""torchtitan's own entry point on the CPU: ``titan_launch.py FOLDER --module titan_launch --config small ...``, in ranks of torchrun."""

import runpy
import sys
from pathlib import Path

from harness.frameworks import torchtitan_trainer as titan


def small():
    """What ``--config small`` names."""
    return titan.config(Path(sys.modules["__main__"].FOLDER), dp=2, steps=3)


if __name__ == "__main__":
    FOLDER = sys.argv.pop(1)
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=False)
