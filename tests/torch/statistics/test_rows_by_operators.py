"""Rows by torch operators, the memory they lie in, and rows of parts of tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_engine.core.settings.schema import SliceSettings
from msprobe_engine.core.statistics import host_kernel, rows
from msprobe_engine.core.statistics.digest import digest_array
from msprobe_integrations.common.statistics.row_memory import MemoryPool, RowBuffer
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics import rows as statistics
from msprobe_integrations.torch.statistics.device_rows import DeviceRows, Taker
from msprobe_integrations.torch.statistics.rows import CODES, host_flags, reduce_device
from msprobe_integrations.torch.tensors.slices import Slices
from msprobe_integrations.torch.testing import ProbeDevice, reads_forbidden

# Rows by torch operators and the memory they lie in.

INTEGER_WORDS = [0, 1, 2, 3, 4, 5, 10, 11, 12]


def by_operators(tensor: torch.Tensor, want: int = host_kernel.WANT_DIGEST, index0: int = 0) -> np.ndarray:
    """The row `reduce_device` writes, with the words of the host put in."""
    device = DeviceRows(tensor, 4)
    reduce_device(tensor, Taker(device, tensor, 0, host_flags(tensor.dtype, want)), want, index0)
    out = rows.empty(1)
    device.scatter(device.join_rows().numpy(), out)
    return out[0]


def by_numpy(tensor: torch.Tensor, index0: int = 0, want: int = host_kernel.WANT_DIGEST) -> np.ndarray:
    """The reference row of the bits of `tensor`."""
    raw = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    flat = torch.view_as_real(raw) if raw.is_complex() else raw
    return host_kernel.row_of(flat.reshape(-1).view(torch.uint8).numpy(), CODES[tensor.dtype], want, index0)


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal rows; sums to rounding."""
    assert got.view(np.int64)[INTEGER_WORDS].tolist() == want.view(np.int64)[INTEGER_WORDS].tolist()
    np.testing.assert_allclose(got[6:8], want[6:8], rtol=1e-15)
    np.testing.assert_allclose(got[9], want[9], rtol=1e-11)
    np.testing.assert_allclose(got[8], want[8], rtol=1e-11, atol=1e-11 * np.sqrt(min(want[9], 1e300)))


def bits(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    """Random bits: NaN, Inf and subnormals come with them."""
    if n == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, dtype=np.uint8))
    if dtype == torch.bool:
        return (raw % 2).view(dtype)
    if dtype in (torch.float64, torch.complex128):
        return torch.from_numpy(np.random.default_rng(seed).standard_normal(n * dtype.itemsize // 8)).view(dtype)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", list(CODES))
@settings(max_examples=3, deadline=None)
@given(n=st.one_of(st.integers(0, 40), st.integers(1000, 3000)), seed=st.integers(0, 2**31), index0=st.sampled_from([0, 1, 2047]))
def test_operators_give_the_numpy_row(dtype: torch.dtype, n: int, seed: int, index0: int) -> None:
    """For every type the operators give the counts, extremes, exact integers and digest of the reference; sums to rounding."""
    tensor = bits(dtype, n, seed)
    same(by_operators(tensor, host_kernel.WANT_DIGEST, index0), by_numpy(tensor, index0))


@pytest.mark.parametrize("dtype", list(CODES))
@settings(max_examples=3, deadline=None)
@given(n=st.sampled_from([0, 1, 3000]), seed=st.integers(0, 2**31), limit=st.sampled_from([2e-38, 1.5]))
def test_moments_and_counts_below_a_limit(dtype: torch.dtype, n: int, seed: int, limit: float) -> None:
    """SUM3, SUM4 and BELOW by operators are those of the reference for every type, in one piece or several."""
    tensor = bits(dtype, n, seed)
    want = host_kernel.WANT_MOMENTS | host_kernel.want_below(limit)
    expected = by_numpy(tensor, 0, want)
    for piece in (1 << 22, 1234):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(statistics, "PIECE", piece)
            row = by_operators(tensor, want)
        same(row, expected)
        assert row.view(np.int64)[rows.BELOW] == expected.view(np.int64)[rows.BELOW]
        np.testing.assert_allclose(row[rows.SUM4], expected[rows.SUM4], rtol=1e-11)
        np.testing.assert_allclose(row[rows.SUM3], expected[rows.SUM3], rtol=1e-11, atol=1e-10 * expected[rows.SUM4] ** 0.75)


def test_any_strides_and_scalars() -> None:
    """Transposed, expanded and 0-dim tensors are counted by logical elements."""
    x = torch.randn(6, 5)
    for tensor in (x.t(), x[:, 1].expand(3, 6), torch.tensor(3.0), x[1:, ::2], torch.ones(1).expand(70)):
        same(by_operators(tensor), by_numpy(tensor))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex128, torch.bfloat16])
def test_one_element_of_any_stride(dtype: torch.dtype) -> None:
    """A tensor of one element is contiguous whatever its stride is, and has a digest all the same."""
    tensor = torch.tensor([3, 5]).to(dtype)[::2]
    assert (tensor.is_contiguous(), tensor.stride()) == (True, (2,))
    same(by_operators(tensor), by_numpy(tensor))


def test_under_autocast_and_inference_mode() -> None:
    """Autocast does not lower the precision, and rows can be written inside and outside of inference mode."""
    x = torch.randn(1000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(by_operators(x), by_numpy(x))
    with torch.inference_mode():
        device = DeviceRows(x, 2)
        reduce_device(x, Taker(device, x, 0, host_flags(x.dtype, False)), False)
    reduce_device(x, Taker(device, x, 1, host_flags(x.dtype, False)), False)
    out = rows.empty(2)
    device.scatter(device.join_rows().numpy(), out)
    assert out[0].tobytes() == out[1].tobytes()


def test_row_memory_is_not_reused_while_a_view_lives() -> None:
    """Memory returns to the pool only when the last array over it, even a slice of a slice, is gone."""
    pool = MemoryPool()
    buffer = RowBuffer(pool, 8)
    address = buffer.address(0)
    part = buffer.rows(6)[2:4][0]
    part[:] = 5.0
    del buffer
    gc.collect()
    other = RowBuffer(pool, 8)
    assert other.address(0) != address
    other.rows(8)[:] = 1.0
    assert (part == 5.0).all()
    del part
    gc.collect()
    assert RowBuffer(pool, 8).address(0) == address


def test_row_buffer_grows_without_moving_rows() -> None:
    """Rows behind the end get new memory; addresses given out before stay valid and the rows come out in order."""
    buffer = RowBuffer(MemoryPool(), 4)
    x = np.arange(1.0, 31.0)
    first = buffer.address(0)
    for i in range(30):
        host_kernel.reduce(x.ctypes.data + 8 * i, 1, 1, buffer.address(i), 0, 0)
    assert buffer.address(0) == first
    assert buffer.rows(30)[:, rows.SUM].tolist() == x.tolist()
    buffer.clear(17)
    assert rows.as_int64(buffer.rows(30))[17, rows.COUNT] == 0


# Cuts of tensors: which part is left, what is taken of it, what the record says.

ITEMS = st.lists(
    st.builds(
        SliceSettings,
        dim=st.integers(0, 3),
        size=st.none() | st.integers(0, 4),
        begin=st.integers(-5, 5),
        end=st.none() | st.integers(-5, 5),
    ),
    max_size=3,
)


def reference(tensor: np.ndarray, items: list[SliceSettings]) -> np.ndarray:
    """The rule of 26.2.0: one Python slice per dimension, the last element for it that applies."""
    index = [slice(None)] * tensor.ndim
    for item in items:
        if item.dim < tensor.ndim and (item.size is None or item.size == tensor.shape[item.dim]):
            index[item.dim] = slice(item.begin, item.end)
    return np.asarray(tensor[tuple(index)])


@pytest.fixture
def backend() -> TorchBackend:
    """A backend that takes digests, which tell parts apart."""
    return TorchBackend(digest=True)


@given(shape=st.lists(st.integers(0, 4), max_size=4), items=ITEMS, turned=st.booleans())
def test_the_part_is_that_of_26_2_0(shape: list[int], items: list[SliceSettings], turned: bool) -> None:
    """Any list of elements leaves what 26.2.0 leaves of tensors of any shape and stride; the record has its shape, and the whole one when
    they differ; `cut` gives the same part as a view."""
    backend = TorchBackend(digest=True)
    slices = Slices(backend, items)
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)
    tensor = tensor.permute(tuple(reversed(range(tensor.ndim)))) if turned else tensor
    want = reference(tensor.numpy(), items)
    ref = slices.reduce(tensor)
    cut = slices.cut_tensor(tensor)
    assert ref.description.shape == want.shape == tuple(cut.shape)
    assert dict(ref.description.extra) == ({} if want.shape == tuple(tensor.shape) else {"full_shape": list(tensor.shape)})
    assert (cut is tensor) == (want.shape == tuple(tensor.shape))
    assert cut.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    s = rows.read_row(backend.finish_step().rows()[ref.row])
    assert (s.count, s.digest) == (want.size, digest_array(want) if want.size else 0)


def test_one_row_per_version(backend: TorchBackend) -> None:
    """The same version of a tensor has one row, cut or not, and the row of the whole is another one; a change ends it."""
    slices = Slices(backend, [SliceSettings(dim=0, begin=1)])
    tensor, short = torch.arange(4.0), torch.tensor(3.0)
    whole, part = backend.reduce(tensor), slices.reduce(tensor)
    assert slices.reduce(tensor) is part
    assert backend.reduce(tensor) is whole
    assert slices.reduce(short) is backend.reduce(short)
    tensor.add_(1)
    again = slices.reduce(tensor)
    assert len({whole.row, part.row, again.row}) == 3
    backend.forget()
    assert slices.reduce(tensor).row != again.row
    data = backend.finish_step().rows()
    assert [rows.read_row(data[r.row]).min for r in (whole, part, again)] == [0.0, 1.0, 2.0]


def test_one_more_element(backend: TorchBackend) -> None:
    """The element of a request comes last and wins for its dimension; without it, and without elements, tensors stay whole."""
    slices = Slices(backend, [SliceSettings(dim=0, begin=0, end=1)])
    tensor = torch.arange(12.0).view(6, 2)
    shapes = [slices.reduce(tensor).description.shape]
    slices.extra = SliceSettings(dim=0, size=6, begin=2, end=5)
    shapes.append(slices.reduce(tensor).description.shape)
    slices.extra = None
    shapes.append(slices.reduce(tensor).description.shape)
    assert shapes == [(1, 2), (3, 2), (1, 2)]
    none = Slices(backend, ())
    assert none.reduce(tensor) is backend.reduce(tensor)
    assert none.cut_tensor(tensor) is tensor
    none.extra = SliceSettings(dim=1, begin=1)
    assert none.reduce(tensor).description.shape == (6, 1)


def test_tensors_without_data(backend: TorchBackend) -> None:
    """Meta tensors have the shape of the cut, as in 26.2.0, and no row."""
    ref = Slices(backend, [SliceSettings(dim=1, begin=-2)]).reduce(torch.ones(3, 5, 2, device="meta"))
    assert (ref.row, ref.description.shape, ref.description.extra) == (-1, (3, 2, 2), (("full_shape", [3, 5, 2]),))


def test_gradients_and_modes(backend: TorchBackend) -> None:
    """A tensor that needs a gradient keeps saying so, its graph and version stay as they are, inference tensors work too."""
    slices = Slices(backend, [SliceSettings(dim=0, end=1)])
    leaf = torch.randn(3, requires_grad=True)
    product = leaf * 2
    refs = [slices.reduce(leaf), slices.reduce(product)]
    assert all(r.description.requires_grad for r in refs)
    assert (leaf._version, product._version, product.grad_fn is not None) == (0, 0, True)
    product.sum().backward()
    assert leaf.grad is not None
    with torch.inference_mode():
        assert slices.reduce(torch.ones(3)).description.shape == (1,)
    assert backend.unsupported == {}


def test_a_device_is_not_waited_for(backend: TorchBackend) -> None:
    """Parts of device tensors are views: nothing is read before the end of the step."""
    slices = Slices(backend, [SliceSettings(dim=0, begin=1, end=3)])
    tensor = torch.randn(5, 3)
    with reads_forbidden():
        ref = slices.reduce(ProbeDevice.wrap(tensor))
        pending = backend.finish_step()
    assert rows.read_row(pending.rows()[ref.row]).digest == digest_array(tensor[1:3].numpy())


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A device mesh of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_wrapped_tensors(backend: TorchBackend, mesh: Any) -> None:
    """DTensor: the local shard is cut; nested: the values; vmap: the whole batch; as 26.2.0 does. The description keeps its type."""
    from torch.distributed.tensor import DTensor, Shard

    slices = Slices(backend, [SliceSettings(dim=0, begin=1)])
    found = [slices.reduce(DTensor.from_local(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]))]
    found.append(slices.reduce(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)))
    slices.reduce(torch.ones(1))  # looks like one row of the batch
    torch.vmap(lambda x: (found.append(slices.reduce(x)), x)[1])(torch.arange(4.0).view(4, 1))
    assert [r.description.shape for r in found] == [(2, 2), (2, 3), (3, 1)]
    assert [r.description.type.rpartition(".")[2] for r in found] == ["DTensor", "NestedTensor", "BatchedTensor"]
    assert [dict(r.description.extra)["full_shape"] for r in found] == [[3, 2], [3, 3], [4, 1]]
    data = backend.finish_step().rows()
    assert [rows.read_row(data[r.row]).min for r in found] == [2.0, 1.0, 1.0]
