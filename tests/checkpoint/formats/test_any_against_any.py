"""One model in every format that frameworks wrote: any two are equal, and a bit that flips in a file of one of them is found from all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import any_formats
import pytest

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.find.checkpoint.diff import diff
from msprobe_engine.find.checkpoint.result import OTHER_VALUES, SAME
from msprobe_engine.formats.checkpoint.model import MODEL, StoredTensor
from msprobe_engine.formats.checkpoint.open import open_checkpoint

pytestmark = [pytest.mark.framework, pytest.mark.slow]  # each format is read beside its own framework by a test of its own
HERE = Path(__file__).parents[1]
MEGATRON = ("qwen", "qwen-tp2pp2", "qwen-dist-tp2")
FORMATS = (*MEGATRON, "hf", "bin", "single.pt", "dcp", "zero0", "zero1", "zero2", "zero3", "universal", "mindspore.ckpt")
"""By name: megatron-core's two formats, transformers, torch, torch's distributed one, DeepSpeed, MindSpore (kept, see
`tests/fixtures/make_mindspore_any.py`)."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, megatron_checkpoints: Path) -> Path:
    """A directory with a checkpoint for each name of `FORMATS`."""
    target = tmp_path_factory.mktemp("any")
    for name in MEGATRON:
        shutil.copytree(megatron_checkpoints / name, target / name)
    any_formats.write(target)
    shutil.copyfile(HERE.parent / "fixtures" / "mindspore_checkpoints" / "qwen3.ckpt", target / "mindspore.ckpt")
    return target


@pytest.mark.parametrize("name", FORMATS)
def test_same_weights_are_equal(files: Path, name: str) -> None:
    """Whatever the framework, the layout and the names: no tensor differs, none is missing, and each of the model was compared."""
    for a, b in ((name, other) for other in FORMATS[FORMATS.index(name) + 1 :]):
        found = diff(files / a, files / b)
        assert found.code == SAME, (a, b, found.verdict())
        weights = [t for t in found.tensors if t.group == MODEL]
        assert sum(t.numel for t in weights) >= 2 * 56 * 16 + 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16), (a, b)


@contextmanager
def flipped(tensor: StoredTensor) -> Iterator[None]:
    """The lowest bit of one element in the middle of a tensor is another, in the file."""
    box = tensor.boxes[len(tensor.boxes) // 2]
    width = item_size(tensor.dtype) or 1
    at = box.start + width * sum((n // 2) * step for n, step in zip(box.sizes, box.strides))
    # of a float32 that a bfloat16 was widened to only the upper half is seen beside a bfloat16
    at += 2 if tensor.dtype == "float32" else 0
    with box.file.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes((byte[0] ^ 1,)))
    try:
        yield
    finally:
        with box.file.open("r+b") as file:
            file.seek(at)
            file.write(byte)


@pytest.mark.parametrize("name", FORMATS)
def test_a_flipped_bit_is_all_that_differs(files: Path, name: str) -> None:
    """One bit of one attention weight flips in the file: from a checkpoint of every other framework exactly this tensor differs, in one
    element, and the file is named."""
    layer = "layers.1.self_attention.linear_qkv.weight" if name in MEGATRON else "layers.1.self_attn.k_proj.weight"
    found = [t for t in open_checkpoint(files / name).tensors.values() if t.name.endswith(layer) and not t.state]
    assert len(found) == 1
    with flipped(found[0]):
        for other in ("qwen-tp2pp2", "hf", "dcp", "zero3"):
            if other == name:
                continue
            result = diff(files / name, files / other)
            assert result.code == OTHER_VALUES
            (wrong,) = [t for t in result.different if t.group == MODEL]
            assert layer in wrong.name
            assert wrong.changed == 1
            assert len(wrong.files_a) == 1
            assert not result.only_in_a
            assert not result.only_in_b
