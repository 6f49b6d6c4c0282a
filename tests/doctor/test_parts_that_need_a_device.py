"""What checks do on a GPU or NPU only, with a stand-in for ``torch.cuda`` on the CPU: its graphs record operators and run them again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor import model
from msprobe_integrations.doctor.costs import memory, overhead
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.frameworks import graphs, ranks


class Graph(TorchDispatchMode):
    """Operators that ran inside, to be run again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            made.copy_(func(*args, **kwargs))


class Other(Graph):
    """A graph whose result hangs on how often it has run."""

    count = itertools.count(1)

    def replay(self) -> None:
        super().replay()
        self.calls[-1][3].add_(next(self.count))


def replay_without_hooks(block: torch.nn.Module, _sample: Any) -> torch.nn.Module:
    """`make_graphed_callables`: from now on nothing inside the module is called by Python."""
    forward = block.forward

    def replay(*args: Any) -> Any:
        inner = [each for each in block.modules() if each is not block]
        hooks = [(each._forward_pre_hooks, each._forward_hooks, dict(each._forward_pre_hooks), dict(each._forward_hooks)) for each in inner]
        for before, after, _, _ in hooks:
            before.clear()
            after.clear()
        try:
            return forward(*args)
        finally:
            for before, after, kept_before, kept_after in hooks:
                before.update(kept_before)
                after.update(kept_after)

    block.forward = replay  # type: ignore[method-assign]
    return block


class Cuda:
    """``torch.cuda``, as far as the checks use it."""

    CUDAGraph: type[Graph] = Graph
    make_graphed_callables = staticmethod(replay_without_hooks)
    taken = 2000

    @staticmethod
    @contextlib.contextmanager
    def graph(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode
        with graph:
            yield

    def max_memory_allocated(self) -> int:
        return self.taken

    memory_allocated = max_memory_reserved = max_memory_allocated

    def synchronize(self) -> None: ...

    reset_peak_memory_stats = empty_cache = synchronize


class StandIn(Device):
    """A device that is the CPU."""

    cuda = Cuda()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def module(self) -> Any:
        return self.cuda


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn("cuda")
    monkeypatch.setattr(StandIn, "cuda", Cuda())
    monkeypatch.setattr(graphs, "_REPLAYS", 4)
    for name in ("large", "small", "many"):
        monkeypatch.setitem(model.SIZES, name, model.TINY_MANY if name == "many" else model.TINY)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", replay_without_hooks)
    return made


def verdicts(lines: Iterator[Line]) -> list[str]:
    return [line.verdict for line in lines]


def other_bits(device: StandIn) -> None:
    device.cuda.CUDAGraph = Other  # type: ignore[misc]


def no_replay(device: StandIn) -> None:
    device.cuda.make_graphed_callables = lambda block, _: block  # type: ignore[method-assign]


def refuse(device: StandIn) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no graphs on this device")

    device.cuda.make_graphed_callables = device.cuda.graph = fails  # type: ignore[method-assign,assignment]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "expected"),
    [
        pytest.param(None, ["ok", "ok", "ok"], marks=pytest.mark.slow),
        pytest.param(other_bits, ["WRONG", "WRONG", "ok"], marks=pytest.mark.slow),
        (no_replay, ["ok", "ok", "WRONG"]),
        pytest.param(refuse, ["skipped", "skipped", "skipped"], marks=pytest.mark.slow),
    ],
)
def test_graphs(device: StandIn, defect: Callable[[StandIn], None] | None, expected: list[str]) -> None:
    """Replays with other bits are WRONG, so are records of calls that a replay does not make; without graphs nothing is checked."""
    if defect is not None:
        defect(device)
    module = device.cuda

    class Through:
        """`make_graphed_callables` is found where the probe looks for it."""

        def __getattr__(self, name: str) -> Any:
            if name == "make_graphed_callables" and defect is None:
                return torch.cuda.make_graphed_callables
            return getattr(module, name)

    StandIn.cuda = Through()  # type: ignore[assignment]
    assert verdicts(graphs.run(device)) == expected


@pytest.mark.parametrize(("more", "verdict"), [(0, "ok"), (1 << 40, "WRONG")])
def test_memory_of_a_training(device: StandIn, more: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak that grows with the probe on is WRONG."""
    real = memory.attach_probe

    @contextlib.contextmanager
    def probing(job: Any, mode: str, *args: Any, **options: Any) -> Iterator[Any]:
        device.cuda.taken = 2000 + (more if mode != "off" else 0)
        with real(job, mode, *args, **options) as step:
            yield step

    monkeypatch.setattr(memory, "attach_probe", probing)
    assert set(verdicts(memory.trainings(device))) == {verdict}


def test_every_model_is_measured(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole table of overheads runs to its end; no step is made for it."""
    monkeypatch.setattr(overhead, "seconds_of", lambda *_: 1.0)
    monkeypatch.setattr(overhead, "attach_probe", lambda *_: contextlib.nullcontext(lambda: None))
    names = [line.name for line in overhead.run(device)]
    assert names == [
        *(f"step time, large, {mode}" for mode in overhead.BOUND_BY_DEVICE),
        *(f"step time, small, {mode}" for mode in overhead.BOUND_BY_HOST),
        *(f"step time, many, {mode}" for mode in ("idle", "gradients", "parameters")),
        "step time, small, tensor",
    ]


@pytest.mark.parametrize(("counts", "verdict"), [((3, 3), "ok"), ((3, 4), "WRONG")])
def test_communicators(device: StandIn, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int], verdict: str) -> None:
    """A communicator of the device that is there with the probe only is WRONG."""
    found = {"plain": True, "repeatable": True, "rows": 1, "wrong": [], "communicators": counts}
    monkeypatch.setattr(ranks, "_ranks", lambda *_: [found])
    assert ranks.compare(device, "DDP", "nccl", 1).verdict == verdict


@pytest.mark.parametrize(("plain", "verdict"), [(False, "skipped"), (True, "WRONG")])
def test_a_rank_that_fails(device: StandIn, monkeypatch: pytest.MonkeyPatch, plain: bool, verdict: str) -> None:
    """What fails without the probe is not checked; what fails with it only is WRONG."""
    found = {"plain": plain, "rows": 0, "wrong": [], "communicators": None, "error": "RuntimeError: no such collective"}
    monkeypatch.setattr(ranks, "_ranks", lambda *_: [found, found])
    assert ranks.compare(device, "FSDP2", "gloo", 2).verdict == verdict
