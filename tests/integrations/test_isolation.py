"""No exception of the probe reaches the training, whatever function of ours it comes from; what a framework lacks costs the part that
needs it.

The fast tier tries some functions, the full one every `STRIDE`-th that a training calls, each from its first call on or from one in the
middle, on all ranks or on one. A new function is found by itself; a new framework needs a row. Megatron has the same in
tests/megatron/training_unchanged/test_isolation.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_family import EVERY_FAMILY
from harness.case import Fault, TrainingCase
from harness.fault_trials import (
    Bits,
    Job,
    Outcome,
    Trial,
    lacking,
    make_job,
    of_fault,
    outcome,
    outcomes,
    reached,
    start_process_with_probe,
    table,
    trials,
    wrong,
)
from harness.probe_faults import Plant, apart, unarmed
from torch import nn

from msprobe_engine.core.settings.schema import (
    CsvSettings,
    IncidentSettings,
    LayerFeatureSettings,
    ProbeSettings,
    RuleSettings,
    SinkSettings,
)
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.training.loop import LoopObserver

pytestmark = pytest.mark.framework
STRIDE = 40
MINDSPEED = Path(__file__).parent / "mindspeed"
STEPS = 2
MONITOR = replace(
    EVERY_FAMILY,
    collectives=True,
    collective_inputs=True,
    layer_features=LayerFeatureSettings(linear=("*",)),
    ops=("norm", "min", "max", "mean", "nans", "zeros", "kurtosis", "underflow"),
)


class Training:
    """A model, its optimizer, its scaler's clipping and a collective, step by step."""

    def __init__(self, scaler: bool = False) -> None:
        torch.manual_seed(0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaler)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.seen: list[bytes] = []

    def step(self) -> torch.Tensor:
        """One update."""
        self.optimizer.zero_grad()
        loss = self.net(torch.randn(3, 4)).square().mean()
        self.scaler.scale(loss).backward()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        total = loss.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        assert work.wait() is True
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.seen.append(total.numpy().tobytes())
        return loss.detach()

    def evaluate(self) -> None:
        """A pass that is no training."""
        with torch.no_grad():
            self.net.eval()(torch.ones(1, 4))
        self.net.train()

    def bits(self) -> Bits:
        """Everything a probe could have changed."""
        weights = [p.detach().numpy().tobytes() for p in self.net.parameters()]
        return (*self.seen, *weights, torch.get_rng_state().numpy().tobytes())


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def observed(place: Path, seen: bool, strict: bool = False) -> Bits:
    """Under the observer that all integrations use, with everything on and a capture armed by an alert."""
    with group():
        training = Training()
        observer: LoopObserver | None = None
        if seen:
            with unarmed():
                settings = ProbeSettings(
                    output_dir=str(place),
                    strict=strict,
                    monitor=MONITOR,
                    sinks=SinkSettings(csv=CsvSettings(enabled=True)),
                    rules=(RuleSettings(rule="recommended"), RuleSettings(rule="extreme_value", args={"threshold": 1e-9})),
                    incident=IncidentSettings(enabled=True, level="mix"),
                )
            observer = LoopObserver(settings)
            observer.setup(training.net, training.optimizer)
        for step in range(STEPS):
            if observer is None:
                training.step()
                training.evaluate()
                continue
            observer.begin(step)
            observer.micro_batch(0)
            loss = training.step()
            observer.add_scalars({"loss": loss})
            with observer.evaluation():
                training.evaluate()
            observer.end()
        if observer is not None:
            observer.close()
        return training.bits()


def dumped(place: Path, seen: bool) -> Bits:
    """Under a debugger of level mix that saves tensors."""
    with group():
        training = Training()
        debugger: PrecisionDebugger | None = None
        if seen:
            PrecisionDebugger._instance = None
            with unarmed():
                debugger = PrecisionDebugger({"task": "tensor", "level": "mix", "dump_path": str(place), "tensor": {}})
        for _ in range(STEPS):
            if debugger is not None:
                debugger.start(training.net)
            training.step()
            if debugger is not None:
                debugger.stop()
                debugger.step()
        return training.bits()


def followed(place: Path, seen: bool) -> Bits:
    """A loop of plain torch that makes no call, with a gradient scaler and evaluations."""
    with group():
        if seen:
            start_process_with_probe(place, "torch")
        training = Training(scaler=True)
        for _ in range(STEPS + 1):
            training.step()
            training.evaluate()
        return training.bits()


EVENTS = ("setup", "begin", "end", "add_scalars", "micro_batch", "evaluation")
JOBS: dict[str, Job] = {
    "observed": Job(observed, calls=("LoopObserver.__init__", *(f"LoopObserver.{name}" for name in EVENTS))),
    "dumped": Job(dumped, calls=tuple(f"PrecisionDebugger.{name}" for name in ("start", "stop", "step"))),
    "plain loop": Job(followed),
}


BRIEF = {"dump": {"step": [1], "level": "L0"}, "incident": {"level": "L0", "capture_level": "L0", "max_incidents": 1}}
"""DeepSpeed calls so much of torch that a dump of it takes most of the time."""
DEEPSPEED, PLAIN, TRAINER = (
    f"msprobe_integrations.{name}" for name in ("deepspeed", "torch.training.plain", "torch.training.trainer_loop")
)


def use_key(conf: dict[str, Any], training: Any) -> dict[str, Any]:
    """The probe is asked for by the key of DeepSpeed's configuration instead of the environment."""
    asked = os.environ.pop("MSPROBE_CONFIG", None)
    del training
    return conf if asked is None else {**conf, "msprobe": asked}


def engine(zero: int, fault: Fault | None = None) -> Job:
    return make_job(TrainingCase("deepspeed_engine", "mlp", {"dp": 2, "zero": zero}, "bf16", ACCUMULATED, fault), DEEPSPEED, **BRIEF)


ACCUMULATED = ("accumulation", "clipping")
CASES = {
    "DDP": lambda: make_job(TrainingCase("torch_loop", "mlp", {"dp": 2}, features=ACCUMULATED), PLAIN),
    "FSDP2": lambda: make_job(TrainingCase("torch_loop", "mlp", {"fsdp2": 2}, features=ACCUMULATED), PLAIN),
    "ZeRO 1": lambda: engine(1),
    "ZeRO 2": lambda: engine(2),
    "ZeRO 3": lambda: engine(3, Fault("key", "launch", use_key)),
    "Transformers": lambda: make_job(
        TrainingCase("transformers_trainer", "gpt_tiny", features=(*ACCUMULATED, "evaluation", "checkpoint")),
        "msprobe_integrations.transformers",
        TRAINER,
    ),
    "Lightning": lambda: make_job(
        TrainingCase("lightning_trainer", features=("accumulation", "evaluation", "checkpoint")), "msprobe_integrations.lightning", TRAINER
    ),
}
FRAMEWORKS = {
    "DDP": ("torch.training.plain.loop", "PlainObserver", "backward"),
    "FSDP2": ("torch.training.plain.loop", "PlainObserver", "attach"),
    "ZeRO 1": ("deepspeed.source", "DeepSpeedSource", "_around"),
    "ZeRO 2": ("deepspeed.engine", "EngineObserver", "_before_update"),
    "ZeRO 3": ("deepspeed.shards", "Zero3Shards", "reduced"),
    "Transformers": ("transformers.callback", "MsprobeCallback", "training"),
    "Lightning": ("lightning.numbers", "", "scalars"),
}
"""One fault in each, in every run."""
OFTEN = ("DDP", "ZeRO 2", "Transformers")


def mindspeed(place: Path, seen: bool) -> Bits:
    """A script that imports MindSpeed's adaptor (the stand-in's) and makes a step."""
    sys.path.append(str(MINDSPEED))
    from mindspeed_world import STAND_IN, imported_anew, write_megatron

    with imported_anew(STAND_IN, write_megatron(place)):
        sys.argv = ["pretrain_gpt.py", "--own-step"]
        if seen:
            sys.argv += ["--msprobe-config", str(start_process_with_probe(place, "mindspeed"))]
            del os.environ["MSPROBE_CONFIG"]
        adaptor = importlib.import_module("mindspeed.megatron_adaptor")
        result = importlib.import_module("user_loop").run()
        training = importlib.import_module("megatron.training.training")
        return tuple(repr(each).encode() for each in (adaptor.ARGS.own_step, result, training.trace, training.evaluate()))


MINDSPEED_JOB = Job(mindspeed, calls=(".observe", ".hooks", ".unwrap", "._replace"), packages=("msprobe_integrations.mindspeed",))
"""What it calls is called where the stand-in is put in place."""


@functools.cache
def job_of(name: str) -> Job:
    return JOBS[name] if name in JOBS else CASES[name]()


@functools.cache
def wanted(job: Job) -> list[Outcome]:
    """Without a probe."""
    return outcomes(job, None, False)


def problems(job: Job, stride: int) -> list[str]:
    """Of one fault in `stride`."""
    tried = trials(job, reached(job), set(), stride)
    assert tried
    return [problem for trial in tried for problem in wrong(job, trial, wanted(job))]


@pytest.mark.parametrize(
    ("name", "stride"), [("plain loop", 400), *(pytest.param(name, STRIDE, marks=pytest.mark.slow) for name in (*JOBS, *CASES))]
)
def test_a_fault_stays_in_the_probe(name: str, stride: int) -> None:
    """A function that the training's probe calls raises: losses, weights and random state are what they are without a probe, nothing is
    raised there nor at the end of the process, and each part that is lost is said once."""
    found = problems(job_of(name), stride)
    assert not found, table(found)


@pytest.mark.parametrize("name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in FRAMEWORKS])
@pytest.mark.slow
def test_a_fault_under_a_framework(name: str) -> None:
    """The same with one fault in the part that follows a framework, on one of several ranks."""
    module, owner, function = FRAMEWORKS[name]
    job = job_of(name)
    found = wrong(job, Trial(Plant(f"msprobe_integrations.{module}", owner, function), 0, job.ranks > 1), wanted(job))
    assert not found, table(found)


@pytest.mark.parametrize("name", ["Transformers", "Lightning"])
@pytest.mark.slow
def test_a_fault_in_an_event_of_a_trainer(name: str) -> None:
    """The same with each event of the observer that a Trainer's callback tells of its training."""
    job = job_of(name)
    plants = [Plant("msprobe_integrations.torch.training.loop", "LoopObserver", event) for event in (*EVENTS, "safely")]
    found = [problem for plant in plants for problem in wrong(job, Trial(plant, 0, False), wanted(job))]
    assert not found, table(found)


@pytest.mark.slow
def test_a_fault_that_mindspeed_reaches() -> None:
    """A function of ours that MindSpeed reaches raises: its features, its patches and Megatron's loop are the same."""
    calls = {plant: count for plant, count in reached(MINDSPEED_JOB).items() if plant.module.startswith("msprobe_integrations.m")}
    tried = trials(MINDSPEED_JOB, calls, set(), STRIDE // 2)
    assert tried
    found = [problem for trial in tried for problem in wrong(MINDSPEED_JOB, trial, wanted(MINDSPEED_JOB))]
    assert not found, table(found)


BROKEN = (
    Plant("msprobe_integrations.torch.backend", "TorchBackend", "reduce"),
    Plant("msprobe_integrations.common.monitor.collective_samples", "CollectiveSamples", "add"),
    Plant("msprobe_integrations.torch.capture.api_names", "ApiNames", "resolve"),
)
"""A hook of modules, a kernel of the dispatcher, a mode."""


@pytest.mark.parametrize("plant", BROKEN, ids=str)
def test_one_message(plant: Plant) -> None:
    """A part is switched off with one message that names it and the fault, however often it is called; the training is the same."""
    job = JOBS["dumped" if "api_names" in plant.module else "observed"]
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
@pytest.mark.parametrize(
    ("name", "every"), [*((name, False) for name in DRIFTS), *(pytest.param(name, True, marks=pytest.mark.slow) for name in DRIFTS)]
)
@pytest.mark.fast_cells("Lightning-False")
def test_names_that_a_framework_lacks(name: str, every: bool) -> None:
    """Each name of the integration's table in turn is another one in the framework: the training is the same, bit for bit, nothing
    fails, and a line names it."""
    job = job_of(name)
    package, *names = DRIFTS[name]
    found = [problem for lost in (names if every else names[:1]) for problem in lacking(job, package, lost, wanted(job))]
    assert not found, table(found)
