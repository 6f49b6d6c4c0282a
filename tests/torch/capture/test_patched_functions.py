"""Functions of torch that several captures look through, put on and taken off in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from capturing import entries
from torch import nn

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.patching import FunctionPatch
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.api import ApiCapture
from msprobe_integrations.torch.capture.level import Capture
from msprobe_integrations.torch.ranks.process_group_teardown import before_ranks_end


def marking(name: str) -> Any:
    return lambda go, x: [name, *go(x)]


def test_any_order() -> None:
    """Three handlers in every order of coming and going: those that are on see a call, the last first; at the end the function is the
    old one."""
    for on, off in itertools.product(itertools.permutations("abc"), repeat=2):
        owner = SimpleNamespace(f=lambda x: [x])
        before, patch = owner.f, FunctionPatch(owner, "f")
        handlers = {name: marking(name) for name in "abc"}
        for name in on:
            patch.add(handlers[name])
            patch.add(handlers[name])
        assert owner.f(0) == [*reversed(on), 0]
        for i, name in enumerate(off):
            patch.discard(handlers[name])
            assert owner.f(0) == [*(n for n in reversed(on) if n not in off[: i + 1]), 0]
        assert owner.f is before


def test_a_wrapper_of_somebody_else() -> None:
    """A wrapper put around a patch stays, and the patch behind it can be used again, without calling itself."""
    owner = SimpleNamespace(f=lambda: ["f"])
    before, patch = owner.f, FunctionPatch(owner, "f")

    def ours(go: Any) -> list[str]:
        return ["ours", *go()]

    patch.add(ours)
    inner = owner.f
    owner.f = lambda: ["theirs", *inner()]
    for _ in range(2):
        patch.discard(ours)
        assert owner.f() == ["theirs", "f"]
        patch.add(ours)
        assert owner.f() == ["theirs", "ours", "f"]
    owner.f = inner
    patch.discard(ours)
    assert owner.f is before


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


@pytest.mark.parametrize("crossing", [False, True])
def test_two_captures(crossing: bool) -> None:
    """Windows of two captures that nest or cross: both see every call of their own window, and nothing stays behind."""
    faults, frames = Faults(strict=True), []
    sessions = []
    for _ in range(2):
        found: list[Frame] = []
        pipeline = Pipeline(TorchBackend(), [], Writer([], faults), faults, [lambda f, _, found=found: found.append(f)])
        sessions.append((Capture(pipeline, "mix"), pipeline))
        frames.append(found)
    (first, one), (second, two) = sessions
    net = nn.Sequential(nn.Linear(2, 2))
    first.attach(net)
    second.attach(net)
    engine, apply = torch.autograd._engine_run_backward, torch.autograd.Function.apply  # type: ignore[attr-defined]
    for step in range(3):
        first.open()
        second.open()
        Twice.apply(net(torch.ones(1, 2))).sum().backward()
        order = [(first, one), (second, two)] if crossing else [(second, two), (first, one)]
        for capture, pipeline in order:
            pipeline.end_step(step, capture.end_step())
            capture.close()
    for found, pipeline in zip(frames, (one, two), strict=True):
        pipeline.advance(wait=True)
        for frame in found:
            assert {"Module.0.Linear.forward.0", "Autograd.Twice.0.forward", "Autograd.Twice.0.backward"} <= set(entries(frame))
    assert torch.autograd._engine_run_backward is engine  # type: ignore[attr-defined]
    assert torch.autograd.Function.apply == apply
    assert torch._C._len_torch_function_stack() == 0


def test_an_interrupt_while_a_capture_is_put_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle: what is there is taken off again, and the next window is as any other."""
    faults = Faults(strict=True)
    pipeline = Pipeline(TorchBackend(), [], Writer([], faults), faults)
    session = Capture(pipeline, "L1")
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr(ApiCapture, "_put_on_operators", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session.open()
    session.close()
    assert torch._C._len_torch_function_stack() == 0
    assert torch.autograd._engine_run_backward is engine  # type: ignore[attr-defined]
    session.open()
    torch.ones(2, requires_grad=True).sum().backward()
    session.close()
    assert torch.autograd._engine_run_backward is engine  # type: ignore[attr-defined]


def test_ranks_end_with_the_default_group() -> None:
    """What waits for the end of the ranks comes before it, however the group is named, and not where a smaller group ends."""
    ended: list[bool] = []
    remove = before_ranks_end(lambda: ended.append(dist.is_initialized()))
    ways: tuple[Callable[[], None], ...] = (
        dist.destroy_process_group,
        lambda: dist.destroy_process_group(dist.group.WORLD),
        lambda: dist.destroy_process_group(group=dist.group.WORLD),
    )
    try:
        for number, end in enumerate(ways, 1):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group(dist.new_group([0]))
            dist.destroy_process_group(group=dist.new_group([0]))
            end()
            assert ended == [True] * number
    finally:
        remove()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert len(ended) == len(ways)
