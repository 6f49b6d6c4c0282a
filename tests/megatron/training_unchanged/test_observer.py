"""The observer's life: callbacks, faults of its own, faults of the training."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from forkpool import run_ranks
from megatron_harness import observed, probe_settings, run_gpt, train_gpt

from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler
from msprobe_integrations.megatron import MegatronCallback, patches
from msprobe_integrations.megatron.observer import losses
from msprobe_integrations.patching import MARK
from msprobe_integrations.torch.monitor.probe import TorchProbe

MONITOR = MonitorSettings(gradients=True)


def with_callback() -> tuple[list[float | None], list[int], float]:

    sink = MemorySink()
    callback = MegatronCallback(probe_settings(MONITOR))
    callback.observer._make_probe = lambda s: TorchProbe(s, extra_sinks=[sink])
    a = train_gpt.arguments(["--quiet", "--steps", "1", "--distopt"])
    _, chunks, optimizer = train_gpt.build(a)
    callback.on_setup(chunks, optimizer)
    history = []
    for step in (10, 11, 12):
        callback.on_step_begin(step)
        history += train_gpt.train(a, chunks, optimizer)
        callback.on_step_end({"extra": torch.tensor(float(step))})
    callback.close()
    names = {s.name for s in sink.frames[0].samples if s.family == "grad_reduced"}
    assert len(names) == len([p for c in chunks for p in c.parameters()])
    return history, [f.step for f in sink.frames], sink.frames[2].scalars["extra"]


@pytest.mark.framework
def test_callback() -> None:
    """With `MegatronCallback` steps have the caller's numbers and scalars, and hold gradients."""
    for history, steps, extra in run_ranks(2, with_callback):
        assert len(history) == 3
        assert steps == [10, 11, 12]
        assert extra == 12.0


def broken(part: str) -> tuple[list[Any], int]:
    def planted(*_: Any, **__: Any) -> None:
        raise ValueError("planted")

    if part:
        owner: Any = {
            "before_step": ParameterSampler,
            "after_step": ParameterSampler,
            "__init__": ParameterSampler,
            "begin_step": TorchProbe,
            "end_step": TorchProbe,
        }[part]
        setattr(owner, part, planted)
    state, frames = run_gpt("--steps 3 --distopt", probe_settings(MONITOR, strict=False))
    return state["losses"], len(frames)


@functools.cache
def unbroken() -> list[Any]:
    return [losses for losses, _ in run_ranks(2, broken, "")]


@pytest.mark.slow
@pytest.mark.framework
@pytest.mark.parametrize("part", ["before_step", "after_step", "__init__", "begin_step", "end_step"])
def test_faults_of_the_probe_stay_in_the_probe(part: str) -> None:
    """An exception in any of our parts leaves losses as they are without it."""
    assert [losses for losses, _ in run_ranks(2, broken, part)] == unbroken()


def one_rank_is_off() -> tuple[int, int]:
    import torch.distributed as dist

    from msprobe_integrations.torch.ranks import merge

    merge.PATIENCE = 1.0
    if dist.get_rank() == 1:
        take = ParameterSampler.before_step

        def sometimes(self: ParameterSampler) -> None:
            if self._probe.step < 1:
                take(self)

        ParameterSampler.before_step = sometimes  # type: ignore[method-assign]
    state, frames = run_gpt("--steps 6 --distopt", probe_settings(MONITOR, strict=False))
    return len(state["losses"]), len(frames)


@pytest.mark.framework
@pytest.mark.slow
def test_a_rank_without_probe_does_not_hang_the_others() -> None:
    """When one rank stops taking part in the merge, training goes on on all ranks and all frames come."""
    assert run_ranks(2, one_rank_is_off, timeout=240) == [(6, 6), (6, 6)]


def interrupted() -> tuple[int, dict[str, float]]:
    observer, sink = observed(probe_settings(MonitorSettings(gradients=True, micro_batch_gradients=True)))
    a = train_gpt.arguments(["--quiet", "--steps", "3"])
    _, chunks, optimizer = train_gpt.build(a)

    def explode(*_: Any) -> None:
        if observer.step == 1:
            raise RuntimeError("a check of the framework")

    chunks[0].module.decoder.register_full_backward_hook(explode)
    with pytest.raises(RuntimeError, match="a check"):
        train_gpt.train(a, chunks, optimizer)
    frames = len(sink.frames)
    observer.close()
    observer.setup(chunks, optimizer)
    assert observer.probe is None, "closed is closed"
    return max(frames, len(sink.frames)), sink.frames[-1].scalars


@pytest.mark.framework
def test_a_step_that_raises_is_handed_on() -> None:
    """When training raises inside a step (Megatron's own NaN check, for example), what was seen of that step still becomes a frame."""
    ((frames, scalars),) = run_ranks(1, interrupted)
    assert frames == 2
    assert scalars["interrupted"] == 1.0


def test_names_taken_earlier_are_wrapped_too() -> None:
    """A module that did ``from ... import get_forward_backward_func`` before the observer came has the wrapped function."""
    observed(probe_settings(None))
    assert hasattr(train_gpt.get_forward_backward_func, MARK)
    assert hasattr(train_gpt.get_megatron_optimizer, MARK)
    patches.observe(None)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([{"lm loss": torch.tensor(2.0)}, {"lm loss": torch.tensor(4.0)}], 3.0),
        ([{"lm loss": torch.tensor([6.0, 2.0])}, {"lm loss": torch.tensor([2.0, 2.0])}], 2.0),
        ([{"lm loss": (torch.tensor(6.0), torch.tensor(2))}], 3.0),
        ({"lm loss": 1.5}, 1.5),
    ],
)
def test_losses(result: Any, expected: float) -> None:
    """The loss is the mean over micro batches; pairs (sum, tokens) are divided after summing."""
    found = losses(result)
    assert float(found["loss"]) == float(found["lm_loss"]) == expected


@pytest.mark.parametrize("result", [[], None, [torch.ones(1)], {}])
def test_no_losses(result: Any) -> None:
    """Ranks without the last pipeline stage have no loss."""
    assert losses(result) == {}
