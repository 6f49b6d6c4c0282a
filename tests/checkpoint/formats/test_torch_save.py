"""Files of ``torch.save`` are read as torch reads them, in every format it ever wrote, and nothing of their data is touched."""

import argparse
import collections
import datetime
import enum
import io
import pathlib
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.tensors.torch_file import FileTensor, Inert, Named, attributes, plain, read_torch, regions

FORMATS: dict[str, dict[str, Any]] = {
    "zip": {},
    "protocol 4": {"pickle_protocol": 4},
    "protocol 5": {"pickle_protocol": 5},
    "before 1.6": {"_use_new_zipfile_serialization": False},
}


def taken(tensor: FileTensor) -> torch.Tensor:
    """The tensor that lies where the reader says."""
    kind = getattr(torch, tensor.dtype)
    if not tensor.numel:
        return torch.empty(tensor.shape, dtype=kind)
    count = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides)) + 1
    with open(tensor.file, "rb") as file:
        file.seek(tensor.start)
        data = bytearray(file.read(count * kind.itemsize))
    return torch.as_strided(torch.frombuffer(data, dtype=kind), tensor.shape, tensor.strides)


def same(found: FileTensor, wanted: torch.Tensor) -> None:
    """Bit for bit."""
    assert f"torch.{found.dtype}" == str(wanted.dtype)
    assert found.shape == tuple(wanted.shape)
    bits = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.detach().flatten()).view(torch.uint8) for t in (taken(found), wanted)]
    assert torch.equal(*bits)


def flattened(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """All tensors of what torch loaded, by dotted path."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    found: dict[str, torch.Tensor] = {}
    for key, item in items:
        found |= flattened(item, f"{path}.{key}" if path else str(key))
    return found


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def everything() -> dict[str, Any]:
    """Tensors of every kind that checkpoints have."""
    base = torch.randn(4, 6)
    marked = nn.Parameter(torch.ones(3))
    marked.tensor_model_parallel = True  # type: ignore[attr-defined]
    model, optimizer, scheduler = trained()
    return {
        "base": base,
        "row": base[1],
        "column": base[:, 2],
        "turned": base.t(),
        "steps": base[::2, 1::2],
        "expanded": torch.ones(1).expand(5),
        "bf16": base.bfloat16(),
        "half": base.half(),
        "double": base.double(),
        **{f"{kind}": base.to(getattr(torch, kind)) for kind in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")},
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "bool": base > 0,
        **{f"int{n}": torch.arange(5).to(getattr(torch, f"int{n}")) for n in (8, 16, 32, 64)},
        "complex": torch.randn(3, dtype=torch.complex64),
        "parameter": marked,
        "buffer": nn.Buffer(torch.ones(2)),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "list": [torch.ones(1), {"deep": (torch.zeros(2),)}],
        "rng": torch.get_rng_state(),
    }


@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_tensor_lies_where_it_is_said_to(tmp_path: Path, name: str) -> None:
    """Shared storages, views, parameters, buffers, optimizer states: bit for bit what torch.load gives, in each format."""
    path = tmp_path / "all.pt"
    tree = everything()
    if name == "before 1.6":  # torch writes float8 in the old format and cannot read it
        tree = {key: value for key, value in tree.items() if not key.startswith("float8")}
    torch.save(tree, path, **FORMATS[name])
    wanted = flattened(torch.load(path, weights_only=False))
    found, _ = plain(read_torch(path).tree)
    assert list(found) == list(wanted)
    for key, tensor in found.items():
        assert tensor.file == path
        same(tensor, wanted[key])


def test_views_of_one_storage_share_the_region(tmp_path: Path) -> None:
    """Tied and sliced tensors are stored once, and the reader says so by where they begin."""
    base = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": base, "same": base, "second row": base[1]}, tmp_path / "x.pt")
    found = read_torch(tmp_path / "x.pt").tree
    assert found["a"].start == found["same"].start
    assert found["second row"].start == found["a"].start + 16


@given(st.data())
def test_any_view_is_where_torch_has_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever view of a storage is saved, in either format, the reader's file place and strides give its elements."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tensor = torch.arange(float(np.prod(shape))).reshape(shape)
    for dim in range(len(shape)):
        first = data.draw(st.integers(0, tensor.shape[dim] - 1))
        tensor = tensor.narrow(dim, first, data.draw(st.integers(0, tensor.shape[dim] - first)))
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    path = tmp_path_factory.mktemp("view") / "x.pt"
    torch.save([tensor], path, _use_new_zipfile_serialization=data.draw(st.booleans()))
    same(read_torch(path).tree[0], tensor)


class Level(enum.Enum):
    LOW = 1


def test_arguments_of_a_run_are_plain_values(tmp_path: Path) -> None:
    """Namespaces, enumerations, data types, paths, dates and numpy values come out as values that can be compared."""
    arguments = argparse.Namespace(
        lr=1e-3,
        layers=[2, 3],
        dtype=torch.bfloat16,
        device=torch.device("cuda", 1),
        size=torch.Size((1, 2)),
        level=Level.LOW,
        path=pathlib.PurePosixPath("/data/x"),
        when=datetime.timedelta(seconds=3),
        norm=nn.LayerNorm,
        scale=np.float32(0.5),
        count=np.int64(7),
        array=np.arange(4, dtype=np.int32),
        long=np.arange(1000),
        order=np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        data=b"\x01\x02",
        many=list(range(100_000)),
        maybe=None,
        tags={"b", "a"},
        counts=collections.Counter(a=2),
        queue=collections.deque([1, 2], maxlen=4),
        by=collections.defaultdict(list, {"k": [1]}),
        number=2 + 3j,
    )
    torch.save({"args": arguments, "numpy": np.random.get_state(), "python": random.getstate()}, tmp_path / "x.pt")
    tree = read_torch(tmp_path / "x.pt", trust=[f"{__name__}.Level"]).tree
    assert isinstance(tree["args"], Inert)
    assert attributes(tree["args"])["lr"] == 1e-3
    tensors, found = plain(tree)
    assert not tensors
    values = {key.removeprefix("args."): value for key, value in found.items()}
    assert values["layers"] == [2, 3]
    assert values["dtype"] == "torch.bfloat16"
    assert values["device"] == "torch.device('cuda', 1)"
    assert values["size"] == [1, 2]
    assert values["level"] in (f"{__name__}.Level(1)", f"{__name__}.Level.LOW")
    assert values["path"] == "/data/x"
    assert values["when"] == "datetime.timedelta(0, 3, 0)"
    assert values["norm"] == "torch.nn.modules.normalization.LayerNorm"
    assert (values["scale"], values["count"], values["array"]) == (0.5, 7, [0, 1, 2, 3])
    assert values["order"] == [[0, 1, 2], [3, 4, 5]]
    assert values["long"].startswith("int64[1000] sha256:")
    assert values["many"].startswith("list[100000] sha256:")
    assert values["data"] == "0102"
    assert values["maybe"] is None
    assert values["tags"] == ["a", "b"]
    assert (values["counts.a"], values["queue"], values["by.k"], values["number"]) == (2, [1, 2], [1], 2 + 3j)
    assert values["numpy"][0] == "MT19937"
    assert values["python.1"].startswith("list[625] sha256:")


def test_values_that_differ_anywhere_look_different(tmp_path: Path) -> None:
    """A digest stands for what is long; one element more or less, or another order, changes it."""
    texts = set()
    for number, state in enumerate((list(range(700)), [*range(699), 0], list(range(699)), tuple(reversed(range(700))))):
        torch.save({"state": state}, tmp_path / f"{number}.pt")
        texts.add(plain(read_torch(tmp_path / f"{number}.pt").tree)[1]["state"])
    assert len(texts) == 4


class Stamped(torch.Tensor):
    """A subclass of a tensor, as quantization and tracing libraries have them."""


def test_what_is_no_plain_tensor_keeps_its_parts(tmp_path: Path) -> None:
    """Subclasses are tensors; sparse ones are their indices and values; lazy conjugates are no tensors but say what they are."""
    sparse = torch.eye(3).to_sparse()
    stamped = torch.ones(3).as_subclass(Stamped)
    torch.save({"sparse": sparse, "conjugate": torch.ones(2, dtype=torch.complex64).conj(), "sub": stamped}, tmp_path / "x.pt")
    tree = read_torch(tmp_path / "x.pt", trust=[f"{__name__}.Stamped"]).tree
    tensors, values = plain(tree)
    assert [tensors[key].dtype for key in tensors] == ["int64", "float32", "complex64", "float32"]
    same(tensors["sub"], torch.ones(3))
    assert isinstance(tree["conjugate"], Inert)
    assert "conjugate" in values["conjugate.args.1"]


def test_a_module_that_was_saved_whole(tmp_path: Path) -> None:
    """Objects of torch are inert: their tensors are found, their classes are names."""
    torch.save(nn.Linear(2, 3), tmp_path / "x.pt")
    tree = read_torch(tmp_path / "x.pt").tree
    assert tree.cls == "torch.nn.modules.linear.Linear"
    tensors, values = plain(tree)
    assert {key: tensor.shape for key, tensor in tensors.items()} == {"_parameters.weight": (3, 2), "_parameters.bias": (3,)}
    assert values["in_features"] == 2


def test_an_archive_inside_a_file(tmp_path: Path) -> None:
    """Items of a .distcp file: tensors get their places in the whole file, several in one pass."""
    path, spans = tmp_path / "__0_0.distcp", []
    with open(path, "wb") as file:
        file.write(b"something before")
        for number in range(6):
            item = io.BytesIO()
            torch.save(torch.arange(20.0)[5 * number : 5 * number + 5] if number == 2 else torch.full((5,), float(number)), item)
            spans.append((file.tell(), len(item.getvalue())))
            file.write(item.getvalue())
        file.write(b"something behind")
    same(next(regions(path, spans[1:2])), torch.ones(5))
    for number, tree in enumerate(regions(path, spans)):  # those of one shape have the same description
        same(tree, torch.arange(10.0, 15.0) if number == 2 else torch.full((5,), float(number)))
    with pytest.raises(DumpFormatError, match="cut off"):
        next(regions(path, [(spans[5][0], 1 << 40)]))


def test_plain_pickles(tmp_path: Path) -> None:
    """A pickle without tensors, in every protocol, gives what pickle gives."""
    value = {
        "a": [1, -5, 1 << 70, 2.5, True, None],
        "b": ("text \n \x00 \ud800", b"\xff" * 300, bytearray(b"12")),
        "c": {1, 2},
        "d": frozenset({3}),
        7: {},
    }
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, protocol))
        assert read_torch(tmp_path / "x.pkl").tree == value


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
def test_nothing_of_the_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    """The description is that of before when the data are others; of a file from before 1.6 only the beginning is taken into memory."""
    monkeypatch.setattr("msprobe_engine.formats.tensors.torch_file._FIRST_READ", 64)
    torch.save({"a": torch.zeros(8), "b": torch.zeros(8)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    before = read_torch(tmp_path / "x.pt").tree
    with open(tmp_path / "x.pt", "r+b") as file:
        file.seek(before["a"].start)
        file.write(b"\xff" * 32)
    assert read_torch(tmp_path / "x.pt").tree == before


def test_names_stand_for_classes(tmp_path: Path) -> None:
    """A class in a checkpoint is its name."""
    torch.save({"class": collections.OrderedDict, "dtype": torch.float32}, tmp_path / "x.pt")
    tree = read_torch(tmp_path / "x.pt").tree
    assert tree == {"class": Named("collections.OrderedDict"), "dtype": Named("torch.float32")}


def test_modules_names_of_python_2(tmp_path: Path) -> None:
    """Old pickles call modules by their old names."""
    (tmp_path / "x.pkl").write_bytes(b"(dp0\nS'a'\nc__builtin__\nset\n((lI1\naI2\natRsS'b'\nI01\ns.")
    assert read_torch(tmp_path / "x.pkl").tree == {"a": {1, 2}, "b": True}
