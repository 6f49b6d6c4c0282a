"""What the hook copies is what the tensor holds at the moment of the call."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from keeping import FORMATS, Keeping, bits, saved

from msprobe_engine.core.records import Entry
from msprobe_engine.core.settings.schema import SliceSettings
from msprobe_engine.formats.tensors.reader import not_saved
from msprobe_integrations.torch.dump import tensor_saver
from msprobe_integrations.torch.tensors.slices import Slices
from msprobe_integrations.torch.tensors.structure import convert
from msprobe_integrations.torch.testing import ProbeDevice, reads_forbidden

DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
          "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
          "float8_e8m0fnu"]  # fmt: skip


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of which every byte is another."""
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * torch.empty(0, dtype=dtype).element_size(), dtype=torch.int32).mul(37).to(torch.uint8)
    return (raw > 100).view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.dtype, found.shape, found.requires_grad) == (wanted.dtype, wanted.shape, False)
    assert bits(found) == bits(wanted)
    assert type(found) is torch.Tensor


@pytest.mark.parametrize("form", FORMATS)
def test_every_type_and_layout(tmp_path: Path, form: str) -> None:
    """All elements in C order, bit for bit: contiguous, transposed, strided, expanded, a part of a storage, 0-dim, empty."""
    for name in DTYPES:
        dtype = getattr(torch, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls complex32 experimental
            base = made(dtype, (6, 8))
            tensors = [base, base.t(), base[::2, 1::3], base[0].expand(3, 8), base[2:4], base[3, 5], base[:, 0], made(dtype, (0, 4))]
            wanted = [t.clone() for t in tensors]
            for found, want in zip(saved(tmp_path / name, form, tensors), wanted):
                same(found, want)


@pytest.mark.parametrize("form", FORMATS)
def test_the_value_is_that_of_the_call(tmp_path: Path, form: str) -> None:
    """An in-place change, a resize and the end of the tensor right after the copy do not reach the file."""
    tensors = [torch.arange(5.0), torch.arange(1e6), torch.arange(6.0).view(2, 3).t(), torch.tensor(3.0)]
    wanted = [t.clone() for t in tensors]

    def spoil() -> None:
        for t in tensors:
            t.fill_(-1.0)
        tensors[1].resize_(0)
        tensors[1].untyped_storage().resize_(0)
        del tensors[:]

    for found, want in zip(saved(tmp_path, form, tensors, spoil), wanted):
        same(found, want)


@pytest.mark.parametrize("form", FORMATS)
def test_conjugate_and_negative_views(tmp_path: Path, form: str) -> None:
    """What only is a flag of the tensor is in the values of the file."""
    x = torch.tensor([1 + 2j, 3 - 4j])
    tensors = [x.conj(), x.conj().imag, torch._neg_view(torch.arange(4.0))]
    for found, want in zip(saved(tmp_path, form, tensors), [torch.tensor([1 - 2j, 3 + 4j]), torch.tensor([-2.0, 4.0]), -torch.arange(4.0)]):
        same(found, want)
        assert torch.equal(found, want)


@pytest.mark.parametrize("form", FORMATS)
def test_only_the_elements_of_a_view_are_saved(tmp_path: Path, form: str) -> None:
    """A row of a large tensor takes the bytes of the row."""
    (found,) = saved(tmp_path, form, [torch.ones(1000, 1000)[3]])
    assert found.untyped_storage().nbytes() == 4000
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 4000 + 4096


@pytest.mark.parametrize("form", FORMATS)
def test_the_user_s_tensor_is_not_touched(tmp_path: Path, form: str) -> None:
    """Version, storage, gradient and flags stay, for types of 8 bits too, which the existing tool frees on the CPU."""
    tensors = [torch.ones(6).to(torch.float8_e4m3fn), torch.rand(3, 4, requires_grad=True), torch.nn.Parameter(torch.rand(5))]
    before = [(t._version, t.untyped_storage().nbytes(), t.data_ptr(), bits(t), t.requires_grad, t.grad_fn) for t in tensors]
    found = saved(tmp_path, form, tensors)
    assert [(t._version, t.untyped_storage().nbytes(), t.data_ptr(), bits(t), t.requires_grad, t.grad_fn) for t in tensors] == before
    for one, tensor in zip(found, tensors):
        same(one, tensor.detach())


def test_special_tensors(tmp_path: Path) -> None:
    """Saved is what the statistics are of: stored values of sparse tensors, values of nested ones, dequantized values, inner tensors."""
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    quantized = torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes
        nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
        tensors = [dense.to_sparse(), dense.to_sparse_csr(), quantized, nested, torch.nn.Buffer(torch.ones(2))]
        found = saved(tmp_path, "files", tensors)
    assert [t.tolist() for t in found] == [[1.0, 2.0], [1.0, 2.0], dense.tolist(), [1, 1, 0, 0, 0], [1.0, 1.0]]
    assert found[2].dtype == torch.float32


def test_tensors_inside_transforms(tmp_path: Path) -> None:
    """A vmap wrapper is saved with the whole batch, a grad wrapper as its inner tensor."""
    keeping = Keeping(tmp_path, "files")
    keeping.begin()

    def seen(x: torch.Tensor) -> torch.Tensor:
        keeping.save(f"Functional.f.{len(keeping.entries)}.forward", x)
        return x.sum()

    batch = torch.arange(6.0).view(3, 2)
    torch.vmap(seen)(batch)
    torch.func.grad(seen)(batch)
    keeping.end()
    found = keeping.load()
    assert [found[f"Functional.f.{i}.forward.output.0.pt"].tolist() for i in range(2)] == [batch.tolist()] * 2


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_to_save(tmp_path: Path, form: str) -> None:
    """Meta tensors and freed ones have no file, no name and are no loss; a type without a kernel is saved with a row of its own."""
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    keeping = Keeping(tmp_path, form)
    keeping.begin()
    refs = keeping.save("Functional.f.0.forward", torch.ones(3, device="meta"), freed, torch.ones(2, dtype=torch.complex32))
    result = keeping.end()
    assert [r.row >= 0 for r in refs] == [False, False, True]
    assert list(keeping.load()) == ["Functional.f.0.forward.output.2.pt"]
    assert (keeping.lost, result.late, result.rows.tolist()) == ({}, {}, [True, False])


@pytest.mark.parametrize("form", FORMATS)
def test_numpy_arrays(tmp_path: Path, form: str) -> None:
    """An array given to a call is saved like a tensor, of whatever strides and byte order; texts are only described."""
    arrays = [np.arange(6.0).reshape(2, 3).T, np.arange(4)[::-1], np.array([1, 2], ">i4"), np.float32([1.5]), np.array(7), np.array(["a"])]
    arrays[3].flags.writeable = False
    keeping = Keeping(tmp_path, form)
    keeping.begin()
    entry = Entry("Functional.f.0.forward", {"input_args": convert(arrays, keeping.keeper.reduce)})
    keeping.keeper.hand_over(entry)
    keeping.end()
    found = keeping.load()
    assert [found[f"Functional.f.0.forward.input.{i}.pt"].tolist() for i in range(5)] == [a.tolist() for a in arrays[:5]]
    assert len(found) == 5
    assert [node.description.type for node in entry.sections["input_args"][:5]] == ["numpy.ndarray"] * 5


@pytest.mark.parametrize("form", FORMATS)
def test_one_content_many_names(tmp_path: Path, form: str) -> None:
    """A tensor that is seen several times unchanged is stored once; after a change it is stored again."""
    keeping = Keeping(tmp_path, form)
    keeping.begin()
    x = torch.rand(1000)
    first = x.clone()
    keeping.save("Functional.a.0.forward", x)
    keeping.save("Functional.b.0.forward", x, x)
    x.add_(1)
    keeping.save("Functional.c.0.forward", x)
    keeping.end()
    found = keeping.load()
    assert len(found) == 4
    for name, tensor in found.items():
        same(tensor, x if ".c." in name else first)
    files = [p for p in (keeping.directory(0) / "dump_tensor_data").iterdir() if p.suffix != ".json"]
    assert len({p.stat().st_ino for p in files}) == (2 if form == "files" else 1)
    assert sum({p.stat().st_ino: p.stat().st_size for p in files}.values()) < 2 * 4000 + 2 * 2048


def test_device_tensors_are_not_waited_for(tmp_path: Path) -> None:
    """On a device the hook starts a copy and reads nothing."""
    inner = torch.arange(12.0).view(3, 4)
    tensors = [ProbeDevice.wrap(inner), ProbeDevice.wrap(inner.t())]
    with reads_forbidden():
        found = saved(tmp_path, "files", tensors)
    assert [t.tolist() for t in found] == [inner.tolist(), inner.t().tolist()]


def test_large_strided_tensors_of_a_device_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device puts a strided tensor in order before it copies: pieces of it, never the whole."""
    monkeypatch.setattr(tensor_saver, "_PIECE", 64)
    sizes: list[int] = []
    real = tensor_saver.stretch
    monkeypatch.setattr(tensor_saver, "stretch", lambda data, start, stop: (sizes.append(stop - start), real(data, start, stop))[1])
    tensors = [torch.arange(40.0).view(5, 8).t(), torch.arange(3.0).expand(13, 3)]
    found = saved(tmp_path, "files", [ProbeDevice.wrap(one) for one in tensors])
    assert [one.tolist() for one in found] == [one.tolist() for one in tensors]
    assert sizes == [16, 16, 8, 16, 16, 7]


@pytest.mark.parametrize("form", FORMATS)
def test_slices(tmp_path: Path, form: str) -> None:
    """With a slice the part is saved that the statistics are of."""
    keeping = Keeping(tmp_path, form, slices=lambda backend: Slices(backend, [SliceSettings(dim=0, begin=1, end=3)]))
    keeping.begin()
    x = torch.arange(20.0).view(5, 4)
    refs = keeping.save("Functional.f.0.forward", x, x.to(torch.complex32))
    keeping.end()
    found = list(keeping.load().values())
    assert found[0].tolist() == x[1:3].tolist()
    assert found[1].shape == (2, 4)
    assert refs[0].description.shape == (2, 4)


def test_inference_mode_and_no_autograd(tmp_path: Path) -> None:
    """Inference tensors are saved, and memory used inside inference mode serves outside of it."""
    keeping = Keeping(tmp_path, "files")
    keeping.begin()
    with torch.inference_mode():
        keeping.save("Functional.a.0.forward", torch.ones(2, 3).t())
    keeping.save("Functional.b.0.forward", torch.zeros(2, 3).t())
    keeping.end()
    assert [t.sum().item() for t in keeping.load().values()] == [6, 0]


def test_names_that_cannot_be_files(tmp_path: Path) -> None:
    """A name that is too long, has a separator or half a character is listed and counted; other names of the tensor are there."""
    keeping = Keeping(tmp_path, "files")
    keeping.begin()
    x = torch.ones(2)
    bad = ["Functional." + "x" * 250, "Functional.a/b", "Functional.a\udc80b", "Functional.a\0b"]
    for i, name in enumerate(bad):
        keeping.save(f"{name}.{i}.forward", x)
    keeping.save("Functional.good.0.forward", x)
    result = keeping.end()
    assert list(keeping.load()) == ["Functional.good.0.forward.output.0.pt"]
    assert result.late == {"tensor names that cannot be file names": 4}
    assert len(not_saved(keeping.directory(0))) == 4
