"""Checkpoints of real MindSpore 2.10 (``tests/fixtures/make_mindspore_checkpoints.py``), held against what it reads of them itself."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored_arrays import array_of
from torch import nn

from msprobe_engine.align.parameters.align_names import align_checkpoints
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.mindspore.file import MindSporeFile, read_file
from msprobe_engine.formats.checkpoint.mindspore.strategy import Layout, read_strategy
from msprobe_engine.formats.checkpoint.open import open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures"
FILES = FIXTURES / "mindspore_checkpoints"
MAKER = FIXTURES / "make_mindspore_checkpoints.py"
Expected = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    with np.load(FILES / "expected.npz") as found:
        return {name: found[name] for name in found.files}


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """The directory of the distributed save, to be damaged."""
    return Path(shutil.copytree(FILES / "ranks", tmp_path / "ranks"))


def of_file(expected: Expected, name: str) -> Expected:
    return {key.partition("|")[2]: value for key, value in expected.items() if key.startswith(f"{name}|")}


def check_tags(directory: Path, expected: Expected) -> None:
    """All entries of all files of one rank."""
    for name in ("adam.ckpt", "adamw.ckpt", "momentum.ckpt", "net.ckpt", "net.safetensors", "types.ckpt", "sliced.ckpt"):
        found = open_checkpoint(directory / name)
        assert found.format == "MindSpore"
        assert found.problems == []
        tensors = {tensor.origin or tensor.name: tensor for tensor in found.tensors.values()}
        for tag, value in of_file(expected, name).items():
            if tag in tensors:
                values = array_of(tensors[tag])
                assert values.shape == value.shape
                assert values.astype(value.dtype).tobytes() == value.tobytes(), (name, tag)
            else:
                assert value.size == 1, (name, tag)
                seen = {"learning_rate": "optimizer.param_groups.0.lr"}.get(tag, tag)
                assert np.float32(found.values.get(seen, found.values.get(f"optimizer.{seen}"))) == value.astype(np.float32), (name, tag)


def test_every_entry_is_what_mindspore_reads(expected: Expected) -> None:
    """Parameters, states, types, slices of one tag and safetensors: the values of `mindspore.load_checkpoint`, bit by bit."""
    check_tags(FILES, expected)


@pytest.mark.skipif("MINDSPORE_ENVIRONMENT" not in os.environ, reason="MINDSPORE_ENVIRONMENT names no environment with mindspore")
@pytest.mark.slow
def test_files_of_the_installed_mindspore(tmp_path: Path) -> None:
    """The MindSpore of the environment that MINDSPORE_ENVIRONMENT names writes the files anew, and they are read alike."""
    python = Path(os.environ["MINDSPORE_ENVIRONMENT"]) / "bin" / "python"
    subprocess.run([python, MAKER, tmp_path / "files"], check=True, env={**os.environ, "GLOG_v": "3"}, timeout=250, capture_output=True)
    with np.load(tmp_path / "files" / "expected.npz") as found:
        check_tags(tmp_path / "files", {name: found[name] for name in found.files})


def test_states_have_the_names_of_their_parameters() -> None:
    """Adam's moments, those of AdamWeightDecay and momentum are states of the optimizer; what the training appended are values."""
    adam, momentum = open_checkpoint(FILES / "adam.ckpt"), open_checkpoint(FILES / "momentum.ckpt")
    assert adam.tensors["optimizer.moment1.fc.weight"].origin == "moment1.fc.weight"
    assert "optimizer.adam_v.norm.gamma" in open_checkpoint(FILES / "adamw.ckpt").tensors
    assert "optimizer.moments.conv.bias" in momentum.tensors
    assert momentum.values["optimizer.momentum"] == 0.9
    assert {key: adam.values[key] for key in ("epoch_num", "step_num", "rate", "flag", "name")} == {
        "epoch_num": 3,
        "step_num": 7,
        "rate": 0.1,
        "flag": True,
        "name": "hé",
    }
    assert adam.values["optimizer.param_groups.0.lr"] == 0.01
    assert adam.values["global_step"] == 1


class Module(nn.Module):
    """The network of the fixture as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.fc = nn.Linear(6, 7)
        self.norm = nn.LayerNorm((7,))
        self.bn = nn.BatchNorm1d(7)
        self.conv = nn.Conv2d(2, 3, 3)
        self.head = nn.Linear(7, 11, bias=False)


def test_a_cell_and_a_module_of_the_same_network_are_paired(expected: Expected, tmp_path: Path) -> None:
    """Embedding tables, gamma and beta, moving averages and Adam's moments find what torch calls otherwise, with the same bits."""
    words = {
        "embedding_table": "weight",
        "gamma": "weight",
        "beta": "bias",
        "moving_mean": "running_mean",
        "moving_variance": "running_var",
    }

    def torch_name(tag: str) -> str:
        head, _, leaf = tag.rpartition(".")
        return f"{head}.{words.get(leaf, leaf)}"

    module = Module()
    values = of_file(expected, "net.ckpt")
    module.load_state_dict({torch_name(tag): torch.from_numpy(value.copy()) for tag, value in values.items()}, strict=False)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    module.head(module.bn(module.norm(module.fc(module.embed(torch.arange(4)))))).sum().backward()
    module.conv.weight.grad, module.conv.bias.grad = torch.ones(3, 2, 3, 3), torch.ones(3)
    optimizer.step()
    moments = of_file(expected, "adam.ckpt")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tags = {torch_name(tag): tag for tag in values}
    for parameter, state in optimizer.state.items():
        for number, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
            state[key].copy_(torch.from_numpy(moments[f"moment{number}.{tags[names[id(parameter)]]}"].copy()))
    module.load_state_dict(
        {torch_name(tag): torch.from_numpy(moments.get(tag, value).copy()) for tag, value in values.items()}, strict=False
    )
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "torch.pt")

    found = align_checkpoints(open_checkpoint(FILES / "adam.ckpt"), open_checkpoint(tmp_path / "torch.pt"))
    assert found.only_a == []
    assert {tensor.name.rpartition(".")[2] for tensor in found.only_b if not tensor.state} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    assert len(found.pairs) == 30
    for pair in found.pairs:
        assert array_of(pair.a).tobytes() == array_of(pair.b).tobytes(), pair.name


def test_a_large_tensor_in_slices_is_one_tensor(expected: Expected) -> None:
    """A tensor that lies in several values of one tag is whole, whatever row a slice ends in."""
    (tensor,) = open_checkpoint(FILES / "sliced.ckpt").tensors.values()
    assert tensor.shape == (30, 50)
    assert len(tensor.boxes) > 6
    assert array_of(tensor).tobytes() == expected["sliced.ckpt|big"].tobytes()


def test_an_encrypted_file_is_refused_with_what_to_do() -> None:
    """Nothing of a file saved with a key is taken for a checkpoint."""
    with pytest.raises(DumpFormatError, match=r"encrypted.*dec_key"):
        open_checkpoint(FILES / "encrypted.ckpt")


def test_ranks_are_put_together_as_mindspores_own_transformation_does(expected: Expected, ranks: Path) -> None:
    """Rows, columns, blocks and the parallel optimizer's rows over four ranks: what `mindspore.transform_checkpoints` makes of them."""
    found = open_checkpoint(ranks)
    assert found.problems == []
    assert found.values == {"step_num": 2}
    for name, value in of_file(expected, "full").items():
        assert array_of(found.tensors[name]).tobytes() == value.tobytes()
        assert value.tobytes() == expected[f"merged|{name}"].tobytes()
    assert found.tensors["optimizer.moment1.block.v.weight"].shape == (6, 8)
    assert len(found.tensors["block.b.bias"].copies) == 3
    (ranks / "strategy" / "rank_0.ckpt").unlink()  # the same as JSON, beside the ranks
    assert open_checkpoint(ranks).tensors == found.tensors
    assert read_strategy(ranks / "strategy.json") == read_strategy(FILES / "ranks" / "strategy" / "rank_0.ckpt")


def test_without_a_strategy_each_rank_is_compared_by_itself(ranks: Path) -> None:
    """What is not known is said, and no rank's slice is taken for the whole."""
    shutil.rmtree(ranks / "strategy")
    (ranks / "strategy.json").unlink()
    found = open_checkpoint(ranks)
    assert found.tensors["rank_3.block.w.weight"].shape == (8, 3)
    assert "optimizer.moment1.rank_2.block.v.weight" in found.tensors
    assert len(found.tensors) == 28
    assert any("no strategy file" in note for note in found.notes)


def test_damaged_ranks_are_named(ranks: Path) -> None:
    """A missing rank, one of another step, and a strategy that is cut off are problems that name them."""
    shutil.rmtree(ranks / "rank_3")
    (file,) = (ranks / "rank_1").iterdir()
    file.rename(file.with_name("net_rank_1-1_1.ckpt"))
    (ranks / "strategy" / "broken.ckpt").write_bytes((ranks / "strategy" / "rank_0.ckpt").read_bytes()[:-3])
    text = "\n".join(open_checkpoint(ranks).problems)
    assert "block.v.weight was cut into 4 pieces and the ranks that can be read have 3" in text
    assert "net_rank_1-1_1.ckpt" in text
    assert "broken.ckpt" in text
    shutil.rmtree(ranks / "rank_0")
    assert "rank_0 missing" in "\n".join(open_checkpoint(ranks).problems)


def test_the_newest_of_several_saves_is_taken(tmp_path: Path) -> None:
    """Epoch and step in the names tell which file is the newest; without them the user is asked."""
    for name in ("net-1_10.ckpt", "net-2_5.ckpt", "net-1_9.ckpt"):
        shutil.copy(FILES / "adam.ckpt", tmp_path / name)
    found = open_checkpoint(tmp_path)
    assert found.files == [tmp_path / "net-2_5.ckpt"]
    assert "3 saves" in found.notes[0]
    (tmp_path / "a.ckpt").write_bytes(b"\x0a")
    for name in ("net-1_10.ckpt", "net-2_5.ckpt", "net-1_9.ckpt"):
        (tmp_path / name).rename(tmp_path / name.replace("-", "").replace("_", ""))
    with pytest.raises(DumpFormatError, match="give one of them"):
        open_checkpoint(tmp_path)


def test_parts_of_unified_safetensors_are_read_by_their_map(tmp_path: Path) -> None:
    """`param_name_map.json` says which file has what; one that is missing is a problem."""
    shutil.copy(FILES / "net.safetensors", tmp_path / "part0.safetensors")
    names = dict.fromkeys(open_checkpoint(FILES / "net.safetensors").tensors, "part0.safetensors")
    (tmp_path / "param_name_map.json").write_text(json.dumps({**names, "more.weight": "part1.safetensors"}))
    found = open_checkpoint(tmp_path)
    assert set(found.tensors) == set(names)
    assert "part1.safetensors" in found.problems[0]


def read_or_named(file: Path) -> MindSporeFile | None:
    """The file; None: it is refused by an error that names it."""
    text = ""
    try:
        return read_file(file)
    except DumpFormatError as error:
        text = str(error)
    assert str(file) in text
    return None


@given(end=st.integers(0, 4700))
def test_a_file_cut_off_anywhere_is_told(tmp_path_factory: pytest.TempPathFactory, end: int) -> None:
    """What is before the cut is read as it was; the cut is a problem or an error that names the file, but between entries."""
    data = (FILES / "adam.ckpt").read_bytes()
    file = tmp_path_factory.mktemp("cut") / "adam.ckpt"
    file.write_bytes(data[:end])
    whole = read_file(FILES / "adam.ckpt")
    found = read_or_named(file)
    if found is None:
        return
    assert found.problems or end >= len(data) or {*found.tensors, *found.texts} < {*whole.tensors, *whole.texts}
    for tag, held in found.tensors.items():
        assert held.shape == whole.tensors[tag].shape
        assert held.boxes[0].start == whole.tensors[tag].boxes[0].start


@given(data=st.binary(max_size=300), at=st.integers(0, 4600))
def test_hostile_bytes_are_an_error_and_never_more(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    """Any bytes alone, or in a file: read, or refused with the name of the file; no length leads outside of it."""
    file = tmp_path_factory.mktemp("hostile") / "x.ckpt"
    good = (FILES / "adam.ckpt").read_bytes()
    for content in (data, good[:at] + data + good[at + len(data) :]):
        file.write_bytes(content)
        found = read_or_named(file)
        for held in found.tensors.values() if found is not None else ():
            for box in held.boxes:
                assert 0 <= box.start <= len(content)


@given(data=st.binary(max_size=200), at=st.integers(0, 320), text=st.booleans())
def test_hostile_strategies_are_an_error_and_never_more(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int, text: bool) -> None:
    """A strategy file with any bytes in it is read, or refused with its name."""
    source = FILES / "ranks" / ("strategy.json" if text else "strategy/rank_0.ckpt")
    file = tmp_path_factory.mktemp("strategy") / source.name
    good = source.read_bytes()
    file.write_bytes(good[:at] + data + good[at + len(data) :])
    refused = ""
    try:
        for layout in read_strategy(file).values():
            assert len(layout.piece(3)) == len(layout.cuts())
    except DumpFormatError as error:
        refused = str(error)
    assert not refused or str(file) in refused


@st.composite
def layouts(draw: Any) -> Layout:
    devices = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)))
    order = draw(st.permutations(range(len(devices))))
    used = draw(st.integers(0, len(devices)))
    axes: list[tuple[int, ...]] = [() for _ in range(draw(st.integers(1, 3)))]
    for axis in order[:used]:
        axes[draw(st.integers(0, len(axes) - 1))] += (axis,)
    free = math.prod(devices[axis] for axis in order[used:])
    return Layout(devices, tuple(axes), draw(st.sampled_from([1, 0, free])))


@given(layout=layouts())
def test_the_pieces_of_a_layout_are_all_pieces_equally_often(layout: Layout) -> None:
    """Over all ranks every piece of the tensor is held, and each by as many ranks."""
    count = math.prod(layout.devices)
    seen: dict[tuple[int, ...], int] = {}
    for rank in range(count):
        piece = tuple(layout.piece(rank))
        assert all(0 <= number < cuts for number, cuts in zip(piece, layout.cuts()))
        seen[piece] = seen.get(piece, 0) + 1
    assert len(seen) == math.prod(layout.cuts())
    assert set(seen.values()) == {count // len(seen)}


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[bytes], Path]:
    def make(content: bytes) -> Path:
        (tmp_path / "x.ckpt").write_bytes(content)
        return tmp_path / "x.ckpt"

    return make


def test_lengths_that_lie_are_refused(changed: Callable[[bytes], Path]) -> None:
    """A value longer than the file, a number without end, dimensions beyond the bytes, and deep nonsense."""
    for content in (b"\x0a\xff\xff\xff\xff\x0f", b"\x0a" + b"\xff" * 30, b"\x0a\x00", b"\x0b\x0c"):
        with pytest.raises(DumpFormatError, match=r"x\.ckpt"):
            read_file(changed(content))
    tensor = b"\x08\xff\xff\xff\x7f\x12\x07Float32\x1a\x04\x00\x00\x00\x00"
    value = b"\x0a\x01w\x12" + bytes([len(tensor)]) + tensor
    found = read_file(changed(b"\x0a" + bytes([len(value)]) + value))
    assert found.tensors == {}
    assert "w has 4 bytes and should have" in found.problems[0]
