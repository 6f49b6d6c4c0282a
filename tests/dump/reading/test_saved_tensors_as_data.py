"""Saved tensors are read as data: every type and layout that torch saves, and files that are damaged or hostile."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core import dtypes
from msprobe_engine.core.errors import DumpFormatError, MissingExtraError, UsageError
from msprobe_engine.core.statistics.host_kernel import CODES, fp8_table
from msprobe_engine.formats.dump.writing import packed_files
from msprobe_engine.formats.dump.writing.step_files import Payload
from msprobe_engine.formats.tensors import saved_file
from msprobe_engine.formats.tensors.pt_file import read_pt
from msprobe_engine.formats.tensors.reader import TensorFiles

torch = pytest.importorskip("torch")

FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
TYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
SHAPES = st.lists(st.integers(0, 4), max_size=4)


def saved(tensor: Any, path: Path) -> Path:
    torch.save(tensor, path)
    return path


@given(st.sampled_from([*TYPES, "complex64", "complex128", *FLOAT8]), SHAPES, st.integers(0, 2**31), st.booleans())
def test_what_torch_saves_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, name: str, shape: list[int], seed: int, t: bool
) -> None:
    """Any dtype and shape, contiguous or transposed, comes back with the very values."""
    dtype = getattr(torch, name)
    count = int(np.prod(shape)) * dtype.itemsize
    words = torch.randint(0, 2 if name == "bool" else 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    tensor = words.view(dtype).reshape(shape)
    tensor = tensor.permute(tuple(reversed(range(len(shape))))) if t else tensor
    stored = read_pt(saved(tensor, tmp_path_factory.mktemp("pt") / "a.0.pt"))
    expected = tensor.float() if name in (*FLOAT8, "bfloat16") else tensor
    np.testing.assert_array_equal(stored.values, expected.numpy())
    assert stored.dtype == f"torch.{name}"


@pytest.mark.parametrize("name", FLOAT8)
def test_every_code_of_an_8_bit_float(name: str) -> None:
    """All 256 codes have the value torch gives them, minus zero too."""
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().numpy()
    ours = fp8_table(CODES[name])
    np.testing.assert_array_equal(ours, values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(values[numbers]))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.ones(2)),
        torch.arange(6.0)[2:5],
        torch.randn(1).expand(3, 4),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["parameter", "view", "expanded", "conjugate", "negative", "channels_last"],
)
def test_odd_layouts(tmp_path: Path, tensor: Any) -> None:
    """Parameters, views into a larger storage, stride 0, lazily conjugated and negated tensors."""
    expected = tensor.detach().resolve_conj().resolve_neg().numpy()
    np.testing.assert_array_equal(read_pt(saved(tensor, tmp_path / "a.pt")).values, expected)


def test_the_array_is_the_users_own(tmp_path: Path) -> None:
    """A loaded array may be written to."""
    values = read_pt(saved(torch.zeros(3), tmp_path / "a.pt")).values
    values += 1
    assert values.tolist() == [1, 1, 1]


def test_big_endian_files(tmp_path: Path) -> None:
    """A file written on a big-endian machine says so and is turned round."""
    path = saved(torch.tensor([1.0, 2.0]), tmp_path / "a.pt")
    values = rewrite(path, {"byteorder": b"big", "data/0": struct.pack(">2f", 1.0, 2.0)})
    assert values.tolist() == [1.0, 2.0]


def rewrite(path: Path, members: dict[str, bytes], compress: bool = False) -> Any:
    """Write the archive again with other members, and read it."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    top = next(iter(content)).split("/")[0]
    content |= {f"{top}/{name}": data for name, data in members.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return read_pt(path).values


class _Bomb:
    def __reduce__(self) -> Any:
        return exec, ("import os; os.environ['MSPROBE_WAS_HERE'] = '1'",)


def _described(storage: str = "torch FloatStorage", shape: Any = (2,), strides: Any = (1,), offset: Any = 0, count: Any = 2) -> bytes:
    """A pickle as torch writes it for one tensor, with parts replaced."""
    parts = io.BytesIO()

    class Storage:
        pass

    class Call:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, strides, False, OrderedDict())

    class Pickler(pickle._Pickler):  # the one in Python: `save_global` of a name that does not exist
        def persistent_id(self, value: Any) -> Any:
            return ("storage", _Name(), "0", "cpu", count) if isinstance(value, Storage) else None

        def save(self, value: Any, save_persistent_id: bool = True) -> Any:
            if isinstance(value, _Name):
                return self.write(b"c" + storage.replace(" ", "\n").encode() + b"\n")
            return super().save(value, save_persistent_id)

    Pickler(parts, protocol=2).dump(Call())
    return parts.getvalue()


class _Name:
    """Stands for a name in a pickle."""


HOSTILE = {
    "code": (pickle.dumps(_Bomb(), 2), "nothing is executed|not executed"),
    "system": (b"cos\nsystem\n(X\x02\x00\x00\x00idtR.", "names os.system in its pickle.*nothing is executed"),
    "eval in protocol 0": (b"c__builtin__\neval\n(S'1'\ntR.", "not executed|nothing is executed"),
    "stack global": (pickle.dumps(_Bomb(), 4), "nothing is executed"),
    "build": (b"ctorch\nTensor\n)\x81}b.", "nothing is executed"),
    "another storage": (_described("os environ"), "storage of an unknown kind"),
    "a storage that is no name": (_described("torch LongTensor"), "storage of an unknown kind"),
    "shape behind the storage": (_described(shape=(3,)), "reaches behind its 2 elements"),
    "strides behind the storage": (_described(strides=(5,)), "reaches behind"),
    "offset behind the storage": (_described(offset=1), "reaches behind"),
    "huge shape": (_described(shape=(1 << 40, 1 << 40), strides=(1, 1)), "take for ever"),
    "number without end": (_described(shape=(1 << 2000,)), "cannot be"),
    "negative shape": (_described(shape=(-1,)), "cannot be"),
    "negative stride": (_described(strides=(-1,)), "cannot be"),
    "bool shape": (_described(shape=(True,)), "cannot be"),
    "65 dimensions": (_described(shape=(1,) * 65, strides=(1,) * 65), "cannot be"),
    "text offset": (_described(offset="0"), "cannot be"),
    "memo bomb": (b"\x80\x02Nr\xff\xff\xff\xff.", "holds a NoneType"),
    "memo miss": (b"\x80\x02h\x07.", "damaged"),
    "empty stack": (b"\x80\x02\x85.", "cut off"),
    "no mark": (b"\x80\x02t.", "cut off"),
    "no stop": (b"\x80\x02N", "damaged|cut off"),
    "too long": (b"\x80\x02" + b"N0" * 40_000 + b"N.", "80004 bytes; 65536 are the most"),
    "not a pickle": (b"\xff\xfe\xfd", "damaged"),
    "empty": (b"", "damaged|cut off"),
    "a number": (b"\x80\x02K\x03.", "holds a int, no tensor"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_descriptions(tmp_path: Path, name: str) -> None:
    """A pickle that is anything but the description of one plain tensor is refused, and nothing in it runs."""
    data, message = HOSTILE[name]
    path = saved(torch.zeros(2), tmp_path / "a.pt")
    with pytest.raises(DumpFormatError, match=message) as caught:
        rewrite(path, {"data.pkl": data})
    assert str(path) in str(caught.value)
    assert "MSPROBE_WAS_HERE" not in os.environ


def test_the_helper_above_describes_a_tensor(tmp_path: Path) -> None:
    """The pickle of the hostile cases is good when nothing is replaced."""
    path = saved(torch.tensor([1.0, 2.0]), tmp_path / "a.pt")
    assert rewrite(path, {"data.pkl": _described()}).tolist() == [1.0, 2.0]


def test_no_decompression_bomb(tmp_path: Path) -> None:
    """Compressed members, which torch never writes, are refused before they are unpacked."""
    path = saved(torch.zeros(2), tmp_path / "a.pt")
    with pytest.raises(DumpFormatError, match="compressed"):
        rewrite(path, {"data/0": bytes(1 << 24)}, compress=True)


@given(st.data())
def test_any_damage(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A file cut anywhere or with any changed byte gives a DumpFormatError, or the tensor where the change does not matter."""
    path = saved(torch.arange(4.0), tmp_path_factory.mktemp("pt") / "a.pt")
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        values = read_pt(path).values
    except DumpFormatError:
        return
    assert values.nbytes <= 4096


@pytest.mark.parametrize("value", [{"a": 1}, [torch.zeros(1)], torch.zeros(2).to_sparse(), "text"], ids=["dict", "list", "sparse", "text"])
def test_what_is_no_plain_tensor(tmp_path: Path, value: Any) -> None:
    """Other things that torch.save can write are refused by name."""
    with pytest.raises(DumpFormatError, match=r"no tensor|only plain tensors|not executed"):
        read_pt(saved(value, tmp_path / "a.pt"))


def test_types_that_numpy_has_not(tmp_path: Path) -> None:
    """A quantized tensor is refused as numpy array."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that quantized tensors will go
        path = saved(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), tmp_path / "a.pt")
    with pytest.raises(DumpFormatError, match="only plain tensors"):
        saved_file.load_numpy(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """A missing file, a directory and a text file are named."""
    folder = tmp_path / "dump_tensor_data"
    (folder / "d.pt").mkdir(parents=True)
    (folder / "t.pt").write_text("no archive")
    (folder / "l.pt").symlink_to(folder / "t.pt")
    files = TensorFiles(tmp_path)
    for load in (saved_file.numpy_of, saved_file.torch_of):
        for name, message in (("no.pt", "no tensor 'no.pt' here"), ("d.pt", "no regular file"), ("l.pt", "a link")):
            with pytest.raises((DumpFormatError, UsageError), match=message):
                load(files, name)
        with pytest.raises(DumpFormatError, match=r"no torch file|cannot be loaded"):
            load(files, "t.pt")
    with pytest.raises(DumpFormatError, match="not there"):
        saved_file.load_numpy(tmp_path / "no.pt")


def test_hostile_numpy_files(tmp_path: Path) -> None:
    """.npy files with objects, with a header that promises more than there is, and cut off ones are refused."""
    objects, huge, cut = (tmp_path / f"{name}.npy" for name in ("objects", "huge", "cut"))
    np.save(objects, np.array([{}], object), allow_pickle=True)
    np.save(cut, np.zeros(100))
    cut.write_bytes(cut.read_bytes()[:300])
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    huge.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    for path in (objects, huge, cut):
        with pytest.raises(DumpFormatError, match="no numpy file or is damaged"):
            saved_file.load_numpy(path)


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy arrays need no torch; a torch tensor without torch is one line with the pip command."""
    (tmp_path / "dump_tensor_data").mkdir()
    saved(torch.ones(2), tmp_path / "dump_tensor_data" / "a.pt")
    files = TensorFiles(tmp_path)

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(saved_file, "load_backend", absent)
    assert saved_file.numpy_of(files, "a.pt").tolist() == [1.0, 1.0]
    with pytest.raises(MissingExtraError, match=r"pip install 'msprobe-integrations\[torch\]'"):
        saved_file.torch_of(files, "a.pt")


def packed(folder: Path, tensors: dict[str, Any]) -> TensorFiles:
    """A directory of packed tensors, as the writer of the run makes it."""
    payloads = []
    for i, (name, tensor) in enumerate(tensors.items()):
        payload = Payload(i, str(tensor.dtype), tuple(tensor.shape), tensor.nbytes)
        payload.key = name
        payloads.append(payload)
    payloads.sort(key=packed_files.alignment, reverse=True)
    data = b"".join(tensors[p.key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for p in payloads)
    (folder / "dump_tensor_data").mkdir()
    shard = packed_files.shard_name(0)
    (folder / "dump_tensor_data" / shard).write_bytes(packed_files.header(payloads, 0) + data)
    index = {name: {"file": shard, "dtype": str(tensor.dtype)} for name, tensor in tensors.items()}
    document = {"format": packed_files.FORMAT, "version": packed_files.VERSION, "tensors": index, "aliases": {"again.pt": "float32.pt"}}
    (folder / "dump_tensor_data" / packed_files.INDEX).write_text(json.dumps(document))
    return TensorFiles(folder)


def test_packed_tensors(tmp_path: Path) -> None:
    """Every type comes out of a packed file with its values, also under a second name; an empty tensor and a scalar too."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name in (*TYPES, "complex64", "complex128", *FLOAT8):
        dtype = getattr(torch, name)
        words = torch.randint(0, 2 if name == "bool" else 256, (6 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        made[f"{name}.pt"] = words.view(dtype).reshape(2, 3)
    made |= {"empty.pt": torch.zeros(0, 3), "scalar.pt": torch.tensor(2.5)}
    files = packed(tmp_path, made)
    for name, tensor in made.items():
        expected = (tensor.float() if name[:-3] in (*FLOAT8, "bfloat16") else tensor).numpy()
        np.testing.assert_array_equal(saved_file.numpy_of(files, name), expected)
        assert saved_file.torch_of(files, name).dtype == tensor.dtype
    np.testing.assert_array_equal(saved_file.numpy_of(files, "again.pt"), saved_file.numpy_of(files, "float32.pt"))
    saved_file.numpy_of(files, "float32.pt")[:] = 0  # the user's own, not a view of something kept


def test_packed_types_that_numpy_has_not(tmp_path: Path) -> None:
    """A packed tensor of 4-bit floats is refused as numpy array by name."""
    files = packed(tmp_path, {"float32.pt": torch.zeros(1)})
    payload = Payload(0, "torch.float4_e2m1fn_x2", (4,), 4)
    payload.key = "float32.pt"
    (tmp_path / "dump_tensor_data" / packed_files.shard_name(0)).write_bytes(packed_files.header([payload], 0) + bytes(4))
    with pytest.raises(DumpFormatError, match=r"of type torch.float4_e2m1fn_x2, for which numpy has no type"):
        saved_file.numpy_of(files, "float32.pt")


@pytest.mark.parametrize("name", [*TYPES, "complex64", "complex128", *FLOAT8])
def test_item_sizes(name: str) -> None:
    """The size of an element is that of torch, under the names of PyTorch, MindSpore and numpy."""
    assert dtypes.item_size(f"torch.{name}") == getattr(torch, name).itemsize
    assert dtypes.item_size(name.capitalize()) == getattr(torch, name).itemsize
    assert dtypes.item_size("torch.unheard_of") is None
