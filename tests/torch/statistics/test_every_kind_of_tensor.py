"""The torch backend: every kind of tensor has an answer, nothing waits, nothing raises, nothing of the training changes."""

from __future__ import annotations

import gc
import importlib
import os
import random
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_engine.core.backend import Backend, PendingRows, load_backend
from msprobe_engine.core.statistics import host_kernel, rows
from msprobe_engine.core.statistics.digest import digest_array
from msprobe_engine.core.statistics.rows import Statistics
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.testing import EarlyRead, ProbeDevice, reads_forbidden


@pytest.fixture
def backend() -> TorchBackend:
    """A fresh backend."""
    return TorchBackend()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def one(backend: TorchBackend, tensor: Any) -> tuple[Any, Statistics]:
    """Description and statistics of one tensor."""
    ref = backend.reduce(tensor)
    assert ref.row >= 0, backend.unsupported
    assert ref.description is backend.reduce(tensor).description
    return ref.description, rows.read_row(backend.finish_step().rows()[ref.row])


def none(backend: TorchBackend, tensor: Any, reason: str) -> Any:
    """Description of a tensor that has no row, for `reason`."""
    ref = backend.reduce(tensor)
    assert ref.row == -1
    assert backend.unsupported[reason] == 1
    return ref.description


def test_protocols() -> None:
    """The registered backend named torch implements `Backend`, its rows `PendingRows`."""
    backend = load_backend("torch")
    assert isinstance(backend, Backend)
    assert isinstance(backend.finish_step(), PendingRows)
    assert (backend.name, backend.framework) == ("torch", "pytorch")
    assert backend.is_tensor(torch.nn.Parameter(torch.ones(1)))
    assert not backend.is_tensor(np.ones(1))


def test_installed_packages_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of a dump ask for the backend with every tensor: only the first time costs a look into every installed package."""
    load_backend("torch")
    monkeypatch.setattr(importlib.import_module("msprobe_engine.core.backend"), "entry_points", None)
    assert isinstance(load_backend("torch"), TorchBackend)


def test_plain_tensor_and_parameter(backend: TorchBackend) -> None:
    """A parameter is described as torch.Tensor; statistics are those of the values."""
    p = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.0, 4.0]]))
    d, s = one(backend, p)
    assert d == ("torch.Tensor", "torch.float32", (2, 2), True, "cpu", ())
    assert (s.max, s.min, s.mean, s.zeros, s.count) == (4.0, -2.0, 0.75, 1, 4)
    assert s.norm == pytest.approx(21**0.5)
    assert s.digest is None
    backend.want_digest = True
    assert one(backend, p)[1].digest == digest_array(p.detach().numpy())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 5).t(),
        torch.randn(3, 1).expand(3, 4),
        torch.tensor(2.5),
        torch.randn(4, 4)[::2, 1:],
        torch.randn(2, 3, 4).permute(2, 0, 1),
    ],
)
def test_strides_and_scalars(tensor: torch.Tensor) -> None:
    """Non-contiguous, expanded and 0-dim tensors count by logical elements; first time and on the fast path."""
    backend = TorchBackend(digest=True)
    for again in (tensor, tensor.view(tensor.shape)):
        s = one(backend, again)[1]
        assert s.digest == digest_array(tensor.contiguous().numpy())
        assert s.mean == pytest.approx(tensor.double().mean().item())


def test_empty(backend: TorchBackend) -> None:
    """An empty tensor has a row with count 0 and nothing else to say."""
    for _ in range(2):
        assert one(backend, torch.empty(0, 3))[1][:8] == (0, 0, 0, 0, None, None, None, None)


def test_healthy_half_does_not_overflow(backend: TorchBackend) -> None:
    """64 float16 values of 60000 have a finite norm (the existing tool: Infinity); float64 1e300 stays 1e300."""
    assert one(backend, torch.full((64,), 60000.0, dtype=torch.float16))[1].norm == pytest.approx(8 * 60000, rel=1e-3)
    assert one(backend, torch.tensor([1e300], dtype=torch.float64))[1].max == 1e300
    s = one(backend, torch.tensor([2**53 + 1, 0]))[1]
    assert (s.max, s.mean) == (2**53 + 1, (2**53 + 1) / 2)


def test_negated_view(backend: TorchBackend) -> None:
    """A lazily negated or conjugated view has the statistics of its values, not of its memory."""
    for _ in range(2):
        assert one(backend, torch._neg_view(torch.tensor([1.0, 2.0])))[1].max == -1.0
        assert one(backend, torch.tensor([3 + 4j]).conj())[1].max == 5.0


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse(backend: TorchBackend, layout: torch.layout) -> None:
    """Sparse tensors: the stored values, with layout and nnz in the description; plain tensors of the same look do not confuse it."""
    plain = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    backend.reduce(plain)
    d, s = one(backend, plain.to_sparse(layout=layout))
    assert (s.count, s.max, s.zeros) == (3, 3.0, 0)
    assert dict(d.extra) == {"layout": str(layout).removeprefix("torch."), "nnz": 3}
    assert (d.type, d.shape) == ("torch.Tensor", (3, 3))
    assert backend.describe(plain).extra == ()


def test_nested(backend: TorchBackend) -> None:
    """Nested tensors, jagged and strided: the values of all components."""
    parts = [torch.full((2, 3), 1.0), torch.full((4, 3), 2.0)]
    d, s = one(backend, torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert (d.type, d.shape, s.count, s.max) == ("torch.nested._internal.nested_tensor.NestedTensor", (6, 3), 18, 2.0)
    d, s = one(backend, torch.nested.nested_tensor(parts))
    assert (s.count, s.mean) == (18, pytest.approx(30 / 18))
    assert ("layout", "strided") in d.extra


def test_quantized(backend: TorchBackend) -> None:
    """Quantized tensors: the values they stand for."""
    d, s = one(backend, torch.quantize_per_tensor(torch.tensor([0.0, 1.0]), 0.5, 0, torch.quint8))
    assert (s.max, d.dtype, d.extra) == (1.0, "torch.quint8", (("quantized", True),))


def test_functorch(backend: TorchBackend) -> None:
    """vmap and grad wrappers: the inner tensor, named as the existing format names them; plain ones do not confuse it."""
    backend.reduce(torch.zeros(4))
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(backend.reduce(x))
        seen.append(backend.describe(x))
        return x.sum()

    torch.vmap(look)(torch.arange(12.0).view(3, 4))
    torch.func.grad(look)(torch.ones(4))
    data = backend.finish_step().rows()
    assert [seen[0].description.type, seen[2].description.type] == ["BatchedTensor", "GradTrackingTensor"]
    assert (rows.read_row(data[seen[0].row]).count, rows.read_row(data[seen[2].row]).count) == (12, 4)
    assert seen[0].description is seen[1]


def test_no_data(backend: TorchBackend) -> None:
    """meta, fake and functional tensors, freed storage, None, and types without a kernel have no row, are counted, and are described."""
    assert none(backend, torch.empty(3, device="meta"), "meta").device == "meta"
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    assert none(backend, fake, "fake").type == "torch._subclasses.fake_tensor.FakeTensor"
    functional = torch._to_functional_tensor(torch.ones(2))
    assert none(backend, functional, "functional").shape == (2,)
    freed = torch.ones(5)
    backend.reduce(freed)
    freed.untyped_storage().resize_(0)
    freed._version  # noqa: B018
    backend.forget(freed)
    assert none(backend, freed, "freed").extra == (("freed", True),)
    assert backend.reduce(None).row == -1
    none(backend, torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "no kernel: torch.bits8")
    assert backend.finish_step().rows().shape == (1, 16)


def test_wrapper_subclasses(backend: TorchBackend) -> None:
    """A wrapper: its one inner tensor; several: what dequantize gives; otherwise no row and a count."""
    from torch.testing._internal.two_tensor import TwoTensor

    assert backend.reduce(TwoTensor(torch.ones(2), torch.ones(2))).row == -1
    assert sum(backend.unsupported.values()) == 1


@pytest.mark.usefixtures("group")
def test_dtensor(backend: TorchBackend) -> None:
    """DTensor: the local shard, with mesh, placements and global shape in the description; async results are not waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    d, s = one(backend, distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,)), [Shard(0)]))
    assert (d.type, s.max) == ("torch.distributed.tensor.DTensor", 5.0)
    assert dict(d.extra) == {"device_mesh": [0], "placements": [{"Shard": {"dim": 0}}], "global_shape": [6]}
    pending = all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert isinstance(pending, AsyncCollectiveTensor)
    assert none(backend, pending, "pending").extra == (("pending", True),)
    assert not pending.completed
    pending.trigger_wait()
    assert one(backend, pending)[1].mean == 1.0
    assert (backend.rank(), backend.world_size()) == (0, 1)


@pytest.mark.usefixtures("group")
def test_a_dtensor_that_is_written_to(backend: TorchBackend) -> None:
    """Its new numbers are seen, though lists that torch writes to in one call (gradients that are clipped) keep their version."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    gradient = distribute_tensor(torch.full((4,), 3.0), init_device_mesh("cpu", (1,)), [Shard(0)])
    refs = [backend.reduce(gradient)]
    torch._foreach_mul_([gradient], 0.5)
    refs.append(backend.reduce(gradient))
    with torch.no_grad():
        gradient.mul_(2)
    refs.append(backend.reduce(gradient))
    found = backend.finish_step().rows()
    assert [rows.read_row(found[ref.row]).max for ref in refs] == [3.0, 1.5, 3.0]


def test_rank_from_environment(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group the launcher's variables count; without those there is no rank."""
    if dist.is_initialized():
        pytest.skip("a process group is there")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (backend.rank(), backend.world_size()) == (3, 8)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert (backend.rank(), backend.world_size()) == (None, 1)


def test_same_version_is_reduced_once(backend: TorchBackend) -> None:
    """The same object in the same version has one row; after an in-place change, `forget`, or a step it has a new one."""
    x = torch.zeros(10)
    first = backend.reduce(x)
    assert backend.reduce(x) is first
    assert backend.reduce(x.view(2, 5)).row != first.row
    x.add_(1)
    second = backend.reduce(x)
    assert second.row != first.row
    x.view(2, 5).mul_(2)
    third = backend.reduce(x)
    assert third.row != second.row
    x.data.fill_(7)  # no new version
    backend.forget(x)
    fourth = backend.reduce(x)
    data = backend.finish_step().rows()
    assert [rows.read_row(data[r.row]).max for r in (first, second, third, fourth)] == [0, 1, 2, 7]
    assert backend.reduce(x).row == 0


def test_marked_tensors_keep_their_row(backend: TorchBackend) -> None:
    """A tensor that is marked as requiring a gradient after it was seen (as checkpointing does) is described anew, with the same row."""
    tensor = torch.ones(3)
    before = backend.reduce(tensor)
    tensor.requires_grad_()
    after = backend.reduce(tensor)
    assert (before.row, before.description.requires_grad) == (after.row, False)
    assert after.description.requires_grad is True
    assert after.description is backend.describe(tensor)
    assert backend.reduce(tensor) is after


def test_reused_ids_are_other_tensors(backend: TorchBackend) -> None:
    """A new tensor at the address of a dead one is reduced again."""
    ids, found = set(), []
    for i in range(200):
        x = torch.full((4,), float(i))
        ids.add(id(x))
        found.append(backend.reduce(x).row)
        del x
    assert len(ids) < 200, "no id was reused: the test shows nothing"
    data = backend.finish_step().rows()
    assert [data[r, rows.MAX] for r in found] == list(range(200))


def test_inference_tensors(backend: TorchBackend) -> None:
    """Inference tensors, which have no version, are reduced each time they are seen."""
    with torch.inference_mode():
        x = torch.ones(3)
        a = backend.reduce(x).row
        x.add_(1)
        b = backend.reduce(x).row
    data = backend.finish_step().rows()
    assert (data[a, rows.MAX], data[b, rows.MAX]) == (1.0, 2.0)


def test_nothing_is_kept_alive(backend: TorchBackend) -> None:
    """The probe holds no tensor: memory is freed when the training lets go of it."""
    import weakref

    x = torch.ones(4)
    gone = weakref.ref(x)
    backend.reduce(x)
    backend.reduce(x.t())
    del x
    assert gone() is None


def test_rows_are_not_overwritten_by_later_steps(backend: TorchBackend) -> None:
    """Rows of a step stay as they are while someone holds them, ten steps on."""
    kept = []
    for step in range(10):
        for i in range(50):
            backend.reduce(torch.full((3,), float(step * 100 + i)))
        kept.append(backend.finish_step().rows()[10:20])
        if step % 3 == 0:
            gc.collect()
    for step, data in enumerate(kept):
        assert data[:, rows.MAX].tolist() == [step * 100 + i for i in range(10, 20)]


def test_more_rows_than_planned(backend: TorchBackend) -> None:
    """A step with more tensors than the buffer was made for loses none."""
    tensors = [torch.full((2,), float(i)) for i in range(5000)]
    refs = [backend.reduce(t) for t in tensors]
    assert backend.finish_step().rows()[[r.row for r in refs], rows.MIN].tolist() == list(range(5000))


def test_no_early_read_and_one_copy() -> None:
    """On a device that refuses host reads, a whole step is reduced without one, and comes over in exactly one copy."""
    backend = TorchBackend(digest=True)
    tensors: list[torch.Tensor] = [torch.randn(10, 7), torch.randn(6, 4).t(), torch.arange(5), torch.tensor([1.0, float("nan")])]
    tensors += [torch.ones(3, dtype=d) for d in (torch.float16, torch.bool, torch.complex64, torch.uint64)] + [torch.empty(0)]
    before = ProbeDevice.copies
    with reads_forbidden():
        shown = [ProbeDevice.wrap(t) for t in tensors]
        refs = [backend.reduce(t) for t in shown]
        assert backend.reduce(shown[0]) is refs[0]
        refs.append(backend.reduce(torch.ones(9)))
        pending = backend.finish_step()
        with pytest.raises(EarlyRead):
            shown[0].sum().item()
    data = pending.rows()
    assert pending.rows() is data
    assert ProbeDevice.copies == before + 1
    assert backend.unsupported == {}
    for tensor, ref in zip([*tensors, torch.ones(9)], refs):
        bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        want = digest_array(tensor.contiguous().numpy()) if bits.numel() else 0
        s = rows.read_row(data[ref.row])
        assert (s.digest, s.count) == (want, tensor.numel())
    assert rows.read_row(data[refs[3].row]).nans == 1


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


class _SeenFunction(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", [True, False])
def test_modes_see_nothing(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Function modes, dispatch modes and autograd of the user see none of our operators, and random streams do not move."""
    if not kernel:
        monkeypatch.setattr(host_kernel, "available", False)
    backend = TorchBackend(digest=True)
    x = torch.randn(5, 3, requires_grad=True)
    y = x * 2
    state = torch.get_rng_state()
    with _SeenFunction() as functions, _Seen() as operators:
        for _ in range(2):
            refs = [backend.reduce(t) for t in (x, y, y.t())]
            backend.describe(y)
            backend.finish_step().rows()
    assert operators.calls == ["aten.t.default"] * 2
    assert len(functions.calls) == 2
    assert all(r.row >= 0 for r in refs)
    assert torch.equal(state, torch.get_rng_state())
    assert y._version == 0
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.eq(2).all()


def test_without_kernel_the_rows_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the C kernel is missing torch operators give the same numbers on the CPU."""
    tensors = [torch.randn(100), torch.randn(8, 8, dtype=torch.bfloat16).t(), torch.arange(7)]
    with_kernel = TorchBackend(digest=True)
    a = [one(with_kernel, t)[1] for t in tensors]
    monkeypatch.setattr(host_kernel, "available", False)
    without = TorchBackend(digest=True)
    for s, t in zip(a, tensors):
        assert one(without, t)[1][:13] == pytest.approx(s[:13], rel=1e-12)


def test_several_threads() -> None:
    """Hooks on several threads each get their own rows."""
    backend = TorchBackend()
    found: list[tuple[int, float]] = []

    def work(k: int) -> None:
        for i in range(500):
            found.append((backend.reduce(torch.full((5,), float(k * 1000 + i))).row, float(k * 1000 + i)))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    data = backend.finish_step().rows()
    assert len({r for r, _ in found}) == 2000
    assert all(data[r, rows.MAX] == v for r, v in found)


def test_save_and_load(backend: TorchBackend, tmp_path: Path) -> None:
    """A saved tensor is a detached, contiguous CPU copy of its values only, in a file that others cannot read."""
    big = torch.randn(1000, 1000, requires_grad=True)
    path = tmp_path / "x.pt"
    backend.save(big[:3, :2].t(), path)
    loaded = backend.load(path)
    assert torch.equal(loaded, big[:3, :2].t())
    assert not loaded.requires_grad
    assert path.stat().st_size < 10_000
    assert stat.S_IMODE(os.stat(path).st_mode) & 0o027 == 0


def test_random_state_round_trip(backend: TorchBackend) -> None:
    """Python, numpy and torch continue from the saved state with the same numbers."""
    state = backend.random_state()
    first = (random.random(), np.random.rand(), torch.rand(2).tolist())
    backend.set_random_state(state)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == first


@pytest.mark.parametrize("kernel", [True, False])
def test_parts_of_a_tensor_add_up(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat parts reduced with their start index merge to the row of the whole, digest included."""
    monkeypatch.setattr(host_kernel, "available", kernel and host_kernel.available)
    backend = TorchBackend(digest=True)
    whole = torch.randn(3000)
    refs = [backend.reduce_part(whole[lo:hi], lo) for lo, hi in ((0, 1000), (1000, 1001), (1001, 3000))]
    data = backend.finish_step().rows()
    merged = rows.empty(1)
    for ref in refs:
        merged = rows.merge(merged, data[ref.row : ref.row + 1])
    s = rows.read_row(merged[0])
    assert (s.count, s.digest, s.max) == (3000, digest_array(whole.numpy()), whole.max().item())


def test_an_expanded_view_costs_what_its_memory_does(backend: TorchBackend) -> None:
    """A view of 2**40 elements, of which there are three in memory, is made in no time, and so is its row; also the second time."""
    base = torch.tensor([[1.0], [-2.0], [float("nan")]])
    began = time.monotonic()
    refs = [backend.reduce(base.expand(3, 1 << 38)).row for _ in range(2)]  # the second one on the fast path
    small = backend.reduce(base.expand(3, 4)).row
    made = backend.finish_step().rows()
    assert time.monotonic() - began < 10
    for row in made[refs]:
        for word in (rows.COUNT, rows.NANS, rows.ZEROS):
            assert row.view(np.int64)[word] == made[small].view(np.int64)[word] << 36
        for word in (rows.SUM, rows.SUMSQ):
            assert row[word] == made[small][word] * 2**36
        assert (row[rows.MIN], row[rows.MAX]) == (-2.0, 1.0)
