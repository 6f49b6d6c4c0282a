"""Saved tensors are read block by block as torch reads them whole; what is no plain tensor is refused and never executed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_engine.core.errors import DumpFormatError, ProbeError
from msprobe_engine.formats.dump.writing.packed_files import DTYPES
from msprobe_engine.formats.tensors.blocks import join, open_elements, open_file, whole
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_engine.formats.tensors.saved_file import load_numpy

ran: list[str] = []
"""What hostile pickles reach when they are executed."""


class Hostile:
    """Appends to `ran` when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return ran.append, ("executed",)


def names_of(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128]


def as_numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    small = tensor.dtype is torch.bfloat16 or "float8" in str(tensor.dtype)
    return (tensor.float() if small else tensor).contiguous().numpy()


@given(
    st.sampled_from(FLOATS + OTHERS),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from(["plain", "transposed", "slice", "expanded", "step"]),
    st.integers(1, 7),
)
def test_blocks_of_any_view_are_its_elements_in_c_order(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: list[int], view: str, block: int
) -> None:
    """Whatever the type, the strides and the offset, blocks of any size put together are what torch has."""
    tensor = (torch.randn([n + 1 for n in shape]) * 10).to(dtype)
    if view == "transposed":
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    elif view == "slice" and shape:
        tensor = tensor[1:]
    elif view == "expanded":
        tensor = tensor.expand(3, *tensor.shape)
    elif view == "step" and shape:
        tensor = tensor[::2]
    path = tmp_path_factory.mktemp("t") / "x.pt"
    torch.save(tensor, path)
    with open_file(path) as found:
        assert found.dtype == names_of(dtype)
        assert found.shape == tuple(tensor.shape)
        memory = bytearray()
        parts = [found.read(at, min(block, found.size - at), memory).copy() for at in range(0, found.size, block)]
    expected = as_numpy(tensor).reshape(-1)
    got = np.concatenate(parts) if parts else np.empty(0, expected.dtype)
    np.testing.assert_array_equal(got, expected)


def test_conjugates_negatives_parameters_and_shared_storage(tmp_path: Path) -> None:
    """Lazy conjugates and negatives, parameters, and views that were saved with their whole storage are what torch makes of them."""
    base = torch.randn(4, 6, dtype=torch.complex64)
    cases = [base.conj(), base.conj().imag, torch.nn.Parameter(torch.randn(3)), base[2:, 1:3], torch.tensor(2.5), torch.empty(0, 3)]
    for number, tensor in enumerate(cases):
        torch.save(tensor, tmp_path / f"{number}.pt")
        with open_file(tmp_path / f"{number}.pt") as found:
            np.testing.assert_array_equal(whole(found), as_numpy(tensor))


@pytest.mark.parametrize("array", [np.arange(12.0).reshape(3, 4), np.asfortranarray(np.arange(12).reshape(3, 4)), np.array(3, ">i4")])
def test_npy(tmp_path: Path, array: Any) -> None:
    """C order, Fortran order, other byte order."""
    np.save(tmp_path / "x.npy", array)
    with open_file(tmp_path / "x.npy") as found:
        np.testing.assert_array_equal(whole(found), array)


def test_joined_parts_are_one_tensor(tmp_path: Path) -> None:
    """q, k and v joined along a dimension; shapes that do not fit are an error."""
    parts = [torch.randn(1, 2, 3), torch.randn(1, 2, 5)]
    for number, part in enumerate(parts):
        torch.save(part, tmp_path / f"{number}.pt")
    found = join([open_file(tmp_path / "0.pt"), open_file(tmp_path / "1.pt")], 1)
    np.testing.assert_array_equal(whole(found), torch.cat(parts, 2)[0].numpy())
    with pytest.raises(DumpFormatError, match="cannot be joined"):
        join([open_file(tmp_path / "0.pt"), open_file(tmp_path / "1.pt")], 0)


def resaved(path: Path, change: Callable[[str, bytes], bytes | None], compress: int = zipfile.ZIP_STORED) -> None:
    """A real file with members changed or, with None, left out."""
    made = io.BytesIO()
    torch.save(torch.randn(8), made)
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(path, "w", compress) as new:
        for member in old.infolist():
            data = change(member.filename, old.read(member))
            if data is not None:
                new.writestr(member.filename, data)


def pickled(data: bytes) -> Callable[[str, bytes], bytes | None]:
    return lambda name, old: data if name.endswith("data.pkl") else old


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "pickle": lambda p: p.write_bytes(pickle.dumps(Hostile())),
    "torch.save of an object": lambda p: torch.save(Hostile(), p),
    "a list of tensors": lambda p: torch.save([torch.ones(2)], p),
    "a dict of tensors": lambda p: torch.save({"a": torch.ones(2)}, p),
    "pickle in the archive": lambda p: resaved(p, pickled(pickle.dumps(Hostile()))),
    "old protocol": lambda p: resaved(p, pickled(pickle.dumps(Hostile(), 0))),
    "empty": lambda p: p.write_bytes(b""),
    "text": lambda p: p.write_text("no tensor"),
    "no data": lambda p: resaved(p, lambda name, old: None if "/data/" in name else old),
    "no description": lambda p: resaved(p, lambda name, old: None if name.endswith("pkl") else old),
    "short data": lambda p: resaved(p, lambda name, old: old[:16] if "/data/" in name else old),
    "compressed": lambda p: resaved(p, lambda _, old: old, zipfile.ZIP_DEFLATED),
    "larger shape": lambda p: resaved(p, lambda name, old: old.replace(b"K\x08\x85", b"K\xff\x85") if name.endswith("pkl") else old),
    "eval": lambda p: resaved(p, pickled(b"c__builtin__\neval\n(V1\ntR.")),
    "inst": lambda p: resaved(p, pickled(b"(S'x'\nios\nsystem\n.")),
    "deep": lambda p: resaved(p, pickled(b"\x80\x02)" + b"\x85" * 60_000 + b".")),
    "huge description": lambda p: resaved(p, pickled(b"\x80\x02" + b"N0" * 100_000 + b".")),
    "directory": lambda p: p.mkdir(),
    "link": lambda p: (torch.save(torch.ones(2), p.with_name("real")), p.symlink_to(p.with_name("real"))),
    "pipe": lambda p: os.mkfifo(p),
    "missing": lambda _: None,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_nothing_runs(tmp_path: Path, name: str) -> None:
    """A clear error that names the file; no code in the file is run, nothing waits."""
    path = tmp_path / "x.pt"
    HOSTILE[name](path)
    ran.clear()
    with pytest.raises(DumpFormatError, match=r"x\.pt: "):
        open_file(path)
    assert not ran


def npy(header: str, data: bytes = b"") -> bytes:
    """A file of numpy's format 1.0."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def described(kind: str, shape: str) -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}\n"


LIES = [
    b"",
    b"\x93NUMPY\x01\x00",
    npy(described("|O", "(1,)"), pickle.dumps([Hostile()])),
    npy(described("<f4", "(9999999,)")),
    npy(described("<f4", "(-1,)")),
    npy(described("<f4", "(2, '3')")),
    npy("[" * 70),
    b"\x93NUMPY\x09\x00" + b"\x00" * 40,
]


@pytest.mark.parametrize("data", LIES)
def test_hostile_npy(tmp_path: Path, data: bytes) -> None:
    """Objects, headers that lie, cut off files."""
    (tmp_path / "x.npy").write_bytes(data)
    ran.clear()
    for read in (open_file, load_numpy):
        with pytest.raises(DumpFormatError, match=r"x\.npy: "):
            read(tmp_path / "x.npy")
    assert not ran


@settings(max_examples=4 * settings().max_examples, deadline=None)
@given(st.data())
def test_damage_anywhere_is_an_error_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut off anywhere or with bytes changed, a file is read or refused; no other error comes out."""
    made = io.BytesIO()
    torch.save(torch.arange(6.0).reshape(2, 3).t(), made)
    content = bytearray(made.getvalue())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 6))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(content)
    try:
        with open_file(path) as found:
            whole(found)
    except DumpFormatError:
        pass


OPCODES = [
    *(b"\x80\x02", b"(", b")", b"}", b"]", b"t", b"\x85", b"\x86", b"\x87", b"R", b"Q", b"N", b"K\x01", b"K\x00", b"q\x00", b"h\x00"),
    *(b"\x88", b"\x89", b"u", b"s", b"b", b"o", b"0", b"1", b"2", b".", b"\x93", b"\x81", b"P0\n", b"X\x01\x00\x00\x000"),
    *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n", b"cos\nsystem\n"),
    *(b"X\x07\x00\x00\x00storage", b"X\x03\x00\x00\x00cpu"),
]


@settings(max_examples=4 * settings().max_examples, deadline=None)
@given(st.lists(st.sampled_from(OPCODES), max_size=40))
def test_any_program_of_pickle_instructions_is_refused_or_a_tensor(tmp_path_factory: pytest.TempPathFactory, program: list[bytes]) -> None:
    """The instructions of a description in any order never run anything and never end in another error."""
    path = tmp_path_factory.getbasetemp() / "program.pt"
    resaved(path, pickled(b"".join(program) + b"."))
    try:
        with open_file(path) as found:
            whole(found)
    except DumpFormatError:
        pass


def test_cut_off_while_it_is_read(tmp_path: Path) -> None:
    """A file that another process cuts off after it was opened is an error, also in the middle of the tensor."""
    torch.save(torch.ones(100_000), tmp_path / "x.pt")
    with open_file(tmp_path / "x.pt") as found:
        os.truncate(tmp_path / "x.pt", 4096)
        with pytest.raises(DumpFormatError, match="cut off"):
            found.read(50_000, 10, bytearray())


def test_packed_shards(tmp_path: Path) -> None:
    """Tensors of a packed dump, of every type it knows, in their shape."""
    from safetensors.torch import save_file

    kinds = {f"{name}.pt": torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in ("float32", "bfloat16", "int64", "bool")}
    assert "torch.bfloat16" in DTYPES or "bfloat16" in DTYPES
    folder = tmp_path / "dump_tensor_data"
    folder.mkdir()
    save_file(kinds, folder / "pack-00000.safetensors")
    files = TensorFiles(tmp_path)
    for name, tensor in kinds.items():
        with open_elements(files, name) as found:
            np.testing.assert_array_equal(whole(found), as_numpy(tensor))
    with pytest.raises(ProbeError, match="no tensor"):
        open_elements(files, "other.pt")
