"""Saved tensors are found in both formats, and what is damaged or hostile is an error of this project."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry, TensorDescription, TensorRef
from msprobe_engine.formats.dump.writing.packed_files import DTYPES
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.formats.tensors.reader import TensorFiles, not_saved

Data = tuple[str, np.ndarray[Any, Any]]


def no_files(dtype: str, shape: tuple[int, ...]) -> Any:
    raise AssertionError(f"the format packed asked for a .pt sample of {dtype} {shape}")


def write(directory: Path, tensors: list[Data], names: int = 1, finish: bool = True, **options: Any) -> TensorStore:
    """A rank directory with these arrays, each with `names` names, in the format packed."""
    store = TensorStore(Options(saves=lambda _: True), no_files, Faults(strict=True), packed=True, **options)
    directory.mkdir(parents=True, exist_ok=True)
    store.begin_step(0, str(directory))
    files = store.step(0)
    assert files is not None
    for row, (dtype, array) in enumerate(tensors):
        payload = store.place(files, row, dtype, array.shape, array.nbytes)
        data = np.ascontiguousarray(array)
        ctypes.memmove(payload.address, data.ctypes.data, data.nbytes)
        store.add(files, payload)
        for k in range(names):
            ref = TensorRef(row, TensorDescription("torch.Tensor", dtype, array.shape, False))
            store.hand_over(files, Entry(f"Functional.f{k}.{row}.forward", {"output": [ref]}))
    store.end_step(files, [])
    if finish:
        store.finish(0)
    else:
        store.drain()
    return store


ARRAYS: list[Data] = [
    ("torch.float32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    ("torch.bfloat16", np.arange(5, dtype=np.uint16)),
    ("torch.bool", np.array([True, False, True])),
    ("torch.complex128", np.array([[1 + 2j]])),
    ("torch.float8_e4m3fnuz", np.arange(7, dtype=np.uint8)),
    ("torch.float64", np.array(3.5)),
    ("torch.int8", np.zeros((0, 4), np.int8)),
]


def name(i: int, k: int = 0) -> str:
    return f"Functional.f{k}.{i}.forward.output.0.pt"


def test_sources(tmp_path: Path) -> None:
    """Every tensor has its file, place, type and shape; further names share them; bytes are those that were saved."""
    write(tmp_path, ARRAYS, names=2)
    files = TensorFiles(tmp_path)
    assert files.names() == sorted(name(i, k) for i in range(len(ARRAYS)) for k in range(2))
    for i, (dtype, array) in enumerate(ARRAYS):
        source = files.source(name(i))
        assert (source.format, source.dtype, source.shape, source.nbytes) == ("safetensors", dtype, array.shape, array.nbytes)
        assert files.read_bytes(name(i)) == files.read_bytes(name(i, 1)) == array.tobytes()
        assert source.offset % max(1, array.dtype.itemsize if dtype in DTYPES else 1) == 0


def test_the_safetensors_library_reads_the_shards(tmp_path: Path) -> None:
    """A shard is a complete safetensors file, whatever its tensors; types it lacks are bytes."""
    write(tmp_path, [a for a in ARRAYS if a[0] != "torch.bfloat16"])
    (shard,) = (tmp_path / "dump_tensor_data").glob("*.safetensors")
    found = load_file(shard)
    assert found[name(0)].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found[name(2)].dtype == np.uint8
    assert found[name(2)].tobytes() == np.array([[1 + 2j]]).tobytes()


def test_many_shards(tmp_path: Path) -> None:
    """A small budget makes many shards; all tensors are found."""
    arrays: list[Data] = [("torch.int64", np.full((3000,), i)) for i in range(200)]
    write(tmp_path, arrays, budget=1 << 20)
    assert len(list((tmp_path / "dump_tensor_data").glob("*.safetensors"))) > 3
    files = TensorFiles(tmp_path)
    assert [np.frombuffer(files.read_bytes(name(i)), np.int64)[0] for i in range(200)] == list(range(200))


def test_without_an_index(tmp_path: Path) -> None:
    """Finished shards of a killed run are read by their own headers, with types that safetensors lacks."""
    write(tmp_path, ARRAYS * 400, finish=False, budget=1 << 16)
    (tmp_path / "dump_tensor_data/index.json").unlink(missing_ok=True)
    files = TensorFiles(tmp_path)
    assert len(files.names()) > 20
    for one in files.names():
        i = int(one.split(".")[2])
        dtype, array = ARRAYS[i % len(ARRAYS)]
        assert (files.source(one).dtype, files.source(one).shape) == (dtype, array.shape)
        assert files.read_bytes(one) == array.tobytes()


def test_what_is_not_there(tmp_path: Path) -> None:
    """A tensor that was not saved is a usage error that names the list of reasons; an empty directory has no tensors."""
    assert TensorFiles(tmp_path).names() == []
    with pytest.raises(UsageError, match=r"not_saved\.json"):
        TensorFiles(tmp_path).source("Functional.f.0.forward.output.0.pt")
    assert not_saved(tmp_path) == []


@pytest.mark.parametrize("bad", ["../x.pt", "a/b.pt", "", "..", "x\0.pt", "a\\b"])
def test_names_that_point_outside(tmp_path: Path, bad: str) -> None:
    """A name that is no plain file name is refused before anything is opened."""
    with pytest.raises(DumpFormatError, match="file name"):
        TensorFiles(tmp_path).source(bad)


def test_links_and_other_things_in_place_of_files(tmp_path: Path) -> None:
    """Links are not followed, pipes are not opened."""
    write(tmp_path, ARRAYS)
    folder = tmp_path / "dump_tensor_data"
    (tmp_path / "secret").write_bytes(b"x")
    (folder / "link.pt").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe.pt")
    files = TensorFiles(tmp_path)
    with pytest.raises(DumpFormatError, match="link"):
        files.source("link.pt")
    with pytest.raises(DumpFormatError, match="regular"):
        files.source("pipe.pt")
    (shard,) = folder.glob("*.safetensors")
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DumpFormatError, match="link"):
        TensorFiles(tmp_path).names()


def index_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "dump_tensor_data/index.json").read_text())
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format="other"),
        lambda d: d.update(version=2),
        lambda d: d.update(tensors=[]),
        lambda d: d.update(aliases=None),
        lambda d: d["tensors"].update(x={"file": "../../etc/passwd"}),
        lambda d: d["tensors"].update(x={"file": "pack-00000.safetensors", "key": "nowhere"}),
        lambda d: d["tensors"].update(x=7),
        lambda d: d["aliases"].update(x="nowhere"),
        lambda d: d["aliases"].update(x=[]),
    ],
)
def test_hostile_index(tmp_path: Path, change: Any) -> None:
    """An index that names what is not in a shard of this directory is refused."""
    write(tmp_path, ARRAYS)
    document = index_of(tmp_path)
    change(document)
    (tmp_path / "dump_tensor_data/index.json").write_text(json.dumps(document))
    with pytest.raises(DumpFormatError, match=r"index\.json"):
        TensorFiles(tmp_path).names()


def shard_bytes(fields: Any, data: bytes = b"\0" * 64) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"{}",
        shard_bytes(b"{"),
        shard_bytes([1]),
        shard_bytes(b"[" * 100_000),
        shard_bytes({"x": 1}),
        shard_bytes({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}),
        shard_bytes({"x": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}),
        shard_bytes({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
        shard_bytes({"x": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}),
        shard_bytes({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
        shard_bytes({"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}),
        shard_bytes({"x": {"dtype": "F77", "shape": [1], "data_offsets": [0, 4]}}),
        shard_bytes({"x": {"dtype": "U8", "shape": [1] * 100, "data_offsets": [0, 1]}}),
        shard_bytes({"__metadata__": {"dtypes": '{"x": 3}'}, "x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}),
        shard_bytes({"__metadata__": {"dtypes": "["}, "x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}),
    ],
)
def test_hostile_shards(tmp_path: Path, content: bytes) -> None:
    """Lengths, offsets, shapes and types are checked against each other and the size of the file."""
    (tmp_path / "dump_tensor_data").mkdir()
    (tmp_path / "dump_tensor_data/pack-00000.safetensors").write_bytes(content)
    with pytest.raises(DumpFormatError, match=r"pack-00000\.safetensors"):
        TensorFiles(tmp_path).names()


@given(st.data())
def test_changed_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any changed or missing bytes give the tensors or an error of this project, never another one."""
    directory = tmp_path_factory.mktemp("packed")
    write(directory, ARRAYS, names=2)
    for path in (directory / "dump_tensor_data").iterdir():
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content))) if data.draw(st.booleans()) else len(content)])
    files = TensorFiles(directory)
    try:
        for one in files.names():
            assert len(files.read_bytes(one)) == files.source(one).nbytes
    except (DumpFormatError, UsageError):
        pass


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"not_saved": 3}', b'{"not_saved": [3]}', b'{"not_saved": [{"name": 3}]}', b"\xff"])
def test_hostile_list_of_what_was_not_saved(tmp_path: Path, content: bytes) -> None:
    """A damaged list is an error that names the file."""
    (tmp_path / "not_saved.json").write_bytes(content)
    with pytest.raises(DumpFormatError, match=r"not_saved\.json"):
        not_saved(tmp_path)


def test_existing_dumps(tmp_path: Path) -> None:
    """Files of the existing tool, .pt and .npy, are found in the same way."""
    (tmp_path / "dump_tensor_data").mkdir()
    np.save(tmp_path / "dump_tensor_data/Mint.add.0.forward.input.0.npy", np.ones((2, 2), np.float32))
    files = TensorFiles(tmp_path)
    assert files.names() == ["Mint.add.0.forward.input.0.npy"]
    assert files.source(files.names()[0]).format == "npy"
    assert files.load(files.names()[0], None).tolist() == [[1, 1], [1, 1]]  # type: ignore[arg-type]  # numpy needs no backend
