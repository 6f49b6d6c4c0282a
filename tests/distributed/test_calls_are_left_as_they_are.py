"""Watching distributed calls changes nothing: no patch is left, no tensor is kept, autograd and inference mode work as before."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from distributed_job import distributed, frames, full, records
from forkpool import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from msprobe_integrations.torch.collectives.calls import _arguments
from msprobe_integrations.torch.collectives.kernels import kernels
from msprobe_integrations.torch.collectives.observer import CollectiveObserver

pytestmark = pytest.mark.framework


@pytest.fixture
def _one_of_two() -> Iterator[None]:
    """A process group that does not communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _methods() -> dict[Any, Any]:
    owners = [dist.Work, torch._C.Future, dist.ProcessGroup, dist.distributed_c10d, dist, *dist.Work.__subclasses__()]
    return {(owner, name): value for owner in owners for name, value in vars(owner).items() if callable(value)}


@pytest.mark.usefixtures("_one_of_two")
def test_nothing_is_left() -> None:
    """While a capture is open methods of handles are wrapped; afterwards everything is what it was, and no kernel is registered."""
    before = _methods()
    inside: list[dict[Any, Any]] = []
    records(lambda: inside.append(_methods()))
    changed = {name for (owner, name), value in inside[0].items() if before[owner, name] is not value}
    assert changed >= {"wait", "is_completed", "get_future", "then", "_end_coalescing", "_warn_not_in_group"}
    assert _methods() == before
    for operator in ("c10d::allreduce_", "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "BackendSelect")


def nothing_kept() -> list[str]:
    peer = 1 - dist.get_rank()

    def batch(t: torch.Tensor) -> None:
        for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer), dist.P2POp(dist.irecv, torch.zeros(2), peer)]):
            request.wait()

    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "sync": dist.all_reduce,
        "async": lambda t: dist.all_reduce(t, async_op=True).wait(),
        "gather": lambda t: dist.all_gather_into_tensor(torch.zeros(4), t),
        "functional": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD) + 1,
        "then": lambda t: dist.all_reduce(t, async_op=True).get_future().then(lambda f: f.value()).wait(),
        "batch": batch,
    }
    kept: list[str] = []

    def work() -> None:
        gc.collect()
        gc.disable()
        for name, call in calls.items():
            tensor = full(1)
            alive = weakref.ref(tensor)
            call(tensor)
            del tensor
            end = time.monotonic() + 5
            while alive() is not None and time.monotonic() < end:
                time.sleep(0.001)  # a thread of the backend lets go of it
            if alive() is not None:
                kept.append(name)
        gc.enable()

    functional.all_reduce(full(1), "sum", dist.group.WORLD).wait()  # torch keeps something of its first call
    for level in ("L0", "L1"):
        records(work, level)
    return kept


def test_no_tensor_is_kept() -> None:
    """When a call is complete and the caller has let its tensors go they are freed, without the cycle collector."""
    assert run_ranks(2, nothing_kept) == [[], []]


def without_and_with_autograd() -> tuple[Any, ...]:
    rank = dist.get_rank()

    def work() -> None:
        with torch.inference_mode():
            dist.all_reduce(full(rank))
            work_ = dist.all_reduce(full(rank), async_op=True)
            assert work_ is not None
            work_.wait()
        needs = full(rank).requires_grad_() * 1
        with torch.no_grad():
            dist.all_reduce(needs)
        assert needs.requires_grad

    (frame,) = frames(work)
    flags = [e.sections["output"][0].description.requires_grad for e in frame.entries if e.name.startswith("Distributed.")]
    return [r.output[0] for r in distributed(frame)], flags


def test_inference_mode_and_gradients() -> None:
    """Calls under inference mode are recorded like others; records say whether a tensor needs a gradient."""
    assert run_ranks(2, without_and_with_autograd)[0] == ([1.0, 1.0, 1.0], [False, False, True])


@pytest.mark.usefixtures("_one_of_two")
def test_gradients_through_functional_collectives_are_those_without_the_probe() -> None:
    """The kernels leave autograd's in place: results need gradients as they do without the probe."""
    needs: list[bool] = []

    def work() -> None:
        needs.append(functional.all_reduce(torch.ones(2, requires_grad=True), "sum", dist.group.WORLD).requires_grad)

    work()
    records(work)
    assert needs[0] == needs[1]


@pytest.mark.usefixtures("_one_of_two")
def test_a_fault_while_an_output_is_recorded() -> None:
    """An error after completion is reported once and does not reach the caller."""
    errors: list[Exception] = []
    seen: list[torch.Tensor] = []

    def reduce(tensor: torch.Tensor) -> Any:
        seen.append(tensor)
        if len(seen) > 1:
            raise ValueError("planted")

    observer = CollectiveObserver(reduce, lambda _: None, fail=errors.append)
    kernels.add(observer)
    dist.all_reduce(full(1))
    dist.all_reduce(full(1))
    kernels.discard(observer)
    assert [str(error) for error in errors] == ["planted"]
    assert not observer.on()


def test_the_form_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """For functions without a wrapper the caller's instruction says what was given by position; where it does not (``*``, ``partial``,
    calls from C), what has no default counts as positional."""
    import sys

    def isend(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:  # noqa: ARG001
        return _arguments(sys._getframe())

    monkeypatch.setattr(dist, "isend", isend)
    both = (1, 2)
    assert dist.isend(1, 2) == ((1, 2), {})
    assert isend(1, dst=3) == ((1,), {"dst": 3})
    assert isend(tensor=1, group_dst=4) == ((), {"tensor": 1, "group_dst": 4})
    assert isend(1, 2, None, 0) == ((1, 2, None, 0), {})
    assert isend(*both) == ((1,), {"dst": 2})
    assert isend(*both, tag=3) == ((1,), {"dst": 2, "tag": 3})
    assert functools.partial(isend, 1)(dst=4) == ((1,), {"dst": 4})
    assert list(map(isend, [1], [2])) == [((1,), {"dst": 2})]
