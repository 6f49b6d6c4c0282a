"""What a step is: updates of the engine, with their numbers and scalars; evaluations, checkpoints and other engines are none."""

from __future__ import annotations

import builtins
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch
from forkpool import run_ranks
from harness.frameworks.deepspeed_engine import weights_of
from harness.memory import seen
from harness.run import ask, write_settings

from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_integrations.deepspeed.callback import DeepSpeedCallback
from msprobe_integrations.torch.training import owner

pytestmark = pytest.mark.framework
ACTIVATIONS = {"monitor": MonitorSettings(activations=True)}


def micro_steps(frame: Any) -> list[int]:
    return sorted({s.micro_step for s in frame.samples if s.family == "actv"})


def accumulated(stage: int) -> Any:
    run = jobs.train(harness.config(stage, "bf16", 3, 0.05), "bf16", 2, ACTIVATIONS)
    return run.losses, [(f.step, f.complete, micro_steps(f), f.scalars) for f in run.frames]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_is_an_update(stage: int) -> None:
    """Micro batches between two updates are one step; its loss is their mean, as the user passed it, and the gradient norm, learning
    rate and loss scale are DeepSpeed's own."""
    for losses, frames in run_ranks(2, accumulated, stage):
        assert [frame[:3] for frame in frames] == [(0, True, [0, 1, 2]), (1, True, [0, 1, 2])]
        for number, (*_, scalars) in enumerate(frames):
            assert scalars["loss"] == pytest.approx(sum(losses[3 * number : 3 * number + 3]) / 3, rel=1e-5)
            assert scalars["learning_rate"] == 0.01
            assert scalars["skipped"] == 0.0
            assert scalars["grad_norm"] > 0


def by_hand(stage: int) -> Any:
    def body(engine: Any, data: list[torch.Tensor]) -> list[float]:
        for start in (0, 2):
            for i, x in enumerate(data[start : start + 2]):
                engine.set_gradient_accumulation_boundary(i == 1)
                engine.backward(engine(x))
            engine.step()
        return []

    run = jobs.train(harness.config(stage, "fp32", 2), "fp32", 2, ACTIVATIONS, body)
    return [(f.step, micro_steps(f)) for f in run.frames]


def test_borders_set_by_hand() -> None:
    """A loop that sets the borders of accumulation itself, and calls step once per update, has the same steps and micro batches."""
    assert run_ranks(2, by_hand, 1) == [[(0, [0, 1]), (1, [0, 1])]] * 2


def with_evaluation() -> Any:
    def body(engine: Any, data: list[torch.Tensor]) -> list[float]:
        with torch.no_grad():
            engine(data[0])
        engine.backward(engine(data[0]))
        with torch.no_grad():
            engine(data[1])
        engine.eval()
        engine(data[1])
        engine.train()
        engine.step()
        engine.eval()
        engine(data[1])
        engine.train()
        engine.backward(engine(data[1]))
        engine.step()
        return []

    run = jobs.train(harness.config(2, "fp32"), "fp32", 2, {"monitor": MonitorSettings(activations=True), **DUMP}, body)
    names = [name for name in run.dumps[f"step0/rank{harness.deepspeed.comm.get_rank()}"] if name.startswith("Module.a.")]
    return [(f.step, micro_steps(f)) for f in run.frames], names


DUMP = {"dump": jobs.dump_of("L0")}


def test_evaluation_is_not_seen() -> None:
    """A pass without gradients or in eval mode is no micro batch and no record, before, inside and between steps."""
    names = ["Module.a.Linear.forward.0", "Module.a.Linear.backward.0", "Module.a.Linear.parameters_grad.0"]
    for frames, records in run_ranks(2, with_evaluation):
        assert frames == [(0, [0]), (1, [0])]
        assert sorted(records) == sorted(names)


def resumed(stage: int, directory: str) -> Any:
    conf = harness.config(stage, "bf16")

    def part(load: bool) -> Any:
        def body(engine: Any, data: list[torch.Tensor]) -> list[float]:
            if load:
                engine.load_checkpoint(directory)
            for x in data[:2]:
                engine.backward(engine(x))
                engine.step()
            engine.save_checkpoint(directory)
            return []

        return jobs.train(conf, "bf16", 2, {"monitor": MonitorSettings(gradients=True, collectives=True)}, body)

    runs = [part(False), part(True)]
    collectives = [[sum(s.family.startswith("comm") for s in f.samples) for f in run.frames] for run in runs]
    return [[f.step for f in run.frames] for run in runs], collectives


@pytest.mark.fast_cells("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_job_goes_on_counting(stage: int) -> None:
    """Steps are DeepSpeed's: after load_checkpoint they go on where the checkpoint was saved; saving and loading belong to no step."""
    with tempfile.TemporaryDirectory() as directory:
        for steps, collectives in run_ranks(2, resumed, stage, directory):
            assert steps == [[0, 1], [2, 3]]
            assert collectives[0] == collectives[1]


def overflowing(stage: int) -> Any:
    def body(engine: Any, data: list[torch.Tensor]) -> list[float]:
        for number, x in enumerate(data):
            if number == 1 and harness.deepspeed.comm.get_rank() == 1:
                x[0, 0] = float("inf")
            engine.backward(engine(x))
            engine.step()
        return []

    run = jobs.train(
        harness.config(stage, "fp16", 1, 0.05), "fp16", 3, {"monitor": MonitorSettings(activations=True, gradients=False)}, body
    )
    return [(f.step, f.scalars["skipped"], f.scalars["loss_scale"]) for f in run.frames]


@pytest.mark.fast_cells("0")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_skipped_update_is_a_step(stage: int) -> None:
    """An overflow keeps its number and says so; the loss scale is the one that the update was made with."""
    for frames in run_ranks(2, overflowing, stage):
        assert [frame[:2] for frame in frames] == [(0, 0.0), (1, 1.0), (2, 0.0)]
        assert [frame[2] for frame in frames][:2] == [64.0, 64.0]


def two_engines() -> Any:
    engines = [harness.engine_of(harness.config(1, "fp32")) for _ in range(2)]
    callback = DeepSpeedCallback(jobs.settings(monitor=MonitorSettings(activations=True)))
    callback.on_setup(engines[1])
    probe = callback.observer.probe
    assert probe is not None
    first, second = harness.batches("fp32", 2)
    for engine, other in ((engines[0], engines[1]), (engines[1], engines[0])) * 2:
        engine.backward(engine(first if engine is engines[0] else second))
        if engine is engines[1]:
            other(first)  # inside of a step
        engine.step()
    callback.close()
    return (
        [(f.step, micro_steps(f)) for f in probe.frames],
        float(engines[1].module.a.weight.sum()),
        float(engines[0].module.a.weight.sum()),
    )


def test_one_engine_is_followed() -> None:
    """Of two engines that train in one process only the one that was named has steps and records."""
    for frames, followed, other in run_ranks(2, two_engines):
        assert frames == [(0, [0]), (1, [0])]
        assert followed != other


def failing(kind: str) -> Any:
    engine = harness.engine_of(harness.config(1, "fp32"))
    callback = DeepSpeedCallback(jobs.settings(monitor=MonitorSettings(activations=True)))
    callback.on_setup(engine)
    probe = callback.observer.probe
    assert probe is not None
    (x,) = harness.batches("fp32", 1)

    def broken(*_: Any) -> None:
        raise RuntimeError("of the user")

    if kind == "forward":
        engine.module.c.register_forward_pre_hook(broken)
    else:
        next(iter(engine.module.parameters())).register_hook(broken)
    with pytest.raises(RuntimeError, match="of the user"):
        engine.backward(engine(x))
    frames = [(f.step, bool(f.samples), f.scalars.get("interrupted")) for f in probe.frames]
    callback.close()
    return frames


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_an_exception_of_the_training_goes_through(kind: str) -> None:
    """The user's own exception arrives unchanged, and what was seen of the step is kept."""
    assert run_ranks(1, failing, kind) == [[(0, True, 1.0)]]


def torn() -> Any:
    engine = harness.engine_of(harness.config(1, "fp32"))
    callback = DeepSpeedCallback(jobs.settings(strict=False, monitor=MonitorSettings(activations=True)))
    callback.on_setup(engine)
    callback.observer._before_update = None  # type: ignore[assignment,method-assign]
    losses = jobs.loop(engine, harness.batches("fp32", 3))
    callback.close()
    return losses, weights_of(engine)


def whole() -> Any:
    return jobs.train(harness.config(1, "fp32"), "fp32", 3, None).bits[:2]


def test_faults_of_the_observer_stay_in_it() -> None:
    """An exception in the observer switches the probe off, and the training is bitwise what it is without."""
    assert [list(r) for r in run_ranks(2, torn)] == [list(r) for r in run_ranks(2, whole)]


def collected_meanwhile(directory: str) -> Any:
    """In a rank: an engine of before is destroyed while the part that follows engines is imported."""
    ask(write_settings(Path(directory)), "deepspeed")
    before, engine = (harness.engine_of(harness.config(1, "fp32")) for _ in range(2))
    name, plain = "msprobe_integrations.deepspeed.engine", builtins.__import__
    sys.modules.pop(name)

    def importing(asked: str, names: Any = None, *args: Any, **kwargs: Any) -> Any:
        if (names or {}).get("__name__") == name:
            builtins.__import__ = plain
            before.destroy()
        return plain(asked, names, *args, **kwargs)

    builtins.__import__ = importing
    jobs.loop(engine, harness.batches("fp32", 2))
    assert builtins.__import__ is plain, "nothing was imported"
    return seen()["steps"]


def test_an_engine_that_is_collected_meanwhile(tmp_path: Path) -> None:
    """The next one is followed all the same."""
    assert run_ranks(2, collected_meanwhile, str(tmp_path)) == [[0, 1]] * 2


def owned() -> Any:
    engine = harness.engine_of(harness.config(1, "fp32"))
    callback = DeepSpeedCallback(jobs.settings(monitor=MonitorSettings()))
    callback.on_setup(engine)
    here = owner.current() is callback.observer
    callback.close()
    return here, owner.current()


def test_a_callback_owns_the_training() -> None:
    """While a callback follows nobody else does, and after `close` anybody may."""
    assert run_ranks(1, owned) == [(True, None)]
