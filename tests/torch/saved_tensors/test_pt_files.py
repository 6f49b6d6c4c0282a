"""`.pt` files from templates are the files that ``torch.save`` writes."""

from __future__ import annotations

import io
import itertools
import warnings
import zipfile
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from keeping import bits

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.dump.writing.pt_template import PtTemplate, Sample, split_sample
from msprobe_integrations.torch.dump.tensor_saver import sample

SAVED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.uint16, torch.bool,
         torch.complex64, torch.complex128, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
         torch.float8_e5m2fnuz, torch.float8_e8m0fnu]  # fmt: skip


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    raw = torch.arange(1, 1 + numel * torch.empty(0, dtype=dtype).element_size(), dtype=torch.float32).to(torch.uint8)
    return (raw > 100).view(shape) if dtype == torch.bool else raw.view(dtype).view(shape).clone()


def by_torch(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def by_template(tensor: torch.Tensor, template: PtTemplate | None = None) -> bytes:
    raw = bits(tensor)
    template = template or PtTemplate(sample(str(tensor.dtype), tuple(tensor.shape)))
    assert template.overhead + len(raw) == len(template.head) + len(raw) + len(template.tail(0))
    return template.head + raw + template.tail(zlib.crc32(raw))


def test_same_bytes_as_torch_save() -> None:
    """Every type and shape gives the very file of torch.save, which unzip accepts and torch.load reads with weights_only."""
    for dtype, shape in itertools.product(SAVED, [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4, 5), (64, 129)]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = made(dtype, shape)
            mine = by_template(tensor)
            assert mine == by_torch(tensor), (dtype, shape)
            assert zipfile.ZipFile(io.BytesIO(mine)).testzip() is None, (dtype, shape)
            read = torch.load(io.BytesIO(mine), weights_only=True)
        assert (read.dtype, read.shape, bits(read)) == (dtype, tensor.shape, bits(tensor))


@given(st.lists(st.integers(0, 12), max_size=4), st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e5m2"]))
def test_any_shape(shape: list[int], dtype: str) -> None:
    """One template serves every content of its type and shape."""
    shapes = tuple(shape)
    template = PtTemplate(sample(f"torch.{dtype}", shapes))
    for _ in range(2):
        raw = torch.randint(0, 2, (torch.Size(shapes).numel() * torch.empty(0, dtype=getattr(torch, dtype)).element_size(),))
        tensor = raw.to(torch.uint8).view(getattr(torch, dtype)).view(shapes)
        assert by_template(tensor, template) == by_torch(tensor.clone())


def test_large_samples_cost_nothing() -> None:
    """A tensor of 6 GiB is sampled without its bytes, and its sizes are written in 64 bits."""
    found = sample("torch.float32", (3 << 29,))
    assert found.nbytes == 6 << 30
    assert len(found.head) + len(found.tail) < 4096
    template = PtTemplate(found)
    assert template.tail(7)[4:8] == (7).to_bytes(4, "little")
    assert template.tail(7)[8:24] == (6 << 30).to_bytes(8, "little") * 2


@pytest.fixture
def _without_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


@pytest.mark.usefixtures("_without_checksums")
@pytest.mark.parametrize("shape", [(0,), (3, 4), (300, 50)], ids=str)
def test_files_have_checksums_also_when_torch_was_told_to_leave_them_out(shape: tuple[int, ...]) -> None:
    """What torch writes without CRC-32 gets them, so that unzip accepts the file."""
    tensor = torch.rand(shape)
    mine = by_template(tensor)
    assert zipfile.ZipFile(io.BytesIO(mine)).testzip() is None
    assert torch.equal(torch.load(io.BytesIO(mine), weights_only=True), tensor)


def test_a_torch_without_skip_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch cannot leave the bytes out (before 2.6) the sample is taken from the whole file."""
    monkeypatch.delattr(torch.serialization, "skip_data")
    tensor = torch.rand(100, 100)
    assert by_template(tensor) == by_torch(tensor)


@given(st.data())
def test_damaged_samples_are_refused(data: st.DataObject) -> None:
    """A sample that torch did not write is an error of this project, never another one."""
    whole = by_torch(torch.arange(12.0))
    place = data.draw(st.integers(0, len(whole) - 1))
    broken = bytearray(whole[: data.draw(st.integers(1, len(whole)))])
    if place < len(broken):
        broken[place] ^= data.draw(st.integers(1, 255))
    try:
        found = split_sample(bytes(broken))
        PtTemplate(found).tail(0)
        PtTemplate(Sample(found.head[:-1], found.nbytes, found.tail)).tail(0)
    except DumpFormatError:
        pass
