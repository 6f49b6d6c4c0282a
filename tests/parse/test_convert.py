"""``msprobe parse -d``: tensors of every kind become .pt or .npy with the same bits, and hostile files become sentences."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.formats.legacy.parse.convert import DTYPES, convert, read_bin

FIXTURES = Path(__file__).parent.parent / "fixtures"
NUMBERS = {getattr(torch, name): number for number, name in DTYPES.items()}


def atb(tensor: torch.Tensor, **other: str) -> bytes:
    """A ``.bin`` file of ATB."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    fields = {"format": "2", "dtype": str(NUMBERS[tensor.dtype]), "dims": ",".join(map(str, tensor.shape))} | other
    head = (
        {"$Version": "1.0", "$Object.Count": "1", "$Object.Length": str(len(data))}
        | fields
        | {"$Object.data": f"0,{len(data)}", "$End": "1"}
    )
    return "".join(f"{key}={value}\n" for key, value in head.items()).encode() + data


@pytest.mark.parametrize("dtype", [dtype for dtype in NUMBERS if dtype is not torch.bool], ids=str)
def test_every_type_of_atb_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """A .bin becomes a .pt of the very type and bits; as .npy the values are the same."""
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    (tmp_path / "x.bin").write_bytes(atb(tensor))
    pt = convert(tmp_path / "x.bin", tmp_path / "pt", "pt").files
    npy = convert(tmp_path / "x.bin", tmp_path / "npy", "npy").files
    assert [pt[0].name, npy[0].name] == ["x.pt", "x.npy"]
    loaded = torch.load(pt[0], weights_only=True)
    assert loaded.dtype is dtype
    assert loaded.shape == (2, 3)
    assert torch.equal(loaded, tensor)
    assert np.load(npy[0]).tolist() == tensor.tolist()
    assert pt[0].stat().st_mode & 0o777 == 0o640


@given(st.lists(st.floats(width=32), max_size=12))
def test_there_and_back(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    """.bin -> .pt -> .npy -> .pt gives the bytes that were there, NaN and Inf too."""
    at = tmp_path_factory.mktemp("there")
    tensor = torch.tensor(values, dtype=torch.float32)
    (at / "x.bin").write_bytes(atb(tensor))
    convert(at / "x.bin", at / "1", "pt")
    convert(at / "1", at / "2", "npy")
    convert(at / "2" / "x.npy", at / "3", "pt")
    assert torch.load(at / "3" / "x.pt", weights_only=True).numpy().tobytes() == tensor.numpy().tobytes()


def test_bfloat16_keeps_its_type_through_pt(tmp_path: Path) -> None:
    """A .pt of bfloat16 becomes float32 in .npy without loss, and stays a bfloat16 .pt, byte for byte."""
    tensor = torch.randn(3, 5).bfloat16()
    torch.save(tensor, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "npy", "npy")
    convert(tmp_path / "x.pt", tmp_path / "pt", "pt")
    assert np.load(tmp_path / "npy" / "x.npy").dtype == np.float32
    assert np.array_equal(np.load(tmp_path / "npy" / "x.npy"), tensor.float().numpy())
    assert (tmp_path / "pt" / "x.pt").read_bytes() == (tmp_path / "x.pt").read_bytes()


def test_packed_tensors(tmp_path: Path) -> None:
    """A dump with packed tensors, written by a real run: every tensor under its name, from the directory and from the file alone."""
    from msprobe.pytorch import PrecisionDebugger

    config = tmp_path / "config.json"
    tensors = {
        "task": "tensor",
        "dump_path": str(tmp_path / "dump"),
        "rank": [],
        "step": [],
        "level": "L1",
        "tensor": {"tensor_format": "packed"},
    }
    config.write_text(json.dumps(tensors))
    debugger = PrecisionDebugger(str(config))
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    debugger.start()
    y = torch.relu(x)
    debugger.stop()
    debugger.step()
    debugger.pipeline.advance(wait=True)
    debugger.writer.flush()
    shards = sorted((tmp_path / "dump").rglob("*.safetensors"))
    assert shards
    for source in (tmp_path / "dump", shards[0]):
        files = {path.name: path for path in convert(source, tmp_path / source.name / "out", "pt").files}
        assert torch.equal(torch.load(files["Torch.relu.0.forward.output.0.pt"], weights_only=True), y)
        assert torch.equal(torch.load(files["Torch.relu.0.forward.input.0.pt"], weights_only=True), x)


def test_a_dump_of_the_existing_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole dump: every .pt becomes one .npy below the directories it was in; what is no tensor is counted."""
    source = FIXTURES / "26.2.0" / "tensor"
    assert main(["parse", "-d", str(source), "-t", "npy", "-o", str(tmp_path)]) == 0
    expected = sorted(path.relative_to(source).with_suffix(".npy") for path in source.rglob("*.pt"))
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.npy")) == expected
    assert len(expected) > 3
    for path in expected:
        assert np.array_equal(
            np.load(tmp_path / path), torch.load((source / path).with_suffix(".pt"), weights_only=True).detach().float().numpy()
        )
    assert f"{len(expected)} tensors written" in capsys.readouterr().out


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (Path.touch, (self.path,))


def test_hostile_files_are_sentences_and_the_rest_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pickles, links, cut files, huge shapes: nothing is executed or followed, each is named, the good one is written, code 1."""
    source = tmp_path / "in"
    source.mkdir()
    torch.save(torch.ones(2), source / "good.pt")
    (source / "evil.pt").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    torch.save(Evil(tmp_path / "ran"), source / "zip.pt")
    np.save(source / "object.npy", np.array([Evil(tmp_path / "ran")], dtype=object), allow_pickle=True)
    (source / "cut.bin").write_bytes(atb(torch.ones(4))[:-3])
    (source / "huge.bin").write_bytes(atb(torch.ones(4), dims="9999999999,9999999999"))
    (source / "away.bin").write_bytes(atb(torch.ones(4), data="/etc/passwd"))
    (source / "none.bin").write_bytes(b"\0" * 100)
    (source / "link.pt").symlink_to(source / "good.pt")
    assert main(["parse", "-d", str(source), "-t", "npy", "-o", str(tmp_path / "out")]) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good.npy"]
    assert not (tmp_path / "ran").exists()
    said = capsys.readouterr()
    assert "8 could not be read" in said.out
    for name in ("evil.pt", "zip.pt", "object.npy", "cut.bin", "huge.bin", "away.bin", "none.bin", "link.pt"):
        assert name in said.err


@pytest.mark.parametrize(
    "content", [b"", b"$End=1", b"dtype=x\n$End=1\n", b"dtype=99\n$End=1\n", b"dtype=0\ndims=-1\n$End=1\n", b"dtype=0\ndims=2,x\n$End=1\n"]
)
def test_damaged_headers(content: bytes, tmp_path: Path) -> None:
    """What is wrong with a .bin is said with its path."""
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(DumpFormatError, match=r"x\.bin"):
        read_bin(tmp_path / "x.bin")


def test_equal_names_do_not_write_over_each_other(tmp_path: Path) -> None:
    """``x.bin`` and ``x.npy`` beside each other: the first is written, the second is named."""
    (tmp_path / "x.bin").write_bytes(atb(torch.ones(2)))
    np.save(tmp_path / "x.npy", np.zeros(2))
    done = convert(tmp_path, tmp_path / "out", "pt")
    assert len(done.files) == 1
    assert "same name" in done.problems[0]


def test_kernel_dumps_go_through_the_program_of_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel dump is handed to msaccucmp.py with the flags it takes; without CANN the message says so."""
    source = tmp_path / "Add.add_1.3.1700000000"
    source.write_bytes(b"kernel")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "none"))
    assert "msaccucmp.py of CANN, which is not here" in convert(source, tmp_path / "out", "npy").problems[0]
    script = tmp_path / "cann" / "tools" / "operator_cmp" / "compare" / "msaccucmp.py"
    script.parent.mkdir(parents=True)
    script.write_text("import sys, pathlib; a = sys.argv; pathlib.Path(a[a.index('-out') + 1], 'made.npy').write_text(' '.join(a[1:]))")
    script.chmod(0o600)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "cann"))
    (made,) = convert(source, tmp_path / "out", "npy").files
    assert made.read_text() == f"convert -d {source} -out {tmp_path / 'out'} -t npy"
    script.chmod(0o666)
    assert "others may write to it" in convert(source, tmp_path / "out2", "npy").problems[0]


def test_wrong_use(tmp_path: Path) -> None:
    """A path that is not there and a directory without tensors are usage errors."""
    with pytest.raises(UsageError, match="no such file"):
        convert(tmp_path / "none", tmp_path)
    with pytest.raises(UsageError, match="holds no tensor file"):
        convert(tmp_path, tmp_path / "out")
