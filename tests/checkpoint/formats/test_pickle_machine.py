"""The machine that takes pickles apart: with its C part and without it the same, also of what is damaged or made to do harm."""

from __future__ import annotations

import argparse
import collections
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from msprobe_engine.formats.checkpoint.dcp.metadata import read_metadata
from msprobe_engine.formats.tensors import pickle_machine
from msprobe_engine.formats.tensors.opaque_objects import Inert
from msprobe_engine.formats.tensors.pickle_machine import Wrong
from msprobe_engine.formats.tensors.torch_pickle import Storage, TorchHooks
from msprobe_engine.formats.tensors.unpickle import load


def metadata(shards: int) -> Metadata:
    whole = torch.Size([4 * shards, 8])
    chunks = [ChunkStorageMetadata(torch.Size([4 * shard, 0]), torch.Size([4, 8])) for shard in range(shards)]
    stored = {MetadataIndex("w", chunk.offsets): _StorageInfo(f"__{n}_0.distcp", n << 33, 300) for n, chunk in enumerate(chunks)}
    return Metadata({"w": TensorStorageMetadata(TensorProperties(), whole, chunks)}, {"w": ("model", "w")}, stored)


def bomb(depth: int) -> bytes:
    """A tuple of nested halves that are one object: its hash asks 2**depth parts. As the function of a call, and as the key of a dict."""
    return b"\x80\x04)" + b"2\x86" * depth


VALUES: dict[str, Any] = {
    "plain values": [
        *(None, True, False, 0, 255, 256, 65535, 65536, -1, 1 << 40, -(1 << 70), 1.5, "ä\ud800", b"x" * 300, "y" * 300),
        *((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    ],
    "containers": {"a": [[], {}, set(), {1, 2}, frozenset({3})], (1, "b"): {"c": {5: [6] * 2000}}, 1.5: collections.OrderedDict(x=1)},
    "one object in two places": [[shared := ["x", {"y": 1}], shared], {"z": shared}],
    "objects": [argparse.Namespace(a=1, b=[argparse.Namespace()]), collections.defaultdict(list, q=[1]), torch.float32, torch.Size([2, 3])],
    "metadata": metadata(40),
}  # fmt: skip
HARM = {
    "no function": b"\x80\x04K\x01)R.",
    "arguments that are no tuple": b"\x80\x04cargparse\nNamespace\n]R.",
    "a value that is missing": b"\x80\x04h\x05.",
    "a mark that is missing": b"\x80\x04}u.",
    "an odd number of items": b"\x80\x04}(K\x01u.",
    "items of a number": b"\x80\x04K\x01(K\x01K\x02u.",
    "elements of a number": b"\x80\x04K\x01(K\x01e.",
    "a state of a number": b"\x80\x04K\x01}b.",
    "a key of nested halves": b"\x80\x04}(" + bomb(60)[2:] + b"K\x01u.",
    "a function of nested halves": bomb(60) + b")R.",
    "a text that is no UTF-8": b"\x80\x04\x8c\x02\xff\xff.",
    "a text that is longer than the file": b"\x80\x04X\xff\xff\xff\xff12.",
    "nothing": b"",
    "no end": b"\x80\x04K\x01",
    "a name that is refused": b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.",
    "a list in itself": b"\x80\x04]2a.",
}


def locate(key: str, dtype: str, count: int, _: Any) -> Storage:
    return Storage(dtype, Path(key), 0, 8 * count)


def shown(value: Any, depth: int = 0) -> Any:
    """Of a tree, with all that an `Inert` holds."""
    if depth > 20:
        return "..."
    if type(value) is Inert:
        parts = (value.cls, value.args, dict(value.keywords), value.state, dict(value.items), list(value.elements))
        return "inert", [shown(part, depth + 1) for part in parts]
    if isinstance(value, dict):
        return type(value).__name__, [(shown(key, depth + 1), shown(item, depth + 1)) for key, item in value.items()]
    if type(value) in (list, tuple):
        return type(value).__name__, [shown(item, depth + 1) for item in value]
    return type(value).__name__, repr(value)


def outcome(data: bytes) -> Any:
    hooks = TorchHooks(locate)
    try:
        value, end = load(data, hooks)
    except Wrong as error:
        return str(error)
    return shown(value), end, list(hooks.refused)


@pytest.fixture
def same(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Any]:
    """Reads a pickle in both ways, which have to agree."""
    native = pickle_machine.load_native()
    if native is None:
        pytest.skip("the C module was not built")

    def read(data: bytes) -> Any:
        monkeypatch.setattr(pickle_machine, "load_native", lambda: native)
        fast = outcome(data)
        monkeypatch.setattr(pickle_machine, "load_native", lambda: None)
        assert outcome(data) == fast, data[:80]
        return fast

    return read


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", VALUES)
def test_values(name: str, protocol: int, same: Callable[[bytes], Any]) -> None:
    """Values of all kinds and protocols give one tree."""
    data = pickle.dumps(VALUES[name], protocol)
    tree, end, refused = same(data)
    assert (end, refused) == (len(data), [])
    if name in ("plain values", "containers", "one object in two places"):
        assert tree == shown(VALUES[name]) or "OrderedDict" in repr(VALUES[name]), "what needs no class is made as it was"


def test_damage(same: Callable[[bytes], Any]) -> None:
    """What is cut off or changed anywhere gives one tree, or one message that names the same byte."""
    draw = random.Random(5)
    for value in VALUES.values():
        data = pickle.dumps(value, 4)
        for cut in range(0, len(data), max(1, len(data) // 150)):
            assert isinstance(same(data[:cut]), str)
        for _ in range(150):
            changed = bytearray(data)
            for _ in range(draw.choice((1, 1, 3))):
                changed[draw.randrange(len(data))] = draw.randrange(256)
            same(bytes(changed))


@pytest.mark.parametrize("name", HARM)
def test_harm(name: str, same: Callable[[bytes], Any]) -> None:
    """Programs that no pickler writes end soon, in the same words."""
    found = same(HARM[name])
    assert isinstance(found, str) or found[2] == ["os.system"] or name == "a list in itself"


def test_metadata_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """All pieces are there, with the places in their files."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata(40)))
    found = read_metadata(tmp_path)
    assert not found.problems
    assert [(c.offsets, c.sizes, c.item) for c in found.tensors["w"].chunks] == [
        ((4 * n, 0), (4, 8), (f"__{n}_0.distcp", n << 33, 300)) for n in range(40)
    ]
