"""No exception of the probe reaches the training, whatever function of ours it comes from; what a framework lacks costs the part that
needs it.

Every run tries some functions, one in `STRIDE`; with ``MSPROBE_EVERY_FAULT=1`` all of them (some minutes).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
from isolation_jobs import JOBS, MONITOR, STEPS, Bits, Training, grouped, observed, plain
from plants import Plant, apart, is_wrapper, planted, reached

from msprobe_engine.settings.schema import CsvSettings, ProbeSettings, SinkSettings
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.loop import LoopObserver
from msprobe_integrations.torch.probe import TorchProbe

pytestmark = pytest.mark.framework
EVERY = os.environ.get("MSPROBE_EVERY_FAULT") == "1"
STRIDE = 1 if EVERY else 60
OF_GUARDS = ("msprobe_engine.guard", "msprobe_engine.log")
"""What says that something has failed: nothing is behind it."""


@functools.cache
def wanted() -> Bits:
    """Without a probe."""
    found: Bits = apart(lambda: grouped(plain))
    return found


def broken(job: Callable[[], Bits], plant: Plant, after: int) -> Bits:
    with planted(plant, after=after):
        return grouped(job)


@pytest.mark.parametrize("name", JOBS)
def test_a_fault_stays_in_the_probe(name: str) -> None:
    """Each function that the job calls raises, from its first call on or from one in the middle: losses, weights and random state are
    what they are without a probe, and nothing is raised."""
    job = JOBS[name]
    calls = reached(lambda: grouped(job))
    plants = sorted((p for p in calls if p.module not in OF_GUARDS and not is_wrapper(p)), key=str)
    assert len(plants) > 200
    wrong: list[str] = []
    for k, plant in enumerate(plants[::STRIDE]):
        after = calls[plant] // 4 if k % 2 else 0
        try:
            if apart(functools.partial(broken, job, plant, after)) != wanted():
                wrong.append(f"{plant} after {after}: other bits")
        except AssertionError as error:
            wrong.append(f"{plant} after {after}: {error}")
    assert wrong == []


BROKEN = (
    Plant("msprobe_integrations.torch.backend", "TorchBackend", "reduce"),
    Plant("msprobe_integrations.torch.watch_collectives", "CollectiveWatch", "put"),
    Plant("msprobe_integrations.torch.apinames", "ApiNames", "resolve"),
)
"""A hook of modules, a kernel of the dispatcher, a mode."""


def messages(plant: Plant) -> tuple[bool, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("msprobe").addHandler(handler)
    job = JOBS["dumped" if "apinames" in plant.module else "observed"]
    same = broken(job, plant, 0) == wanted()
    return same, [text for text in said if "training goes on" in text]


@pytest.mark.parametrize("plant", BROKEN, ids=str)
def test_one_message(plant: Plant) -> None:
    """A part is switched off with one message that names it and the fault, however often it is called; the training is the same."""
    wanted()
    same, said = apart(functools.partial(messages, plant))
    assert same
    assert said
    parts = [text.partition(" is switched off")[0] for text in said]
    assert len(parts) == len(set(parts))
    assert all("Planted: planted in" in text for text in said)


def strict(plant: Plant, error: BaseException | None, raises: bool) -> str:
    try:
        with planted(plant, error):
            grouped(observed, strict=raises)
    except BaseException as raised:
        return type(raised).__name__
    return ""


@pytest.mark.parametrize("plant", BROKEN[:2], ids=str)
def test_strict_and_interrupts(plant: Plant) -> None:
    """``strict: true`` raises the fault; KeyboardInterrupt is the user's and passes in any case."""
    assert apart(functools.partial(strict, plant, None, True)) == "Planted"
    assert apart(functools.partial(strict, plant, KeyboardInterrupt(), False)) == "KeyboardInterrupt"


class Bare:
    """An optimizer that has nothing but a step."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def step(self) -> None:
        """One update."""
        self._inner.step()


def bare(place: str) -> tuple[Bits, set[str]]:
    training = Training()
    made: list[TorchProbe] = []

    def make(settings: ProbeSettings) -> TorchProbe:
        made.append(TorchProbe(settings))
        return made[0]

    sinks = SinkSettings(csv=CsvSettings(enabled=False), memory=True)
    observer = LoopObserver(ProbeSettings(output_dir=place, monitor=MONITOR, sinks=sinks), make)
    observer.setup(training.net, Bare(training.optimizer))
    for _ in range(STEPS):
        observer.begin()
        training.step()
        observer.end()
    observer.close()
    return training.bits(), {s.family for frame in made[0].frames for s in frame.samples}


def test_an_optimizer_without_attributes(tmp_path: Path) -> None:
    """An optimizer object that lacks everything a probe asks for: the training goes on."""
    bits, _ = apart(lambda: grouped(bare, place=str(tmp_path)))  # type: ignore[arg-type]
    assert bits == wanted()


LACKING = (
    (torch.amp.GradScaler, "unscale_"),
    (torch.Tensor, "record_stream"),
    (TorchBackend, "forget"),
    (torch._C._distributed_c10d, "Backend"),
)


def without(owner: Any, name: str) -> Bits:
    delattr(owner, name)
    return grouped(observed)


@pytest.mark.parametrize(("owner", "name"), LACKING, ids=[name for _, name in LACKING])
def test_names_that_torch_lacks(owner: Any, name: str) -> None:
    """A name that this version of torch does not have costs what needs it."""
    if name not in vars(owner):
        pytest.skip(f"torch has no {name} of its own there")
    assert apart(functools.partial(without, owner, name)) == wanted()
