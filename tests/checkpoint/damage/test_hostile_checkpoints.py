"""Checkpoints that were made to do harm or are damaged: nothing in them runs, nothing takes memory or time without end."""

import argparse
import builtins
import contextlib
import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.open import open_checkpoint
from msprobe_engine.formats.tensors.opaque_objects import Inert
from msprobe_engine.formats.tensors.safetensors_file import read_safetensors
from msprobe_engine.formats.tensors.torch_file import UnknownNameError, plain, read_torch

RAN = "MSPROBE_HOSTILE_RAN"


class Call:
    """A pickle of this calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


def environment() -> str:
    return f"__import__('os').environ[{RAN!r}] = '1'"


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    """No file of this module may run anything."""
    os.environ.pop(RAN, None)
    yield
    assert RAN not in os.environ


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """No file of this module may take 2 GB or 20 seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000
    assert time.process_time() - start < 20


def archive(data: bytes, extra: dict[str, bytes] | None = None, compress: int = zipfile.ZIP_STORED) -> bytes:
    """A file of torch.save with another description."""
    made, out = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.arange(4.0)}, made)
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(out, "w", compress) as new:
        for member in old.infolist():
            name = member.filename
            content = data if name.endswith("data.pkl") else old.read(member)
            new.writestr(name, (extra or {}).get(name.partition("/")[2], content))
    return out.getvalue()


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "exec": (lambda: Call(exec, environment()), "builtins.exec"),
    "eval": (lambda: Call(eval, environment()), "builtins.eval"),
    "os.system": (lambda: Call(os.system, "touch hostile"), "posix.system"),
    "nested": (lambda: {"model": {"w": [Call(exec, environment())]}}, "builtins.exec"),
    "in a key": (lambda: {(1, Call(exec, environment())): 1}, "builtins.exec"),
    "beside tensors": (lambda: {"model": {"w": torch.ones(2)}, "x": Call(os.system, "touch hostile")}, "posix.system"),
    "in arguments": (lambda: argparse.Namespace(lr=1, evil=Call(exec, environment())), "builtins.exec"),
    "import": (lambda: Call(__import__, "antigravity"), "builtins.__import__"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("form", ["pickle 0", "pickle 2", "pickle 5", "zip", "old torch"])
def test_code_in_a_pickle_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    """The error names function, file and the option to go on; nothing ran, also not with the option."""
    monkeypatch.chdir(tmp_path)
    make, function = CALLS[name]
    path = tmp_path / "x.pt"
    if form.startswith("pickle"):
        if name == "beside tensors":
            return  # pickle alone writes the tensors' data as a call too
        path.write_bytes(pickle.dumps(make(), int(form[-1])))
    else:
        torch.save(make(), path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(UnknownNameError) as caught:
        read_torch(path)
    for part in (function, str(path), f"--trust {function}", "Nothing was executed"):
        assert part in str(caught.value)
    read_torch(path, trust=[function])
    read_torch(path, trust=[function.partition(".")[0]])
    assert not (tmp_path / "hostile").exists()


@pytest.mark.parametrize(("count", "more"), [(1, ""), (8, ""), (9, " and 1 more"), (11, " and 3 more")])
def test_many_names_are_counted(tmp_path: Path, count: int, more: str) -> None:
    """Eight are named, the others counted."""
    names = ("abs", "all", "any", "bin", "chr", "dir", "hex", "len", "max", "min", "oct")[:count]
    (tmp_path / "x.pt").write_bytes(pickle.dumps([Call(getattr(builtins, name), 1) for name in names]))
    with pytest.raises(UnknownNameError) as caught:
        read_torch(tmp_path / "x.pt")
    assert f"names {', '.join(f'builtins.{name}' for name in names[:8])}{more} in its pickle" in str(caught.value)


PICKLES: dict[str, bytes] = {
    "an opcode that is none": b"\x80\x02\xff.",
    "protocol 9": b"\x80\x09N.",
    "no end": b"\x80\x02}",
    "nothing but a start": b"\x80",
    "memo that is not there": b"\x80\x02h\x07.",
    "stack that is empty": b"\x80\x02\x86.",
    "mark that is not there": b"\x80\x02t.",
    "text longer than the file": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "bytes of 2**62": b"\x80\x05\x8e" + struct.pack("<Q", 1 << 62) + b".",
    "bytearray of 2**40": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "frame of 2**60": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60),
    "integer of a megabyte": b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\xff" * (1 << 20) + b".",
    "integer of negative length": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "decimal of 100,000 digits": b"L" + b"9" * 100_000 + b"L\n.",
    "number by extension": b"\x80\x02\x82\x01.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "unhashable key": b"\x80\x02}]K\x01s.",
    "unhashable element": b"\x80\x04\x8f(]\x90.",
    "call of a number": b"\x80\x02K\x01)R.",
    "call of what a call gave": b"\x80\x02ctorch\nSize\n)R)R.",
    "attribute of a value": b"\x80\x02c__builtin__\ngetattr\n(K\x01U\x01atR.",
    "state of a number": b"\x80\x02K\x01}b.",
    "items of a number": b"\x80\x02K\x01K\x02K\x03s.",
    "elements of a text": b"\x80\x02U\x01aK\x01a.",
    "storage that is none": b"\x80\x02U\x01aQ.",
    "storage by text": b"Pevil\n.",
    "storage of another class": b"\x80\x02(U\x07storagecargparse\nNamespace\nU\x010U\x03cpuK\x04tQ.",
    "storage outside a torch file": b"\x80\x02(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04tQ.",
    "names that are no text": b"\x80\x04K\x01K\x02\x93.",
    "text that is no UTF-8": b"\x80\x04\x8c\x02\xff\xfe.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_broken_pickles(tmp_path: Path, name: str) -> None:
    """Each is one error that names the file, alone and inside a torch archive."""
    (tmp_path / "alone.pkl").write_bytes(PICKLES[name])
    (tmp_path / "inside.pt").write_bytes(archive(PICKLES[name]))
    for path in (tmp_path / "alone.pkl", tmp_path / "inside.pt"):
        if path.name == "inside.pt" and name == "storage outside a torch file":
            continue
        with pytest.raises(DumpFormatError, match=path.name):
            read_torch(path)


BOMBS: dict[str, bytes] = {
    "memo at 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo at 10**18": b"Np1000000000000000000\n.",
    "lists 300,000 deep": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "tuples 300,000 deep": b"\x80\x02N" + b"\x85" * 300_000 + b".",
    "tuple that doubles 60 times": b"\x80\x02N" + b"2\x86" * 60 + b".",
    "tuple that doubles, in a list": b"\x80\x02]N" + b"2\x86" * 60 + b"a.",
    "tuple that doubles, as arguments": b"\x80\x02cdatetime\ndate\nN" + b"2\x86" * 60 + b"R.",
    "deep tuple as arguments": b"\x80\x02cdatetime\ndate\nN" + b"\x85" * 300_000 + b"R.",
    "list in itself": b"\x80\x02]q\x00h\x00a.",
    "dict in itself": b"\x80\x02}q\x00U\x01ah\x00s.",
    "object in itself": b"\x80\x02cargparse\nNamespace\n)\x81q\x00}U\x01ah\x00sb.",
    "object as its own argument's state": b"\x80\x02cdatetime\ndate\n(]q\x00tRq\x01h\x00h\x01a0.",
    "lists that hold the next one ten times": b"\x80\x02]q\x00"
    + b"".join(b"](" + bytes([ord("h"), n]) * 10 + b"e" + b"q" + bytes([n + 1]) for n in range(30))
    + b".",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_take_no_memory_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They are read as what they are, or refused; flattening them ends at a number of values (a smaller one here, for time)."""
    monkeypatch.setattr("msprobe_engine.formats.checkpoint.flat_tables._MAX_NODES", 20_000)
    for path, data in ((tmp_path / "x.pkl", BOMBS[name]), (tmp_path / "x.pt", archive(BOMBS[name]))):
        path.write_bytes(data)
        with contextlib.suppress(DumpFormatError):
            tensors, values = plain(read_torch(path).tree)
            assert not tensors
            assert all(len(str(value)) < 2000 for value in values.values())


@pytest.mark.slow
def test_very_many_entries_of_one_name(tmp_path: Path) -> None:
    """Keys 0 and "0" at 18 levels, each dict stored once: 262,144 values called 0.0...0 are numbered at once, not each from 2 on."""
    tree: Any = 1
    for _ in range(18):
        tree = {0: tree, "0": tree}
    torch.save({"w": torch.ones(2), "kept": tree}, tmp_path / "a.pt")
    begin = time.process_time()
    assert len(open_checkpoint(tmp_path / "a.pt").values) == 1 << 18
    assert time.process_time() - begin < 30


def test_a_key_that_takes_for_ever_to_hash(tmp_path: Path) -> None:
    """Tuples that share their parts, as a key of a dict and as an element of a set."""
    (tmp_path / "x.pkl").write_bytes(b"\x80\x02}N" + b"2\x86" * 60 + b"Ns.")
    (tmp_path / "y.pkl").write_bytes(b"\x80\x04\x8f(N" + b"2\x86" * 60 + b"\x90.")
    for name in ("x.pkl", "y.pkl"):
        with pytest.raises(DumpFormatError, match="take for ever"):
            read_torch(tmp_path / name)


def tensor_pickle(shape: Any = (2, 2), strides: Any = (2, 1), offset: Any = 0, count: Any = 4, key: Any = "0") -> bytes:
    """The description of one tensor, with parts replaced."""
    code = io.BytesIO()
    pickler = pickle._Pickler(code, 2)  # type: ignore[attr-defined]
    code.write(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((")
    pickler.save("storage")
    code.write(b"ctorch\nFloatStorage\n")
    for value in (key, "cpu", count):
        pickler.save(value)
    code.write(b"tQ")
    for value in (offset, shape, strides, False):
        pickler.save(value)
    code.write(b"ccollections\nOrderedDict\n)RtR.")
    return code.getvalue()


LIES = {
    "larger than the storage": tensor_pickle(shape=(3, 2)),
    "strides behind the end": tensor_pickle(strides=(4, 1)),
    "offset behind the end": tensor_pickle(offset=1),
    "offset before the beginning": tensor_pickle(offset=-1),
    "negative stride": tensor_pickle(strides=(-1, 1)),
    "strides of other dimensions": tensor_pickle(strides=(1,)),
    "shape of text": tensor_pickle(shape=("a", "b")),
    "shape of 2**61": tensor_pickle(shape=(2**61, 2**61), strides=(0, 0)),
    "2**50 elements of a storage of 4": tensor_pickle(shape=(2**25, 2**25), strides=(0, 0)),
    "storage larger than its member": tensor_pickle(count=5),
    "storage that is not there": tensor_pickle(key="7"),
    "storage outside the archive": tensor_pickle(key="../../../etc/passwd"),
    "65 dimensions": tensor_pickle(shape=(1,) * 65, strides=(1,) * 65),
}


@pytest.mark.parametrize("name", LIES)
def test_tensors_that_are_not_in_the_file(tmp_path: Path, name: str) -> None:
    """A description that does not fit the storage is an error before anything is read."""
    (tmp_path / "x.pt").write_bytes(archive(LIES[name]))
    with pytest.raises(DumpFormatError, match=r"x\.pt"):
        read_torch(tmp_path / "x.pt")


def test_the_helper_describes_a_tensor(tmp_path: Path) -> None:
    """The cases above are good but for what is replaced."""
    (tmp_path / "x.pt").write_bytes(archive(tensor_pickle()))
    assert read_torch(tmp_path / "x.pt").tree.shape == (2, 2)
    (tmp_path / "y.pt").write_bytes(archive(tensor_pickle(shape=(1000, 1000), strides=(0, 0))))
    assert read_torch(tmp_path / "y.pt").tree.numel == 1_000_000  # a broadcast tensor may well be saved


def small(path: Path, **kinds: Any) -> bytes:
    torch.save({"a": torch.arange(16.0), "b": torch.arange(16.0)}, path, **kinds)
    return path.read_bytes()


def replaced(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def test_archives_with_other_members(tmp_path: Path) -> None:
    """Compressed, encrypted, moved and overlapping members, several descriptions, programs."""
    path = tmp_path / "x.pt"
    path.write_bytes(archive(tensor_pickle(), compress=zipfile.ZIP_DEFLATED))
    with pytest.raises(DumpFormatError, match="compressed"):
        read_torch(path)
    data = small(path)
    directory = data.index(b"PK\x01\x02")  # the entry of data.pkl: flags at 8, size at 24, place at 42
    cases = (
        (8, b"\x01", "encrypted"),
        (24, b"\xff\xff\xff\x7f", "unpacks from 220 to 2147483647 bytes"),
        (42, b"\xff\xff\xff\x00", "damaged"),
    )
    for at, value, message in cases:
        path.write_bytes(replaced(data, directory + at, value))
        with pytest.raises(DumpFormatError, match=message):
            read_torch(path)
    first, second = (data.index(f"x/data/{n}".encode(), directory) for n in (0, 1))
    path.write_bytes(replaced(data, second - 4, data[first - 4 : first]))
    with pytest.raises(DumpFormatError, match="over each other"):
        read_torch(path)
    script = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    script.save(str(path))
    with pytest.raises(DumpFormatError, match="TorchScript"):
        read_torch(path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
def test_a_file_cut_off_anywhere(tmp_path: Path, zipped: bool) -> None:
    """At every length there is an error that names the file."""
    path = tmp_path / "x.pt"
    data = small(path, _use_new_zipfile_serialization=zipped)
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(DumpFormatError, match=r"x\.pt"):
            read_torch(path)


@given(st.data())
def test_changed_bytes_give_a_description_or_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """No other error comes out, and no tensor lies outside the file."""
    path = tmp_path_factory.mktemp("x") / "x.pt"
    content = bytearray(small(path, _use_new_zipfile_serialization=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        tensors, _ = plain(read_torch(path).tree)
    except DumpFormatError:
        return
    for tensor in tensors.values():
        assert 0 <= tensor.start <= len(content)


@given(st.binary(max_size=200))
def test_any_bytes_as_a_pickle(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Whatever the bytes are, there is a value or an error of this project."""
    path = tmp_path_factory.mktemp("x") / "x.pkl"
    path.write_bytes(b"\x80\x04" + data)
    with contextlib.suppress(DumpFormatError):
        plain(read_torch(path).tree)


def safetensors(header: Any, data: bytes = b"\x00" * 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes}


SAFETENSORS: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\x00" * 7,
    "header of 2**60": struct.pack("<Q", 1 << 60) + b"{}",
    "header of 2**64 - 1": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "header behind the end": struct.pack("<Q", 100) + b"{}",
    "no JSON": safetensors(b"not json"),
    "no UTF-8": safetensors(b'{"\xff\xfe": 1}'),
    "a list": safetensors(b"[]"),
    "deep lists": safetensors(b"[" * 100_000 + b"]" * 100_000),
    "two of one name": safetensors(
        b'{"w": {"dtype":"F32","shape":[4],"data_offsets":[0,16]}, "w": {"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    ),
    "cut off": safetensors(entry(), b"\x00" * 15),
    "offsets turned": safetensors(entry(data_offsets=[16, 0])),
    "offsets negative": safetensors(entry(data_offsets=[-16, 0])),
    "offsets of text": safetensors(entry(data_offsets=["0", "16"])),
    "one offset": safetensors(entry(data_offsets=[0])),
    "offsets of 2**63": safetensors(entry(data_offsets=[0, 1 << 63])),
    "shape that does not fit": safetensors(entry(shape=[3, 2])),
    "negative shape": safetensors(entry(shape=[-2, -2])),
    "shape of 2**62": safetensors(entry(shape=[1 << 61, 8])),
    "shape of truth values": safetensors(entry(shape=[True, 4])),
    "100 dimensions": safetensors(entry(shape=[1] * 100)),
    "no dtype": safetensors({"w": {"shape": [4], "data_offsets": [0, 16]}}),
    "entry that is a number": safetensors({"w": 3}),
    "metadata that are a list": safetensors({"__metadata__": []}),
    "tensors over each other": safetensors(entry() | {"v": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors_that_lie(tmp_path: Path, name: str) -> None:
    """Each is one error that names the file; no memory is taken for what a header promises."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(SAFETENSORS[name])
    with pytest.raises(DumpFormatError, match=r"x\.safetensors"):
        read_safetensors(path)


def test_safetensors_of_a_type_to_come(tmp_path: Path) -> None:
    """A type that is not known yet is compared as bytes, and said."""
    (tmp_path / "x.safetensors").write_bytes(safetensors(entry(dtype="F6_E3M2", shape=[21])))
    found = open_checkpoint(tmp_path / "x.safetensors")
    assert (found.tensors["w"].dtype, found.tensors["w"].shape) == ("uint8", (16,))
    assert "compared as bytes" in found.notes[0]


def test_safetensors_with_bytes_of_nobody(tmp_path: Path) -> None:
    """A tensor that a header has lost is still there: that bytes are of none is said."""
    for data, count in ((safetensors(entry()), 0), (safetensors(entry()) + bytes(7), 7)):
        (tmp_path / "x.safetensors").write_bytes(data)
        said = [note for note in open_checkpoint(tmp_path / "x.safetensors").notes if "not compared" in note]
        assert said == (
            [f"{tmp_path / 'x.safetensors'}: {count} bytes in it are of no tensor that its header names; they are not compared"]
            if count
            else []
        )


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "..", "a/../../b", "x\x00y", "..\\x"])
def test_an_index_that_names_files_elsewhere(tmp_path: Path, name: str) -> None:
    """Nothing outside the checkpoint is opened."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(DumpFormatError, match="not inside the checkpoint"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"w": 3}}', "{", '{"weight_map": {"w": "x"'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    """An empty, cut off or other file is an error that names it."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DumpFormatError, match=r"index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["../elsewhere", "..", "", "a/b", "/etc", "x\x00", "gone"])
def test_trackers_that_name_something_else(tmp_path: Path, text: str) -> None:
    """Both tracker files may only name a directory beside them that exists."""
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        root = tmp_path / name.partition(".")[0]
        root.mkdir(exist_ok=True)
        (root / name).write_text(text)
        with pytest.raises(DumpFormatError, match=name):
            open_checkpoint(root)


def test_what_is_no_file(tmp_path: Path) -> None:
    """Pipes and devices are not waited for; a link to itself, a directory without rights and a missing path are said."""
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "loop.pt").symlink_to(tmp_path / "loop.pt")
    for name in ("pipe.pt", "loop.pt", "gone.pt"):
        with pytest.raises(DumpFormatError, match=name):
            open_checkpoint(tmp_path / name)
    with pytest.raises(DumpFormatError):
        read_torch(Path("/dev/zero"))


def test_inert_objects_never_print_what_they_hold() -> None:
    """An object that holds itself can be shown."""
    value = Inert("a.B")
    value.args = (value,)
    value.state = {"self": value}
    assert repr(value) == "<a.B>"
    assert plain({"x": value})


def test_an_optimizer_whose_parts_are_something_else(tmp_path: Path) -> None:
    """Groups without lists, numbers that are lists, states that are text: what can be read is read."""
    for groups, states in (
        ([3], {}),
        ([{"params": 3}], {0: "x"}),
        ([{"params": [[0], 0]}], {0: {"exp_avg": torch.ones(2)}}),
        ([], {(1, 2): None}),
    ):
        torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"state": states, "param_groups": groups}}, tmp_path / "x.pt")
        assert "w" in open_checkpoint(tmp_path / "x.pt").tensors


def test_what_no_reader_has_thought_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside a reader is an error of the files, with the path and the format; the cause is kept for --debug."""
    small(tmp_path / "x.pt")
    monkeypatch.setattr("msprobe_engine.formats.checkpoint.files.reader.read_checkpoint", lambda path, _: path["x"])
    with pytest.raises(DumpFormatError, match=r"x\.pt: cannot be read as .*TypeError") as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_snapshot_of_links(tmp_path: Path) -> None:
    """The cache of Hugging Face: files are links to blobs, three directories below the name of the model."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "77").write_bytes(safetensors(entry()))
    (snapshot / "model.safetensors").symlink_to("../../blobs/77")
    assert open_checkpoint(tmp_path / "models--a--b").tensors.keys() == {"w"}
