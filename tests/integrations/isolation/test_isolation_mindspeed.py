"""No exception of the probe reaches a training on MindSpeed (its stand-in): its features, its patches and Megatron's loop are what they
are without the probe."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from isolation_jobs import asked
from isolation_run import Bits, Job, outcomes, reached, table, trials, wrong

pytestmark = pytest.mark.framework
MINDSPEED = Path(__file__).parents[1] / "mindspeed"
EVERY = os.environ.get("MSPROBE_EVERY_FAULT") == "1"


def train(place: Path, seen: bool) -> Bits:
    """A script that imports MindSpeed's adaptor and makes a step."""
    sys.path.append(str(MINDSPEED))
    from mindspeed_world import STAND_IN, imported_anew, write_megatron

    with imported_anew(STAND_IN, write_megatron(place)):
        sys.argv = ["pretrain_gpt.py", "--own-step"]
        if seen:
            sys.argv += ["--msprobe-config", str(asked(place, "mindspeed"))]
            del os.environ["MSPROBE_CONFIG"]
        adaptor = importlib.import_module("mindspeed.megatron_adaptor")
        result = importlib.import_module("user_loop").run()
        training = importlib.import_module("megatron.training.training")
        return tuple(repr(each).encode() for each in (adaptor.ARGS.own_step, result, training.trace, training.evaluate()))


JOB = Job(train, calls=(".observe", ".hooks", ".unwrap", "._replace"), packages=("msprobe_integrations.mindspeed",))
"""What it calls is called where the stand-in is put in place."""


def test_a_fault_stays_in_the_probe() -> None:
    """A function of ours that MindSpeed reaches raises: features, patches and steps are the same."""
    wanted = outcomes(JOB, None, False)
    calls = {plant: count for plant, count in reached(JOB).items() if plant.module.startswith("msprobe_integrations.m")}
    tried = trials(JOB, calls, set())
    assert len(tried) > 20
    found = [problem for trial in tried[:: 1 if EVERY else 24] for problem in wrong(JOB, trial, wanted)]
    assert not found, table(found)
