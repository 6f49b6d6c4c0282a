"""Cuts of tensors: which part is left, what is taken of it, what the record says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_engine import rows
from msprobe_engine.digest import digest_array
from msprobe_engine.settings.schema import SliceSettings
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.slices import Slices
from msprobe_integrations.torch.testing import ProbeDevice, reads_forbidden

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
@settings(max_examples=60, deadline=None)
def test_the_part_is_that_of_26_2_0(shape: list[int], items: list[SliceSettings], turned: bool) -> None:
    """Any list of elements leaves what 26.2.0 leaves of tensors of any shape and stride; the record has its shape, and the whole one when
    they differ; `cut` gives the same part as a view."""
    backend = TorchBackend(digest=True)
    slices = Slices(backend, items)
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)
    tensor = tensor.permute(tuple(reversed(range(tensor.ndim)))) if turned else tensor
    want = reference(tensor.numpy(), items)
    ref = slices.reduce(tensor)
    cut = slices.cut(tensor)
    assert ref.description.shape == want.shape == tuple(cut.shape)
    assert dict(ref.description.extra) == ({} if want.shape == tuple(tensor.shape) else {"full_shape": list(tensor.shape)})
    assert (cut is tensor) == (want.shape == tuple(tensor.shape))
    assert cut.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    s = rows.read(backend.finish_step().rows()[ref.row])
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
    assert [rows.read(data[r.row]).min for r in (whole, part, again)] == [0.0, 1.0, 2.0]


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
    assert none.cut(tensor) is tensor
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
    assert rows.read(pending.rows()[ref.row]).digest == digest_array(tensor[1:3].numpy())


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
    assert [rows.read(data[r.row]).min for r in found] == [2.0, 1.0, 1.0]
