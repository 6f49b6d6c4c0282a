"""No exception of the probe reaches the training, whatever function of ours it comes from; what a framework lacks costs the part that
needs it.

Every run tries some functions. ``MSPROBE_EVERY_FAULT=1 python -m pytest tests/integrations/isolation -k fault`` tries all that a training
calls, each from its first call on or from one in the middle, on all ranks or on one: well over a thousand trainings of a second or two
each (``-k "plain and loop"`` for one training alone). A new function is found by itself, a new framework needs a `Job`. Megatron has
the same in tests/megatron/test_isolation_megatron.py.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation_jobs import JOBS, MONITOR, STEPS, Bits, Training, group, observed
from isolation_run import Job, Outcome, Trial, lacking, of_fault, outcome, outcomes, reached, table, trials, wrong
from plants import Plant, apart

from msprobe_engine.settings.schema import CsvSettings, ProbeSettings, SinkSettings
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.loop import LoopObserver
from msprobe_integrations.torch.probe import TorchProbe

pytestmark = pytest.mark.framework
EVERY = os.environ.get("MSPROBE_EVERY_FAULT") == "1"
STRIDE = 1 if EVERY else 400
FRAMEWORKS = {
    "DDP": ("torch.plain_loop", "PlainObserver", "backward"),
    "FSDP2": ("torch.plain_loop", "PlainObserver", "attach"),
    "ZeRO 1": ("deepspeed.source", "DeepSpeedSource", "_around"),
    "ZeRO 2": ("deepspeed.engine", "EngineObserver", "_before_update"),
    "ZeRO 3": ("deepspeed.shards", "Zero3Shards", "reduced"),
    "Transformers": ("transformers.callback", "MsprobeCallback", "training"),
    "Lightning": ("lightning.numbers", "", "scalars"),
}
"""Trainings of `framework_jobs`, and one fault in each."""
OFTEN = ("DDP", "ZeRO 2", "Transformers", "Lightning")
"""Those of every run."""
_known: set[Plant] = set()


@functools.cache
def wanted(job: Job) -> list[Outcome]:
    """Without a probe."""
    return outcomes(job, None, False)


def problems(job: Job, stride: int) -> list[str]:
    """Of every fault, or of one in `stride`."""
    tried = trials(job, reached(job), _known)[::stride]
    _known.update(trial.plant for trial in tried if EVERY)
    assert tried
    return [problem for trial in tried for problem in wrong(job, trial, wanted(job))]


@pytest.mark.parametrize("name", JOBS)
def test_a_fault_stays_in_the_probe(name: str) -> None:
    """A function that the training's probe calls raises: losses, weights and random state are what they are without a probe, nothing is
    raised there nor at the end of the process, and each part that is lost is said once."""
    found = problems(JOBS[name], STRIDE)
    assert not found, table(found)


@pytest.mark.parametrize("name", FRAMEWORKS if EVERY else OFTEN)
def test_a_fault_under_a_framework(name: str) -> None:
    """The same under the frameworks."""
    job = importlib.import_module("framework_jobs").JOBS[name]
    if EVERY:
        found = problems(job, 1)
    else:
        module, owner, function = FRAMEWORKS[name]
        found = wrong(job, Trial(Plant(f"msprobe_integrations.{module}", owner, function), 0, job.ranks > 1), wanted(job))
    assert not found, table(found)


BROKEN = (
    Plant("msprobe_integrations.torch.backend", "TorchBackend", "reduce"),
    Plant("msprobe_integrations.common.collective_samples", "CollectiveSamples", "add"),
    Plant("msprobe_integrations.torch.apinames", "ApiNames", "resolve"),
)
"""A hook of modules, a kernel of the dispatcher, a mode."""


@pytest.mark.parametrize("plant", BROKEN, ids=str)
def test_one_message(plant: Plant) -> None:
    """A part is switched off with one message that names it and the fault, however often it is called; the training is the same."""
    job = JOBS["dumped" if "apinames" in plant.module else "observed"]
    (found,) = outcomes(job, Trial(plant, 0, False))
    assert found.bits == wanted(job)[0].bits
    said = of_fault(found)
    assert said
    parts = [text.partition(" is switched off")[0] for text in said]
    assert len(parts) == len(set(parts))
    assert all("Planted: planted in" in text and "training goes on" in text for text in said)


def raised(plant: Plant, error: BaseException | None, strict: bool) -> str:
    """Type of what comes out of the training."""
    job = Job(functools.partial(observed, strict=strict))
    try:
        outcome(job, Trial(plant, 0, False), error=error)
    except BaseException as out:
        return type(out).__name__
    return ""


@pytest.mark.parametrize("plant", BROKEN[:2], ids=str)
def test_strict_and_interrupts(plant: Plant) -> None:
    """``strict: true`` raises the fault; KeyboardInterrupt and SystemExit are the user's and pass in any case."""
    assert apart(functools.partial(raised, plant, None, True)) == "Planted"
    assert apart(functools.partial(raised, plant, KeyboardInterrupt(), False)) == "KeyboardInterrupt"
    assert apart(functools.partial(raised, plant, SystemExit(3), False)) == "SystemExit"


class Bare:
    """An optimizer that has nothing but a step."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def step(self) -> None:
        """One update."""
        self._inner.step()


def bare(place: Path, seen: bool) -> Bits:
    with group():
        return under_bare(place, seen)


def under_bare(place: Path, seen: bool) -> Bits:
    assert seen
    training = Training()
    sinks = SinkSettings(csv=CsvSettings(enabled=False), memory=True)
    observer = LoopObserver(ProbeSettings(output_dir=str(place), monitor=MONITOR, sinks=sinks), TorchProbe)
    observer.setup(training.net, Bare(training.optimizer))
    for _ in range(STEPS):
        observer.begin()
        training.step()
        training.evaluate()
        observer.end()
    observer.close()
    return training.bits()


def test_an_optimizer_without_attributes() -> None:
    """An optimizer object that lacks everything a probe asks for: the training goes on."""
    assert outcomes(Job(bare), None)[0].bits == wanted(JOBS["observed"])[0].bits


LACKING = (
    (torch.amp.GradScaler, "unscale_"),
    (torch.Tensor, "record_stream"),
    (TorchBackend, "forget"),
    (torch._C._distributed_c10d, "Backend"),
)


def without(owner: Any, name: str, place: Path, seen: bool) -> Bits:
    delattr(owner, name)
    return observed(place, seen)


@pytest.mark.parametrize(("owner", "name"), LACKING, ids=[name for _, name in LACKING])
def test_names_that_torch_lacks(owner: Any, name: str) -> None:
    """A name that this version of torch does not have costs what needs it."""
    if name not in vars(owner):
        pytest.skip(f"torch has no {name} of its own there")
    assert outcomes(Job(functools.partial(without, owner, name)), None)[0].bits == wanted(JOBS["observed"])[0].bits


DRIFTS = {
    "Transformers": (
        "transformers",
        *("training_step", "_maybe_log_save_evaluate", "evaluate", "_save_checkpoint", "on_pre_optimizer_step"),
        *("callback_handler", "model_wrapped"),
    ),
    "Lightning": (
        "lightning",
        *("_batches_that_stepped", "_should_accumulate", "save_checkpoint", "_callback_metrics", "precision_plugin", "callbacks"),
    ),
}
"""Package, and names of its table that neither torch nor the script uses: the one that is tried in every run first."""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions are as of Python 3.11")
@pytest.mark.parametrize("name", DRIFTS)
def test_names_that_a_framework_lacks(name: str) -> None:
    """Each name of the integration's table in turn is another one in the framework: the training is the same, bit for bit, nothing
    fails, and a line names it."""
    job = importlib.import_module("framework_jobs").JOBS[name]
    package, *names = DRIFTS[name]
    found = [problem for lost in (names if EVERY else names[:1]) for problem in lacking(job, package, lost, wanted(job))]
    assert not found, table(found)
