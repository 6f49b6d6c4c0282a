"""Collectives of the monitor in gloo ranks: one sample per tensor and call."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once here instead of in every forked rank
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from forkpool import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import make, monitor, watch

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.records import Frame
from msprobe_engine.core.statistics import rows
from msprobe_engine.probe.sinks.memory import MemorySink

pytestmark = pytest.mark.framework
Seen = tuple[str, str, float]
ALL = monitor(collectives=True, collective_inputs=True)


def seen(frame: Frame) -> list[Seen]:
    """Operation, end of the tag, mean; in order."""
    found = []
    for s in frame.samples:
        assert s.family == "other"
        assert s.extra["tag"].startswith(f"{s.name}/rank{frame.rank}/")
        mean = rows.read_row(frame.rows[s.ref.row]).mean
        assert mean is not None
        found.append((s.name, s.extra["tag"].rpartition("/")[2], mean))
    return found


def under(work: Any, settings: Any = ALL, steps: int = 1) -> list[Frame]:
    return watch(nn.Identity(), settings, lambda _: work(), steps)


def full(value: float, n: int = 2) -> torch.Tensor:
    return torch.full((n,), float(value))


def every_kind() -> list[Seen]:
    rank = dist.get_rank()

    def work() -> None:
        dist.all_reduce(full(rank + 1))
        dist.broadcast(full(rank + 5), 1)
        parts = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(parts, full(rank + 1))
        dist.all_gather_into_tensor(torch.zeros(4), full(rank + 1))
        dist.reduce_scatter_tensor(torch.zeros(1), torch.tensor([1.0, 2.0]) + rank)
        dist.all_to_all_single(torch.zeros(2), full(rank + 1))
        sent = [full(rank + 1, 1), full(rank + 3, 1)]
        dist.all_to_all([torch.zeros(1), torch.zeros(1)], sent)
        if rank:
            dist.recv(torch.zeros(2), 0)
        else:
            dist.send(full(7), 1)
        other = 1 - rank
        batch = [dist.P2POp(dist.isend, full(rank + 1), other), dist.P2POp(dist.irecv, torch.zeros(2), other)]
        for request in dist.batch_isend_irecv(batch):
            assert request.wait() is True
        dist.all_reduce(full(rank + 10))

    return seen(under(work)[0])


def test_every_kind() -> None:
    """Inputs before and outputs after, of each call, with its number; calls of one operation are not mixed; the second tensor of a
    call has its own number."""
    zero, one = run_ranks(2, every_kind)
    expected = [
        ("all_reduce", "pre_0_0", 1), ("all_reduce", "post_0_0", 3),
        ("broadcast", "post_0_0", 6),
        ("all_gather", "pre_0_0", 1), ("all_gather", "post_0_0", 1), ("all_gather", "post_0_1", 2),
        ("all_gather_into_tensor", "pre_0_0", 1), ("all_gather_into_tensor", "post_0_0", 1.5),
        ("reduce_scatter_tensor", "pre_0_0", 1.5), ("reduce_scatter_tensor", "post_0_0", 3),
        ("all_to_all_single", "pre_0_0", 1), ("all_to_all_single", "post_0_0", 1.5),
        ("all_to_all", "pre_0_0", 1), ("all_to_all", "pre_0_1", 3), ("all_to_all", "post_0_0", 1), ("all_to_all", "post_0_1", 2),
        ("send", "pre_0_0", 7),
        ("batch_isend_irecv", "pre_0_0", 1), ("batch_isend_irecv", "post_0_0", 2),
        ("all_reduce", "pre_1_0", 10), ("all_reduce", "post_1_0", 21),
    ]  # fmt: skip
    assert zero == expected  # without what lay in the memory that the other rank's broadcast came to
    assert ("broadcast", "pre_0_0", 6) in one
    assert ("recv", "post_0_0", 7) in one


def asynchronous() -> tuple[list[Seen], list[bool], dict[str, int]]:
    rank = dist.get_rank()
    results: list[bool] = []
    held: list[Any] = []

    def work() -> None:
        tensor = full(rank + 1)
        later = dist.all_reduce(tensor, async_op=True)
        assert later is not None
        results.append(later.wait())
        tensor.zero_()

        functional.all_reduce(full(rank + 2), "sum", dist.group.WORLD).sum()
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(full(rank))
            dist.all_reduce(full(rank + 1))
        manager.wait()
        forgotten = full(rank)
        held.append(dist.all_reduce(forgotten, async_op=True))
        held.append(forgotten)
        forgotten.add_(0)  # written to: what comes then is not what arrived

    (frame,) = under(work, monitor(collectives=True))
    held[0].wait()
    return seen(frame), results, frame.lost


def test_outputs_at_completion() -> None:
    """Outputs of asynchronous work are taken when somebody has waited; what nobody waits for is counted as lost; `wait` returns what it
    returned before; functional and coalesced ones are seen too."""
    found, results, lost = run_ranks(2, asynchronous)[0]
    assert results == [True]
    assert found[:2] == [("all_reduce", "post_0_0", 3), ("functional_all_reduce", "post_0_0", 5)]
    assert sorted(mean for _, _, mean in found[2:]) == [1, 3]
    assert sum(lost.values()) == 1


def with_ddp() -> tuple[set[str], list[Any], list[tuple[float, float]]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    x = torch.randn(2, 3) * (dist.get_rank() + 1)
    norms = []

    def step(_: int) -> None:
        model.zero_grad()
        model(x).sum().backward()
        norms.append(float(model.module.weight.grad.double().norm()))

    frames = watch(model, ALL, step, steps=3)
    rows_of = [
        (float(rows.read_row(f.rows[s.ref.row]).norm or 0), norm)
        for f, norm in zip(frames, norms)
        for s in f.samples
        if s.extra["tag"].endswith("post_0_0") and s.name == "c10d_all_reduce"
    ]
    return {s.name for f in frames for s in f.samples}, [s.extra["group"] for f in frames for s in f.samples], rows_of


def test_gradients_of_ddp() -> None:
    """The reducer's all-reduce of gradient buckets is seen: what comes out is the sum, or the mean, that the optimizer gets."""
    for names, groups, found in run_ranks(2, with_ddp):
        assert "c10d_all_reduce" in names
        assert set(groups) == {"0-1"}
        assert found
        for bucket, gradient in found:
            assert bucket == pytest.approx(gradient, rel=1e-6) or bucket == pytest.approx(2 * gradient, rel=1e-6)


def sites(patterns: tuple[str, ...]) -> list[tuple[str, str]]:
    def here() -> None:
        dist.all_reduce(full(1))

    def there() -> None:
        dist.all_reduce(full(2))

    def work() -> None:
        here()
        there()

    line = here.__code__.co_firstlineno + 1
    (frame,) = under(work, monitor(collectives=True, collective_sites=tuple(p.format(line=line) for p in patterns)))
    return [(s.extra["tag"], s.extra["site"]) for s in frame.samples]


def test_sites() -> None:
    """Patterns choose calls by any frame of their stack; a call that is left out counts in the numbers. `site` is the caller's line."""
    (every,) = run_ranks(1, sites, ())
    assert [tag for tag, _ in every] == ["all_reduce/rank0/post_0_0", "all_reduce/rank0/post_1_0"]
    assert [site.rpartition("[")[0] for _, site in every] == [__file__, __file__]
    (one,) = run_ranks(1, sites, (r"test_collectives\.py\[{line}\]",))
    assert one == every[:1]
    (none,) = run_ranks(1, sites, ("megatron",))
    assert none == []


def stacks(output: Path) -> int:
    def work() -> None:
        for _ in range(3):
            dist.all_reduce(full(1))

    memory = MemorySink()
    probe = make(monitor(collective_stacks=True, collectives=True), memory, output=output)
    probe.attach(nn.Identity())
    for number in range(3):
        probe.begin_step(number)
        work()
        if number:
            dist.broadcast(full(1), 0)
        probe.end_step()
    probe.close()
    return sum(len(frame.samples) for frame in memory.frames)


def test_stacks(tmp_path: Path) -> None:
    """Every call stack is written once, no statistics are taken, and the training goes on."""
    assert run_ranks(2, stacks, tmp_path) == [0, 0]
    for rank in (0, 1):
        (path,) = (tmp_path / "monitor").glob(f"*-rank{rank}-*/collective_stacks.csv")
        with open(path, newline="") as file:
            found = list(csv.DictReader(file))
        assert [(r["op"], r["group"]) for r in found] == [("all_reduce", "0-1"), ("broadcast", "0-1")]
        assert all(r["site"].startswith(f"{__file__}[") for r in found)
        assert found[0]["stack"].splitlines()[0].endswith(" work")


def test_pattern_that_is_none() -> None:
    """A pattern that is no regular expression is an error with the pattern."""
    with pytest.raises(SettingsError, match=r"collective_sites: 'a\[1' is no regular expression"):
        make(monitor(collectives=True, collective_sites=("a[1",)), MemorySink())


def undone() -> bool:
    before = (dist.Work.__dict__["wait"], torch._C.Future.__dict__.get("wait"))
    under(lambda: dist.all_reduce(full(1)))
    return before == (dist.Work.__dict__["wait"], torch._C.Future.__dict__.get("wait"))


def test_nothing_is_left_behind() -> None:
    """After the last step the methods of `Work` are torch's own."""
    assert run_ranks(1, undone) == [True]
